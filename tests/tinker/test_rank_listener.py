"""The process that knows the key gets through, whoever else connects before it."""

from __future__ import annotations

import socket
import threading
from contextlib import closing
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest

from postlude.tinker import rank_listener
from postlude.tinker.rank_listener import MAX_HANDSHAKES, RankListener


def accepted(listener: RankListener) -> tuple[threading.Thread, list[Any]]:
    """Returns a thread that waits for a connection, and the list that gets its first message."""
    messages: list[Any] = []

    def wait() -> None:
        with listener.accept() as connection:
            messages.append(connection.recv())

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread, messages


def test_strangers_do_not_keep_rank_0_out() -> None:
    """One that says nothing, one that closes, one with another key."""
    with closing(RankListener(("127.0.0.1", 0), b"right")) as listener:
        thread, messages = accepted(listener)
        with socket.create_connection(listener.address) as silent:
            socket.create_connection(listener.address).close()
            with pytest.raises(AuthenticationError):
                Client(listener.address, authkey=b"wrong")
            with Client(listener.address, authkey=b"right") as connection:
                connection.send("ready")
                thread.join(60)
            assert messages == ["ready"]
            assert silent.fileno() >= 0


def test_silent_connections_are_closed_and_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_listener, "HANDSHAKE_SECONDS", 0.2)
    with closing(RankListener(("127.0.0.1", 0), b"right")) as listener:
        silent = [socket.create_connection(listener.address) for _ in range(MAX_HANDSHAKES)]
        for stranger in silent:
            stranger.settimeout(60)
            while stranger.recv(4096):  # the challenge, then the end
                pass
            stranger.close()
        monkeypatch.undo()  # the process that knows the key has as long as it needs
        thread, messages = accepted(listener)
        with Client(listener.address, authkey=b"right") as connection:
            connection.send("ready")
            thread.join(60)
        assert messages == ["ready"]


def test_it_listens_at_its_address_alone_and_close_ends_the_wait(tmp_path: Path) -> None:
    for address in (("127.0.0.1", 0), str(tmp_path / "rank0")):
        listener = RankListener(address, b"right")
        assert listener.address[0] == "127.0.0.1" or listener.address == address
        threading.Timer(0.05, listener.close).start()
        with pytest.raises(EOFError):
            listener.accept()

"""One client cannot take what others need: memory, disk, models, connections, or the log."""

from __future__ import annotations

import asyncio
import io
import logging
import socket
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from postlude.serving.http.connection import HTTPConnection
from postlude.serving.http.log_lines import OneLineFormatter
from postlude.tinker.app import PROTOBUF
from postlude.tinker.futures import FutureStore
from postlude.tinker.limits import Limits

from .asgi_client import Client, pass_body, request, running_server
from .fake_backend import BASE

FORGED = "1\n2026-01-01 00:00:00 session root: \x1b[2Jgone\u202e\u2028"


@pytest.fixture
def log() -> Any:
    """What the server logs, as `postlude tinker` writes it."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(OneLineFormatter("%(message)s"))
    logger = logging.getLogger("postlude")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_a_client_cannot_write_lines_of_the_log(tmp_path: Path, log: io.StringIO) -> None:
    async def run() -> None:
        async with running_server(tmp_path) as (app, _, _service):
            agent = {"user-agent": FORGED.encode().decode("latin-1")}
            for path, body in (("create_session", {"sdk_version": FORGED}), ("client/config", {"sdk_version": FORGED})):
                assert (await request(app, "POST", f"/api/v1/{path}", body, headers=agent)).status == 200

    asyncio.run(run())
    try:
        raise ValueError(FORGED)
    except ValueError:
        logging.getLogger("postlude").exception("%s failed", FORGED)
    lines = log.getvalue().split("\n")
    assert [line.split(" ")[0] for line in lines if line and not line.startswith("    ")] == [
        "first",
        "session",
        "a",
        "1\\n2026-01-01",
    ]
    assert all(line.isprintable() for line in lines)


async def test_a_link_with_a_signature_of_other_letters_is_refused(tmp_path: Path) -> None:
    async with running_server(tmp_path) as (app, _, _service):
        for query in ("signature=%C3%A9&expires=99999999999", "signature=%00", "expires=%C2%B2"):
            assert (await request(app, "GET", f"/api/v1/files/a/b/c?{query}", key=None)).status == 403


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"user_metadata": {"a": "b" * 50_000_000}}, 413),
        ({"user_metadata": {"a": "b" * 20_000}}, 400),
        ({"user_metadata": {str(key): "" for key in range(5000)}}, 400),
        ({"tags": ["a"] * 65}, 400),
        ({"sdk_version": "1" * 300}, 400),
        ({"display_name": "a" * 300}, 400),
        ({"user_metadata": {"a": "b" * 10_000}}, 200),
    ],
)
async def test_what_is_saved_of_a_session_has_a_limit(tmp_path: Path, fields: dict[str, Any], status: int) -> None:
    async with running_server(tmp_path) as (app, _, service):
        assert (await request(app, "POST", "/api/v1/create_session", fields)).status == status
        assert len(service.state.sessions) == (status == 200)


async def test_finished_sessions_are_deleted_after_a_time(tmp_path: Path) -> None:
    limits = {"session_seconds": 300.0, "gap_seconds": 0.04, "finished_seconds": 0.0}  # sweeps every 0.01 s
    async with running_server(tmp_path, **limits) as (app, _, service):
        client = await Client(app).open()
        saved, unsaved = await client.create_model(0), await client.create_model(1)
        await client.call("save_weights", {"model_id": saved, "path": "a", "seq_id": 1})
        await client.post(f"sessions/{client.session}/finish", {})
        service.sessions[client.session].heartbeat -= 300
        async with asyncio.timeout(60):
            while service.state.sessions:
                await asyncio.sleep(0.01)
        assert list((tmp_path / "sessions").iterdir()) == []
        assert [path.name for path in (tmp_path / "runs").iterdir()] == [saved] == list(service.state.runs)
        assert (await client.get(f"training_runs/{unsaved}")).status == 404
        assert len((await client.get("checkpoints")).json["checkpoints"]) == 1


async def test_one_key_cannot_have_all_models(tmp_path: Path) -> None:
    async with running_server(tmp_path, models=3, models_per_key=2) as (app, _, _service):
        first, second = await Client(app).open(), await Client(app, "tml-two").open()
        for number in range(2):
            await first.create_model(number)
        body = {"session_id": first.session, "model_seq_id": 2, "base_model": BASE, "lora_config": {"rank": 4}}
        refused = await first.post("create_model", body)
        assert (refused.status, "--max-models-per-key" in refused.json["error"]) == (400, True)
        await second.create_model()


async def test_one_key_cannot_fill_the_queue_or_push_out_results_of_others(tmp_path: Path) -> None:
    async with running_server(tmp_path, queued_bytes_per_key=1000) as (app, _, _service):
        first, second = await Client(app).open(), await Client(app, "tml-two").open()
        for client, status in ((first, 429), (second, 200)):
            model = await client.create_model()
            headers = {"content_type": PROTOBUF}
            for number in (3, 4):  # which wait for 1
                body = pass_body(model, number, *([1.0] * (20 if client is first else 1)))
                reply = await client.post("forward_backward", body, **headers)
            assert reply.status == status
    futures = FutureStore(Limits(result_bytes=300))
    for name, owner, size in (("one", "a", 100), ("two", "b", 150), ("three", "b", 150)):
        futures.add(name, owner, "sample", b"").succeed(b" " * size)
    futures.drop_old()
    assert [futures.get(name) is not None for name in ("one", "two", "three")] == [True, False, True]


def sent_to(port: int, sent: bytes) -> socket.socket:
    """Returns a connection on which these bytes arrive before the server accepts it: in time, on a busy machine too."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(sent)
    return connection


@pytest.mark.parametrize(
    ("sent", "reply"),
    [
        (b"", b""),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: ", b"HTTP/1.1 408 "),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000, b"HTTP/1.1 431 "),
        (b"SSH-2.0-OpenSSH_9.7\r\n", b"HTTP/1.1 400 "),
        (b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc", b"HTTP/1.1 200 "),
    ],
    ids=["nothing", "half a head", "a long head", "no HTTP", "half a body of a refused request"],
)
async def test_a_connection_without_a_whole_request_is_closed(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, reply: bytes
) -> None:
    if len(sent) < 70_000:
        monkeypatch.setattr("postlude.serving.http.connection.HEAD_SECONDS", 0.2)
        monkeypatch.setattr("postlude.serving.http.connection.DRAIN_SECONDS", 0.2)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.3)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    config = uvicorn.Config(app, http=HTTPConnection, port=0, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection(sock=sent_to(port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"))
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200"), "a reply may take longer"
    writer.close()
    reader, writer = await asyncio.open_connection(sock=sent_to(port, sent))
    received = await asyncio.wait_for(reader.read(), 60)
    assert received.startswith(reply)
    assert bool(received) == bool(reply)
    server.should_exit = True
    await task

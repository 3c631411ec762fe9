"""Launched servers: ready or an error, restarted when they end, and ended with the run."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from postlude.generate.protocol import Request, VersionSpan
from postlude.serving.clients.server_weights import WeightsVersion
from postlude.serving.errors import ServerError
from postlude.serving.launch import supervisor
from postlude.serving.launch.launcher import LocalLauncher, ServerCommand, log_tail
from postlude.serving.launch.supervisor import ServerSupervisor, SupervisedClient
from postlude.world.ports import ReservedPort, is_own_listener
from tests.serving.test_server_pool import PROMPTS, THREE, check

ROOT = Path(__file__).parents[2]
FAKE = ServerCommand(
    (sys.executable, "-m", "tests.serving.fake_vllm", "{port}"), {"PYTHONPATH": str(ROOT)}, start_timeout=60.0
)
QUICK = {"backoff": 0.01, "retries": 2, "concurrency": 4}


def server_command(text: str, **settings: float) -> ServerCommand:
    return ServerCommand((sys.executable, "-c", textwrap.dedent(text)), **settings)


def wait_until(true: Callable[[], object], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def pid_of(engine: SupervisedClient, place: int) -> int:
    """Returns the pid of the server: the only child of its wrapper process."""
    keeper = engine.supervisor._slots[place].process.process.pid  # type: ignore[union-attr]
    return int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0])


def test_killed_server_is_restarted_with_the_newest_weights(tmp_path: Path, caplog) -> None:
    """No completion is lost, repeated or swapped, and none uses the weights it was started with."""
    with (
        caplog.at_level(logging.WARNING, "postlude"),
        closing(SupervisedClient(ServerSupervisor(FAKE, 2, LocalLauncher(tmp_path)), **QUICK)) as engine,
    ):
        engine.connect()
        engine.reload(WeightsVersion("/weights/1", "start.1"))
        first = {server.url for server in engine.pool.servers}
        request_ids = {engine.submit(Request(tuple(prompt), THREE)) for prompt in PROMPTS}
        os.kill(pid_of(engine, 0), signal.SIGKILL)
        while request_ids:
            for done in engine.poll(None):
                assert done.completion is not None, done.error
                assert done.completion.versions == (VersionSpan("start.1", 0, 3),)
                request_ids.remove(done.request_id)
        check(engine)
        wait_until(lambda: engine.pool.count_up() == 2)
        (new,) = {server for server in engine.pool.servers if server.url not in first}
        assert (new.weights.version, engine.pool.pending_replacements, engine.supervisor.restarted) == ("start.1", 0, 1)
        assert "was ended by signal 9" in caplog.text
        assert "It is restarted." in caplog.text


def test_a_proxy_is_not_used_for_launched_servers(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with closing(SupervisedClient(ServerSupervisor(FAKE, 1, LocalLauncher(tmp_path)), **QUICK)) as engine:
        check(engine)


@pytest.mark.slow
def test_requests_wait_for_the_replacement_of_the_only_server(tmp_path: Path) -> None:
    with closing(SupervisedClient(ServerSupervisor(FAKE, 1, LocalLauncher(tmp_path)), **QUICK)) as engine:
        check(engine)
        os.kill(pid_of(engine, 0), signal.SIGKILL)
        wait_until(lambda: engine.pool.pending_replacements or engine.supervisor.restarted)
        check(engine)


@pytest.mark.slow
def test_server_without_restarts_left_fails_requests_with_clear_error(tmp_path: Path) -> None:
    with closing(
        SupervisedClient(ServerSupervisor(FAKE, 1, LocalLauncher(tmp_path), max_restarts=0), **QUICK)
    ) as engine:
        check(engine)
        os.kill(pid_of(engine, 0), signal.SIGKILL)
        with pytest.raises(ServerError, match=r"does not reply any more: .* was ended by signal 9"):
            engine.generate([[1]], THREE)


@pytest.mark.thorough  # it is given time to end by itself
def test_server_that_cannot_be_stopped_fails_requests_with_clear_error(tmp_path: Path, monkeypatch) -> None:
    """Requests would otherwise wait for a replacement for ever."""
    with closing(SupervisedClient(ServerSupervisor(FAKE, 1, LocalLauncher(tmp_path)), **QUICK)) as engine:
        check(engine)
        running = engine.supervisor._slots[0].process

        def refuse() -> None:
            raise OSError("its node does not answer")

        monkeypatch.setattr(running, "stop", refuse)
        os.kill(pid_of(engine, 0), signal.SIGKILL)
        wait_until(lambda: engine.pool.unreplaced)
        with pytest.raises(ServerError, match="it could not be restarted: its node does not answer"):
            engine.generate(PROMPTS[:1], THREE)


@pytest.mark.thorough
def test_hanging_server_is_restarted(tmp_path: Path) -> None:
    settings = QUICK | {"timeout": 5.0, "retries": 0}
    with closing(SupervisedClient(ServerSupervisor(FAKE, 1, LocalLauncher(tmp_path)), **settings)) as engine:
        check(engine)
        os.kill(pid_of(engine, 0), signal.SIGSTOP)
        check(engine)
        assert engine.supervisor.restarted == 1


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        (server_command("print('one'); print('there is no such model'); exit(3)"), r"ended with code 3; .*such model"),
        (ServerCommand(("/nowhere/python",)), "/nowhere/python cannot be started: No such file or directory"),
    ],
)
def test_server_that_fails_to_start_gives_error_with_end_of_log(
    program: ServerCommand, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ServerError, match=sentence):
        SupervisedClient(ServerSupervisor(program, 1, LocalLauncher(tmp_path)))


def test_server_start_timeout_gives_error_with_end_of_log(tmp_path: Path, monkeypatch) -> None:
    """The timeout passes after its first output."""
    log = tmp_path / "0.log"

    def monotonic() -> float:
        return 1000.0 if log.is_file() and "loading" in log.read_text() else 0.0

    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    program = server_command("import time; print('loading', flush=True); time.sleep(600)", start_timeout=60.0)
    with pytest.raises(ServerError, match=r"within 60 s.*loading"):
        SupervisedClient(ServerSupervisor(program, 1, LocalLauncher(tmp_path)))


def test_gpus_are_assigned_and_released_and_rank_variables_removed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    launcher = LocalLauncher(tmp_path, ["4", "5", "6"])
    expression = "os.environ['CUDA_VISIBLE_DEVICES'], os.environ.get('LOCAL_RANK')"
    show = server_command(f"import os, time; print({expression}, flush=True); time.sleep(60)", gpus=2.0)
    process = launcher.start(show)
    with pytest.raises(ValueError, match=r"needs 2 GPUs, but 1 are free here of those that the trainer leaves \(4, 5"):
        launcher.start(show)
    wait_until(lambda: (tmp_path / "0.log").read_text() == "4,5 None\n")
    process.stop()
    assert process.exit_reason() is not None
    launcher.start(show).stop()


def test_the_port_of_a_server_is_reserved_until_it_listens(tmp_path: Path) -> None:
    running = LocalLauncher(tmp_path).start(server_command("import time; time.sleep(60)"))
    port = int(running.url.rpartition(":")[2])
    with socket.socket() as listener, pytest.raises(OSError, match="in use"):
        listener.bind(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
        pass  # as the server itself does
    running.stop()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()


class FakeLauncher:
    """Launches servers without processes: `how` gives the exit reason of each, or raises."""

    def __init__(self, *results: Callable[[], str | None]) -> None:
        self.how, self.urls = iter(results), iter(range(8000, 8100))

    def start(self, program: ServerCommand) -> Any:
        return SimpleNamespace(
            url=f"http://{next(self.urls)}",
            key="",
            exit_reason=next(self.how),
            is_listening=lambda: True,
            stop=lambda: None,
        )


def test_the_supervisor_continues_after_an_error_of_a_launcher(tmp_path: Path, monkeypatch) -> None:
    """A missing log and a launcher that raises affect only their own server."""

    def lost() -> str:
        raise RuntimeError("no such actor")

    heard: list[str] = []
    engine: Any = SimpleNamespace(
        pool=SimpleNamespace(servers=[]),
        remove_server=lambda url, problem: heard.append(f"{url} {problem}"),
        add_server=heard.append,
        cancel_replacement=heard.append,
    )
    monkeypatch.setattr(supervisor, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(supervisor, "_replies", lambda url, body=None: True)
    ends = iter([False, False])
    machines = FakeLauncher(
        lambda: None if next(ends, True) is False else log_tail(tmp_path / "gone.log"), lambda: None
    )
    with closing(ServerSupervisor(FAKE, 1, machines)) as started:
        started.start()
        started.watch(engine)
        wait_until(lambda: "http://8001" in heard)
    assert heard[0] == f"http://8000 {tmp_path}/gone.log cannot be read: No such file or directory"
    heard.clear()
    fine = iter([True])
    raising = FakeLauncher(lambda: None if next(fine, False) else lost(), lambda: None)
    with closing(ServerSupervisor(FAKE, 1, raising)) as started:
        started.start()
        started.watch(engine)
        wait_until(lambda: "http://8001" in heard)
    assert heard[0] == "http://8000 cannot be watched: no such actor"
    heard.clear()
    engine.pool.servers = [SimpleNamespace(url="http://8000", state="unavailable", problem="cannot be reached")]
    known = iter([None] * 6)
    dying = FakeLauncher(lambda: next(known, "was ended by signal 9"), lambda: None)
    with closing(ServerSupervisor(FAKE, 1, dying)) as started:
        started.start()
        started.watch(engine)
        wait_until(lambda: "http://8001" in heard)
    assert heard[0] == "http://8000 was ended by signal 9", "as is known a moment after it is not reached any more"


def test_first_error_in_a_log_is_shown_before_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    after = [f"(pid=7) went on {count}" for count in range(9)]
    log.write_text("\n".join(["loading", "(pid=8) ERROR 10:53 [worker.py:9] ValueError: no memory", *after]))
    assert log_tail(log).startswith(f"ValueError: no memory (the last lines of {log}: {after[3]} | ")
    log.write_text("\n".join(["a warning of `OSError: too many`", *after]))
    assert log_tail(log).startswith(f"the last lines of {log}: ")


@pytest.mark.thorough
def test_servers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Killed with SIGKILL, with a server that ignores SIGTERM, and a child process of it."""
    stubborn = """
        import os, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(os.getpid(), child.pid, flush=True)
        time.sleep(60)
    """
    starts = f"""
        import time
        from pathlib import Path
        from postlude.serving.launch.launcher import LocalLauncher, ServerCommand
        command = ({sys.executable!r}, "-c", {textwrap.dedent(stubborn)!r})
        running = LocalLauncher(Path({str(tmp_path)!r})).start(ServerCommand(command))
        time.sleep(60)
    """
    started = subprocess.Popen([sys.executable, "-c", textwrap.dedent(starts)])
    log = tmp_path / "0.log"
    try:
        wait_until(lambda: log.exists() and len(log.read_text().split()) == 2, 60)
    finally:
        started.kill()
        started.wait()
    for pid in map(int, log.read_text().split()):
        wait_until(
            lambda pid=pid: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()
        )


OTHER_USER = """
import os, socket, sys
os.setuid(65534)
listening = socket.socket()
listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listening.bind(("127.0.0.1", int(sys.argv[1])))
listening.listen()
print("listening", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.getuid() != 0 or sys.platform != "linux", reason="only root can act as another user, on Linux")
def test_a_port_that_another_user_took_is_not_the_servers() -> None:
    """A reserved port is not protected from other users: whoever replies there first would get key and prompts."""
    port = ReservedPort("127.0.0.1")
    assert not is_own_listener(port.number), "reserved, but nothing listens"
    with subprocess.Popen(
        [sys.executable, "-c", OTHER_USER, str(port.number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"listening\n"
        assert not is_own_listener(port.number)
        other.communicate()
    with closing(socket.socket()) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind(("127.0.0.1", port.number))
        own.listen()
        assert is_own_listener(port.number)
    port.release()


def test_a_server_gets_no_request_before_its_port_is_its_own(monkeypatch) -> None:
    listening = iter([False, False, True])
    sent: list[tuple[str, Any, str]] = []
    monkeypatch.setattr(supervisor, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(supervisor, "_replies", lambda url, body=None, key="": sent.append((url, body, key)) or True)
    process = SimpleNamespace(
        url="http://x", key="k", exit_reason=lambda: None, is_listening=lambda: next(listening), stop=lambda: None
    )
    command = replace(FAKE, setup_requests=(("/setup", {}),))
    with closing(ServerSupervisor(command, 1, SimpleNamespace(start=lambda _: process))) as started:
        assert started.start() == ["http://x"]
        assert next(listening, None) is None
        assert started.key_of("http://x") == "k"
    assert sent == [("http://x/health", None, ""), ("http://x/setup", {}, "k")]


def test_each_start_has_a_new_key_in_its_environment_alone(tmp_path: Path) -> None:
    printing = server_command("import os, sys; print(os.environ['SECRET'], sys.argv)")
    launcher = LocalLauncher(tmp_path)
    started = [launcher.start(replace(printing, key_variable="SECRET")) for _ in range(2)]
    for process in started:
        wait_until(process.exit_reason)
        assert process.key in str(process.exit_reason())
        command = Path(f"/proc/{process.process.pid}/cmdline")
        assert not command.exists() or process.key not in command.read_text()
        process.stop()
    assert len({process.key for process in started}) == 2
    assert all(len(process.key) >= 32 for process in started)

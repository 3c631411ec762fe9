"""The ends of agents' episodes and calls: whatever an agent, its client or the run does, nothing hangs or stays."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from postlude.data.chat import Encoder
from postlude.generate.protocol import FinishedCompletion, Request
from postlude.rollout.agent_programs import Agent, AgentClient, AgentLimits, CommandAgent, FunctionAgent, ServiceAgent
from postlude.rollout.agents import AgentEnvironment, AgentOptions
from postlude.rollout.conversations import Conversations, PromptSource, TrajectoryGroup
from postlude.rollout.sandbox import open_sandbox
from postlude.serving.errors import RequestRefused, ServerError
from postlude.world.work_directories import PREFIX, WorkDirectories
from tests.conftest import PATIENCE
from tests.rollout.agent_runs import (
    BUDGET,
    SAMPLING,
    RecordingEngine,
    Reply,
    check_tokens,
    run_agents,
    tasks,
    tokenizer,
)
from tests.rollout.model_calls import post
from tests.rollout.test_agents import USER, asking, counted

CHAT = {"model": "any", "messages": [USER]}


class SilentEngine(RecordingEngine):
    """Never returns a completion, and notes which requests were cancelled."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self.cancelled: list[int] = []

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)

    def poll(self, timeout: float | None = 0.0) -> list[FinishedCompletion]:
        return []


class FailingEngine(RecordingEngine):
    """Fails every request."""

    def __init__(self, error: Exception) -> None:
        super().__init__(counted)
        self.error = error

    def submit(self, request: Request) -> int:
        self.finished.append(FinishedCompletion(request_id := next(self.ids), 0, None, self.error))
        return request_id


def refused() -> ServerError:
    error = ServerError("http://a:1 refused the request with no such thing.")
    error.__cause__ = RequestRefused("no such thing")
    return error


def test_an_error_of_a_request_is_the_agents_and_a_lost_server_is_the_runs() -> None:
    statuses: list[Any] = []
    for error in (ValueError("too long"), refused()):
        (trajectory,) = run_agents(asking({}, statuses=statuses), FailingEngine(error))
        assert (trajectory.reward, trajectory.transcripts) == (1.0, ())
    assert statuses == [(400, None)] * 2
    with pytest.raises(ServerError, match="no server"):
        run_agents(asking({}), FailingEngine(ServerError("no server is left.")))


def test_a_function_that_blocks_its_thread_still_gets_its_completions() -> None:
    async def run(task: Mapping[str, Any], client: AgentClient) -> float:
        return float(post(client.url, client.api_key, CHAT)[0] == 200)

    engine = RecordingEngine(counted)
    trajectories = run_agents(FunctionAgent(run, "run"), engine, samples=3)
    assert [trajectory.reward for trajectory in trajectories] == [1.0] * 3
    check_tokens(trajectories, engine)


def test_a_key_is_of_one_episode_and_ends_with_it() -> None:
    clients: list[AgentClient] = []
    statuses: list[int] = []

    async def run(task: Mapping[str, Any], client: AgentClient) -> float:
        clients.append(client)
        for key in ("", "sk-another", *(earlier.api_key for earlier in clients[:-1])):
            statuses.append((await asyncio.to_thread(post, client.url, key, CHAT))[0])
        return 1.0

    run_agents(FunctionAgent(run, "run"), RecordingEngine(counted), samples=3, options={"concurrency": 1})
    assert len({client.api_key for client in clients}) == 3
    assert statuses == [401] * (2 + 3 + 4)


def test_the_call_of_a_client_that_disconnects_is_cancelled_and_is_not_trained_on() -> None:
    engine = SilentEngine(counted)

    async def run(task: Mapping[str, Any], client: AgentClient) -> float:
        connection = http.client.HTTPConnection(urlsplit(client.url).netloc)
        headers = {"x-api-key": client.api_key, "Content-Type": "application/json"}
        await asyncio.to_thread(connection.request, "POST", "/v1/chat/completions", json.dumps(CHAT), headers)
        while not engine.sampled:
            await asyncio.sleep(0.01)
        connection.close()
        while not engine.cancelled:
            await asyncio.sleep(0.01)
        return 1.0

    (trajectory,) = run_agents(FunctionAgent(run, "run"), engine, options={"unfinished_reward": 0.5})
    assert (trajectory.reward, trajectory.transcripts, trajectory.completions) == (1.0, (), [])
    assert engine.cancelled == [0]


def processes_with(marker: str) -> list[int]:
    """Returns the processes that have a text in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                if marker in (entry / "cmdline").read_bytes().decode(errors="replace"):
                    found.append(int(entry.name))
    return found


@pytest.mark.parametrize("kind", ["waits for the model", "ignores signals"])
def test_closing_ends_agents_and_what_they_started(tmp_path: Path, kind: str) -> None:
    marker = f"postlude-test-{tmp_path.name}-{os.getpid()}-{kind.split(maxsplit=1)[0]}"
    source = f"""
        import json, os, signal, subprocess, sys, time, urllib.request
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", {marker!r}], start_new_session=True)
        open("agent.py.pid", "w").close()
        open({str(tmp_path / "started")!r}, "w").close()
        if {kind == "ignores signals"}:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(300)
        body = json.dumps({CHAT!r}).encode()
        headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}}
        url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
        urllib.request.urlopen(urllib.request.Request(url, body, headers))
    """
    path = tmp_path / "agent.py"
    path.write_text(textwrap.dedent(source))
    agent = CommandAgent([sys.executable, str(path), marker], open_sandbox())
    environment = AgentEnvironment(tasks(), agent, AgentOptions(AgentLimits(seconds=100.0)))
    engine = SilentEngine(counted)
    group = TrajectoryGroup.of(
        environment.tasks[0], 0, (), SAMPLING, 1, PromptSource(environment, Encoder(tokenizer=tokenizer()))
    )
    with closing(environment), closing(Conversations(engine, budget=BUDGET, background=True)) as conversations:
        conversations.start(group)
        until = time.monotonic() + PATIENCE
        while not (tmp_path / "started").exists() or (kind == "waits for the model" and not engine.sampled):
            assert time.monotonic() < until
            time.sleep(0.01)
        assert len(processes_with(marker)) >= 2
        began = time.monotonic()
    assert time.monotonic() - began < 60
    assert not processes_with(marker)
    assert not group.done
    assert not list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*/*/{path.name}.pid"))
    for thread in threading.enumerate():
        if thread.name in ("postlude agents' model", f"loop of {agent.name}"):
            thread.join(PATIENCE)
            assert not thread.is_alive()


def test_a_later_process_removes_the_work_directories_of_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    source = "from postlude.world.work_directories import *; import os; WorkDirectories().make(); os._exit(9)"
    assert subprocess.call([sys.executable, "-c", source], env={**os.environ, "TMPDIR": str(tmp_path)}) == 9
    (killed,) = tmp_path.glob(f"{PREFIX}*")
    first = WorkDirectories()
    used = first.make()
    assert not killed.exists()
    second = WorkDirectories()
    assert used.is_dir()
    first.close()
    first.close()
    second.close()
    assert not list(tmp_path.iterdir())


def test_a_group_does_not_wait_for_those_it_does_not_need() -> None:
    """Failed episodes do not count as those that it needs."""
    started: list[int] = []
    failed = asyncio.Event()

    async def run(task: Mapping[str, Any], client: AgentClient) -> float:
        started.append(number := len(started))
        await asyncio.to_thread(post, client.url, client.api_key, CHAT)
        if number == 0:
            failed.set()
            raise ValueError("no such thing")
        await failed.wait()
        await asyncio.sleep(600 if number > 2 else 0)
        return 1.0

    engine = RecordingEngine(counted)
    trajectories = run_agents(FunctionAgent(run, "run"), engine, samples=5, needed=2)
    ends = [next(iter(trajectory.components), "scored") for trajectory in trajectories]
    assert ends == ["raised", "scored", "scored", "dropped", "dropped"]
    assert [trajectory.trainable for trajectory in trajectories] == [False, True, True, False, False]


class Harness(BaseHTTPRequestHandler):
    """A service that runs episodes: it asks the model once, and replies as the task says."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        environment, action = body["environment"], self.path.rpartition("/")[2]
        url = environment["OPENAI_BASE_URL"].removesuffix("/v1")
        status, reply = post(url, environment["OPENAI_API_KEY"], {"messages": [USER]})
        if action == "hangs":
            time.sleep(30)
        text = reply["choices"][0]["message"]["content"]
        value: Any = {"reward": 0.5, "length": len(text)} if action == "good" else body["task"]["prompt"]
        data = b"{" if action == "broken" else json.dumps(value).encode()
        self.send_response(500 if action == "fails" else status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture(scope="module")
def harness() -> Any:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Harness)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_service_gets_the_episode_and_replies_with_the_reward(harness: str) -> None:
    engine = RecordingEngine(counted)
    trajectories = run_agents(ServiceAgent(f"{harness}/v1/good"), engine, samples=3)
    assert [(t.reward, t.components) for t in trajectories] == [(0.5, {"length": 7.0})] * 3
    check_tokens(trajectories, engine)


@pytest.mark.parametrize(
    ("action", "kind", "message"),
    [
        ("fails", "died", "replied with status 500"),
        ("broken", "died", "is not JSON"),
        ("other", "invalid", "returned '0\\+1\\?'"),
        ("hangs", "timed_out", "gave no reply within 1 s"),
        ("no server", "died", "Connection refused|connect"),
    ],
)
def test_a_service_that_fails_fails_the_episode(harness: str, action: str, kind: str, message: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{unused.getsockname()[1]}"
        agent: Agent = ServiceAgent(f"{closed if action == 'no server' else harness}/{action}")
        limits = {"seconds": 1.0 if action == "hangs" else 60.0}
        (trajectory,) = run_agents(agent, RecordingEngine(counted), limits=limits)
    assert trajectory.score is not None
    assert (trajectory.excluded, trajectory.components) == (True, {kind: 1.0, "failed": 1.0})
    assert re.search(message, str(trajectory.score.error)), trajectory.score.error

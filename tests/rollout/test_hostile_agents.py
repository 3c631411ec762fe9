"""Agents that do what they should not: what is trained on stays what was sampled, each end has its reason, none stays.

They fork and rewrite their chats, leave in the middle of calls, send what is no request, and exceed every limit.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from postlude.generate.protocol import FinishedCompletion, Request
from postlude.rollout.agent_programs import AgentClient, FunctionAgent
from postlude.rollout.conversations import Trajectory
from tests.rollout.agent_runs import RecordingEngine, check_tokens, run_agents, sampled_parts, trained_parts
from tests.rollout.model_calls import post
from tests.rollout.test_agents import counted, program
from tests.rollout.test_rewards import has_exited

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux")
CHAT = "/v1/chat/completions"
Work = Callable[["Chat"], Awaitable[Any]]


class Chat:
    """An agent's client that sends whatever it is given."""

    def __init__(self, client: AgentClient) -> None:
        self.url, self.key, self.address = client.url, client.api_key, urlsplit(client.url)

    async def ask(self, *texts: str, status: int = 200, **fields: Any) -> str:
        """Returns the reply to a chat of the user's and the assistant's texts in turn."""
        roles = ("user", "assistant")
        messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
        replied, reply = await asyncio.to_thread(post, self.url, self.key, {"messages": messages, **fields})
        assert replied == status, reply
        return reply["choices"][0]["message"]["content"] if status == 200 else reply["error"]["message"]

    async def stream(self, text: str, *, leave_after: int | None = None) -> str:
        """Returns the streamed reply, or what of it had come after some events."""
        return await asyncio.to_thread(self._stream, text, leave_after)

    def open(self, body: bytes, *, length: int | None = None) -> http.client.HTTPConnection:
        """Sends a call, or a part of it."""
        connection = http.client.HTTPConnection(self.address.netloc, timeout=30)
        connection.putrequest("POST", CHAT)
        connection.putheader("Authorization", f"Bearer {self.key}")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(body) if length is None else length))
        connection.endheaders(body)
        return connection

    def status(self, body: bytes) -> int:
        """Returns the status of the reply to a body."""
        connection = self.open(body)
        reply = connection.getresponse()
        assert json.loads(reply.read())["error"]["message"]
        connection.close()
        return reply.status

    def _stream(self, text: str, leave_after: int | None) -> str:
        connection = self.open(json.dumps({"messages": [_user(text)], "stream": True}).encode())
        reply, pieces = connection.getresponse(), []
        for number, line in enumerate(line for line in reply if line.strip()):
            if number == leave_after or line.strip() == b"data: [DONE]":
                break
            pieces.append(json.loads(line.removeprefix(b"data: "))["choices"][0]["delta"].get("content") or "")
        if leave_after is not None:
            reset(connection)
        connection.close()
        return "".join(pieces)


class SlowEngine(RecordingEngine):
    """Completes a prompt with "slow" in it when `released` is set."""

    def __init__(self) -> None:
        super().__init__(counted)
        self.released, self.slow = threading.Event(), list[FinishedCompletion]()

    def submit(self, request: Request) -> int:
        request_id = super().submit(request)
        if "slow" in self.tokenizer.decode(list(request.prompt)):
            self.slow += [finished for finished in self.finished if finished.request_id == request_id]
            self.finished = [finished for finished in self.finished if finished.request_id != request_id]
        return request_id

    def poll(self, timeout: float | None = 0.0) -> list[FinishedCompletion]:
        if self.released.is_set():
            self.finished, self.slow = self.finished + self.slow, []
        return super().poll(timeout)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def reset(connection: http.client.HTTPConnection) -> None:
    """Ends a connection at once, with what was sent on it."""
    assert connection.sock is not None
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.sock.close()


def function(work: Work) -> FunctionAgent:
    """Returns an agent that does this and has reward 1."""

    async def run(task: Mapping[str, Any], client: AgentClient) -> float:
        await work(Chat(client))
        return 1.0

    return FunctionAgent(run, "run")


def run(work: Work, engine: RecordingEngine, **settings: Any) -> Trajectory:
    """Returns the trajectory of an agent's only episode, with reward 1."""
    (trajectory,) = run_agents(function(work), engine, **settings)
    assert (trajectory.done, trajectory.score and trajectory.score.error, trajectory.reward) == (True, None, 1.0)
    return trajectory


def test_chats_that_fork_shrink_and_stream_are_trained_as_sampled() -> None:
    async def work(chat: Chat) -> None:
        first = await chat.ask("a")
        second = await chat.ask("a", first, "b")
        await asyncio.gather(*(chat.ask("a", first, "b", second, f"subtask {index}") for index in range(8)))
        await chat.ask("a summary of all", "understood", "c")
        await chat.ask("a", first.upper(), "b")  # another reply than it got
        assert await chat.stream("streamed") == "reply 1"
        await chat.ask("a", first, "b", n=3)

    engine = RecordingEngine(counted)
    trajectory = run(work, engine)
    check_tokens([trajectory], engine)
    assert (len(engine.sampled), len(trajectory.transcripts)) == (16, 8 + 1 + 1 + 1 + 3 + 0)


def test_what_is_no_request_is_refused_and_costs_nothing() -> None:
    deep = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    bodies = {
        b"": 400,
        b"{": 400,
        b"\xff\xfe": 400,
        b"null": 400,
        b"[]": 400,
        deep: 400,
        b'{"messages": "?"}': 400,
        b'{"messages": []}': 400,
        b'{"messages": [{"role": "user"}]}': 400,
        b'{"messages": [{"role": "user", "content": "?"}], "max_tokens": -1}': 400,
        b'{"messages": [{"role": "user", "content": "?"}], "n": 1000000000}': 400,
        b'{"messages": [{"role": "user", "content": "' + b"x" * 10_000 + b'"}]}': 400,  # above the model's context
        b'{"messages": [{"role": "user", "content": "' + b"x" * (17 << 20) + b'"}]}': 413,
    }

    async def work(chat: Chat) -> None:
        for body, status in bodies.items():
            if len(body) < 1 << 24:
                assert await asyncio.to_thread(chat.status, body) == status, body[:80]
            else:
                connection = await asyncio.to_thread(chat.open, body[:100], length=len(body))
                assert (await asyncio.to_thread(connection.getresponse)).status == status
                connection.close()
        message = {"messages": [_user("?")]}
        assert [post(chat.url, "sk-of-nobody", message)[0], post(chat.url, chat.key, message, "/v1/files")[0]] == [
            401,
            404,
        ]
        await chat.ask("a")

    engine = RecordingEngine(counted)
    check_tokens([run(work, engine)], engine)
    assert len(engine.sampled) == 1


def test_who_leaves_in_the_middle_costs_only_that_call() -> None:
    engine = SlowEngine()

    async def work(chat: Chat) -> None:
        body = json.dumps({"messages": [_user("slow")]}).encode()
        for sent in (body[:20], body):  # in the middle of a request, and of waiting for its reply
            reset(chat.open(sent, length=len(body)))
        waiting = chat.open(json.dumps({"messages": [_user("slow stream")], "stream": True}).encode())
        while len(engine.slow) < 1:
            await asyncio.sleep(0.01)
        reset(waiting)
        assert (await chat.stream("streamed", leave_after=1)) in ("", "reply 1")
        engine.released.set()
        await chat.ask("a")

    trajectory = run(work, engine)
    sampled, trained = sampled_parts(engine), trained_parts([trajectory])
    assert all(part in sampled for part in trained)
    assert len(trained) == 2  # the stream whose first event it read, and the last call


LIMITED = {
    "model_calls": ({"model_calls": 3}, 3),
    "tokens": ({"tokens": 40}, 3),
}


@pytest.mark.parametrize("name", LIMITED)
def test_calls_beyond_a_limit_are_refused_and_end_who_does_not_stop(name: str) -> None:
    limits, most = LIMITED[name]

    async def work(chat: Chat) -> None:
        while True:
            await asyncio.to_thread(post, chat.url, chat.key, {"messages": [_user("a")]})

    engine = RecordingEngine(counted)
    options = {"unfinished_reward": -0.5}
    (trajectory,) = run_agents(function(work), engine, limits=limits, options=options)
    check_tokens([trajectory], engine)
    assert 1 <= len(engine.sampled) <= most
    assert (trajectory.reward, trajectory.excluded) == (-0.5, False)
    assert trajectory.components == {f"{name}_limit": 1.0, "unfinished": 1.0}


def test_more_calls_at_a_time_than_allowed_are_told_to_retry() -> None:
    engine, statuses = SlowEngine(), list[int]()

    async def work(chat: Chat) -> None:
        calls = [
            asyncio.to_thread(post, chat.url, chat.key, {"messages": [_user(f"slow {index}")]}) for index in range(5)
        ]
        for call in asyncio.as_completed(calls):
            statuses.append((await call)[0])
            if len(statuses) == 3:
                engine.released.set()

    check_tokens([run(work, engine, limits={"concurrent_calls": 2})], engine)
    assert statuses == [429] * 3 + [200] * 2


def test_an_episode_that_takes_too_long_ends_with_its_calls() -> None:
    engine = SlowEngine()

    async def work(chat: Chat) -> None:
        await chat.ask("a")
        await chat.ask("slow")

    began = time.monotonic()
    (trajectory,) = run_agents(function(work), engine, limits={"seconds": 1.0})
    assert (trajectory.components, trajectory.excluded) == ({"timed_out": 1.0, "failed": 1.0}, True)
    assert trajectory.score is not None
    assert trajectory.score.error == "run took more than 1 s on row 0."
    assert all(part in sampled_parts(engine) for part in trained_parts([trajectory]))
    assert time.monotonic() - began < 55


FAULTS = {  # source, limits, kind of failure, its reason
    "time": ("time.sleep(1000)", {"seconds": 1.0}, "timed_out", "took more than 1 s"),
    "memory": ("x = b'x' * (1 << 29); time.sleep(1000)", {"memory_gib": 0.25}, "died", "MemoryError"),
    "processes": (
        "for _ in range(40): subprocess.Popen(['sleep', '1000'])\ntime.sleep(1000)",
        {"processes": 16},
        "died",
        "more than 16 processes",
    ),
    "file": ("open('large', 'wb').write(b'x' * (1 << 22))\nprint(1)", {"file_gib": 2**-10}, "died", "File too large"),
    "code": ("print('why it failed', file=sys.stderr); sys.exit(3)", {}, "died", "ended with code 3"),
    "signal": ("os.kill(os.getpid(), 11)", {}, "died", "ended by signal 11"),
    "nothing": ("print('no number')", {}, "invalid", "returned no reward"),
    "not finite": ("print('{\"reward\": NaN}')", {}, "invalid", "a reward is finite"),
    "text": ('print(\'{"reward": "1"}\')', {}, "invalid", "a number or a dict of numbers"),
    "no JSON": ("open('reward.json', 'w').write('{')", {}, "invalid", "reward.json that is not JSON"),
    "a link": ("os.symlink('/proc/self/environ', 'reward.json')", {}, "invalid", "reward.json that cannot be read"),
    "a pipe": ("os.mkfifo('reward.json')", {}, "invalid", "no file of at most"),
    "large": ("open('reward.json', 'w').write(' ' * (1 << 21) + '1')", {}, "invalid", "no file of at most"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_program_that_fails_has_its_reason(name: str, tmp_path: Path) -> None:
    source, limits, kind, reason = FAULTS[name]
    engine = RecordingEngine(counted)
    agent = program(tmp_path, f"import subprocess\nask([{_user('a')}])\n{source}\n")
    (trajectory,) = run_agents(agent, engine, limits=limits)
    assert trajectory.score is not None
    assert trajectory.score.error is not None
    assert (trajectory.components, reason in trajectory.score.error) == ({kind: 1.0, "failed": 1.0}, True), (
        trajectory.score.error
    )
    check_tokens([trajectory], engine)


LEAVES_PROCESSES = """
import subprocess
pids = []
for number in range(4):
    options = {"start_new_session": number % 2 == 0, "env": {} if number > 1 else None}
    pids.append(subprocess.Popen(["/bin/sleep", "1000"], **options).pid)
if not (child := os.fork()):
    os.setsid()
    if not os.fork():
        open(PIDS, "w").write(" ".join(map(str, [*pids, os.getpid()])))
        time.sleep(1000)
    os._exit(0)
os.waitpid(child, 0)
ask([{"role": "user", "content": "a"}])
while not os.path.exists(PIDS): time.sleep(0.01)
sys.stdout.write("x" * (3 << 20) + "\\n")
print('{"reward": 1, "printed": 2}')
"""


def test_nothing_that_a_program_started_outlives_it(tmp_path: Path) -> None:
    pids, engine, threads = tmp_path / "pids", RecordingEngine(counted), set(threading.enumerate())
    agent = program(tmp_path, f"PIDS = {str(pids)!r}\n{LEAVES_PROCESSES}")
    (trajectory,) = run_agents(agent, engine)
    assert (trajectory.reward, trajectory.components) == (1.0, {"printed": 2.0})
    check_tokens([trajectory], engine)
    assert [pid for pid in map(int, pids.read_text().split()) if not has_exited(pid)] == []
    end = time.monotonic() + 60
    while left := {thread.name for thread in set(threading.enumerate()) - threads}:
        assert time.monotonic() < end, left
        time.sleep(0.02)

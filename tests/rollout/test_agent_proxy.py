"""The server of agents' calls fails in the middle: the episodes go on at the same address, with the same tokens."""

from __future__ import annotations

import asyncio
import http.client
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from postlude.generate.protocol import Completion
from postlude.rollout.agent_programs import AgentLimits
from postlude.rollout.agent_proxy import AgentProxy
from postlude.rollout.agent_session import AgentSession
from postlude.rollout.agent_transcripts import ChatEncoders
from postlude.rollout.agents import AgentEnvironment, AgentOptions
from postlude.rollout.episode import Episode
from postlude.rollout.model_calls import ModelAccess, ModelCall
from postlude.serving.server.served_model import ServedModel
from tests.conftest import PATIENCE
from tests.rollout.agent_runs import BUDGET, SAMPLING, RecordingEngine, tasks, tokenizer
from tests.rollout.model_calls import post
from tests.rollout.test_agents import USER, asking, counted

EPISODES, CALLS = 4, 3


def new_session(submit: Callable[[ModelCall], None]) -> AgentSession:
    made = tokenizer()
    return AgentSession(
        Episode(tasks()[0]),
        ModelAccess(made, SAMPLING, BUDGET),
        ServedModel("tiny", made, BUDGET),
        ChatEncoders(made, {}),
        AgentLimits(),
        sampling="config",
        keep_reasoning=False,
        submit=submit,
        stop=lambda: None,
    )


def cancel_server(loop: asyncio.AbstractEventLoop) -> None:
    """Ends the server, which closes its socket and its connections."""
    (task,) = [task for task in asyncio.all_tasks(loop) if "AgentProxy._serve" in repr(task)]
    task.cancel()


@pytest.mark.parametrize("kill", [lambda loop: loop.call_soon(sys.exit), lambda loop: loop.stop(), cancel_server])
def test_a_server_that_fails_starts_again_and_no_episode_is_lost(kill: Callable[[Any], None]) -> None:
    kills: list[int] = []
    submitted: list[ModelCall] = []

    def submit(call: ModelCall) -> None:
        submitted.append(call)
        if len(submitted) == EPISODES + 1:  # each has had a reply, or waits for it
            kills.append(len(submitted))
            kill(asyncio.get_running_loop())
        text = f"{len(submitted)}.".encode()
        completion = Completion(list(text), [-1.0] * len(text), [-1.0] * len(text), "stop", text.decode())
        threading.Timer(0.05, call.deliver, ([completion],)).start()

    def converse(url: str, session: AgentSession) -> int:
        messages, failed = [USER], 0
        while len(messages) < 2 * CALLS:
            try:
                status, reply = post(url, session.key, {"model": "any", "messages": messages})
            except (OSError, http.client.HTTPException):
                failed += 1
                assert failed < 100
                time.sleep(0.05)
                continue
            assert status == 200
            messages += [reply["choices"][0]["message"], USER]
        return failed

    sessions = [new_session(submit) for _ in range(EPISODES)]
    with closing(AgentProxy()) as proxy, ThreadPoolExecutor(EPISODES) as clients:
        for session in sessions:
            proxy.add(session)
        failed = sum(clients.map(lambda session: converse(proxy.url, session), sessions))
        proxy.check()
    assert kills
    assert (failed > 0) == (kill is cancel_server)  # else not even a connection is lost
    for session in sessions:
        (transcript,) = session.transcripts.transcripts()
        assert len(session.transcripts.turns) == CALLS
        assert sum(transcript.mask) == sum(len(reply.completion.tokens) for reply in session.transcripts.replies)


def test_a_server_that_cannot_go_on_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its restarts fail at once, as where another program has taken its port."""
    monkeypatch.setattr("postlude.rollout.agent_proxy.RESTARTS", 0)
    environment = AgentEnvironment(tasks(), asking({}), AgentOptions(AgentLimits()))
    episode = environment.reset(tasks()[0])
    with closing(environment):
        environment.start(episode, ModelAccess(tokenizer(), SAMPLING, BUDGET))
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "postlude agents' model"]
        (call,) = wait_for_calls(environment)
        engine = RecordingEngine(counted)
        engine.submit(call.request)
        (finished,) = engine.poll()
        assert finished.completion is not None

        class Exits(list[Completion]):
            def __iter__(self) -> Any:
                raise SystemExit

        call.deliver(Exits([finished.completion]))
        thread.join(PATIENCE)
        with pytest.raises(RuntimeError, match="the server of agents' calls"):
            environment.poll(1.0)


def wait_for_calls(environment: AgentEnvironment) -> list[ModelCall]:
    until = time.monotonic() + PATIENCE
    while not (calls := environment.model_calls()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return calls

"""Agents that ask for completions at a URL: what is trained on is what was sampled, and every end has its reason."""

from __future__ import annotations

import asyncio
import re
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from postlude.generate.protocol import FinishedCompletion, Request
from postlude.rollout import conversations
from postlude.rollout.agent_programs import AgentClient, CommandAgent, FunctionAgent
from postlude.rollout.episode import Episode
from postlude.rollout.function_reward import FunctionReward
from postlude.rollout.model_calls import ModelCall, PendingCalls
from postlude.rollout.sandbox import open_sandbox
from tests.rollout.agent_runs import BUDGET, SAMPLING, RecordingEngine, check_tokens, run_agents, tasks
from tests.rollout.model_calls import post
from tests.rollout.test_agent_transcripts import TOOL

USER = {"role": "user", "content": "1+1?"}


def counted(prompt: str, request: Request) -> str:
    """The reply of the tests' model: how many messages it read."""
    return f"reply {prompt.count('<|im_start|>') - 1}"


def program(tmp_path: Path, source: str) -> CommandAgent:
    """Returns an agent whose program has a function `ask(messages)` and the `task`."""
    path = tmp_path / "agent.py"
    start = """
        import json, os, sys, time, urllib.request
        task = json.load(open("task.json"))
        def ask(messages, **fields):
            body = json.dumps({"model": "gpt", "messages": messages, **fields}).encode()
            headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
            url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
            with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as reply:
                return json.load(reply)["choices"][0]["message"]["content"]
    """
    path.write_text(textwrap.dedent(start) + textwrap.dedent(source))
    return CommandAgent([sys.executable, str(path)], open_sandbox())


TWO_TURNS = """
    chat = [{"role": "user", "content": task["prompt"]}]
    first = ask(chat)
    second = ask([*chat, {"role": "assistant", "content": first}, {"role": "user", "content": "And?"}])
    print("working")
    print(json.dumps({"reward": 0.5, "turns": 2}))
"""


def test_a_program_is_trained_on_the_tokens_that_were_sampled(tmp_path: Path) -> None:
    engine = RecordingEngine(counted)
    trajectories = run_agents(program(tmp_path, TWO_TURNS), engine, groups=2, samples=2)
    assert [(len(t.transcripts), t.reward, t.components) for t in trajectories] == [(1, 0.5, {"turns": 2.0})] * 4
    check_tokens(trajectories, engine)
    assert len({sampled.request.seed for sampled in engine.sampled}) == 8
    assert {sampled.request.sampling.temperature for sampled in engine.sampled} == {SAMPLING.temperature}


def test_a_function_uses_the_clients_arguments() -> None:
    async def run(task: Mapping[str, Any], client: AgentClient) -> float:
        chat = {"model": "any", "messages": [{"role": "user", "content": task["prompt"]}]}
        status, reply = await asyncio.to_thread(post, client.url, client.api_key, chat)
        assert (status, reply["choices"][0]["message"]["content"]) == (200, "reply 1")
        return 1.0

    engine = RecordingEngine(counted)
    trajectories = run_agents(FunctionAgent(run, "run"), engine, samples=3)
    assert [trajectory.reward for trajectory in trajectories] == [1.0] * 3
    check_tokens(trajectories, engine)


def asking(*bodies: dict[str, Any], statuses: list[Any] | None = None, value: Any = 1.0) -> FunctionAgent:
    """Returns an agent that makes these calls one after the other, and notes their statuses or codes of errors."""

    async def run(task: Mapping[str, Any], client: AgentClient) -> Any:
        for body in bodies:
            fields = {"model": "any", "messages": [USER], **body}
            status, reply = await asyncio.to_thread(post, client.url, client.api_key, fields)
            if statuses is not None:
                statuses.append(status if status == 200 else (status, reply["error"]["code"]))
        if isinstance(value, Exception):
            raise value
        return value

    return FunctionAgent(run, "asking")


def test_a_rewritten_history_is_a_branch_and_branches_last_trains_the_last() -> None:
    later = {"messages": [USER, {"role": "assistant", "content": "else"}, USER]}
    for branches, count in (("all", 2), ("last", 1)):
        engine = RecordingEngine(counted)
        (trajectory,) = run_agents(asking({}, later), engine, options={"branches": branches})
        assert (len(trajectory.transcripts), len(trajectory.completions)) == (count, 2)
        if branches == "last":
            engine.sampled = engine.sampled[1:]
        check_tokens([trajectory], engine)


def test_several_choices_are_sampled_with_one_call_and_all_are_trained_on() -> None:
    engine = RecordingEngine(lambda prompt, request: f"{request.sampling.seed}")
    (trajectory,) = run_agents(asking({"n": 3}), engine)
    assert [sampled.request.n for sampled in engine.sampled] == [3] * 3
    check_tokens([trajectory], engine)


@pytest.mark.parametrize("sampling", ["config", "agent"])
def test_sampling_parameters_are_the_runs_or_the_agents(sampling: str, caplog: pytest.LogCaptureFixture) -> None:
    """What has another temperature or filter than the run has no log-probs of the trained policy."""
    asked = {"temperature": 0.9, "top_p": 0.5, "max_tokens": 7, "stop": ["x"], "seed": 5}
    engine = RecordingEngine(counted)
    agent = asking({}, asked, {"top_p": 0.5, "max_tokens": 4096})
    masking = replace(SAMPLING, return_sampling_mask=True)
    (trajectory,) = run_agents(agent, engine, options={"sampling": sampling}, sampling=masking)
    plain, changed, filtered = (sampled.request.sampling for sampled in engine.sampled)
    of_agent = sampling == "agent"
    assert (plain.temperature, plain.top_p, plain.max_new_tokens, plain.stop) == (0.5, 1.0, 64, ())
    wanted = (0.9, 0.5) if of_agent else (0.5, 1.0)
    assert (changed.temperature, changed.top_p, changed.max_new_tokens, changed.stop) == (*wanted, 7, ("x",))
    assert (filtered.temperature, filtered.top_p, filtered.max_new_tokens) == (0.5, 0.5 if of_agent else 1.0, 64)
    assert len({plain.seed, changed.seed, filtered.seed}) == 3
    masked = [params.return_sampling_mask for params in (plain, changed, filtered)]
    assert masked == [True, not of_agent, not of_agent], "masks are of what is trained on"
    assert trajectory.components == ({"untrained_calls": 2.0} if of_agent else {})
    assert ("top_p 0.5 (the run has 1.0), so those completions are not trained on" in caplog.text) == of_agent
    if of_agent:
        del engine.sampled[1:]
    check_tokens([trajectory], engine)


def test_a_call_is_submitted_and_its_completion_delivered_without_a_poll_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("POLL_SECONDS", "CALL_POLL_SECONDS", "ENGINE_POLL_SECONDS"):
        monkeypatch.setattr(conversations, name, 60.0)
    engine, began = RecordingEngine(counted), time.monotonic()
    trajectories = run_agents(asking({}, {}), engine, groups=2, samples=2)
    assert [trajectory.reward for trajectory in trajectories] == [1.0] * 4
    assert time.monotonic() - began < 30
    check_tokens(trajectories, engine)


def test_a_strict_tool_is_sampled_under_a_grammar_only_if_its_call_is_forced() -> None:
    strict = {"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]}
    engine = RecordingEngine(counted)
    run_agents(asking(strict, {**strict, "tool_choice": "required"}), engine)
    assert [sampled.request.sampling.constrained for sampled in engine.sampled] == [False, True]


class TokenEngine(RecordingEngine):
    """Returns no text, as an engine without a tokenizer."""

    def poll(self, timeout: float | None = 0.0) -> list[FinishedCompletion]:
        entries = ((entry, entry.completion) for entry in super().poll(timeout))
        return [replace(entry, completion=replace(done, text=None)) for entry, done in entries if done is not None]


def test_the_text_that_an_agent_gets_ends_before_a_stop_string_of_the_run() -> None:
    replies: list[Any] = []

    async def run(task: Mapping[str, Any], client: AgentClient) -> float:
        chat = {"model": "any", "messages": [USER]}
        replies.append((await asyncio.to_thread(post, client.url, client.api_key, chat))[1]["choices"][0]["message"])
        body = {"prompt": "Once"}
        status, reply = await asyncio.to_thread(post, client.url, client.api_key, body, "/v1/completions")
        replies.append(reply["choices"][0]["text"])
        return float(status == 200)

    engine = TokenEngine(lambda prompt, request: "two<END>")
    trajectories = run_agents(FunctionAgent(run, "run"), engine, sampling=replace(SAMPLING, stop=("<END>",)))
    assert [replies[0]["content"], replies[1]] == ["two", "two"]
    check_tokens(trajectories, engine)


def test_completions_of_prompts_are_trained_on_at_the_temperature_of_the_run() -> None:
    async def run(task: Mapping[str, Any], client: AgentClient) -> float:
        for temperature in (0.5, 0.9):
            body = {"prompt": "Once", "temperature": temperature}
            await asyncio.to_thread(post, client.url, client.api_key, body, "/v1/completions")
        return 1.0

    engine = RecordingEngine(counted)
    (trajectory,) = run_agents(FunctionAgent(run, "run"), engine, options={"sampling": "agent"})
    assert [sampled.request.sampling.temperature for sampled in engine.sampled] == [0.5, 0.9]
    del engine.sampled[1]
    check_tokens([trajectory], engine)


def test_an_agent_that_makes_the_same_calls_gets_the_same_completions() -> None:
    def seeds(samples: int) -> list[int]:
        engine = RecordingEngine(counted)
        run_agents(asking({}, {}), engine, samples=samples)
        return sorted(sampled.request.seed for sampled in engine.sampled)

    assert seeds(3) == seeds(3)
    assert set(seeds(1)) < set(seeds(3))


LONG = {"messages": [{"role": "user", "content": "a" * BUDGET}]}
LIMITS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], list[Any]]] = {
    "model calls": ({"model_calls": 2}, [{}] * 3, [200, 200, (400, "model_calls_limit")]),
    "tokens": ({"tokens": 30}, [{}] * 2, [200, (400, "tokens_limit")]),
    "concurrent calls": ({"concurrent_calls": 2}, [{"n": 3}, {"n": 2}], [(429, "rate_limit_exceeded"), 200]),
    "context": ({}, [LONG, {}], [(400, "context_length_exceeded"), 200]),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_call_beyond_a_limit_is_refused_and_the_reward_stays(name: str) -> None:
    limits, bodies, wanted = LIMITS[name]
    statuses: list[Any] = []
    engine = RecordingEngine(counted)
    (trajectory,) = run_agents(asking(*bodies, statuses=statuses), engine, limits=limits)
    assert statuses == wanted
    assert trajectory.reward == 1.0
    limit = name.replace(" ", "_")
    assert trajectory.components == ({f"{limit}_limit": 1.0} if limit in ("model_calls", "tokens") else {})
    check_tokens([trajectory], engine)


def test_an_agent_without_a_reward_after_a_limit_is_unfinished() -> None:
    for value, bodies in ((ValueError("refused"), 2), (None, 2), (1.0, 40)):  # the last one does not end by itself
        agent = asking(*[{}] * bodies, value=value)
        settings = {"limits": {"model_calls": 1}, "options": {"unfinished_reward": -0.5}}
        (trajectory,) = run_agents(agent, RecordingEngine(counted), **settings)  # type: ignore[arg-type]
        assert (trajectory.reward, trajectory.excluded) == (-0.5, False)
        assert trajectory.components == {"model_calls_limit": 1.0, "unfinished": 1.0}


async def _sleeps(task: Mapping[str, Any], client: AgentClient) -> float:
    await asyncio.sleep(60)
    return 1.0


FAILURES: dict[str, tuple[Any, str, str]] = {
    "raises": (asking(value=RuntimeError("no such thing")), "raised", "RuntimeError: no such thing"),
    "sleeps": (FunctionAgent(_sleeps, "sleeps"), "timed_out", "sleeps took more than 1 s on row 0"),
    "returns nothing": (asking(value=None), "invalid", "asking returned no reward"),
    "returns text": (asking(value="well done"), "invalid", "asking returned 'well done' for row 0, but a reward is"),
    "returns nan": (asking(value={"reward": float("nan")}), "invalid", "a reward is finite"),
    "exits": ("sys.exit(3)", "died", "ended with code 3"),
    "prints a traceback": ("print(1.0)\n1 / 0", "died", "ZeroDivisionError: division by zero"),
    "is killed": ("os.kill(os.getpid(), 9)", "died", "was ended by signal 9"),
    "hangs": ("time.sleep(60)", "timed_out", "took more than 1 s, and was ended"),
    "prints no reward": ("print('done')", "invalid", "returned no reward"),
    "writes no JSON": ("open('reward.json', 'w').write('{')", "invalid", "wrote a reward.json that is not JSON"),
    "writes a link": ("os.symlink('/etc/passwd', 'reward.json')", "invalid", "left a reward.json that cannot be read"),
    "writes a pipe": ("os.mkfifo('reward.json')", "invalid", "left a reward.json that is no file"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_no_reward_and_has_its_reason(tmp_path: Path, name: str) -> None:
    source, kind, message = FAILURES[name]
    agent = program(tmp_path, source) if isinstance(source, str) else source
    limits = {"seconds": 1.0 if "1 s" in message else 60.0}
    (excluded,) = run_agents(agent, RecordingEngine(counted), limits=limits)
    assert excluded.score is not None
    assert re.search(message, str(excluded.score.error))
    assert (excluded.excluded, excluded.components) == (True, {kind: 1.0, "failed": 1.0})
    if not isinstance(source, str):
        (failed,) = run_agents(agent, RecordingEngine(counted), limits=limits, failed_reward=-1.0)
        assert (failed.excluded, failed.reward) == (False, -1.0)


REWARDS: dict[str, tuple[str, float, dict[str, float]]] = {
    "a number": ("print(0.25)", 0.25, {}),
    "the last line of JSON": ("print('{\"reward\": 1}')\nprint(-0.5)\nprint('bye {')", -0.5, {}),
    "a file first": ("open('reward.json', 'w').write('{\"reward\": 2, \"tests\": 3}')\nprint(7)", 2.0, {"tests": 3.0}),
}


@pytest.mark.parametrize("name", REWARDS)
def test_forms_of_a_programs_reward(tmp_path: Path, name: str) -> None:
    source, reward, components = REWARDS[name]
    (trajectory,) = run_agents(program(tmp_path, source), RecordingEngine(counted))
    assert (trajectory.reward, trajectory.components) == (reward, components)


def test_a_reward_function_gets_the_last_chat_and_the_work_directory(tmp_path: Path) -> None:
    def reward(completion: str, transcript: list[dict[str, Any]], workdir: str, answer: str) -> float:
        contents = [message["content"] for message in transcript]
        assert contents == ["0+1?", "reply 1", "And?", "reply 3"]
        assert (completion, answer) == ("reply 3", "1")
        return float(Path(workdir, "solution").read_text())

    for end, total in (("", 4.0), ("\nprint(0.5)", 4.5)):
        source = TWO_TURNS.replace('print(json.dumps({"reward": 0.5, "turns": 2}))', 'open("solution", "w").write("4")')
        agent = program(tmp_path, textwrap.dedent(source) + end)
        scored = run_agents(agent, RecordingEngine(counted), reward=FunctionReward(reward, workers=0))
        assert [(trajectory.reward, trajectory.score.error) for trajectory in scored if trajectory.score] == [
            (total, None)
        ]


def test_a_call_that_is_cancelled_before_it_is_submitted_never_is() -> None:
    engine = RecordingEngine(lambda prompt, request: "a")
    call = ModelCall(Episode(tasks()[0]), Request((1,), SAMPLING), lambda result: None)
    call.cancel()
    calls = PendingCalls(engine, lambda completion, start: None)
    calls.submit([call])
    assert not calls.any
    assert not engine.sampled


@pytest.mark.parametrize(
    ("options", "shown"),
    [({}, ["prompt", "answer"]), ({"answer": "answer"}, ["prompt"]), ({"task_columns": ("answer",)}, ["answer"])],
)
def test_an_agent_gets_the_columns_that_it_may_see(options: dict[str, Any], shown: list[str]) -> None:
    seen: list[list[str]] = []

    async def run(task: Mapping[str, Any], client: AgentClient) -> float:
        seen.append(list(task))
        return 1.0

    run_agents(FunctionAgent(run, "run"), RecordingEngine(counted), options=options)
    assert seen == [shown]

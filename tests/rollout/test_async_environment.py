"""AsyncEnvironment: each episode has its own state and waits by itself; a failure ends one episode."""

import asyncio
import importlib.util
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import pytest
import torch

from postlude.rollout import coroutine_pool
from postlude.rollout.async_environment import AsyncEnvironment, read_turn
from postlude.rollout.coroutine_pool import CoroutinePool
from postlude.rollout.environments import TurnResult
from postlude.rollout.episode import AssistantTurn
from postlude.rollout.function_reward import FunctionReward
from postlude.rollout.openenv import OpenEnvServer, OpenEnvTasks
from postlude.rollout.reward import Weighted, WeightedSum
from postlude.rollout.rewards import Score
from postlude.rollout.tasks import Task
from tests.clock import Clock
from tests.conftest import PATIENCE
from tests.rollout.episodes import collect, step


class Counting:
    """Counts its messages; "stop" ends it, and some words make it fail."""

    closed = 0
    blocks, unblocked = threading.Event(), threading.Event()

    def __init__(self, example: Mapping[str, Any], **settings: Any) -> None:
        self.count, self.example = example["start"], example

    async def begin(self) -> None:
        await asyncio.sleep(0)
        self.count *= 10

    async def step(self, turn: AssistantTurn) -> Any:
        self.count += 1
        match turn.text:
            case "stop":
                return {"reward": 1.0, "count": self.count}
            case "earn":
                return f"{self.count}", 0.25
            case "raise":
                raise RuntimeError("no such thing")
            case "exit":
                sys.exit(2)  # as argparse does
            case "exit later":
                await asyncio.create_task(Counting(self.example).step(AssistantTurn("exit")))
            case "hang":
                await asyncio.sleep(600)
            case "block":
                Counting.blocks.set()
                Counting.unblocked.wait(PATIENCE)  # what an episode should never do
            case "nonsense":
                return [1, 2]
            case "both":
                return 1.0, "the wrong way round"
        return f"{self.count}"

    async def close(self) -> None:
        Counting.closed += 1


def counting(**settings: Any) -> AsyncEnvironment:
    tasks = [Task("count", {"start": start}, f"row {start}") for start in range(8)]
    return AsyncEnvironment(tasks, Counting, name="Counting", **{"max_turns": 3, "timeout": PATIENCE, **settings})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(coroutine_pool, "time", clock)
    return clock


def test_an_episode_keeps_its_state_and_sums_its_rewards() -> None:
    environment = counting()
    episodes = [environment.reset(environment.tasks[index]) for index in (1, 2)]
    assert step(environment, episodes, ["go", "earn"]) == [TurnResult(observation="11"), TurnResult(Score(0.25), "21")]
    assert step(environment, episodes, ["stop", "earn"]) == [
        TurnResult(Score(1.0, {"count": 12.0})),
        TurnResult(Score(0.5), "22"),
    ]
    assert step(environment, episodes[1:], ["go"]) == [TurnResult(Score(0.5, {"unfinished": 1.0}))], "after three turns"
    assert episodes[1].observations == ["21", "22"]
    before = Counting.closed
    for episode in episodes:
        environment.release(episode)
    until = time.monotonic() + PATIENCE
    while Counting.closed < before + 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert Counting.closed == before + 2
    environment.close()


def test_an_episode_has_its_own_reward_and_weighted_rewards_over_its_transcript() -> None:
    seen: list[Any] = []

    def turns(transcript: list[dict[str, Any]], completion: str) -> float:
        seen.append([message["content"] for message in transcript])
        return float(len(transcript))

    def fails(completion: str, start: int) -> float:
        return 1.0 / (start - 2)

    before = Counting.closed
    parts = {
        "turns": Weighted(FunctionReward(turns, workers=0), 0.5),
        "fails": Weighted(FunctionReward(fails, workers=0), 0.25),
    }
    environment = counting(reward=WeightedSum(parts))
    environment.trial_call(environment.tasks[3], AssistantTurn("stop"))
    with pytest.raises(ValueError, match="fails failed: ZeroDivisionError"):
        environment.trial_call(environment.tasks[2], AssistantTurn("stop"))
    first, failing, goes_on = episodes = [environment.reset(environment.tasks[index]) for index in (3, 2, 3)]
    seen.clear()
    assert step(environment, episodes[:2], ["earn", "earn"])[0] == TurnResult(Score(0.25), "31")
    results = step(environment, episodes, ["stop", "stop", "go"])
    own = {"count": 32.0, "turns": 3.0, "fails": 1.0}
    assert results[0] == TurnResult(Score(0.25 + 1.0 + 0.5 * 3 + 0.25, own))
    assert results[1].score is not None
    assert (results[1].score.excluded, results[1].score.components["raised"]) == (True, 1.0)
    assert (results[2].done, results[2].score) == (False, None), "an episode that goes on is not scored"
    assert seen == [["earn", "31", "stop"], ["earn", "21", "stop"]]
    for episode in (first, failing):
        environment.release(episode)
    environment._ended[goes_on] = Score(0.0)  # as while a slow reward scores it
    environment.close()
    assert Counting.closed == before + 5, "also the one whose reward was still missing"


def test_failed_episode_affects_no_other(clock: Clock) -> None:
    environment = counting()
    kinds = {
        "raise": ("raised", "Counting failed: RuntimeError: no such thing"),
        "hang": ("timed_out", "Counting took more than 300 s and was given up."),
        "nonsense": ("invalid", "Counting returned [1, 2], but a reward is a number or a dict of numbers."),
        "both": ("invalid", "Counting returned (1.0, 'the wrong way round'), but of two things the first is text"),
    }
    episodes = {kind: environment.reset(environment.tasks[0]) for kind in (*kinds, "stop")}
    for kind, episode in episodes.items():
        environment.submit(episode, AssistantTurn(kind))
    results = collect(environment, 4)
    clock.passed += 1000  # the others have ended
    results |= collect(environment, 1)
    turns = {kind: results[id(episode)] for kind, episode in episodes.items()}
    assert turns.pop("stop") == TurnResult(Score(1.0, {"count": 1.0}))
    for kind, turn in turns.items():
        assert turn.score is not None
        assert turn.score.reward == 0.0
        assert kinds[kind][1] in str(turn.score.error)
    assert dict(environment.failures.failures) == {"raised": 1, "timed_out": 1, "invalid": 2}
    environment.close()


@pytest.mark.parametrize("way", ["exit", "exit later"])
def test_episode_that_calls_exit_affects_no_other(way: str) -> None:
    """Neither concurrent nor later ones."""
    environment = counting()
    episodes = [environment.reset(task) for task in environment.tasks]
    turns = step(environment, episodes[:4], ["go", way, "go", "go"])
    assert [turn.observation for turn in turns] == ["1", None, "21", "31"]
    assert turns[1].score is not None
    assert turns[1].score.error is not None
    assert turns[1].score.error.startswith("Counting failed: SystemExit: 2")
    assert step(environment, episodes[4:5], ["go"]) == [TurnResult(observation="41")]
    environment.close()


@pytest.mark.slow
def test_episode_that_blocks_the_event_loop_is_abandoned(clock: Clock) -> None:
    environment = counting()
    first, second = (environment.reset(environment.tasks[0]) for _ in range(2))
    environment.submit(first, AssistantTurn("block"))
    assert Counting.blocks.wait(PATIENCE)
    clock.passed += 1000
    (turn,) = collect(environment, 1).values()
    assert "took more than 300 s and was given up" in str(turn.score and turn.score.error)
    assert step(environment, [second], ["stop"])[0].score == Score(1.0, {"count": 1.0}), "nobody waits for it"
    Counting.unblocked.set()
    environment.close()


def test_hundreds_of_episodes_wait_concurrently() -> None:
    coroutines, waiting, everyone = CoroutinePool("wait", 300.0), [0], asyncio.Event()

    async def wait_for_all(call_id: int) -> int:
        waiting[0] += 1
        if waiting[0] == 300:
            everyone.set()
        await everyone.wait()
        return call_id

    for call_id in range(300):
        coroutines.submit(call_id, wait_for_all(call_id))
    results: dict[int, Any] = {}
    while len(results) < 300:
        results |= coroutines.poll(None)
    assert {call_id: outcome.value for call_id, outcome in results.items()} == {
        call_id: call_id for call_id in range(300)
    }
    coroutines.close()


def test_preflight_runs_a_trial_episode() -> None:
    environment = counting()
    environment.trial_call(environment.tasks[3], AssistantTurn("go"))
    with pytest.raises(ValueError, match="Counting failed on trial on row 3: RuntimeError: no such thing"):
        environment.trial_call(environment.tasks[3], AssistantTurn("raise"))
    environment.make = lambda example: object()
    with pytest.raises(ValueError, match=r"TypeError: Counting has no `async def step\(self, turn\)`"):
        environment.trial_call(environment.tasks[3], AssistantTurn("go"))
    environment.close()
    assert read_turn((None, 1)) == TurnResult(Score(1.0))
    assert read_turn(("on", None)) == TurnResult(observation="on")


@pytest.mark.parametrize("number", [numpy.float32(0.5), numpy.float64(0.5), torch.tensor(0.5)])
@pytest.mark.parametrize("scored", [False, True])
def test_numbers_of_numpy_and_torch_are_rewards(number: Any, scored: bool) -> None:
    for value in (number, (None, number), {"reward": number}):
        assert read_turn(value, scored=scored) == TurnResult(Score(0.5))
    with pytest.raises(ValueError, match="max_turns is 0"):
        counting(max_turns=0)


def test_missing_openenv_package_gives_install_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postlude.rollout.openenv.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="openenv, but its package is missing"):
        OpenEnvServer("http://localhost:1")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A real OpenEnv server in a thread: a guessing game."""
    if importlib.util.find_spec("openenv") is None:
        pytest.skip("the package is missing: pip install openenv")
    import socket

    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment as ServerEnvironment
    from openenv.core.env_server.types import Action, Observation, State

    class Guess(Action):
        guess: str

    class Hint(Observation):
        hint: str

    class Game(ServerEnvironment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
            self.number = (seed or 0) % 10
            return Hint(hint=f"Guess my number, game {seed}.")

        def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
            guess = int(action.guess)
            if guess == self.number:
                return Hint(hint="right", reward=1.0, done=True)
            return Hint(hint="higher" if guess < self.number else "lower", reward=-0.1)

        @property
        def state(self) -> State:
            return State()

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=8)
    serving = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=serving.run, daemon=True)
    thread.start()
    until = time.monotonic() + PATIENCE
    while not serving.started and time.monotonic() < until:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    serving.should_exit = True
    thread.join(10)


@pytest.mark.slow
def test_openenv_episodes(server: str) -> None:
    openenv = OpenEnvServer(server, action="guess", observation="hint")
    tasks = OpenEnvTasks(openenv, first=40, size=10, chat=True, system=None)
    assert tasks[4].prompt == [{"role": "user", "content": "Guess my number, game 44."}]
    environment = AsyncEnvironment(tasks, openenv.episode, name="the server", max_turns=3)
    episodes = [environment.reset(tasks[index]) for index in (4, 7)]
    assert step(environment, episodes, ["4", "9"]) == [TurnResult(Score(1.0)), TurnResult(Score(-0.1), "lower")]
    assert step(environment, episodes[1:], ["7"]) == [TurnResult(Score(0.9))]
    wrong = environment.reset(tasks[1])
    (turn,) = step(environment, [wrong], ["a number"])
    assert turn.score is not None
    assert "ValueError" in str(turn.score.error) or "invalid literal" in str(turn.score.error)
    for episode in (*episodes, wrong):
        environment.release(episode)
    other_task = Task("x", {"seed": 3, "shown": "Guess my number, game 4."})
    (turn,) = step(environment, [environment.reset(other_task)], ["3"])
    assert "seed 3 began with 'Guess my number, game 3.', and before" in str(turn.score and turn.score.error)
    assert environment.failures.failures["raised"] == 2
    environment.close()
    everything = OpenEnvTasks(OpenEnvServer(server), first=0, size=1, chat=False, system=None)
    assert everything[0].prompt == '{"hint": "Guess my number, game 0."}'


@pytest.mark.slow
def test_unreachable_openenv_server_gives_clear_error(server: str) -> None:
    openenv = OpenEnvServer("http://127.0.0.1:9", timeout=5.0)
    with pytest.raises(
        ValueError, match=r"the OpenEnv server at http://127\.0\.0\.1:9 did not begin seed 0: .* running"
    ):
        OpenEnvTasks(openenv, first=0, size=1, chat=False, system=None)[0]

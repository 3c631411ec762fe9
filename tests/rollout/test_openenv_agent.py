"""An agent that plays an OpenEnv environment with its tools is trained like any other, by the episode's URL."""

from __future__ import annotations

import importlib.util
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest

from postlude.generate.protocol import Request
from postlude.rollout.agent_programs import FunctionAgent
from postlude.user_code import load_callable
from tests.rollout.agent_runs import RecordingEngine, check_tokens, run_agents
from tests.rollout.test_example_agents import AGENTS, WithTask

NUMBER = 7


def guess(prompt: str, request: Request) -> str:
    """Guesses 4, then one more each time it reads "higher"."""
    number = 4 + prompt.count("higher")
    return f'<tool_call>{{"name": "guess", "arguments": {{"number": {number}}}}}</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A real OpenEnv server in a thread: a guessing game with one tool."""
    if importlib.util.find_spec("openenv") is None:
        pytest.skip("the package is missing: pip install openenv")
    import uvicorn
    from fastmcp import FastMCP
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
    from openenv.core.env_server.types import Observation, State

    class Game(MCPEnvironment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            tools = FastMCP("game")

            @tools.tool
            def guess(number: int) -> str:
                """Compares a number with the right one."""
                return "right" if number == self.number else "higher" if number < self.number else "lower"

            super().__init__(tools)

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
            self.number = seed or 0
            return Observation()

        def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
            raise AssertionError

        def _scored(self, action: Any, observation: Any) -> Any:
            if isinstance(action, CallToolAction):
                observation.done = action.arguments["number"] == self.number
                observation.reward = 1.0 if observation.done else -0.1
            return observation

        def step(self, action: Any, timeout_s: float | None = None, **options: Any) -> Any:
            return self._scored(action, super().step(action, timeout_s, **options))

        async def step_async(self, action: Any, timeout_s: float | None = None, **options: Any) -> Any:
            return self._scored(action, await super().step_async(action, timeout_s, **options))

        @property
        def state(self) -> State:
            return State()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    app = create_fastapi_app(Game, CallToolAction, CallToolObservation, max_concurrent_envs=8)
    serving = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=serving.run, daemon=True)
    thread.start()
    until = time.monotonic() + 300
    while not serving.started and time.monotonic() < until:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    serving.should_exit = True
    thread.join(10)


class ScriptedGame:
    """The client of the same game, without a server."""

    def __init__(self, base_url: str) -> None:
        self.number = 0

    async def __aenter__(self) -> ScriptedGame:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def reset(self, seed: int) -> None:
        self.number = seed

    async def list_tools(self) -> list[Any]:
        schema = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
        return [types.SimpleNamespace(name="guess", description="Compares a number.", input_schema=schema)]

    async def step(self, action: Any) -> Any:
        number = action.arguments["number"]
        text = "right" if number == self.number else "higher" if number < self.number else "lower"
        observation = types.SimpleNamespace(result={"data": text}, error=None)
        return types.SimpleNamespace(
            observation=observation, done=text == "right", reward=1.0 if text == "right" else -0.1
        )


def use_scripted_package(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, dict[str, Any]] = {
        "openenv": {},
        "openenv.core": {},
        "openenv.core.env_server": {},
        "openenv.core.env_server.mcp_types": {"CallToolAction": types.SimpleNamespace},
        "openenv.core.mcp_client": {"MCPToolClient": ScriptedGame},
    }
    for name, values in modules.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)


def check_game(url: str) -> None:
    pytest.importorskip("openai")
    agent = FunctionAgent(load_callable(f"{AGENTS / 'openenv_agent.py'}:run"), "run")
    task = {"prompt": "Guess my number.", "server": url, "seed": NUMBER}
    engine = RecordingEngine(guess)
    (trajectory,) = run_agents(WithTask(agent, task), engine, limits={"seconds": 100.0}, seconds=110.0)
    assert trajectory.score is not None
    assert trajectory.score.error is None
    assert trajectory.reward == pytest.approx(1.0 - 3 * 0.1)
    assert (len(trajectory.completions), len(trajectory.transcripts)) == (4, 1)
    check_tokens([trajectory], engine)


def test_an_openenv_agent_is_trained_on_all_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    use_scripted_package(monkeypatch)
    check_game("http://127.0.0.1:9")


@pytest.mark.slow
def test_an_agent_with_the_real_openenv_is_trained_on_all_its_turns(server: str) -> None:
    check_game(server)

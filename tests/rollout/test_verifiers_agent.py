"""Environments of the library verifiers, by a stand-in for it that has what is used of version 0.4."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from postlude.recipes.config.environments import VerifiersSettings
from postlude.rollout.agents import AgentEnvironment
from postlude.rollout.verifiers_agent import VerifiersLibrary, VerifiersTasks
from tests.rollout.agent_runs import RecordingEngine, check_tokens, run_environment

LIBRARY = """
    import asyncio, contextlib, http.client, json
    from types import SimpleNamespace as Value
    from urllib.parse import urlsplit

    class EvalClientConfig(Value): pass
    class ModelContext(Value): pass

    class Environment:
        def __init__(self, config):
            self.config, self.serves = config, False
            data = [Value(prompt_text=f"{index}+1?", name=None) for index in range(3)]
            self.taskset = (Value(data=row, key=f"key {index}") for index, row in enumerate(data))

        @contextlib.asynccontextmanager
        async def serving(self):
            self.serves = True
            yield
            self.serves = False

        async def run_episode(self, task, context):
            assert self.serves
            reply = await asyncio.to_thread(ask, context, task.data.prompt_text)
            trace = Value(
                reward=float(reply == "two") / 2, metrics={"turns": 1.0, "unknown": None}, errors=[], is_timeout=False,
                rewards={"right": Value(score=float(reply == "two")), "skipped": None},
            )
            error = [Value(type="TaskError", message="no box")] if self.config.kind == "fails" else []
            traces = [trace] * (2 if self.config.kind == "two agents" else 1)
            return Value(ok=not error, errors=error, is_timeout=False, traces=traces)

    def ask(context, text):
        client = context.client
        headers = {**client.headers, "Authorization": "Bearer EMPTY", "Content-Type": "application/json"}
        connection = http.client.HTTPConnection(urlsplit(client.base_url).netloc, timeout=30)
        body = {"model": context.model, "messages": [{"role": "user", "content": text}]}
        connection.request("POST", urlsplit(client.base_url).path + "/chat/completions", json.dumps(body), headers)
        return json.loads(connection.getresponse().read())["choices"][0]["message"]["content"]
"""
LOADERS = """
    from types import SimpleNamespace
    from verifiers.v1 import Environment as load_environment

    class Config(SimpleNamespace):
        env_id = "sums"
        def model_dump(self, mode): return vars(self)

    def resolve_env_config(data): return Config(**data)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts the stand-in where the library would be."""
    for name, source in {"": "", "v1/": LIBRARY, "v1/utils/": "", "v1/utils/loaders/": LOADERS}.items():
        file = tmp_path / "verifiers" / name / "__init__.py"
        file.parent.mkdir(parents=True)
        file.write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(str(tmp_path))
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "verifiers"}
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "verifiers"]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.usefixtures("library")
def test_an_episode_is_trained_on_the_tokens_that_were_sampled() -> None:
    environment = VerifiersSettings(settings={"kind": "works"}, size=2).build(seed=0)
    assert isinstance(environment, AgentEnvironment)
    assert [environment.tasks[index].prompt for index in range(len(environment.tasks))] == ["0+1?", "1+1?"]
    assert environment.tasks[1].content == "key 1"
    engine = RecordingEngine(lambda prompt, request: "two")
    trajectories = run_environment(environment, engine, groups=2, samples=2)
    assert [t.reward for t in trajectories] == [0.5] * 4
    assert [t.components for t in trajectories] == [{"turns": 1.0, "right": 1.0}] * 4
    check_tokens(trajectories, engine)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [("fails", "verifiers' sums: TaskError: no box"), ("two agents", "sums has 2 agents in an episode, but one alone")],
)
def test_a_failed_episode_has_a_reason(kind: str, reason: str) -> None:
    environment = VerifiersSettings(settings={"kind": kind}).build(seed=0)
    (trajectory,) = run_environment(environment, RecordingEngine(lambda prompt, request: "two"))
    assert trajectory.score is not None
    assert reason in str(trajectory.score.error)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postlude.rollout.verifiers_agent.find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=r"environment is verifiers, but its package is missing. Run `pip install ver"
    ):
        VerifiersLibrary({})


@pytest.mark.usefixtures("library")
def test_an_old_library_is_named(tmp_path: Path) -> None:
    (tmp_path / "verifiers/__init__.py").write_text("__version__ = '0.1.14'")
    (tmp_path / "verifiers/v1/utils/loaders/__init__.py").write_text("")
    with pytest.raises(ImportError, match=r"verifiers 0.1.14 has not what 0.4 has .* 'verifiers>=0.4'"):
        VerifiersTasks(VerifiersLibrary({}), 1)

"""Environments of the library verifiers (0.4 or newer): their tasks, and an agent that runs one episode of them.

Their agents, which the library calls harnesses, ask for completions through our proxy, which keeps the tokens. So none
of the library's own clients for training is needed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from postlude.pool.worker_pool import CallResult
from postlude.rollout.agent_programs import Agent, AgentClient, AgentLimits
from postlude.rollout.tasks import Task, check_index
from postlude.user_code import describe_error

INDEX = "index"
NO_KEY = "POSTLUDE_HAS_NO_KEY_IN_THE_ENVIRONMENT"  # the library takes keys from there, but each episode has its own


class VerifiersLibrary:
    """What is used of the library, for one environment: its `[env]` settings, as in the library's own configs."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        if find_spec("verifiers") is None:
            raise ImportError(
                "the environment is verifiers, but its package is missing. Run `pip install verifiers`, or choose "
                "another."
            )
        try:
            self._library = import_module("verifiers.v1")
            loaders = import_module("verifiers.v1.utils.loaders")
            self._load, resolve = loaders.load_environment, loaders.resolve_env_config
        except (ImportError, AttributeError) as error:
            version = getattr(import_module("verifiers"), "__version__", "unknown")
            raise ImportError(
                f"verifiers {version} has not what 0.4 has ({error}). Run `pip install 'verifiers>=0.4'`."
            ) from error
        self.config = resolve(dict(settings))

    def environment(self) -> Any:
        return self._load(self.config)

    def context(self, client: AgentClient) -> Any:
        """Returns what an episode needs to ask the trained model."""
        headers = {"Authorization": f"Bearer {client.api_key}", "x-api-key": client.api_key}
        endpoint = self._library.EvalClientConfig(base_url=f"{client.url}/v1", api_key_var=NO_KEY, headers=headers)
        return self._library.ModelContext(model="policy", client=endpoint)


class VerifiersTasks:
    """The first `size` tasks of an environment; all if it has fewer."""

    def __init__(self, library: VerifiersLibrary, size: int) -> None:
        environment = library.environment()
        self.name = str(library.config.env_id)
        self.source = f"{self.name} {json.dumps(library.config.model_dump(mode='json'), sort_keys=True)} {size}"
        self.rows = list(itertools.islice(environment.taskset, size))
        if not self.rows:
            raise ValueError(f"the environment {self.name} of verifiers has no tasks.")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Task:
        row = self.rows[check_index(index, len(self))]
        text = row.data.prompt_text or row.data.name or row.key
        return Task(text, {INDEX: index}, f"{self.name} {index}", row.key)


class VerifiersAgent(Agent):
    """Runs an episode of an environment. Each has an environment of its own, so that its keys and servers end with it.

    The reward is that of its only trace; the scores of its reward functions and its metrics are parts.
    """

    def __init__(self, library: VerifiersLibrary, tasks: VerifiersTasks) -> None:
        self.library, self.tasks, self.name = library, tasks, f"verifiers' {tasks.name}"

    @classmethod
    def load(cls, settings: Mapping[str, Any], size: int) -> VerifiersAgent:
        """Returns the agent of the first `size` tasks of an environment."""
        library = VerifiersLibrary(settings)
        return cls(library, VerifiersTasks(library, size))

    async def run(self, task: Mapping[str, Any], client: AgentClient, limits: AgentLimits) -> CallResult:
        import asyncio  # noqa: PLC0415 - so that an error in a config is found without it

        limit = asyncio.timeout(limits.seconds)
        try:
            async with limit:
                environment = self.library.environment()
                async with environment.serving():
                    row, context = self.tasks.rows[task[INDEX]], self.library.context(client)
                    episode = await environment.run_episode(row, context)
        except Exception as error:
            if limit.expired():
                return CallResult(failure="timed_out", error=f"{self.name} took more than {limits.seconds:g} s.")
            return CallResult(failure="raised", error=describe_error(error))
        return self._result(episode)

    def close(self) -> None:
        """Does nothing."""

    def _result(self, episode: Any) -> CallResult:
        """Returns the reward of an episode, or why it has none."""
        if not episode.ok:
            errors = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
            late = episode.is_timeout or any(trace.is_timeout for trace in episode.traces)
            message = f"{errors[-1].type}: {errors[-1].message}" if errors else "it ended without saying why"
            return CallResult(failure="timed_out" if late else "raised", error=f"{self.name}: {message}")
        if len(episode.traces) != 1:
            return CallResult(
                failure="invalid",
                error=f"{self.name} has {len(episode.traces)} agents in an episode, but one alone can be trained.",
            )
        trace = episode.traces[0]
        return CallResult({**dict(_parts(trace)), "reward": trace.reward})


def _parts(trace: Any) -> Iterator[tuple[str, float]]:
    """Yields the parts of a reward by name: metrics, then the scores of reward functions."""
    yield from ((name, value) for name, value in trace.metrics.items() if value is not None)
    yield from ((name, reward.score) for name, reward in trace.rewards.items() if reward is not None)

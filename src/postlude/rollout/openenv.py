"""Episodes on an OpenEnv server: tasks are its seeds, and its first observation is the prompt.

Needs the package openenv. A server holds one session per episode, so allow it as many as there are at once
(its MAX_CONCURRENT_ENVS). It refuses one more, which counts as a failure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from postlude.rollout.coroutine_pool import CoroutinePool
from postlude.rollout.episode import AssistantTurn
from postlude.rollout.tasks import Task, chat_prompt, check_index

SEED, SHOWN = "seed", "shown"
HIDDEN = ("reward", "done", "metadata")  # fields of an observation that the model does not see


@dataclass(frozen=True)
class OpenEnvServer:
    """A server, the field of an action that holds the text, and the field of an observation that is read."""

    address: str
    action: str = "message"
    observation: str | None = None
    timeout: float = 30.0

    def __post_init__(self) -> None:
        if find_spec("openenv") is None:
            raise ImportError(
                "the environment is openenv, but its package is missing. Run `pip install openenv`, or choose another."
            )

    def episode(self, example: Mapping[str, Any]) -> OpenEnvEpisode:
        return OpenEnvEpisode(self, example)

    def read(self, observation: Any) -> str:
        """Returns an observation as text."""
        if self.observation is None:
            visible = {key: value for key, value in dict(observation).items() if key not in HIDDEN}
            return json.dumps(visible, ensure_ascii=False)
        if self.observation not in observation:
            raise ValueError(
                f'an observation has no field "{self.observation}"; it has: {", ".join(observation)}. Name one in '
                "environment.observation"
            )
        value = observation[self.observation]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class OpenEnvEpisode:
    """One session of a server."""

    def __init__(self, server: OpenEnvServer, example: Mapping[str, Any]) -> None:
        library = import_module("openenv.core.generic_client")  # only for who asks for it
        self.server, self.example = server, example
        self._client = library.GenericEnvClient(base_url=server.address, message_timeout_s=server.timeout)

    async def reset(self) -> str:
        """Connects and starts the seed. Returns the first observation."""
        await self._client.connect()
        result = await self._client.reset(seed=self.example[SEED])
        return self.server.read(result.observation)

    async def begin(self) -> None:
        """Starts the seed again, and refuses a first observation that is not the prompt."""
        observation = await self.reset()
        if observation != self.example[SHOWN]:
            raise ValueError(
                f"seed {self.example[SEED]} began with {observation[:60]!r}, and before with "
                f"{self.example[SHOWN][:60]!r}: the environment must begin alike for one seed"
            )

    async def step(self, turn: AssistantTurn) -> tuple[str | None, float]:
        """Sends a completion. Returns the observation, or None at the end, and the reward."""
        result = await self._client.step({self.server.action: turn.text})
        return None if result.done else self.server.read(result.observation), result.reward or 0.0

    async def close(self) -> None:
        await self._client.close()


class OpenEnvTasks:
    """One task per seed. Each is started once for its prompt, and again by every attempt."""

    def __init__(self, server: OpenEnvServer, *, first: int, size: int, chat: bool, system: str | None) -> None:
        self.server, self.first, self.size, self.chat, self.system = server, first, size, chat, system
        self.source = f"{server.address} {server.observation} {first} {size}"
        self._first_observations: dict[int, str] = {}
        self._coroutines = CoroutinePool(f"the server at {server.address}", server.timeout)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Task:
        seed = self.first + check_index(index, self.size)
        if seed not in self._first_observations:
            self._coroutines.submit(seed, self._first_observation(seed))
            result = self._coroutines.poll(None)[seed]
            if result.failure is not None:
                raise ValueError(
                    f"the OpenEnv server at {self.server.address} did not begin seed {seed}: "
                    f"{str(result.error).rstrip('.')}. Is it running, and has it room for another session?"
                )
            self._first_observations[seed] = result.value
        text = self._first_observations[seed]
        prompt = chat_prompt(text, self.system) if self.chat else text
        return Task(prompt, {SEED: seed, SHOWN: text}, f"seed {seed} of {self.server.address}", text)

    async def _first_observation(self, seed: int) -> str:
        episode = OpenEnvEpisode(self.server, {SEED: seed})
        try:
            return await episode.reset()
        finally:
            await episode.close()

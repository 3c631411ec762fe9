"""The native generator on several ranks: a whole model on every rank, and the prompts shared out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from postlude.engine import Engine
from postlude.generate.generator import Generator
from postlude.generate.protocol import Completion, ConversationEngine, PollAdapter
from postlude.generate.sampling_params import SamplingParams, sampling_per_prompt
from postlude.generate.stop_strings import Detokenizer
from postlude.hf.read_model import end_tokens
from postlude.model import LanguageModel
from postlude.world.agreement import Rank0Controller

Part = TypeVar("Part")


class DistributedEngine(ConversationEngine, Protocol):
    """An engine of all ranks of a run. The first rank alone submits and polls, within what it says by `lead`."""

    controller: Rank0Controller[Any, Any]

    def refresh(self) -> None:
        """Have the newest weights, before answers are asked for. Every rank calls it."""
        ...

    def check_health(self) -> None:
        """See that answers can go on. The first rank calls it now and then while it waits for them."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """What happened since the last time. The first rank asks."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


class ReplicatedGenerator(PollAdapter):
    """A whole model on every rank that answers prompts. Each rank answers its share.

    Which rank answers makes no difference to what it says, so the same seeds give the same answers on any number of
    ranks. Where every rank makes the same call of `generate`, all get all answers; within what the first rank says by
    `lead` it alone calls, and it alone gets them.
    """

    batched_polls = True

    def __init__(self, model: LanguageModel, tokenizer: Detokenizer | None, **limits: Any) -> None:
        self.model = model
        self.generator = Generator(model, tokenizer, **limits)
        self.controller: Rank0Controller[_Asked, list[list[Completion]]] = Rank0Controller(self._share)
        super().__init__(_Led(self.controller))

    def refresh(self) -> None:
        """It has the weights that it was given."""

    def check_health(self) -> None:
        """It goes on by itself."""

    def take_metrics(self) -> dict[str, float]:
        """Nothing happens to it."""
        return {}

    def close(self) -> None:
        """Let go of the memory of answers."""
        self.generator.release()
        self.controller.close()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        n: int = 1,
        *,
        first: int = 0,
    ) -> list[list[Completion]]:
        """As `Generator.generate`, the prompts shared out over all ranks. Give each prompt a seed of its own."""
        everyone: list[list[list[Completion]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(
            everyone, self._share(_Asked(prompts, sampling_per_prompt(sampling, len(prompts)), n, first))
        )
        return in_turn(everyone, len(prompts))

    def _share(self, asked: _Asked) -> list[list[Completion]]:
        """This rank's answers."""
        rank, size = dist.get_rank(), dist.get_world_size()
        own, samplings = asked.prompts[rank::size], asked.samplings[rank::size]
        return self.generator.generate(own, samplings, asked.n, first=asked.first) if own else []


@dataclass(frozen=True)
class _Asked:
    """What all ranks are to answer together."""

    prompts: Sequence[Sequence[int]]
    samplings: Sequence[SamplingParams]
    n: int
    first: int


class _Led:
    """An engine for the first rank to call, whose orders all ranks obey."""

    def __init__(self, controller: Rank0Controller[_Asked, list[list[Completion]]]) -> None:
        self.controller = controller

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        n: int = 1,
        *,
        first: int = 0,
    ) -> list[list[Completion]]:
        found = self.controller.call_all(_Asked(prompts, sampling_per_prompt(sampling, len(prompts)), n, first))
        return in_turn(found, len(prompts))


def in_turn(shares: Sequence[Sequence[Part]], count: int) -> list[Part]:
    """`count` things in their order, of which rank r of n had r, r + n, r + 2n, …"""
    return [shares[place % len(shares)][place // len(shares)] for place in range(count)]


class SyncedGenerator(ReplicatedGenerator):
    """A copy of an engine's model, brought up to date before it answers. It works in every layout of the engine."""

    def __init__(self, engine: Engine, tokenizer: Detokenizer | None, **limits: Any) -> None:
        self.engine = engine
        with torch.device("meta"):
            model = LanguageModel(engine.config, dtype=engine.compute_dtype, blocks=engine.block_types)
        eos_token = tokenizer.eos_token_id if tokenizer is not None else None
        limits.setdefault("eos_tokens", end_tokens(engine.generation, eos_token))
        super().__init__(model.to_empty(device=engine.device).eval(), tokenizer, **limits)
        self.updated_at = -1

    def refresh(self) -> None:
        """Copy the engine's weights, if a step was made since the last time."""
        if self.updated_at != self.engine.step:
            self.engine.copy_weights(self.model)
            self.updated_at = self.engine.step

    def _share(self, asked: _Asked) -> list[list[Completion]]:
        """Answer with the engine's weights as they are now. A large cache is not kept from training."""
        self.refresh()
        answers = super()._share(asked)
        self.generator.release(small=False)
        return answers

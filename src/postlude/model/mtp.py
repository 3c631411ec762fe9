"""Multi-token prediction: after the trunk, each depth looks one token further ahead.

Depth d takes what the depth before it left at a position (the trunk's final states, for the first) and the embedding of
the token d ahead, makes one state of both, and passes it through layers of its own. With the model's own head that
predicts the token after. The tokens ahead come with the microbatch, shifted before it was cut: see
`Microbatch.mtp_microbatches`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from postlude.model.blocks import Block
from postlude.model.config import ModelConfig
from postlude.model.context import ForwardContext
from postlude.model.output import MTPOptions, OutputInputs
from postlude.model.parallel import Linear, RMSNorm
from postlude.model.schedule_plan import PlannedStep, StepOwner
from postlude.model.stack import LogicalLayer
from postlude.model.steps import compute
from postlude.world.mesh import Mesh

Embed = Callable[[Tensor, Tensor | None], Tensor]
"""Tokens [T], and this rank's part of the embedding -> [T / tp, H]."""


class MTPDepth(nn.Module):
    """One depth: norms of both inputs, their projection, layers, and a last norm."""

    def __init__(self, depth: int, config: ModelConfig, mesh: Mesh, blocks: Mapping[str, type[Block]]) -> None:
        super().__init__()
        size = config.hidden_size
        self.hidden_norm = RMSNorm(size, config.norm_eps, tp=mesh.tp, offset=config.norm_offset)
        self.embedding_norm = RMSNorm(size, config.norm_eps, tp=mesh.tp, offset=config.norm_offset)
        self.proj = Linear(2 * size, size, tp=mesh.tp)
        self.layers = nn.ModuleDict(
            {
                str(layer.index): LogicalLayer(layer, config, mesh, blocks, within=f"mtp.{depth}.layers")
                for layer in config.pattern.depth_layers(depth)
            }
        )
        self.norm = RMSNorm(size, config.norm_eps, tp=mesh.tp, offset=config.norm_offset)

    def forward(self, hidden: Tensor, embedded: Tensor, context: ForwardContext) -> Tensor:
        """Both [T / tp, H] -> [T / tp, H], which the head projects and the next depth goes on from."""
        hidden = self.join(hidden, embedded)
        for layer in self.layers.values():
            hidden = layer(hidden, context)
        left: Tensor = self.norm(hidden)
        return left

    def join(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """What its layers begin from: both [T / tp, H] -> [T / tp, H]."""
        joined: Tensor = self.proj(torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1))
        return joined


class MTP(nn.ModuleList):
    """The depths of a model, by their numbers from 0; with `repeated` there is one, used again at every depth."""

    def __init__(self, config: ModelConfig, mesh: Mesh, blocks: Mapping[str, type[Block]]) -> None:
        self.depths = len(config.pattern.mtp)
        super().__init__(MTPDepth(depth, config, mesh, blocks) for depth in range(config.mtp_module_count))

    @property
    def repeated(self) -> bool:
        """Whether a forward uses weights more than once."""
        return len(self) < self.depths

    @property
    def layers(self) -> tuple[LogicalLayer, ...]:
        """Every logical layer, in order."""
        return tuple(cast(LogicalLayer, layer) for depth in self for layer in cast(MTPDepth, depth).layers.values())

    def at_depths(self, context: ForwardContext) -> Iterator[tuple[MTPDepth, ForwardContext]]:
        """For each depth what makes it, and its own context, from that of the trunk."""
        contexts = context.mtp_contexts()
        if len(contexts) < self.depths:
            raise ValueError(
                f"the model predicts {self.depths} tokens further ahead, but the microbatch was packed for "
                f"{len(contexts)}. Pack it with depths={self.depths}."
            )
        for number, own in enumerate(contexts[: self.depths]):
            yield cast(MTPDepth, self[number % len(self)]), own

    def planned(self, context: ForwardContext, embed: Embed, mtp_options: MTPOptions) -> Iterator[PlannedStep]:
        """All depths for a schedule plan, after the trunk's `closing`: each ends with its own."""
        for number, (depth, own) in enumerate(self.at_depths(context)):
            first_use = number < len(self)
            yield _joining(depth, number, own, embed, mtp_options, used_again=self.repeated and first_use)
            for layer in depth.layers.values():
                begin, *others = cast(LogicalLayer, layer).planned(own)
                done = begin.completes if first_use else ()
                yield replace(begin, completes=done, used_again=done if self.repeated else ())
                yield from others
            yield closing(number + 1, depth.norm, own)


def _joining(
    depth: MTPDepth, number: int, context: ForwardContext, embed: Embed, mtp_options: MTPOptions, *, used_again: bool
) -> PlannedStep:
    def join(hidden: Tensor, embedding: Tensor, context: ForwardContext) -> Mapping[str, Tensor]:
        embedded = embed(context.microbatch.tokens, embedding)
        return {"hidden": depth.join(*_entering(hidden, embedded, number, stop_trunk=mtp_options.stop_trunk))}

    again = (depth,) if used_again else ()
    return PlannedStep(compute("join", join, once=True), context, name=f"mtp.{number} join", used_again=again)


def _entering(hidden: Tensor, embedded: Tensor, number: int, *, stop_trunk: bool) -> tuple[Tensor, Tensor]:
    """What a depth starts from, without a gradient where it is not the depths' own."""
    if not stop_trunk:
        return hidden, embedded
    return hidden if number else hidden.detach(), embedded.detach()


def closing(depth: int, norm: RMSNorm, context: ForwardContext) -> PlannedStep:
    """The planned step that gives the final states of a depth, 0 for the trunk, to the next one and to the processor.

    The embedding is given along, for a head that is tied to it: so its gradients are summed in the order of a forward
    at once.
    """

    def close(hidden: Tensor, embedding: Tensor | None, context: ForwardContext) -> Mapping[str, Any]:
        normed = norm(hidden)
        return {"hidden": normed, **dict(zip(closed(depth), (normed, embedding, context), strict=True))}

    return PlannedStep(compute("norm", close, once=True), context, StepOwner("norm"), "norm")


def for_processor(hidden: Tensor) -> Tensor:
    """The same for a processor: what its uses give is summed before the next depth's is added, as plans sum it."""
    return hidden.view_as(hidden)


def closed(depth: int) -> tuple[str, str, str]:
    """What values are called that `closing` gives to the processor: states, embedding and context."""
    return f"states {depth}", f"embedding {depth}", f"context {depth}"


@dataclass(frozen=True)
class LazyDepths:
    """What the depths of a model make of one microbatch, when it is asked for: what nobody asks for costs nothing."""

    mtp: MTP
    hidden: Tensor
    """The trunk's final states, [T / tp, H]."""
    context: ForwardContext
    """The trunk's."""
    embedding: Tensor | None
    embed: Embed

    def __call__(self, inputs: OutputInputs, *, stop_trunk: bool, stop_head: bool) -> Iterator[OutputInputs]:
        """See `postlude.model.output.MTPDepths`."""
        hidden = self.hidden
        for number, (depth, context) in enumerate(self.mtp.at_depths(self.context)):
            embedded = self.embed(context.microbatch.tokens, self.embedding)
            hidden = depth(*_entering(hidden, embedded, number, stop_trunk=stop_trunk), context)
            yield _output(inputs, for_processor(hidden), inputs.head.weight, context, stop_head=stop_head)


@dataclass(frozen=True)
class PlannedDepths:
    """The same, made by the steps of a plan before it is asked for."""

    mtp_options: MTPOptions
    outputs: Sequence[tuple[Tensor, Tensor | None, ForwardContext]]
    """Of each depth its states, the embedding, and its context."""

    def __call__(self, inputs: OutputInputs, *, stop_trunk: bool, stop_head: bool) -> Iterator[OutputInputs]:
        """See `postlude.model.output.MTPDepths`."""
        if stop_trunk != self.mtp_options.stop_trunk:
            raise ValueError(
                f"the processor asks for depths with stop_trunk={stop_trunk}, but its `mtp_options` says "
                f"stop_trunk={self.mtp_options.stop_trunk}, and so they were made. Say there what it asks for."
            )
        for hidden, embedding, context in self.outputs:
            weight = embedding if inputs.config.tied_head and embedding is not None else inputs.head.weight
            yield _output(inputs, hidden, weight, context, stop_head=stop_head)


def _output(
    inputs: OutputInputs, hidden: Tensor, weight: Tensor, context: ForwardContext, *, stop_head: bool
) -> OutputInputs:
    """A depth's final states for the processor, which was given the trunk's `inputs`; `weight` is the head's."""
    microbatch = context.microbatch
    counted = microbatch.targets, microbatch.target_count
    return replace(
        inputs,
        hidden=hidden,
        head=replace(inputs.head, weight=weight.detach() if stop_head else weight, counted=counted),
        microbatch=microbatch,
        reports=context.reports,
        ahead=None,
    )

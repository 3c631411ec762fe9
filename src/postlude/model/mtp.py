"""Multi-token prediction (MTP): after the trunk, each depth predicts one token further ahead.

Depth d combines the hidden states of the depth before it (the trunk's final states for the first) with the embedding of
the token d ahead, and applies its own layers. The model's head then predicts the token after. The tokens ahead come
with the microbatch, shifted before it is sharded: see `Microbatch.mtp_microbatches`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from postlude.lora import LoRAGroup
from postlude.model.blocks import Block, BlockTable
from postlude.model.config import ModelConfig
from postlude.model.context import ForwardContext
from postlude.model.output import MTPOptions, OutputInputs
from postlude.model.parallel import Linear, RMSNorm
from postlude.model.schedule_plan import PlannedStep
from postlude.model.stack import LogicalLayer
from postlude.model.steps import compute
from postlude.world.mesh import Mesh

Embed = Callable[[Tensor, Tensor | None], Tensor]
"""Tokens [T] and this rank's part of the embedding -> [T / tp, H]."""


class MTPDepth(nn.Module):
    """One depth: norms of both inputs, their projection, layers and a final norm."""

    lora_groups: ClassVar[Mapping[str, LoRAGroup]] = {"proj": "named"}

    def __init__(self, depth: int, config: ModelConfig, mesh: Mesh, blocks: BlockTable) -> None:
        super().__init__()
        size = config.hidden_size
        self.hidden_norm = RMSNorm(size, config.norm_eps, tp=mesh.tp, offset=config.norm_offset)
        self.embedding_norm = RMSNorm(size, config.norm_eps, tp=mesh.tp, offset=config.norm_offset)
        self.proj = Linear(2 * size, size, tp=mesh.tp)
        self.layers = nn.ModuleDict(
            {
                str(layer.index): LogicalLayer(layer, config, mesh, blocks, prefix=f"mtp.{depth}.layers")
                for layer in config.pattern.depth_layers(depth)
            }
        )
        self.norm = RMSNorm(size, config.norm_eps, tp=mesh.tp, offset=config.norm_offset)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block for layer in self.layers.values() for block in cast(LogicalLayer, layer).blocks)

    def forward(self, hidden: Tensor, embedded: Tensor, context: ForwardContext) -> Tensor:
        """Runs the depth, both [T / tp, H] -> [T / tp, H], for the head and the next depth."""
        hidden = self.join(hidden, embedded)
        for layer in self.layers.values():
            hidden = layer(hidden, context)
        output: Tensor = self.norm(hidden)
        return output

    def join(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Returns the input of its layers: both [T / tp, H] -> [T / tp, H]."""
        joined: Tensor = self.proj(torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1))
        return joined


class MTPModule(nn.ModuleList):
    """The depths of a model, numbered from 0. If `repeated`, one module serves every depth."""

    def __init__(self, config: ModelConfig, mesh: Mesh, blocks: BlockTable) -> None:
        self.depths = len(config.pattern.mtp)
        super().__init__(MTPDepth(depth, config, mesh, blocks) for depth in range(config.mtp_module_count))

    @property
    def repeated(self) -> bool:
        """Whether a forward uses weights more than once."""
        return len(self) < self.depths

    @property
    def layers(self) -> tuple[LogicalLayer, ...]:
        return tuple(cast(LogicalLayer, layer) for depth in self for layer in cast(MTPDepth, depth).layers.values())

    def at_depths(self, context: ForwardContext) -> Iterator[tuple[MTPDepth, ForwardContext]]:
        contexts = context.mtp_contexts()
        if len(contexts) < self.depths:
            raise ValueError(
                f"the model predicts {self.depths} tokens further ahead, but the microbatch was packed for "
                f"{len(contexts)}. Pack it with depths={self.depths}."
            )
        for number, depth_context in enumerate(contexts[: self.depths]):
            yield cast(MTPDepth, self[number % len(self)]), depth_context

    def planned_steps(self, context: ForwardContext, embed: Embed, mtp_options: MTPOptions) -> Iterator[PlannedStep]:
        """Yields the steps of all depths for a schedule plan, after the trunk's `final_norm_step`."""
        for number, (depth, depth_context) in enumerate(self.at_depths(context)):
            first_use = number < len(self)
            yield _join_step(depth, number, depth_context, embed, mtp_options, used_again=self.repeated and first_use)
            for layer in depth.layers.values():
                first, *others = cast(LogicalLayer, layer).planned_steps(depth_context)
                completes = first.completes if first_use else ()
                yield replace(first, completes=completes, used_again=completes if self.repeated else ())
                yield from others
            yield final_norm_step(number + 1, depth.norm, depth_context)


def _join_step(
    depth: MTPDepth, number: int, context: ForwardContext, embed: Embed, mtp_options: MTPOptions, *, used_again: bool
) -> PlannedStep:
    def join(hidden: Tensor, embedding: Tensor, context: ForwardContext) -> Mapping[str, Tensor]:
        embedded = embed(context.microbatch.tokens, embedding)
        return {"hidden": depth.join(*_depth_inputs(hidden, embedded, number, stop_trunk=mtp_options.stop_trunk))}

    used_again_modules = (depth,) if used_again else ()
    return PlannedStep(
        compute("join", join, never_recompute=True), context, name=f"mtp.{number} join", used_again=used_again_modules
    )


def _depth_inputs(hidden: Tensor, embedded: Tensor, number: int, *, stop_trunk: bool) -> tuple[Tensor, Tensor]:
    if not stop_trunk:
        return hidden, embedded
    return hidden if number else hidden.detach(), embedded.detach()


def final_norm_step(depth: int, norm: Callable[[Tensor], Tensor], context: ForwardContext) -> PlannedStep:
    """Returns the planned step that passes a depth's final states (0: the trunk's) to the next one and the processor.

    It passes the embedding along for a tied head, so that its gradients are summed in the order of a plain forward.
    """

    def apply_norm(hidden: Tensor, embedding: Tensor | None, context: ForwardContext) -> Mapping[str, Any]:
        normed = norm(hidden)
        return {"hidden": normed, **dict(zip(output_names(depth), (normed, embedding, context), strict=True))}

    return PlannedStep(compute("norm", apply_norm, never_recompute=True), context, object(), "norm")


def view_for_processor(hidden: Tensor) -> Tensor:
    """Returns a view for the processor: its gradients are summed before the next depth's, as in a plan."""
    return hidden.view_as(hidden)


def output_names(depth: int) -> tuple[str, str, str]:
    """Returns the names of the values for the processor: states, embedding and context."""
    return f"states {depth}", f"embedding {depth}", f"context {depth}"


@dataclass(frozen=True)
class LazyDepths:
    """Runs the depths of one microbatch on request: depths that are not requested cost nothing."""

    mtp: MTPModule
    hidden: Tensor
    """The trunk's final states, [T / tp, H]."""
    context: ForwardContext
    """The trunk's."""
    embedding: Tensor | None
    embed: Embed

    def __call__(self, inputs: OutputInputs, *, stop_trunk: bool, stop_head: bool) -> Iterator[OutputInputs]:
        hidden = self.hidden
        for number, (depth, context) in enumerate(self.mtp.at_depths(self.context)):
            embedded = self.embed(context.microbatch.tokens, self.embedding)
            hidden = depth(*_depth_inputs(hidden, embedded, number, stop_trunk=stop_trunk), context)
            yield _output(inputs, view_for_processor(hidden), inputs.head.weight, context, stop_head=stop_head)


@dataclass(frozen=True)
class PlannedDepths:
    """The depths' outputs, computed by the steps of a plan."""

    mtp_options: MTPOptions
    outputs: Sequence[tuple[Tensor, Tensor | None, ForwardContext]]
    """States, embedding and context of each depth."""

    def __call__(self, inputs: OutputInputs, *, stop_trunk: bool, stop_head: bool) -> Iterator[OutputInputs]:
        if stop_trunk != self.mtp_options.stop_trunk:
            raise ValueError(
                f"the processor requests depths with stop_trunk={stop_trunk}, but its `mtp_options` has "
                f"stop_trunk={self.mtp_options.stop_trunk}, with which they were computed. Set both to the same value."
            )
        for hidden, embedding, context in self.outputs:
            weight = embedding if inputs.config.tied_head and embedding is not None else inputs.head.weight
            yield _output(inputs, hidden, weight, context, stop_head=stop_head)


def _output(
    inputs: OutputInputs, hidden: Tensor, weight: Tensor, context: ForwardContext, *, stop_head: bool
) -> OutputInputs:
    """Returns the trunk's `inputs` with a depth's final states; `weight` is the head's."""
    microbatch = context.microbatch
    head = replace(
        inputs.head,
        weight=weight.detach() if stop_head else weight,
        known_target_count=(microbatch.targets, microbatch.target_count),
        sampling_masks=None,  # a draft proposes any token
    )
    return replace(
        inputs,
        hidden=hidden,
        head=head,
        microbatch=microbatch,
        mtp=None,
    )

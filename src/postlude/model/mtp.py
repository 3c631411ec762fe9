"""Multi-token prediction: after the trunk, each depth looks one token further ahead.

Depth d takes what the depth before it left at a position (the trunk's final states, for the first) and the embedding of
the token d ahead, makes one state of both, and passes it through layers of its own. With the model's own head that
predicts the token after. The tokens ahead come with the microbatch, shifted before it was cut: see `Microbatch.ahead`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from postlude.model.blocks import Block
from postlude.model.config import ModelConfig
from postlude.model.context import ForwardContext
from postlude.model.output import OutputInputs
from postlude.model.parallel import Linear, RMSNorm
from postlude.model.recompute import Recompute
from postlude.model.stack import LogicalLayer
from postlude.ops.backend import ScanBackend
from postlude.trace.recorder import SILENT, Recorder
from postlude.world.mesh import Mesh


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
        hidden = self.proj(torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1))
        for layer in self.layers.values():
            hidden = layer(hidden, context)
        left: Tensor = self.norm(hidden)
        return left


class MTP(nn.ModuleList):
    """The depths of a model, by their numbers from 0; with `repeated` there is one, used again at every depth."""

    def __init__(self, config: ModelConfig, mesh: Mesh, blocks: Mapping[str, type[Block]]) -> None:
        self.depths = len(config.pattern.mtp)
        super().__init__(MTPDepth(depth, config, mesh, blocks) for depth in range(config.own_depths))

    @property
    def layers(self) -> tuple[LogicalLayer, ...]:
        """Every logical layer, in order."""
        return tuple(cast(LogicalLayer, layer) for depth in self for layer in cast(MTPDepth, depth).layers.values())


@dataclass(frozen=True)
class Ahead:
    """What the depths of a model make of one microbatch, when it is asked for: what nobody asks for costs nothing."""

    mtp: MTP
    mesh: Mesh
    recompute: Recompute
    scans: ScanBackend
    embed: Callable[[Tensor], Tensor]
    """Tokens [T] -> [T / tp, H]."""
    recorder: Recorder = SILENT

    def __call__(self, inputs: OutputInputs, *, stop_trunk: bool, stop_head: bool) -> Iterator[OutputInputs]:
        """See `postlude.model.output.Depths`."""
        head = inputs.head
        if stop_head:
            head = replace(head, weight=head.weight.detach())
        hidden = inputs.hidden.detach() if stop_trunk else inputs.hidden
        if len(inputs.microbatch.ahead) < self.mtp.depths:
            raise ValueError(
                f"the model predicts {self.mtp.depths} tokens further ahead, but the microbatch was packed for "
                f"{len(inputs.microbatch.ahead)}. Pack it with depths={self.mtp.depths}."
            )
        for depth, microbatch in enumerate(inputs.microbatch.ahead[: self.mtp.depths]):
            embedded = self.embed(microbatch.tokens)
            context = ForwardContext(
                microbatch, self.mesh, recompute=self.recompute, scans=self.scans, recorder=self.recorder
            )
            hidden = self.mtp[depth % len(self.mtp)](hidden, embedded.detach() if stop_trunk else embedded, context)
            yield replace(
                inputs,
                hidden=hidden,
                head=replace(head, counted=(microbatch.targets, microbatch.target_count)),
                microbatch=microbatch,
                reports=context.reports,
                ahead=None,
            )

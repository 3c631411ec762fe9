"""What one forward pass hands to every block: where the sequences lie, and what they would otherwise all compute."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.data import Microbatch
from postlude.model.recompute import Recompute
from postlude.ops.attention import Scores
from postlude.ops.packing import Packing
from postlude.ops.rotary import RotaryConfig, rotary_table
from postlude.world.mesh import Mesh


class AttentionCache(Protocol):
    """Keys and values of tokens that passed before, and how the tokens of this forward attend to them."""

    def attend(self, name: str, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Keep the new keys and values [T, kv_heads, width] of block `name`; query [T, heads, width] -> the same."""
        ...


class ForwardContext:
    """One microbatch's packing and positions, rotary tables made once, and a place to report side values.

    The microbatch is this context-parallel rank's, alike on its tensor-parallel ranks, each of which holds the hidden
    states of its own shard of the tokens between blocks.
    """

    def __init__(
        self,
        microbatch: Microbatch,
        mesh: Mesh | None = None,
        *,
        cache: AttentionCache | None = None,
        recompute: Recompute = "none",
    ) -> None:
        self.microbatch = microbatch
        self.mesh = mesh or Mesh.alone()
        self.cache = cache
        self.recompute = recompute
        self.real = self._real()
        self.reports: dict[str, Tensor] = {}
        self._done: set[str] = set()
        self._tables: dict[tuple[RotaryConfig, int], tuple[Tensor, Tensor]] = {}

    @property
    def packing(self) -> Packing:
        """Where each sequence begins and ends among the tokens."""
        return self.microbatch.packing

    def rotary(self, config: RotaryConfig, width: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of this microbatch's positions, fp32 [T, 1, width]; layers alike share one table."""
        key = (config, width)
        if key not in self._tables:
            with torch.no_grad():
                self._tables[key] = rotary_table(config, self.microbatch.positions, width)
        return self._tables[key]

    def _real(self) -> Tensor | None:
        """[T / tp] bool, False where this rank's shard is padding; None where there is none."""
        real, tp = self.microbatch.real, self.mesh.tp
        return real if real is None else real[slice(*tp.block(len(real)))]

    def drop_padding(self, values: Tensor) -> Tensor:
        """`values` [T / tp, ...] with zero in place of padding."""
        if self.real is None:
            return values
        return torch.where(self.real.view(-1, *(1,) * (values.ndim - 1)), values, 0.0)

    @torch.no_grad()
    def total(self, values: Tensor) -> Tensor:
        """Each rank's addend -> their sum over all ranks that share this microbatch."""
        for axis in (self.mesh.tp, self.mesh.cp):
            if axis.group is not None:
                values = values.clone()
                dist.all_reduce(values, group=axis.group)
        return values

    def mean_of_total(self, values: Tensor) -> Tensor:
        """Each rank's sum over its tokens -> the mean over the real tokens of the microbatch."""
        tokens = (
            torch.ones_like(values) * len(self.microbatch) / self.mesh.tp.size if self.real is None else self.real.sum()
        )
        total, count = self.total(torch.stack((values.detach(), tokens.to(values.dtype)))).unbind()
        return total / count.clamp_min(1.0)

    def first_time(self, name: str) -> bool:
        """Whether `name` is asked for the first time: what a layer counts must not count again when recomputed."""
        first = name not in self._done
        self._done.add(name)
        return first

    def report(self, name: str, value: Tensor) -> None:
        """Leave a value for the log, by a name of its own. It carries no gradient."""
        self.reports[name] = value.detach()

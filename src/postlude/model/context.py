"""What one forward pass hands to every block: where the sequences lie, and what they would otherwise all compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.data import Microbatch
from postlude.model.recompute import Recompute
from postlude.ops.attention import Scores
from postlude.ops.decode_linear import COUNTERS
from postlude.ops.kernels.capabilities import ScanBackend
from postlude.ops.packing import Packing
from postlude.ops.rotary import RotaryConfig, rotary_table
from postlude.trace.recorder import NO_RECORDER, Recorder
from postlude.world.mesh import Mesh

Inputs = tuple[Tensor, ...]
States = tuple[Tensor, ...]
DecodeStep = Callable[[Inputs, States], tuple[Tensor, States]]
Scan = Callable[[Inputs, Packing], tuple[Tensor, States]]
Stores = tuple[Tensor, ...]
AttendCache = Callable[[Tensor, Tensor, Tensor, Scores], Tensor]
DecodeAttend = Callable[[Inputs, Stores, AttendCache], Tensor]
PrefillAttend = Callable[[Inputs, Packing], Tensor]


class DecodeState(Protocol):
    """What blocks keep of sequences that are generated token by token, and how they go on from it.

    A forward holds the next tokens of some sequences, equally many of each and side by side, and all tokens so far of
    others, which begin. What is kept grows with a sequence (keys and values) or does not (a recurrence, a convolution's
    last inputs); a block says which by what it calls, under its name. Of several next tokens some may turn out to be
    wrong: what was kept of those is taken back, and a block need not know.
    """

    def attend(self, name: str, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Keep the new keys [T, kv_heads, width] and values [T, kv_heads, value_width] of block `name`.

        Query [T, heads, width] -> what the queries see of these and of those before, [T, heads, value_width].
        """
        ...

    def attend_latents(
        self, name: str, inputs: Inputs, new: Inputs, go_on: DecodeAttend, begin: PrefillAttend
    ) -> Tensor:
        """Keep what is `new` of block `name`, each [T, kv_heads, width], and make outputs of it and what was before.

        `go_on(inputs, stores, attend)` takes n next tokens [n, ...] and what is kept of all, each
        [rows, capacity, kv_heads, width] in the order of `new`; `attend(query, keys, values, scores)` is attention of
        these tokens' queries [n, heads, width] to stores, or to some features of them. `begin(inputs, packing)` takes
        whole packed sequences [T, ...] from their beginning. Both return outputs, [n, ...] and [T, ...]. Of `inputs`,
        all [T, ...], -> the outputs of all T tokens.
        """
        ...

    def recur(self, name: str, inputs: Inputs, step: DecodeStep, scan: Scan) -> Tensor:
        """Go on from the states of block `name`, and keep the new ones; a sequence's states are of one size for ever.

        `step(inputs, states)` takes one token [n, ...] of each of n sequences and their states [n, ...], and returns
        the outputs [n, ...] and the new states. `scan(inputs, packing)` takes whole packed sequences [T, ...] from
        their beginning, and returns the outputs [T, ...] and the last states [count, ...]. Of `inputs`, all [T, ...],
        -> the outputs of all T tokens.
        """
        ...

    def record_routing(self, name: str, choice: Tensor) -> None:
        """Hear which experts block `name` sends this rank's tokens to, [T / tp, top_k]."""
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
        decode_state: DecodeState | None = None,
        recompute: Recompute = "none",
        scans: ScanBackend = "auto",
        routers: Sequence[str] = (),
        recorder: Recorder = NO_RECORDER,
    ) -> None:
        self.microbatch = microbatch
        self.mesh = mesh or Mesh.single_rank()
        self.decode_state = decode_state
        self.recompute = recompute
        self.scans = scans
        self.routers = routers
        self.recorder = recorder
        self.real = self._real()
        self.reports: dict[str, Tensor] = {}
        self._counters: Tensor | None = None
        self._done: set[str] = set()
        self._tables: dict[tuple[RotaryConfig, int], tuple[Tensor, Tensor]] = {}

    def mtp_contexts(self) -> list[ForwardContext]:
        """The same for each multi-token-prediction depth's part of the microbatch; depths choose experts themselves."""
        return [
            ForwardContext(each, self.mesh, recompute=self.recompute, scans=self.scans, recorder=self.recorder)
            for each in self.microbatch.mtp_microbatches
        ]

    @property
    def packing(self) -> Packing:
        """Where each sequence begins and ends among the tokens."""
        return self.microbatch.packing

    @cached_property
    def sequence_index(self) -> Tensor:
        """[T / tp] int64, which sequence each of this rank's tokens belongs to."""
        index = self.packing.sequence_index()
        return index[slice(*self.mesh.tp.block(len(index)))]

    def rotary(self, config: RotaryConfig, width: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of this microbatch's positions, fp32 [T, 1, width]; layers alike share one table."""
        key = (config, width)
        if key not in self._tables:
            with torch.no_grad():
                self._tables[key] = rotary_table(config, self.microbatch.positions, width)
        return self._tables[key]

    @property
    def counters(self) -> Tensor:
        """For programs of one kernel of this forward that count themselves: see `few_rows.linear_add`."""
        if self._counters is None:
            self._counters = torch.zeros(COUNTERS, dtype=torch.int32, device=self.microbatch.tokens.device)
        return self._counters

    def routing(self, name: str) -> Tensor | None:
        """Which experts block `name` is to send this rank's tokens to, [T / tp, top_k or more]; None if it chooses.

        A token with a -1 is sent where the block chooses. See `Microbatch.routing`.
        """
        given, tp = self.microbatch.routing, self.mesh.tp
        if given is None or name not in self.routers:
            return None
        return given[slice(*tp.block(len(given))), self.routers.index(name)]

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

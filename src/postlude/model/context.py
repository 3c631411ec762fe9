"""ForwardContext: what one forward passes to every block. DecodeState: the cache of blocks during generation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.data import Microbatch
from postlude.data.microbatch import ROUTING, SharedSegments
from postlude.model.recompute import Recompute
from postlude.ops.attention import ScoreConfig
from postlude.ops.decode_linear import COUNTERS
from postlude.ops.kernels.capabilities import ScanBackend
from postlude.ops.packing import Packing
from postlude.ops.rotary import RotaryConfig, rotary_table
from postlude.trace.recorder import NO_RECORDER, Recorder
from postlude.world.mesh import Mesh

Inputs = tuple[Tensor, ...]
States = tuple[Tensor, ...]
Stores = tuple[Tensor, ...]
# The functions that `DecodeState.recur` takes.
RecurrentStep = Callable[[Inputs, States, Tensor | None], Tensor]
RecurrentScan = Callable[[Inputs, Packing], tuple[Tensor, States]]
# The functions that `DecodeState.attend_latents` takes, and the one that it gives to `decode`.
AttendCache = Callable[[Inputs, Tensor, Tensor, ScoreConfig], Tensor]
DecodeAttend = Callable[[Inputs, Stores, AttendCache], Tensor]
PrefillAttend = Callable[[Inputs, Inputs, Packing, Packing], Tensor]


class DecodeState(Protocol):
    """The cache that blocks read and write during generation.

    A forward holds the next tokens of running sequences, equally many of each and adjacent, then whole sequences to
    prefill. A block calls one of the methods with its name. `attend` and `attend_latents` keep *stores*, tensors with
    one entry per token (keys, values, latents). `recur` keeps *states* of fixed size (a recurrence, the last inputs of
    a convolution). The cache itself undoes the tokens of a rejected draft.
    """

    def attend(self, name: str, query: Tensor, key: Tensor, value: Tensor, score_config: ScoreConfig) -> Tensor:
        """Stores the new keys [T, kv_heads, width] and values [T, kv_heads, value_width] of block `name`.

        Returns the attention of the queries [T, heads, width] to these and all earlier ones, [T, heads, value_width].
        """
        ...

    def attend_latents(
        self, name: str, inputs: Inputs, new: Inputs, decode: DecodeAttend, prefill: PrefillAttend
    ) -> Tensor:
        """Stores the `new` tensors of block `name`, each [T, kv_heads, width], and returns the outputs of all T tokens.

        `inputs` are [T, ...] each. `decode(inputs, stores, attend)` gets those of the n next tokens, and the stores of
        all rows, [rows or pages, capacity, kv_heads, width] each, in the order of `new`. In it, `attend(queries, keys,
        values, score_config)` returns the attention of these tokens' queries to stores, or to their first features. A
        query is the features of all `queries` [n, heads, ...], one after the other. `prefill(inputs, stored, queries,
        keys)` gets the inputs of packed sequences, or of the last tokens of each, and what is stored of all their
        tokens, in the order of `new`; with the packing of either.
        """
        ...

    def recur(self, name: str, inputs: Inputs, step: RecurrentStep, scan: RecurrentScan) -> Tensor:
        """Continues from the recurrent states of block `name`, stores the new ones, and returns the outputs, [T, ...].

        `inputs` are [T, ...] each. `step(inputs, states, running)` gets one token of each of n sequences, [n, ...], and
        their states [n, ...]. It returns the outputs [n, ...] and overwrites the states, of the sequences that are
        `running` [n] bool alone, or of all if that is None. `scan(inputs, packing)` gets whole packed sequences, and
        returns their outputs and their last states [sequences, ...]. The size of a state is fixed.
        """
        ...

    def record_routing(self, name: str, choice: Tensor) -> None:
        """Records the experts of block `name` for this rank's tokens, [T / tp, top_k]."""
        ...


class ForwardContext:
    """One microbatch's packing and positions, and shared rotary tables.

    With `segments`, `microbatch` is theirs, and its packing has the segments that sequences share. It is this
    context-parallel rank's, the same on its tensor-parallel ranks. Between blocks each of those holds the hidden states
    of its own shard of the tokens.
    """

    def __init__(
        self,
        microbatch: Microbatch,
        mesh: Mesh | None = None,
        *,
        segments: SharedSegments | None = None,
        decode_state: DecodeState | None = None,
        recompute: Recompute = "none",
        scan_backend: ScanBackend = "auto",
        routers: Sequence[str] = (),
        recorder: Recorder = NO_RECORDER,
    ) -> None:
        self.microbatch = microbatch
        self.segments = segments
        self.mesh = mesh or Mesh.single_rank()
        self.decode_state = decode_state
        self.recompute = recompute
        self.scan_backend = scan_backend
        self.routers = routers
        self.recorder = recorder
        self.offloaded_before: ref[Any] | None = None  # see `ActivationOffload`
        self.token_mask = self._local_token_mask()
        self._counters: Tensor | None = None
        self._done: set[str] = set()
        self._tables: dict[tuple[RotaryConfig, int], tuple[Tensor, Tensor]] = {}

    def mtp_contexts(self) -> list[ForwardContext]:
        """Returns the contexts of the MTP depths. Depths choose their experts themselves, and share no tokens."""
        return [
            ForwardContext(
                microbatch, self.mesh, recompute=self.recompute, scan_backend=self.scan_backend, recorder=self.recorder
            )
            for microbatch in self.microbatch.mtp_microbatches
        ]

    @property
    def packing(self) -> Packing:
        return self.microbatch.packing

    @cached_property
    def sequence_index(self) -> Tensor:
        """[T / tp] int64: the sequence of each of this rank's tokens."""
        index = self.packing.sequence_index()
        return index[slice(*self.mesh.tp.block(len(index)))]

    def rotary(self, config: RotaryConfig, width: int) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine of the positions, fp32 [T, 1, width]. Equal layers share one table."""
        key = (config, width)
        if key not in self._tables:
            with torch.no_grad():
                self._tables[key] = rotary_table(config, self.microbatch.positions, width)
        return self._tables[key]

    @property
    def shared_tensors(self) -> list[Tensor]:
        routing = self.microbatch.routing
        return [*itertools.chain(*self._tables.values()), *([] if routing is None else [routing])]

    @property
    def counters(self) -> Tensor:
        """Zeroed counters for kernels whose programs share a sum: see `decode_linear.linear_add`."""
        if self._counters is None:
            self._counters = torch.zeros(COUNTERS, dtype=torch.int32, device=self.microbatch.tokens.device)
        return self._counters

    def routing(self, name: str) -> Tensor | None:
        """Returns the experts that block `name` must use for this rank's tokens, [T / tp, top_k or more], or None.

        The router chooses for a token with a -1. See `Microbatch.routing`.
        """
        routing, tp = self.microbatch.routing, self.mesh.tp
        if routing is None or name not in self.routers:
            return None
        return routing[slice(*tp.block(len(routing))), self.routers.index(name)]

    def _local_token_mask(self) -> Tensor | None:
        """Returns [T / tp] bool, False at padding; None without padding."""
        token_mask, tp = self.microbatch.token_mask, self.mesh.tp
        return token_mask if token_mask is None else token_mask[slice(*tp.block(len(token_mask)))]

    def drop_padding(self, values: Tensor) -> Tensor:
        """Returns `values` [T / tp, ...] with zeros at padding."""
        if self.token_mask is None:
            return values
        return torch.where(self.token_mask.view(-1, *(1,) * (values.ndim - 1)), values, 0.0)

    def count_copies(self, values: Tensor) -> Tensor:
        """Returns `values` [T / tp, ...] times the number of sequences that share each token, and 0 at padding."""
        values = self.drop_padding(values)
        if self.segments is None:
            return values
        copies = self.segments.multiplicity
        copies = copies[slice(*self.mesh.tp.block(len(copies)))].view(-1, *(1,) * (values.ndim - 1))
        return values * copies

    def sum_to_sequences(self, values: Tensor) -> Tensor:
        """Returns the sum over the segments of each sequence: [packing.count, ...] -> [sequences, ...]."""
        if self.segments is None:
            return values
        sums = values.new_zeros(len(self.segments.tree.last_segments), *values.shape[1:])
        return sums.index_add_(0, self.segments.sequence_of_pair, values[self.segments.segment_of_pair])

    def sum_to_segments(self, values: Tensor) -> Tensor:
        """Returns the sum over the sequences of each segment: [sequences, ...] -> [packing.count, ...]."""
        if self.segments is None:
            return values
        sums = values.new_zeros(self.packing.count, *values.shape[1:])
        return sums.index_add_(0, self.segments.segment_of_pair, values[self.segments.sequence_of_pair])

    @torch.no_grad()
    def total(self, values: Tensor) -> Tensor:
        """Sums over all ranks that share this microbatch."""
        for axis in (self.mesh.tp, self.mesh.cp):
            if axis.group is not None:
                values = values.clone()
                dist.all_reduce(values, group=axis.group)
        return values

    def is_first_call(self, name: str) -> bool:
        """Whether this is the first call with `name`: recomputed layers must not count twice."""
        first = name not in self._done
        self._done.add(name)
        return first


Routers = Mapping[str, tuple[int, int]]
"""`ModelConfig.routers`: (top_k, experts) by block."""


def check_routing(routing: Tensor, routers: Routers) -> None:
    """Raises ValueError for a dtype or shape [T, ...] that does not fit these routers."""
    if not routers:
        raise ValueError(
            f'the batch has a column "{ROUTING}", which gives the experts of each token, but this model has no router. '
            "Leave it out, or give it another name."
        )
    blocks, top_k = len(routers), max(top_k for top_k, _ in routers.values())
    if routing.ndim != 3 or tuple(routing.shape[1:]) != (blocks, top_k):
        raise ValueError(
            f'column "{ROUTING}" has shape {tuple(routing.shape[1:])} per token, but the model sends a token to '
            f"{top_k} experts in each of {blocks} blocks. Give [length, {blocks}, {top_k}], with -1 for "
            "tokens whose experts the router is to choose."
        )
    if routing.is_floating_point() or routing.is_complex() or routing.dtype == torch.bool:
        raise ValueError(f'column "{ROUTING}" holds {routing.dtype}, but experts have numbers. Give torch.int16.')


def check_experts(routing: Tensor, routers: Routers) -> None:
    """Raises ValueError for expert numbers, [T, routers, top_k] on the host, that do not exist."""
    check_routing(routing, routers)
    for index, (name, (_, experts)) in enumerate(routers.items()):
        ids = routing[:, index]
        if ids.numel() and not -1 <= (worst := int(ids.min() if ids.min() < -1 else ids.max())) < experts:
            raise ValueError(
                f'column "{ROUTING}" sends a token to expert {worst} of {name}, whose experts are numbered from 0 to '
                f"{experts - 1}. Give one of them, or -1 where the router is to choose."
            )

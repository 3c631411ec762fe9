"""The gated delta rule: the tensors of its kernels and the order they run in.

5.4 times as fast as torch forward and 5.5 times both ways: 1.90 against 10.2 ms and 6.93 against 38.2 ms for 16,384
tokens of 16 key and 32 value heads of 128, bf16 on an H200 with Triton 3.6. flash-linear-attention's forward takes
1.26 ms; its backward does not run with that Triton (benchmarks/results/scans_h200.json).

Three kernels make the outputs: `solve_kernel` the triangular systems of all chunks side by side, `states_kernel` the
states along each sequence, `outputs_kernel` the tokens' outputs. The backward runs the first two again, then the
gradients of what is written (`seen_back_kernel`), those of the states from a sequence's end to its beginning
(`states_back_kernel`), and everything else by chunks (`gradients_kernel`). Nothing is added up out of order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from postlude.ops.kernels import gated_delta_device as kernels
from postlude.ops.kernels.capabilities import GATED_DELTA_KEYS
from postlude.ops.packing import to_device

# Columns of values a program takes at a time, its warps and stages, measured on an H200.
SETTINGS = {
    "solve": (128, 4, 1),
    "states": (64, 4, 2),
    "outputs": (128, 4, 1),
    "seen_back": (64, 4, 1),
    "states_back": (64, 4, 2),
    "gradients": (64, 8, 1),
}


@dataclass(frozen=True)
class _Table:
    """Where chunks of `size` lie, all int32. `starts` and `stops` [chunks] are tokens, `first` [n + 1] are chunks.

    `order` [n] lists the sequences, the longest first: they take longest, one chunk after the other.
    """

    count: int
    starts: Tensor
    stops: Tensor
    first: Tensor
    order: Tensor

    @classmethod
    def of(cls, lengths: list[int], size: int, device: torch.device) -> _Table:
        sizes = torch.tensor([0, *lengths])
        begin = sizes.cumsum(0)
        needed = (sizes + size - 1) // size
        first = needed.cumsum(0)
        count = int(first[-1])
        sequence = torch.arange(len(lengths)).repeat_interleave(needed[1:])
        starts = begin[sequence] + (torch.arange(count) - first[sequence]) * size
        stops = torch.minimum(starts + size, begin[sequence + 1])
        order = sizes[1:].argsort(descending=True, stable=True)
        parts = (starts, stops, first, order)
        # Each part begins at a multiple of 16 bytes, since Triton compiles another kernel for other pointers.
        table = torch.zeros(len(parts), -(-max(count, len(first)) // 4) * 4, dtype=torch.int32)
        for row, part in zip(table, parts, strict=True):
            row[: len(part)] = part
        return cls(count, *to_device(table, device))


class GatedDeltaCall:
    """One call of the operator: its tensors, [T, heads, ...] each unless noted.

    `keep` keeps the inverses for a backward. Call `run` first, then `outputs` or `gradients`.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor,
        lengths: list[int],
        scale: float,
        normalise: bool,
        chunk: int,
        keep: bool = False,
    ) -> None:
        self.query, self.key, self.value = query.contiguous(), key.contiguous(), value.contiguous()
        self.log_decay, self.beta = log_decay.contiguous(), beta.contiguous()
        self.cu_seqlens, self.scale = cu_seqlens, scale
        tokens, heads, width = value.shape
        key_heads, key_width = key.shape[1:]
        self.sequences, self.heads, self.key_heads = len(lengths), heads, key_heads
        self.table = _Table.of(lengths, chunk, value.device)
        self.sizes: dict[str, Any] = {
            "HEADS": heads,
            "KEY_HEADS": key_heads,
            "KEY": key_width,
            "VALUE": width,
            "CHUNK": chunk,
            "KEYS": self._tile(key_width, GATED_DELTA_KEYS),
        }
        self.normalise = normalise
        make = value.new_empty
        self.total = make(tokens, heads, dtype=torch.float64)  # G
        self.leaving = make(tokens, heads, dtype=torch.float32)  # e^{G_C − G} over the key's length
        self.reading = make(tokens, heads, key_width)  # w
        self.written = make(tokens, heads, width)  # u, then δ
        self.inverse = make(tokens, heads, chunk) if keep else None
        self.states = make(self.table.count, heads, key_width, width)  # at each chunk's start

    def _tile(self, width: int, widest: int) -> int:
        """Returns the columns of a tile. In half precision always `widest`: Triton 3.6 compiles narrow ones wrongly."""
        return widest if self.value.itemsize == 2 else min(widest, max(16, triton.next_power_of_2(width)))

    def sized(self, kernel: str) -> tuple[int, dict[str, Any]]:
        """Returns how many slices a kernel cuts the values into, and its constants."""
        widest, warps, stages = SETTINGS[kernel]
        width = self.value.shape[-1]
        values = self._tile(width, widest)
        return triton.cdiv(width, values), {**self.sizes, "VALUES": values, "num_warps": warps, "num_stages": stages}

    def run(self, last_states: bool) -> Tensor:
        """Solves the chunks, then walks the sequences.

        Returns last states, fp32 [n, heads, dk, dv], or an empty one.
        """
        _, sizes = self.sized("solve")
        kernels.solve_kernel[(self.table.count * self.heads,)](
            self.key, self.value, self.log_decay, self.beta, self.table.starts, self.table.stops, self.total,
            self.leaving, self.reading, self.written, self.inverse, **sizes, NORMALISE=self.normalise,
        )  # fmt: skip
        shape = (self.sequences, *self.states.shape[1:]) if last_states else (0,)
        last = self.value.new_empty(shape, dtype=torch.float32)
        slices, sizes = self.sized("states")
        kernels.states_kernel[(self.sequences * self.heads * slices,)](
            self.key, self.total, self.leaving, self.reading, self.written, self.states,
            last if last_states else None, self.cu_seqlens, self.table.first, self.table.order, **sizes,
        )  # fmt: skip
        return last

    def outputs(self) -> Tensor:
        """Returns the outputs [T, heads, dv], after `run`."""
        output = torch.empty_like(self.value)
        slices, sizes = self.sized("outputs")
        kernels.outputs_kernel[(self.table.count * self.heads, slices)](
            self.query, self.key, self.total, self.written, self.states, output, self.table.starts, self.table.stops,
            self.scale, **sizes, NORMALISE=self.normalise,
        )  # fmt: skip
        return output

    def gradients(self, output: Tensor, last_states: Tensor | None) -> tuple[Tensor, ...]:
        """Returns the gradients of query, key, value, log decay and beta, after `run`."""
        output = output.contiguous()
        last_states = None if last_states is None else last_states.contiguous()
        written = torch.empty_like(self.written)  # of δ
        entering = torch.empty_like(self.leaving)  # e^G, times the query's scale over its length
        _, sizes = self.sized("seen_back")
        kernels.seen_back_kernel[(self.table.count * self.heads,)](
            self.query, self.key, self.total, output, written, entering, self.table.starts, self.table.stops,
            self.scale, **sizes, NORMALISE=self.normalise,
        )  # fmt: skip
        ahead = torch.empty_like(self.states)  # of the state each chunk leaves
        slices, sizes = self.sized("states_back")
        kernels.states_back_kernel[(self.sequences * self.heads * slices,)](
            self.query, self.key, self.total, self.leaving, entering, self.reading, output, written, ahead,
            last_states, self.cu_seqlens, self.table.first, self.table.order, **sizes,
        )  # fmt: skip
        inputs = (self.query, self.key, self.value, self.log_decay, self.beta)
        gradients = tuple(torch.empty_like(tensor) for tensor in inputs)
        _, sizes = self.sized("gradients")
        kernels.gradients_kernel[(self.table.count * self.key_heads,)](
            self.query, self.key, self.value, self.beta, self.total, self.inverse, self.written, self.states, output,
            written, ahead, *gradients, self.table.starts, self.table.stops, self.scale, **sizes,
            NORMALISE=self.normalise,
        )  # fmt: skip
        return gradients

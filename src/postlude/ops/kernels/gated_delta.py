"""The gated delta rule: the tensors of its kernels and the order they run in.

5.4 times as fast as torch forward and 5.5 times both ways: 1.90 against 10.2 ms and 6.93 against 38.2 ms for 16,384
tokens of 16 key and 32 value heads of 128, bf16 on an H200 with Triton 3.6. flash-linear-attention's forward takes
1.26 ms; its backward does not run with that Triton (benchmarks/results/scans_h200.json).

Three kernels make the outputs: `solve_kernel` the triangular systems of all chunks side by side, `states_kernel` the
states along each sequence, `outputs_kernel` the tokens' outputs. The backward runs the first two again, then the
gradients of what is written (`delta_gradient_kernel`), those of the states from a sequence's end to its beginning
(`state_gradient_kernel`), and everything else by chunks (`input_gradient_kernel`). Nothing is added up out of order.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    "delta_gradient": (64, 4, 1),
    "state_gradient": (64, 4, 2),
    "input_gradient": (64, 8, 1),
}


@dataclass(frozen=True)
class _Table:
    """Where chunks of `size` are, all int32: their first tokens and ends, `starts` and `stops` [chunks].

    `first_chunks` [n + 1] has each sequence's first chunk.

    `longest_first` [n] lists the sequences, the longest first: they take longest, one chunk after the other.
    """

    count: int
    starts: Tensor
    stops: Tensor
    first_chunks: Tensor
    longest_first: Tensor

    @classmethod
    def of(cls, lengths: list[int], size: int, device: torch.device) -> _Table:
        sizes = torch.tensor([0, *lengths])
        sequence_starts = sizes.cumsum(0)
        chunk_counts = (sizes + size - 1) // size
        first_chunks = chunk_counts.cumsum(0)
        count = int(first_chunks[-1])
        sequence = torch.arange(len(lengths)).repeat_interleave(chunk_counts[1:])
        starts = sequence_starts[sequence] + (torch.arange(count) - first_chunks[sequence]) * size
        stops = torch.minimum(starts + size, sequence_starts[sequence + 1])
        longest_first = sizes[1:].argsort(descending=True, stable=True)
        columns = (starts, stops, first_chunks, longest_first)
        # Each part begins at a multiple of 16 bytes, since Triton compiles another kernel for other pointers.
        table = torch.zeros(len(columns), -(-max(count, len(first_chunks)) // 4) * 4, dtype=torch.int32)
        for row, column in zip(table, columns, strict=True):
            row[: len(column)] = column
        return cls(count, *to_device(table, device))


class GatedDeltaCall:
    """One call of the operator: its tensors, [T, heads, ...] each unless noted. `inputs` are in `gated_delta`'s order.

    `keep` keeps the inverses for a backward. Call `run` first, then `outputs` or `gradients`.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        cu_seqlens: Tensor,
        lengths: list[int],
        scale: float,
        normalise: bool,
        chunk: int,
        keep: bool = False,
    ) -> None:
        self.inputs = tuple(tensor.contiguous() for tensor in inputs)
        self.query, self.key, self.value, self.log_decay, self.beta = self.inputs
        self.cu_seqlens, self.scale = cu_seqlens, scale
        value = self.value
        tokens, heads, width = value.shape
        key_heads, key_width = self.key.shape[1:]
        self.sequences, self.heads, self.key_heads = len(lengths), heads, key_heads
        self.table = _Table.of(lengths, chunk, value.device)
        self.constants: dict[str, Any] = {
            "HEADS": heads,
            "KEY_HEADS": key_heads,
            "KEY": key_width,
            "VALUE": width,
            "CHUNK": chunk,
            "KEYS": self._tile(key_width, GATED_DELTA_KEYS),
        }
        self.normalise = normalise
        make = value.new_empty
        self.decay_sums = make(tokens, heads, dtype=torch.float64)  # G, of log decays
        self.key_decay = make(tokens, heads, dtype=torch.float32)  # e^{G_C − G} over the key's length
        self.state_reader = make(tokens, heads, key_width)  # w
        self.delta = make(tokens, heads, width)  # u, then δ
        self.inverse = make(tokens, heads, chunk) if keep else None
        self.states = make(self.table.count, heads, key_width, width)  # at each chunk's start

    def _tile(self, width: int, widest: int) -> int:
        """Returns the columns of a tile. In half precision always `widest`: Triton 3.6 compiles narrow ones wrongly."""
        return widest if self.value.itemsize == 2 else min(widest, max(16, triton.next_power_of_2(width)))

    def slices_and_constants(self, kernel: str) -> tuple[int, dict[str, Any]]:
        """Returns how many slices a kernel cuts the values into, and its constants."""
        widest, warps, stages = SETTINGS[kernel]
        width = self.value.shape[-1]
        values = self._tile(width, widest)
        return triton.cdiv(width, values), {
            **self.constants,
            "VALUES": values,
            "num_warps": warps,
            "num_stages": stages,
        }

    def run(self, last_states: bool) -> Tensor:
        """Solves the chunks, then walks the sequences.

        Returns last states, fp32 [n, heads, dk, dv], or an empty one.
        """
        _, constants = self.slices_and_constants("solve")
        kernels.solve_kernel[(self.table.count * self.heads,)](
            self.key, self.value, self.log_decay, self.beta, self.table.starts, self.table.stops, self.decay_sums,
            self.key_decay, self.state_reader, self.delta, self.inverse, **constants, NORMALISE=self.normalise,
        )  # fmt: skip
        shape = (self.sequences, *self.states.shape[1:]) if last_states else (0,)
        last_state = self.value.new_empty(shape, dtype=torch.float32)
        slices, constants = self.slices_and_constants("states")
        kernels.states_kernel[(self.sequences * self.heads * slices,)](
            self.key, self.decay_sums, self.key_decay, self.state_reader, self.delta, self.states,
            last_state if last_states else None, self.cu_seqlens, self.table.first_chunks, self.table.longest_first,
            **constants,
        )  # fmt: skip
        return last_state

    def outputs(self) -> Tensor:
        """Returns the outputs [T, heads, dv], after `run`."""
        output = torch.empty_like(self.value)
        slices, constants = self.slices_and_constants("outputs")
        kernels.outputs_kernel[(self.table.count * self.heads, slices)](
            self.query, self.key, self.decay_sums, self.delta, self.states, output, self.table.starts,
            self.table.stops, self.scale, **constants,
            NORMALISE=self.normalise,
        )  # fmt: skip
        return output

    def gradients(self, grad_output: Tensor, last_state_grads: Tensor | None) -> tuple[Tensor, ...]:
        grad_output = grad_output.contiguous()
        last_state_grads = None if last_state_grads is None else last_state_grads.contiguous()
        delta_grads = torch.empty_like(self.delta)  # of δ
        query_decay = torch.empty_like(self.key_decay)  # e^G, times the query's scale over its length
        _, constants = self.slices_and_constants("delta_gradient")
        kernels.delta_gradient_kernel[(self.table.count * self.heads,)](
            self.query, self.key, self.decay_sums, grad_output, delta_grads, query_decay, self.table.starts,
            self.table.stops, self.scale, **constants,
            NORMALISE=self.normalise,
        )  # fmt: skip
        state_grads = torch.empty_like(self.states)  # of the state each chunk leaves
        slices, constants = self.slices_and_constants("state_gradient")
        kernels.state_gradient_kernel[(self.sequences * self.heads * slices,)](
            self.query, self.key, self.decay_sums, self.key_decay, query_decay, self.state_reader, grad_output,
            delta_grads, state_grads, last_state_grads, self.cu_seqlens, self.table.first_chunks,
            self.table.longest_first, **constants,
        )  # fmt: skip
        gradients = tuple(torch.empty_like(tensor) for tensor in self.inputs)
        _, constants = self.slices_and_constants("input_gradient")
        kernels.input_gradient_kernel[(self.table.count * self.key_heads,)](
            self.query, self.key, self.value, self.beta, self.decay_sums, self.inverse, self.delta, self.states,
            grad_output, delta_grads, state_grads, *gradients, self.table.starts, self.table.stops, self.scale,
            **constants,
            NORMALISE=self.normalise,
        )  # fmt: skip
        return gradients

"""Mamba-2's scan and its gradients; the mathematics and the names are those of `ops/ssd.py`.

18.5 times as fast as torch forward and 13 times both ways: 1.09 against 20.2 ms and 5.66 against 71.6 ms for 16,384
tokens of 128 heads of 64 with states of 128, bf16 on an H200. flash-linear-attention's forward takes 4.25 ms
(benchmarks/results/scans_h200.json).

One program for each head and tile of the state walks over the chunks and stores the state before each. Then all chunks
compute their outputs at the same time. The gradient of the states goes the same way backwards. Products take operands
of x's dtype and sum in fp32. Decays are fp32. Logarithms of decays are summed in float64 and kept as two fp32 numbers,
since the differences of large sums must stay exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from postlude.ops.kernels import ssd_device as kernels

BLOCK = 64  # tokens, state or width of a product
LONGEST, SHORTEST = 2 * BLOCK, 16  # tokens of a chunk, a power of 2; the gradient of dt handles two blocks
STEP_HEADS = 16  # heads whose time steps a program sums

# Warps, and loads ahead, measured on an H200.
STATES, OUTPUTS, HEADS_GRADIENT, GROUPS_GRADIENT = (4, 3), (4, 2), (4, 1), (4, 2)


class Scan(NamedTuple):
    """What all kernels read. `x` [T, heads, p]; `B` and `C` [T, groups, n]; last dimensions are contiguous."""

    x: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    sequence: Tensor
    """[T] int32: the sequence of each token."""
    steps: Tensor
    """[3, heads, chunks · length] fp32: dt, and high and low part of the sum of dt · A since the chunk began."""
    length: int

    @classmethod
    def of(cls, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, sequence: Tensor, chunk: int) -> Scan:
        """Builds it from the inputs of `ssd`. Chunks have about `chunk` tokens, a power of 2."""
        tokens, heads = dt.shape
        length = min(LONGEST, max(SHORTEST, triton.next_power_of_2(min(chunk, tokens))))
        chunks = triton.cdiv(tokens, length)
        steps = torch.empty(3, heads, chunks * length, dtype=torch.float32, device=x.device)
        dt = _dense(dt)
        kernels.fill_steps[(triton.cdiv(heads, STEP_HEADS) * chunks,)](
            dt, A, steps, tokens, heads, dt.stride(0), chunks * length, LENGTH=length, HEADS=STEP_HEADS, num_warps=4
        )
        return cls(_dense(x), A, _dense(B), _dense(C), sequence, steps, length)

    @property
    def chunks(self) -> int:
        return self.steps.shape[2] // self.length

    @property
    def sizes(self) -> dict[str, int]:
        (_, heads, width), (_, groups, state) = self.x.shape, self.B.shape
        return {
            "HEADS": heads,
            "GROUP_HEADS": heads // groups,
            "WIDTH": width,
            "STATE": state,
            "LENGTH": self.length,
            "BLOCK": min(BLOCK, self.length),
        }

    @property
    def blocks(self) -> dict[str, int]:
        return {"P": _block_size(self.x.shape[2]), "N": _block_size(self.B.shape[2])}

    def states(self) -> Tensor:
        """Returns the state before each chunk, [chunks, heads, n, p]."""
        return self._scan(self.B, self.x, backward=False)

    def grad_states(self, gradient: Tensor) -> Tensor:
        """Returns the gradient of the state after each chunk, [chunks, heads, n, p], from that of y."""
        return self._scan(self.C, gradient, backward=True)

    def _scan(self, factors: Tensor, values: Tensor, *, backward: bool) -> Tensor:
        (tokens, heads, width), state_size = values.shape, factors.shape[2]
        states = torch.empty(self.chunks, heads, state_size, width, dtype=self.x.dtype, device=self.x.device)
        sizes = {name: self.sizes[name] for name in ("HEADS", "GROUP_HEADS", "WIDTH", "STATE", "LENGTH")}
        P, N = (min(BLOCK, tile) for tile in (self.blocks["P"], self.blocks["N"]))
        kernels.scan_states[(heads, triton.cdiv(state_size, N), triton.cdiv(width, P))](
            *(factors, *factors.stride()[:2], values, *values.stride()[:2], self.sequence, self.steps, states), tokens,
            self.chunks, BACKWARD=backward, P=P, N=N, **sizes, **_launch_options(STATES),
        )  # fmt: skip
        return states

    def outputs(self, D: Tensor | None) -> Tensor:
        """Returns y [T, heads, p] in x's dtype."""
        states, y = self.states(), torch.empty_like(self.x, memory_format=torch.contiguous_format)
        x, B, C = self.x, self.B, self.C
        kernels.compute_outputs[(x.shape[1] * self.chunks * (self.length // self.sizes["BLOCK"]),)](
            *(x, *x.stride()[:2], B, *B.stride()[:2], C, *C.stride()[:2], D, self.sequence, self.steps, states, y),
            x.shape[0], self.chunks, **self.sizes, **self.blocks, **_launch_options(OUTPUTS),
        )  # fmt: skip
        return y

    def gradients(self, D: Tensor | None, gradient: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients of x, dt, A, B, C and D from that of y [T, heads, p]; dt's, A's and D's are fp32."""
        x, A, B, C, gradient = self.x, self.A, self.B, self.C, _dense(gradient)
        tokens, heads, _ = x.shape
        states, grad_states = self.states(), self.grad_states(gradient)
        grad_x, grad_B, grad_C = (
            torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (x, B, C)
        )
        grad_dt = torch.empty(tokens, heads, dtype=torch.float32, device=x.device)
        grad_A, grad_D, state_decay_grad = (grad_dt.new_empty(self.chunks, heads) for _ in range(3))
        decay_grads = grad_dt.new_empty(5, *self.steps.shape[1:])
        options = {**self.sizes, **self.blocks}
        inputs = (x, *x.stride()[:2], B, *B.stride()[:2], C, *C.stride()[:2], gradient, *gradient.stride()[:2])
        inputs = (*inputs, self.sequence, self.steps, states, grad_states)
        kernels.gradient_by_head[(heads * self.chunks,)](
            *(*inputs, D, grad_x, grad_D, decay_grads, state_decay_grad), tokens, self.chunks,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32", **options, **_launch_options(HEADS_GRADIENT),
        )  # fmt: skip
        kernels.gradient_of_dt[(triton.cdiv(heads, STEP_HEADS) * self.chunks,)](
            *(self.steps, decay_grads, state_decay_grad, A, grad_dt, grad_A), *(tokens, heads, self.steps.shape[2]),
            LENGTH=self.length, HEADS=STEP_HEADS, num_warps=4,
        )  # fmt: skip
        blocks = self.chunks * (self.length // self.sizes["BLOCK"])
        for is_of_b, output in ((False, grad_C), (True, grad_B)):
            kernels.gradient_by_group[(B.shape[1] * blocks,)](
                *(*inputs, output), tokens, self.chunks, OF_B=is_of_b, **options, **_launch_options(GROUPS_GRADIENT),
            )  # fmt: skip
        return grad_x, grad_dt, grad_A.sum(0), grad_B, grad_C, grad_D.sum(0)


def _launch_options(warps_and_stages: tuple[int, int]) -> dict[str, int]:
    return {"num_warps": warps_and_stages[0], "num_stages": warps_and_stages[1]}


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _block_size(size: int) -> int:
    """Returns the least power of 2 that holds `size`, at least 16 as products need."""
    return int(max(16, triton.next_power_of_2(size)))

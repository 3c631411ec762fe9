"""Mamba-2's scan and its gradients; the mathematics and the names are those of `ops/ssd.py`.

18 times as fast as torch forward and 13 times both ways: 1.09 against 20.2 ms and 5.66 against 71.6 ms for 16,384
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
        kernels.steps[(triton.cdiv(heads, STEP_HEADS) * chunks,)](
            dt, A, steps, tokens, heads, dt.stride(0), chunks * length, LENGTH=length, HEADS=STEP_HEADS, num_warps=4
        )
        return cls(_dense(x), A, _dense(B), _dense(C), sequence, steps, length)

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return self.steps.shape[2] // self.length

    @property
    def sizes(self) -> dict[str, int]:
        """The constants of every kernel."""
        (_, heads, width), (_, groups, state) = self.x.shape, self.B.shape
        return {
            "HEADS": heads,
            "SHARE": heads // groups,
            "WIDTH": width,
            "STATE": state,
            "LENGTH": self.length,
            "BLOCK": min(BLOCK, self.length),
        }

    @property
    def tiles(self) -> dict[str, int]:
        """The whole width and state as blocks."""
        return {"P": _block(self.x.shape[2]), "N": _block(self.B.shape[2])}

    def states(self) -> Tensor:
        """Returns the state before each chunk, [chunks, heads, n, p]."""
        return self._walk(self.B, self.x, back=False)

    def ahead(self, gradient: Tensor) -> Tensor:
        """Returns the gradient of the state after each chunk, [chunks, heads, n, p], from that of y."""
        return self._walk(self.C, gradient, back=True)

    def _walk(self, keys: Tensor, values: Tensor, *, back: bool) -> Tensor:
        (tokens, heads, width), size = values.shape, keys.shape[2]
        states = torch.empty(self.chunks, heads, size, width, dtype=self.x.dtype, device=self.x.device)
        sizes = {name: self.sizes[name] for name in ("HEADS", "SHARE", "WIDTH", "STATE", "LENGTH")}
        P, N = (min(BLOCK, tile) for tile in (self.tiles["P"], self.tiles["N"]))
        kernels.states[(heads, triton.cdiv(size, N), triton.cdiv(width, P))](
            *(keys, *keys.stride()[:2], values, *values.stride()[:2], self.sequence, self.steps, states), tokens,
            self.chunks, BACK=back, P=P, N=N, **sizes, **_launch(STATES),
        )  # fmt: skip
        return states

    def outputs(self, D: Tensor | None) -> Tensor:
        """Returns y [T, heads, p] in x's dtype."""
        states, y = self.states(), torch.empty_like(self.x, memory_format=torch.contiguous_format)
        x, B, C = self.x, self.B, self.C
        kernels.outputs[(x.shape[1] * self.chunks * (self.length // self.sizes["BLOCK"]),)](
            *(x, *x.stride()[:2], B, *B.stride()[:2], C, *C.stride()[:2], D, self.sequence, self.steps, states, y),
            x.shape[0], self.chunks, **self.sizes, **self.tiles, **_launch(OUTPUTS),
        )  # fmt: skip
        return y

    def gradients(self, D: Tensor | None, gradient: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients of x, dt, A, B, C and D from that of y [T, heads, p]; dt's, A's and D's are fp32."""
        x, A, B, C, gradient = self.x, self.A, self.B, self.C, _dense(gradient)
        tokens, heads, _ = x.shape
        states, ahead = self.states(), self.ahead(gradient)
        grad_x, grad_B, grad_C = (
            torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (x, B, C)
        )
        of_dt = torch.empty(tokens, heads, dtype=torch.float32, device=x.device)
        of_A, of_D, through = (of_dt.new_empty(self.chunks, heads) for _ in range(3))
        parts = of_dt.new_empty(5, *self.steps.shape[1:])
        options = {**self.sizes, **self.tiles}
        read = (x, *x.stride()[:2], B, *B.stride()[:2], C, *C.stride()[:2], gradient, *gradient.stride()[:2])
        read = (*read, self.sequence, self.steps, states, ahead)
        kernels.heads_gradient[(heads * self.chunks,)](
            *(*read, D, grad_x, of_D, parts, through), tokens, self.chunks,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32", **options, **_launch(HEADS_GRADIENT),
        )  # fmt: skip
        kernels.rates[(triton.cdiv(heads, STEP_HEADS) * self.chunks,)](
            *(self.steps, parts, through, A, of_dt, of_A), *(tokens, heads, self.steps.shape[2]), LENGTH=self.length,
            HEADS=STEP_HEADS, num_warps=4,
        )  # fmt: skip
        blocks = self.chunks * (self.length // self.sizes["BLOCK"])
        for of_b, out in ((False, grad_C), (True, grad_B)):
            kernels.groups_gradient[(B.shape[1] * blocks,)](
                *(*read, out), tokens, self.chunks, OF_B=of_b, **options, **_launch(GROUPS_GRADIENT),
            )  # fmt: skip
        return grad_x, of_dt, of_A.sum(0), grad_B, grad_C, of_D.sum(0)


def _launch(chosen: tuple[int, int]) -> dict[str, int]:
    return {"num_warps": chosen[0], "num_stages": chosen[1]}


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _block(size: int) -> int:
    """Returns the least power of 2 that holds `size`, at least 16 as products need."""
    return int(max(16, triton.next_power_of_2(size)))

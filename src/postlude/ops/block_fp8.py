"""Linear layers in FP8 without gradients: weights in blocks of 128 × 128, tokens in blocks of 1 × 128, e4m3.

This is the block format of DeepSeek and vLLM. Scales are powers of two in fp32, as in DeepSeek-V3.1: dividing by one
rounds nothing, and a rounded value is exact in bf16. So the product of rounded tensors in bf16 or fp32 with an fp32 sum
is the product in FP8, and a machine without FP8 computes the same function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.ops.activation import Activation, gated_activation
from postlude.ops.adapted_linear import AdapterOperand
from postlude.ops.fp8_kv import FP8, power_of_two, scale_exponents
from postlude.ops.kernels.capabilities import EMPTY, Backend, use_kernel
from postlude.ops.linear import adjacent_view
from postlude.ops.norm import Norm, rms_norm

BLOCK = 128


@dataclass(frozen=True, eq=False)
class FP8Weight:
    """A weight [out, in] in FP8, with the scale of each block, [out / 128, in / 128] fp32, rounded up."""

    values: Tensor
    scales: Tensor
    restored: Tensor | None
    """The rounded weight in its own dtype, where no kernel multiplies by FP8: not on a GPU, or not of whole blocks."""

    @staticmethod
    def like(weight: Tensor, features: int | None = None) -> FP8Weight:
        """Returns an uninitialised one of the size of `weight` [out, in], or with other `features`."""
        features, width = features or weight.shape[0], weight.shape[1]
        is_whole_blocks = features % BLOCK == 0 and width % BLOCK == 0
        return FP8Weight(
            weight.new_empty(features, width, dtype=FP8),
            weight.new_empty(-(-features // BLOCK), -(-width // BLOCK), dtype=torch.float32),
            None if is_whole_blocks and weight.is_cuda else weight.new_empty(features, width),
        )

    def split(self, sizes: Sequence[int]) -> list[FP8Weight]:
        """Returns parts with these features, multiples of 128, as views."""
        values, scales = self.values.split(sizes), self.scales.split([size // BLOCK for size in sizes])
        restored = [None] * len(sizes) if self.restored is None else self.restored.split(sizes)
        return [FP8Weight(*parts) for parts in zip(values, scales, restored, strict=True)]

    def write(self, weight: Tensor) -> None:
        """Rounds `weight` [out, in] into this one's memory."""
        features, width = weight.shape
        padded = F.pad(weight.float(), (0, -width % BLOCK, 0, -features % BLOCK))
        blocks = padded.view(self.scales.shape[0], BLOCK, self.scales.shape[1], BLOCK)
        exponents = scale_exponents(blocks.abs().amax((1, 3), keepdim=True))
        rounded = (blocks * power_of_two(-exponents)).view(padded.shape)[:features, :width]
        self.values.copy_(rounded)
        self.scales.copy_(power_of_two(exponents).view(self.scales.shape))
        if self.restored is not None:
            self.restored.copy_(self.rounded(torch.float32))

    def rounded(self, dtype: torch.dtype) -> Tensor:
        """Returns the rounded weight, [out, in]."""
        return (self.values.float() * self._scale_of_each()).to(dtype)

    def half_steps(self) -> Tensor:
        """Returns how far a number may be from each rounded one, [out, in] fp32: half the step to the next one."""
        exponents = (self.values.float().view(torch.int32) >> 23 & 0xFF) - 127
        return power_of_two((exponents - 4).clamp_min(-10)) * self._scale_of_each()

    def _scale_of_each(self) -> Tensor:
        features, width = self.values.shape
        return self.scales.repeat_interleave(BLOCK, 0)[:features].repeat_interleave(BLOCK, 1)[:, :width]

    @property
    def size_in_bytes(self) -> int:
        return self.values.numel() + 4 * self.scales.numel()


def joined(weights: Sequence[FP8Weight]) -> FP8Weight | None:
    """Returns weights that are adjacent in memory as one; None where they are not."""
    if len(weights) == 1:
        return weights[0]
    if any(weight.restored is not None for weight in weights):
        return None
    values, scales = (adjacent_view([getattr(weight, part) for weight in weights]) for part in ("values", "scales"))
    return None if values is None or scales is None else FP8Weight(values, scales, None)


def round_rows(rows: Tensor) -> Tensor:
    """Returns `rows` [T, in] rounded to FP8, in their own dtype."""
    count, width = rows.shape
    blocks = F.pad(rows.float(), (0, -width % BLOCK)).view(count, -1, BLOCK)
    exponents = scale_exponents(blocks.abs().amax(-1, keepdim=True))
    rounded = (blocks * power_of_two(-exponents)).to(FP8).float() * power_of_two(exponents)
    return rounded.view(count, -1)[:, :width].to(rows.dtype)


def fp8_linear(
    rows: Tensor,
    weight: FP8Weight,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    counters: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Returns `rows` [T, in], or their norm, times `weight`ᵀ, plus the residual [T, out] if given: [T, out].

    `counters`: see `decode_linear.linear_add`.
    """
    if _use_kernel(rows, weight, backend):
        from postlude.ops.kernels.block_fp8 import product, quantize  # needs triton

        quantized = quantize(rows, norm)
        return product(quantized, weight.values, weight.scales, rows.dtype, residual=residual, counters=counters)
    normed = rows if norm is None else rms_norm(rows, norm.weight, norm.eps, norm.offset)
    restored = weight.rounded(rows.dtype) if weight.restored is None else weight.restored
    output = F.linear(round_rows(normed), restored)
    return output if residual is None else residual + output


def fp8_mlp(
    hidden: Tensor,
    norm: Norm,
    activation: Activation,
    gate_and_up: FP8Weight,
    down: FP8Weight,
    *,
    counters: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Returns `hidden` [T, H] + `down` of activation(gate) · up, where gate and up are of the norm of `hidden`: [T, H].

    `counters`: see `decode_linear.linear_add`.
    """
    if _use_kernel(hidden, gate_and_up, backend) and _use_kernel(hidden, down, backend):
        from postlude.ops.kernels.block_fp8 import product, quantize  # needs triton

        dtype = hidden.dtype
        projected = product(quantize(hidden, norm), gate_and_up.values, gate_and_up.scales, dtype, counters=counters)
        rows = quantize(projected, activation=activation)
        return product(rows, down.values, down.scales, dtype, residual=hidden, counters=counters)
    gate, up = fp8_linear(hidden, gate_and_up, norm=norm, backend=backend).chunk(2, -1)
    features = gated_activation(gate, up, activation)
    return fp8_linear(features, down, residual=hidden, counters=counters, backend=backend)


def fp8_linears(
    rows: Tensor,
    weights: Sequence[FP8Weight],
    biases: Sequence[Tensor | None],
    adapters: Sequence[AdapterOperand | None],
) -> tuple[Tensor, ...]:
    """Returns `rows` [T, in] times each of `weights`, with its bias and what its adapter adds: [T, out] each.

    Adjacent weights are one product.
    """
    joined_weight = joined(weights)
    if joined_weight is None:
        products = [fp8_linear(rows, weight) for weight in weights]
    else:
        products = list(fp8_linear(rows, joined_weight).split([len(weight.values) for weight in weights], -1))
    for index, (bias, adapter) in enumerate(zip(biases, adapters, strict=True)):
        if bias is not None:
            products[index] = products[index] + bias
        if adapter is not None:
            a_product = F.linear(rows, adapter.a.to(rows.dtype)) * adapter.scale
            products[index] = products[index] + F.linear(a_product, adapter.b.to(rows.dtype))
    return tuple(products)


def _use_kernel(rows: Tensor, weight: FP8Weight, backend: Backend) -> bool:
    unsupported_reason, (features, width) = None, weight.values.shape
    if not len(rows):
        unsupported_reason = EMPTY
    elif weight.restored is not None and backend == "auto" and not rows.is_cuda:
        return False
    elif features % BLOCK or width % BLOCK:
        unsupported_reason = f"a weight of {[features, width]} does not divide into blocks of {BLOCK}"
    elif rows.stride(-1) != 1 or not weight.values.is_contiguous():
        unsupported_reason = "rows or weights are not dense"
    return use_kernel("block_fp8", backend, rows.device, rows.dtype, unsupported_reason=unsupported_reason)

"""Products of tokens and weights in FP8 e4m3, with a scale for each row of both operands.

`fp8_products` computes X · Wᵀ and `fp8_input_gradient` dX = dY · W. The rows of an operand are its vectors along the
contracted dimension. The gradient of a weight stays in the compute dtype (`linear.wgrad`): its contraction runs over
tokens, so its scales would depend on how tokens are divided into microbatches.

A scale is a power of two, so scaling rounds nothing and a value keeps the four significant bits of e4m3. It is the
smallest that brings the row's largest magnitude to at most 448. Ranks that hold parts of a row (`FP8Scaling`) share
that magnitude, so values are rounded as on one rank. It is handled as the bits of fp32, in int32: they have the order
of magnitudes, and NaN is above all. A row with NaN or infinity gets the scale NaN, and so do its products.

On CUDA `torch.nn.functional.scaled_mm` multiplies. Elsewhere the same rounded values are multiplied in fp32, or in
float64 if the tensors are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from postlude.ops.collectives import Group
from postlude.ops.kernels.capabilities import EMPTY, Backend, gpu_of, use_kernel, why_no_fp8

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
MULTIPLE = 16  # of which both sizes of a weight are multiples, as scaled_mm needs
INFINITY_BITS = 0x7F800000
NAN_BITS = 0x7FC00000


@dataclass(frozen=True)
class FP8Scaling:
    """That a layer's products are in FP8, and the ranks that hold parts of the rows of its operands."""

    input_group: Group = None
    """Ranks that share the input features: of a row-parallel layer."""
    output_group: Group = None
    """Ranks that share the output features: of a column-parallel layer."""


class Quantized(NamedTuple):
    """A matrix, or one per expert, in e4m3. A row of `values` [..., R, K] has one of `scales` [..., R]."""

    values: Tensor
    scales: Tensor

    def restored(self, dtype: torch.dtype) -> Tensor:
        """Returns the rounded matrix, [..., R, K]."""
        return self.values.to(dtype) * self.scales[..., None].to(dtype)


def check_fp8(device: torch.device, dtype: torch.dtype) -> str:
    """Returns how products in FP8 are computed on a device. Raises ValueError if they cannot be in this dtype."""
    if device.type != "cuda":
        return f"emulated in fp32, as {device.type} has none in FP8: slower than without, not faster"
    if (reason := why_no_fp8(gpu_of(device))) is not None:
        raise ValueError(f"fp8=True cannot run on this GPU: {reason}. Use fp8=False.")
    if dtype != torch.bfloat16:
        raise ValueError(
            f"fp8=True computes in bfloat16 on a GPU, but the compute dtype is {str(dtype).removeprefix('torch.')}. "
            "Use bfloat16, or fp8=False."
        )
    return "in e4m3 with a scale per row, by torch.nn.functional.scaled_mm"


def fp8_products(
    rows: Tensor, weights: Sequence[Tensor], shared: list[Tensor] | None, *, joined: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Returns `rows` [T, in] times each of `weights` [out, in], [T, out] each; `shared` is what `share_amax` returns.

    `joined` are all weights as one matrix; products are then columns of one tensor.
    """
    # One operator, so that selective recompute keeps the products and does not round again.
    products = torch.ops.postlude.fp8_products(rows, list(weights), joined, shared)
    return tuple(products) if joined is None else products[0].split([len(weight) for weight in weights], -1)


def share_amax(rows: Tensor, weights: Sequence[Tensor], scaling: FP8Scaling) -> list[Tensor] | None:
    """Returns bits of the largest magnitudes of whole rows of all operands; None where this rank holds whole rows."""
    if scaling.input_group is None:
        return None
    return _largest_of_ranks([_row_bits(part) for part in (rows, *weights)], scaling.input_group)


def _products(rows: Tensor, weights: list[Tensor], joined: Tensor | None, shared: list[Tensor] | None) -> list[Tensor]:
    row_bits, weight_bits = (None, [None] * len(weights)) if shared is None else (shared[0], shared[1:])
    quantized = quantize_rows([rows], row_bits)
    if joined is not None:
        joined_bits = None if shared is None else torch.cat(shared[1:])
        return [_multiply(quantized, quantize_rows([joined], joined_bits), rows.dtype)]
    return [
        _multiply(quantized, quantize_rows([weight], bits), rows.dtype)
        for weight, bits in zip(weights, weight_bits, strict=True)
    ]


def fp8_input_gradient(gradients: Sequence[Tensor], weights: Sequence[Tensor], scaling: FP8Scaling) -> Tensor:
    """Returns the sum of each of `gradients` [T, out] times its weight [out, in]: [T, in].

    It is one product: the output features of all layers are one row, with one scale.
    """
    row_bits = column_bits = None
    if scaling.output_group is not None:
        local = [
            _elementwise_max(_row_bits(part) for part in gradients),
            _elementwise_max(_column_bits(part) for part in weights),
        ]
        row_bits, column_bits = _largest_of_ranks(local, scaling.output_group)
    return _multiply(quantize_rows(gradients, row_bits), quantize_columns(weights, column_bits), gradients[0].dtype)


_LIBRARY = torch.library.Library("postlude", "FRAGMENT")
_LIBRARY.define("fp8_products(Tensor rows, Tensor[] weights, Tensor? joined, Tensor[]? shared) -> Tensor[]")
_LIBRARY.impl("fp8_products", _products, "CompositeExplicitAutograd")


def quantize_rows(parts: Sequence[Tensor], bits: Tensor | None = None, *, backend: Backend = "auto") -> Quantized:
    """Returns matrices [R, K] beside each other in e4m3, [R, sum of K], with a scale for each row.

    `bits` [R] are those of each row's largest magnitude, where others than these parts have a say.
    """
    if not _use_kernel(parts, backend):
        joined = torch.cat([part.float() for part in parts], -1) if len(parts) > 1 else parts[0].float()
        return _rounded(joined, _row_bits(joined, backend="torch") if bits is None else bits)
    from postlude.ops.kernels import fp8 as kernels  # needs triton

    dense = [_with_adjacent_columns(part) for part in parts]
    values = dense[0].new_empty(len(dense[0]), sum(part.shape[1] for part in dense), dtype=E4M3)
    scales = dense[0].new_empty(len(dense[0]), dtype=torch.float32)
    if bits is None and len(dense) > 1:
        bits = _elementwise_max(kernels.row_amax(part) for part in dense)
    for part, columns in zip(dense, values.split([part.shape[1] for part in dense], 1), strict=True):
        kernels.quantize_rows(part, bits, columns, scales)
    return Quantized(values, scales)


def quantize_columns(parts: Sequence[Tensor], bits: Tensor | None = None, *, backend: Backend = "auto") -> Quantized:
    """Returns matrices [..., R, K] above each other, transposed, in e4m3: [..., K, sum of R], a scale for each column.

    `bits` [..., K] are those of each column's largest magnitude, where others than these parts have a say.
    """
    if not _use_kernel(parts, backend):
        joined = torch.cat([part.float() for part in parts], -2).transpose(-2, -1).contiguous()
        return _rounded(joined, _row_bits(joined, backend="torch") if bits is None else bits)
    from postlude.ops.kernels import fp8 as kernels

    stacks = [_with_adjacent_columns(part if part.dim() == 3 else part[None]) for part in parts]
    count, _, width = stacks[0].shape
    values = stacks[0].new_empty(count, width, sum(stack.shape[1] for stack in stacks), dtype=E4M3)
    scales = stacks[0].new_empty(count, width, dtype=torch.float32)
    column_bits = (
        _elementwise_max(kernels.column_amax(stack) for stack in stacks) if bits is None else bits.view(count, width)
    )
    for stack, columns in zip(stacks, values.split([stack.shape[1] for stack in stacks], 2), strict=True):
        kernels.quantize_columns(stack, column_bits, columns, scales)
    return Quantized(values, scales) if parts[0].dim() == 3 else Quantized(values[0], scales[0])


def _rounded(matrix: Tensor, bits: Tensor) -> Quantized:
    """Returns a matrix [..., R, K] with the scales of its rows' largest magnitudes. The kernels compute the same."""
    exponent = ((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).int()).clamp(1, 247)  # 448 is 1.75 · 2⁸
    finite = bits < INFINITY_BITS
    scales = torch.where(finite, exponent << 23, NAN_BITS).view(torch.float32)
    inverse = torch.where(finite, (254 - exponent) << 23, NAN_BITS).view(torch.float32)
    return Quantized((matrix * inverse[..., None]).to(E4M3), scales)


def _row_bits(matrix: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Returns the bits of the largest magnitude of each row of [..., K], int32."""
    if matrix.dim() == 2 and _use_kernel([matrix], backend):
        from postlude.ops.kernels import fp8 as kernels

        return kernels.row_amax(_with_adjacent_columns(matrix))
    return matrix.float().abs().view(torch.int32).amax(-1)


def _column_bits(matrix: Tensor) -> Tensor:
    """Returns the bits of the largest magnitude of each column of [R, K], int32."""
    if _use_kernel([matrix], "auto"):
        from postlude.ops.kernels import fp8 as kernels

        return kernels.column_amax(_with_adjacent_columns(matrix)[None])[0]
    return matrix.float().abs().contiguous().view(torch.int32).amax(0)


def _elementwise_max(parts: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.maximum, parts)


def _largest_of_ranks(parts: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Returns the largest of each number over the ranks of the group, in one collective."""
    together = torch.cat(list(parts))
    dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
    return list(together.split([len(part) for part in parts]))


def _multiply(left: Quantized, right: Quantized, dtype: torch.dtype) -> Tensor:
    """Returns left · rightᵀ, [R, K] and [C, K] -> [R, C]."""
    if not len(left.values):
        return left.scales.new_empty(0, len(right.values), dtype=dtype)
    if not left.values.is_cuda:
        wide = _emulated_dtype(dtype)
        return left.restored(wide).mm(right.restored(wide).t()).to(dtype)
    return F.scaled_mm(
        left.values,
        right.values.t(),
        left.scales[:, None],
        F.ScalingType.RowWise,
        right.scales[None, :],
        F.ScalingType.RowWise,
        output_dtype=dtype,
    )


def _emulated_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _with_adjacent_columns(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def _use_kernel(parts: Sequence[Tensor], backend: Backend) -> bool:
    first = parts[0]
    if not first.is_cuda and backend == "auto":
        return False
    unsupported_reason = EMPTY if any(part.numel() == 0 for part in parts) else None
    return use_kernel("fp8_quantize", backend, first.device, first.dtype, unsupported_reason=unsupported_reason)

"""Compiles every Triton kernel for GPUs that are not present, at model sizes: Triton's compiler needs no GPU.

`CALLS` call each kernel as its operation does, with tensors in host memory. Nothing is launched.
"""

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from postlude.ops import kernels
from postlude.ops.adamw_storage import AdamWHyperparameters, QuantizedMoment, TensorSlice, scales_shape
from postlude.ops.attention import ScoreConfig
from postlude.ops.fp8_kv import FP8
from postlude.ops.kernels import (
    activation,
    adamw,
    attention,
    block_fp8,
    capabilities,
    convolution,
    decode_experts,
    decode_linear,
    experts,
    fp8,
    gated_delta,
    invariant_attention,
    invariant_linear,
    latent_attention,
    linear_logprobs_fused,
    linear_logprobs_quantized,
    linear_logprobs_rows,
    norm,
    paged_attention,
    recurrent_step,
    rotary,
    sample,
    ssd,
)
from postlude.ops.linear_logprobs.statistics import SelectionRule, Slab, TokenRows, Upstream
from postlude.ops.low_rank import LowRank
from postlude.ops.norm import Norm
from postlude.ops.packing import Packing
from postlude.ops.paged_attention import new_page_store
from postlude.ops.shared_pages import SharedPages
from postlude.ops.ssd import shared_memory_for

TOKENS = 512
BF16, FP32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")


def bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=BF16)


def fp32(*shape: int) -> Tensor:
    return torch.empty(shape)


def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def call_norm() -> None:
    rows, weight = bf16(TOKENS, 4096), bf16(4096)
    norm.forward(rows, weight, 1e-6, 0.0)
    norm.backward(rows, weight, 1e-6, 0.0, rows, rows, None)


def call_activation() -> None:
    gate, up = bf16(TOKENS, 2 * 12288).chunk(2, 1)
    activation.forward(gate, up, "silu")
    activation.backward(gate, up, "silu", bf16(TOKENS, 12288), bf16(TOKENS, 12288))


def call_rotary() -> None:
    query, key, table = bf16(TOKENS, 32, 128), bf16(TOKENS, 8, 128), (fp32(TOKENS, 128), fp32(TOKENS, 128))
    weights = bf16(128), bf16(128)
    rotary.forward(query, key, table, weights, 1e-6, 0.0)
    rotary.backward(query, key, table, weights, 1e-6, 0.0, (query, key), (None, None))


def call_experts() -> None:
    tokens, rows = bf16(TOKENS, 2048), bf16(TOKENS * 8, 2048)
    inverse, weights = integers(TOKENS * 8), fp32(TOKENS, 8)
    experts.replicate(tokens, inverse, 8)
    experts.merge(rows, inverse, 8, weights)
    experts.merge_backward(tokens, inverse, 8, weights, rows)
    experts.add_to(fp32(2048, 768), bf16(2048, 768))


def call_embedding() -> None:
    experts.add_rows(fp32(8192, 2048), bf16(TOKENS, 2048), integers(TOKENS), integers(TOKENS))


def call_grouped_wgrad() -> None:
    gradient, rows = bf16(TOKENS, 2 * 768)[:, 768:], bf16(TOKENS, 2048)
    for is_empty in (False, True):
        ends = integers(8, dtype=torch.int32)
        experts.add_products(fp32(8, 768, 2048), gradient, rows, ends, is_empty=is_empty)


def call_fp8() -> None:
    rows, weights = bf16(TOKENS, 24576), bf16(1, 4096, 12288)
    values, scales = torch.empty(TOKENS, 24576, dtype=torch.float8_e4m3fn), fp32(TOKENS)
    fp8.quantize_rows(rows, None, values, scales)
    fp8.quantize_rows(rows, fp8.row_amax(rows), values, scales)
    columns = torch.empty(1, 12288, 4096, dtype=torch.float8_e4m3fn)
    fp8.quantize_columns(weights, fp8.column_amax(weights), columns, fp32(1, 12288))


def call_convolution() -> None:
    inputs, kernel, bias, positions = bf16(TOKENS, 10240), bf16(10240, 4), bf16(10240), integers(TOKENS)
    convolution.forward(inputs, kernel, bias, positions, True)
    convolution.backward(inputs, kernel, bias, positions, True, inputs)


def call_recurrent_step() -> None:
    channels, kernel, running = bf16(16, 10240), bf16(10240, 4), integers(16, dtype=torch.bool)
    recurrent_step.convolve(channels, bf16(16, 3, 10240), kernel, bf16(10240), running, True)
    x, groups = bf16(16, 128, 64), bf16(16, 8, 128)
    recurrent_step.mamba(x, fp32(16, 128), fp32(128), groups, groups, fp32(128), fp32(16, 128, 64, 128), running)
    keys, values, numbers = bf16(16, 16, 128), bf16(16, 32, 128), fp32(16, 32)
    states = fp32(16, 32, 128, 128)
    recurrent_step.delta_rule(keys, keys, values, numbers, numbers, states, running, 0.1, 1e-6)


def call_ssd(width: int, state: int) -> None:
    heads, groups = 16, 8
    x, B, C = bf16(TOKENS, heads, width), bf16(TOKENS, groups, state), bf16(TOKENS, groups, state)
    scan = ssd.Scan.of(x, fp32(TOKENS, heads), fp32(heads), B, C, integers(TOKENS, dtype=torch.int32), 128)
    scan.outputs(fp32(heads))
    scan.gradients(fp32(heads), x)


def call_gated_delta() -> None:
    key, value = bf16(TOKENS, 2, 128), bf16(TOKENS, 4, 128)
    rates = fp32(TOKENS, 4), fp32(TOKENS, 4)
    packing = Packing.from_lengths([TOKENS])
    inputs = key, key, value, *rates
    call = gated_delta.GatedDeltaCall(inputs, packing.cu_seqlens, [TOKENS], 0.1, True, 64, keep=True)
    states = call.run(last_states=True)
    call.outputs()
    call.gradients(value, states)


def call_attention(
    widths: tuple[int, int] = (128, 128), parents: tuple[int, ...] | None = None, **config: float
) -> None:
    lengths = [TOKENS // len(parents)] * len(parents) if parents else [TOKENS]
    packing = Packing.from_lengths(lengths, parents=parents)
    query, key, value = bf16(TOKENS, 8, widths[0]), bf16(TOKENS, 2, widths[0]), bf16(TOKENS, 2, widths[1])
    call = attention.AttentionCall.of(
        (query, key, value), packing, packing, 0.1, config.get("window"), config.get("softcap")
    )
    output, lse = attention.forward(query, key, value, None, call)
    attention.backward(query, key, value, None, output, lse, output, call)


def call_paged_attention(
    width: int = 128, rows: int = 16, dtype: torch.dtype = BF16, fp8: bool = False, tokens: int = 1, **score: int
) -> None:
    query, key = (torch.empty(rows * tokens, heads, width, dtype=dtype) for heads in (32, 8))
    store = new_page_store(4, 8, width, FP8 if fp8 else dtype, CPU)
    table, lengths = integers(rows, 4, dtype=torch.int32), integers(rows)
    exponents = new_page_store(4, 8, 1, torch.int8, CPU)
    for shared in (None, SharedPages(integers(2, 8, dtype=torch.int32), integers(rows, dtype=torch.int32))):
        paged_attention.attend(
            *(query, key, key, store, store, table, lengths, ScoreConfig(scale=0.1, **score)),
            exponents=(exponents, exponents) if fp8 else None,
            shared=shared,
        )


def call_latent_attention(heads: int = 16, size: int = 512, dtype: torch.dtype = BF16, tokens: int = 1) -> None:
    query, rotated = (torch.empty(16 * tokens, heads, width, dtype=dtype) for width in (size, 64))
    latents, store = torch.empty(16 * tokens, size + 64, dtype=dtype), new_page_store(4, 1, size + 64, dtype, CPU)
    table, lengths = integers(16, 4, dtype=torch.int32), integers(16)
    latent_attention.attend(query, rotated, latents, store, table, lengths, 0.1)
    angles, norm = (fp32(16 * tokens, 64), fp32(16 * tokens, 64)), Norm(torch.empty(size, dtype=dtype), 1e-6, 0.0)
    latent_attention.rotate(rotated, latents, norm, angles, interleaved=True)


def call_invariant_linear(count: int, dtype: torch.dtype = BF16) -> None:
    rows, out = torch.empty(count, 4096, dtype=dtype), fp32(count, 1024)
    invariant_linear.product(rows, torch.empty(1024, 4096, dtype=dtype), fp32(1024), out)
    invariant_linear.grouped_product(rows, torch.empty(8, 1024, 4096, dtype=dtype), integers(8))


def call_invariant_attention(width: int = 128, dtype: torch.dtype = BF16) -> None:
    query, key = (torch.empty(16, heads, width, dtype=dtype) for heads in (32, 8))
    invariant_attention.forward(query, key, key, None, integers(4, 4, dtype=torch.int32), 0.1, None, None)
    store, table = new_page_store(4, 8, width, dtype, torch.device("cpu")), integers(16, 4, dtype=torch.int32)
    invariant_attention.attend_pages(query, key, key, store, store, table, integers(16), ScoreConfig(scale=0.1))


def call_decode_experts(tokens: int, biased: bool) -> None:
    experts, top_k, hidden, inner = 8, 4, 2880, 1408
    rows, counts = bf16(tokens, hidden), integers(experts, dtype=torch.int32)
    bias, options = (fp32(experts), {"alpha": 1.7, "limit": 7.0, "up_offset": 1.0}) if biased else (None, {})
    _, weights, slots = decode_experts.route(
        fp32(tokens, experts), bias, counts, top_k, softmax=not biased, normalise=True, scale=1.0, dtype=BF16
    )
    up, down = [
        (bf16(experts, *size), bf16(experts, size[0]) if biased else None)
        for size in ((inner, hidden), (hidden, inner))
    ]
    average = tokens * top_k / experts
    tiles = [decode_experts.tile_for(average, True), decode_experts.tile_for(average, False)]
    features = decode_experts.products(rows, counts, slots, up, up, top_k, tiles[0], activation="silu", **options)
    outputs = decode_experts.products(features, counts, slots, None, down, 1, tiles[1])
    decode_experts.merge(rows, outputs, weights, rows if biased else None, counts)


def call_decode_linear(rank: int | None = None, width: int = 4096) -> None:
    rows, gate_and_up, down = bf16(16, width), bf16(2 * 3 * width, width), bf16(width, 3 * width)
    weights = Norm(bf16(width), 1e-6, 0.0)
    first = second = None
    if rank is not None:
        first = LowRank(bf16(2 * rank, width), bf16(6 * width, rank), (3 * width, 3 * width))
        second = LowRank(bf16(rank, 3 * width), bf16(width, rank), (width,))
    decode_linear.product(rows, gate_and_up, 16, norm=weights, low_rank=first)
    decode_linear.product(rows, gate_and_up, 16, norm=weights, activation="silu", low_rank=first)
    counters = integers(1024, dtype=torch.int32)
    decode_linear.product(bf16(16, 3 * width), down, 16, residual=rows, counters=counters, low_rank=second)


def call_block_fp8(rows: int) -> None:
    counters = integers(1024, dtype=torch.int32)
    hidden = block_fp8.quantize(bf16(rows, 4096), Norm(bf16(4096), 1e-6, 0.0))
    block_fp8.product(hidden, torch.empty(24576, 4096, dtype=FP8), fp32(192, 32), BF16, counters=counters)
    features = block_fp8.quantize(bf16(rows, 24576), activation="silu")
    weight, weight_scales = torch.empty(4096, 12288, dtype=FP8), fp32(32, 96)
    block_fp8.product(features, weight, weight_scales, BF16, residual=bf16(rows, 4096), counters=counters)


def call_low_rank(rank: int, count: int) -> None:
    product, a_products = bf16(count, 2 * 12288), bf16(1, count, 2 * rank)
    adapters = LowRank(bf16(2 * rank, 4096), bf16(2 * 12288, rank), (12288, 12288))
    decode_linear.add_low_rank(product, a_products, adapters)
    decode_linear.add_low_rank(product, a_products, adapters, activation="silu")


def call_sample() -> None:
    logits, rows = fp32(16, 151936), integers(16)
    sample.sample_next(
        logits, rows, integers(6, 16), fp32(3, 16), integers(2, 16), torch.empty(16, 3, dtype=torch.float64), True
    )


def call_adamw(eight_bits: bool, dtype: torch.dtype, split: bool) -> None:
    shape = (64, 4096)
    weight, gradient = torch.empty(shape, dtype=dtype), fp32(*shape)
    moments: list[Tensor | QuantizedMoment] = [fp32(*shape), fp32(*shape)]
    if eight_bits:
        moments = [QuantizedMoment(integers(*shape, dtype=torch.uint8), fp32(*scales_shape(shape))) for _ in range(2)]
    hyperparameters = AdamWHyperparameters(lr=1e-6, betas=(0.9, 0.95), eps=1e-8, decay=0.0)
    low = integers(*shape, dtype=torch.int16) if split else None
    bounds = TensorSlice.of(tuple(slice(0, size) for size in shape), shape)
    adamw.step(weight, gradient, *moments, fp32(3), hyperparameters, low, fp32(2), 7, bounds)


def call_head_rows() -> None:
    rows = TokenRows(integers(TOKENS), fp32(TOKENS), None)
    linear_logprobs_rows.select(rows.targets, 1.0, 1.0, SelectionRule(-100, (0, 8192), 0, FP32, None))
    products = fp32(TOKENS, 8192)
    slab = Slab(
        products=products, rows=rows, bias=None, hidden=products, weight=products, row_range=slice(0, TOKENS),
        column_range=slice(0, 8192),
    )  # fmt: skip
    state = fp32(4, TOKENS)
    linear_logprobs_rows.accumulate(slab, state, entropy=True)
    results = linear_logprobs_rows.results(state)
    upstream = Upstream(fp32(TOKENS), fp32(TOKENS), None)
    coefficients = linear_logprobs_rows.coefficients(rows, results.normalizer, results.entropy, upstream, None)
    linear_logprobs_rows.differentiate(slab, coefficients, BF16)
    linear_logprobs_rows.scale(bf16(TOKENS, 4096), fp32())


def call_head_fused(softcap: bool) -> None:
    hidden, weight, columns = bf16(TOKENS, 4096), bf16(1024, 4096), slice(0, 1024)
    rows, state = TokenRows(integers(TOKENS), fp32(TOKENS), 0.1 if softcap else None), fp32(4, TOKENS)
    linear_logprobs_fused.accumulate(hidden, weight, None, rows, columns, state)
    linear_logprobs_fused.differentiate(hidden, weight, None, rows, columns, fp32(5, TOKENS), bf16(TOKENS, 1024))
    codes = integers(TOKENS, 1024, dtype=torch.int16).view(BF16)
    partial, results = linear_logprobs_quantized.encode(hidden, weight, None, rows, 1024, codes, state)
    upstream = Upstream(fp32(TOKENS), fp32(TOKENS), None)
    linear_logprobs_quantized.decode(codes, partial, rows, results, upstream, masked=False)


@dataclass(frozen=True)
class Call:
    """A call of an operation's kernels. `fits` returns whether the operation makes this call on a GPU."""

    operation: str
    label: str
    make: Callable[[], None]
    fits: Callable[[capabilities.GPU], bool] = lambda gpu: True


def ssd_call(width: int, state: int) -> Call:
    def fits(gpu: capabilities.GPU) -> bool:
        return shared_memory_for(width, state, gpu) <= gpu.shared_memory

    return Call("ssd", f"{width}x{state}", partial(call_ssd, width, state), fits)


CALLS = (
    Call("rms_norm", "4096", call_norm),
    Call("gated_activation", "12288", call_activation),
    Call("rotate_heads", "128", call_rotary),
    Call("merge_rows", "2048", call_experts),
    Call("embed", "2048", call_embedding),
    Call("grouped_wgrad", "2048", call_grouped_wgrad),
    Call("fp8_quantize", "24576", call_fp8),
    Call("convolve", "10240", call_convolution),
    Call("recurrent_step", "10240", call_recurrent_step),
    ssd_call(64, 128),
    ssd_call(128, 128),
    ssd_call(64, 256),
    Call("gated_delta", "128", call_gated_delta),
    Call("attention", "128", call_attention),
    Call("attention", "128, shared segments", partial(call_attention, parents=(-1, 0))),
    Call("attention", "64, window", partial(call_attention, (64, 64), window=64)),
    Call("attention_softcap", "256", partial(call_attention, (256, 256), softcap=50.0)),
    Call("attention_softcap", "192 and 128", partial(call_attention, (192, 128), softcap=50.0)),
    Call("attention_softcap", "128", partial(call_attention, softcap=50.0)),
    Call("attend_pages", "128", call_paged_attention),
    Call("attend_pages", "256, fp32", partial(call_paged_attention, 256, dtype=FP32)),
    Call("attend_pages", "two tokens of a row", partial(call_paged_attention, tokens=2, window=100)),
    Call("attend_pages_fp8", "128", partial(call_paged_attention, fp8=True)),
    Call("attend_pages_fp8", "two tokens of a row", partial(call_paged_attention, fp8=True, tokens=2)),
    Call("attend_pages_fp8", "256, fp32", partial(call_paged_attention, 256, dtype=FP32, fp8=True)),
    Call("attend_latent_pages", "16 heads", call_latent_attention),
    Call("attend_latent_pages", "two tokens of a row", partial(call_latent_attention, tokens=2)),
    Call("attend_latent_pages", "128 heads", partial(call_latent_attention, 128)),
    Call("attend_latent_pages", "128, fp32", partial(call_latent_attention, size=128, dtype=FP32)),
    Call("invariant_linear", "16 rows", partial(call_invariant_linear, 16)),
    Call("invariant_linear", "128 rows", partial(call_invariant_linear, 128)),
    Call("invariant_linear", "8192 rows", partial(call_invariant_linear, 8192)),
    Call("invariant_linear", "fp32", partial(call_invariant_linear, 128, FP32)),
    Call("invariant_attention", "128", call_invariant_attention),
    Call("invariant_attention", "256", partial(call_invariant_attention, 256)),
    Call("invariant_attention", "128, fp32", partial(call_invariant_attention, dtype=FP32)),
    Call("decode_experts", "16 rows", partial(call_decode_experts, 16, False)),
    Call("decode_experts", "32 rows", partial(call_decode_experts, 32, True)),
    Call("decode_experts", "128 rows", partial(call_decode_experts, 128, True)),
    Call("decode_linear", "4096", call_decode_linear),
    Call("decode_linear", "1024, narrow tiles", partial(call_decode_linear, width=1024)),
    Call("decode_linear", "rank 64", partial(call_decode_linear, 64)),
    Call("decode_linear", "rank 64 of 512 rows", partial(call_low_rank, 64, 512)),
    Call("decode_linear", "rank 256 of 512 rows", partial(call_low_rank, 256, 512)),
    Call("block_fp8", "16 rows", partial(call_block_fp8, 16)),
    Call("block_fp8", "64 rows", partial(call_block_fp8, 64)),
    Call("block_fp8", "128 rows", partial(call_block_fp8, 128)),
    Call("block_fp8", "512 rows", partial(call_block_fp8, 512)),
    Call("sample_next", "151936", call_sample),
    Call("adamw_step", "fp32", partial(call_adamw, False, FP32, False)),
    Call("adamw_step", "8 bits", partial(call_adamw, True, BF16, True)),
    Call("linear_logprobs", "8192", call_head_rows),
    Call("linear_logprobs_fused", "4096", partial(call_head_fused, False)),
)


class FakeDriver:
    """Reports a GPU of this capability to Triton. Its device number separates the compilations."""

    def __init__(self, capability: capabilities.Capability) -> None:
        self.architecture = 10 * capability[0] + capability[1]

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)


@dataclass(frozen=True)
class Launch:
    """A kernel launch: the kernel, its constants, and after compilation its memory."""

    kernel: str
    options: dict[str, object]
    shared_memory: int = 0
    tensor_memory: int = 0  # columns, of Blackwell


@contextlib.contextmanager
def launches_on(gpu: capabilities.GPU, *, compiles: bool) -> Iterator[list[Launch]]:
    """Yields the launches made inside, as if on this GPU. With `compiles`, Triton compiles them; nothing runs."""
    launches: list[Launch] = []
    run = jit.JITFunction.run

    def note(kernel: jit.JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        names = [
            name for name, parameter in zip(kernel.arg_names, kernel.params, strict=True) if parameter.is_constexpr
        ]
        bound = dict(zip(kernel.arg_names, arguments, strict=False)) | options
        chosen = {name: bound[name] for name in (*names, "num_warps", "num_stages") if name in bound}
        memory = (0, 0)
        if compiles:
            metadata = run(kernel, *arguments, grid=grid, warmup=True, **options).metadata
            memory = metadata.shared, getattr(metadata, "tmem_size", 0)
        launches.append(Launch(f"{kernel.fn.__module__.rsplit('.', 1)[1]}.{kernel.fn.__name__}", chosen, *memory))

    driver.set_active(FakeDriver(gpu.capability))
    modules = [module for module in [*sys.modules.values()] if getattr(module, "gpu_of", None) is capabilities.gpu_of]
    try:
        with contextlib.ExitStack() as patches:
            patches.enter_context(mock.patch.object(jit.JITFunction, "run", note))
            for module in modules:
                patches.enter_context(mock.patch.object(module, "gpu_of", return_value=gpu))
            yield launches
    finally:
        if torch.cuda.is_available():
            driver.reset_active()  # without a GPU there is no other driver


def launched_kernels() -> set[str]:
    """Returns the names of all kernels that the project launches, as in `Launch.kernel`."""
    names = set()
    for file in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{file.name}")
        for value in vars(module).values():
            launched = getattr(value, "function", None) or getattr(value, "kernel", None)
            if isinstance(launched, jit.JITFunction):
                names.add(f"{launched.fn.__module__.rsplit('.', 1)[1]}.{launched.fn.__name__}")
    return names

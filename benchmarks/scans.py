"""One layer of 16,384 packed tokens: Mamba-2, gated delta net, and attention of the same width, forward and backward.

    PYTHONPATH=src python benchmarks/scans.py --json benchmarks/results/scans_h200.json

Where flash-linear-attention is installed, the same layer is also timed with its kernels in place of ours: the scan and
the convolution. Its backward refuses Triton 3.4 to 3.7.0 on Hopper, as wrong; then its forward alone is timed. Sizes
are Nemotron-H-8B's and Qwen3-Next's. Times are medians: single calls on an idle GPU, and CUDA events in a loop.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from postlude import LanguageModel, ModelConfig, Pattern, pack
from postlude.model.blocks import AttentionConfig, BlockConfig, GatedDeltaConfig, MambaConfig
from postlude.model.context import ForwardContext
from postlude.ops.packing import Packing

LENGTHS = (3000, 1, 700, 5000, 129, 2000, 1554, 4000)  # 16,384 together
LAYERS: dict[str, tuple[str, int, BlockConfig]] = {
    "Mamba-2 (Nemotron-H-8B)": (
        "M",
        4096,
        MambaConfig(heads=128, head_dim=64, state_size=128, groups=8, norm_groups=8),
    ),
    "attention (Nemotron-H-8B)": ("*", 4096, AttentionConfig(heads=32, kv_heads=8, head_dim=128, rotary=None)),
    "gated delta (Qwen3-Next)": ("G", 2048, GatedDeltaConfig(key_heads=16, value_heads=32, key_dim=128, value_dim=128)),
    "attention (Qwen3-Next)": ("*", 2048, AttentionConfig(heads=16, kv_heads=2, head_dim=256)),
}


def fla_gated_delta(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, packing: Packing, **options: Any
) -> tuple[Tensor, Tensor]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    share = value.shape[1] // key.shape[1]
    output, states = chunk_gated_delta_rule(
        query.repeat_interleave(share, 1)[None],
        key.repeat_interleave(share, 1)[None],
        value[None],
        g=log_decay[None],
        beta=beta[None],
        use_qk_l2norm_in_kernel=options.get("normalise", False),
        cu_seqlens=packing.cu_seqlens.long(),
        output_final_state=False,
    )
    return output[0], states


def fla_ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, packing: Packing, **_: Any
) -> tuple[Tensor, None]:
    from fla.ops.simple_gla import chunk_simple_gla

    share = x.shape[1] // B.shape[1]
    output, _state = chunk_simple_gla(
        C.repeat_interleave(share, 1)[None],
        B.repeat_interleave(share, 1)[None],
        (x * dt[..., None]).to(x.dtype)[None],
        g=(dt * A)[None],
        scale=1.0,
        cu_seqlens=packing.cu_seqlens.long(),
    )
    y = output[0]
    return (y if D is None else y + D[:, None] * x).to(x.dtype), None


def fla_convolve(
    inputs: Tensor, kernel: Tensor, bias: Tensor | None, packing: Packing, *, silu: bool = False
) -> Tensor:
    from fla.modules.convolution import causal_conv1d

    output = causal_conv1d(
        inputs[None], kernel, bias, activation="silu" if silu else None, cu_seqlens=packing.cu_seqlens.long()
    )
    return (output[0] if isinstance(output, tuple) else output)[0]


@contextlib.contextmanager
def with_fla(symbol: str) -> Iterator[None]:
    """The block's own lines, around fla's kernels."""
    where = {"M": "mamba", "G": "gated_delta"}[symbol]
    own = ("ssd", fla_ssd) if symbol == "M" else ("gated_delta", fla_gated_delta)
    room = f"postlude.model.blocks.{where}"
    with patch(f"{room}.{own[0]}", own[1]), patch(f"{room}.convolve", fla_convolve):
        yield


def timed(run: Callable[[], None], count: int = 10) -> dict[str, float]:
    """Milliseconds: the median in a loop, and of single calls on an idle GPU, the host's part included."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    alone = []
    for _ in range(5):
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        alone.append((time.perf_counter() - began) * 1e3)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    loop = [one.elapsed_time(other) for one, other in itertools.pairwise(events)]
    return {"loop_ms": statistics.median(loop), "alone_ms": statistics.median(alone)}


def measure(name: str) -> list[dict[str, Any]]:
    symbol, hidden_size, block_config = LAYERS[name]
    config = ModelConfig(
        pattern=Pattern.parse(symbol), hidden_size=hidden_size, vocab_size=256, blocks={symbol: block_config}
    )
    model = LanguageModel(config, dtype=torch.bfloat16).cuda()
    layer = next(iter(model.layers.values()))
    (microbatch,) = pack([torch.zeros(length, dtype=torch.int64) for length in LENGTHS], budget=sum(LENGTHS))
    microbatch = microbatch.to("cuda")
    torch.manual_seed(0)
    hidden = torch.randn(len(microbatch), hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn_like(hidden)

    def forward() -> None:
        with torch.no_grad():
            layer(hidden, ForwardContext(microbatch))

    def both() -> None:
        layer(hidden, ForwardContext(microbatch)).backward(upstream)

    found = []
    for peer in (False, True) if symbol in "MG" else (False,):
        line: dict[str, Any] = {"layer": name, "kernels": "fla" if peer else "postlude"}
        try:
            with with_fla(symbol) if peer else contextlib.nullcontext():
                line["forward"] = timed(forward)
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                line["both"] = timed(both)
                line["extra_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        except Exception as error:  # what a peer cannot do is a line in the table
            line["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        found.append(line)
        print(json.dumps(line))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    lines = [line for name in LAYERS for line in measure(name)]
    if arguments.json:
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "tokens": sum(LENGTHS)}
        arguments.json.write_text(json.dumps({"machine": machine, "lines": lines}, indent=2) + "\n")


if __name__ == "__main__":
    main()

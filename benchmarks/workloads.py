"""Shared by the step benchmarks: published models' shapes, mixes of lengths, FLOPs, clocks, and results as JSON.

The FLOPs of a step are those that every implementation needs:

    6 · tokens · matrices + 6 · layers · heads · head_dim · Σ length²

`matrices` are the weights that a token is multiplied with: projections, MLP or its chosen experts and the router, and
the head. An embedding that is only looked up does not count. Two FLOPs per weight forward, four backward. Causal
attention has half of length² pairs, with 4 · heads · head_dim FLOPs each forward and twice that backward. Only real
tokens count, and nothing that is computed twice. Forward alone is a third. MFU is that over the time and the GPU's
989 TFLOP/s of dense bf16 products.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    NemotronHConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

GIB = 2**30
PEAK_FLOPS = 989e12
OUT_OF_MEMORY = "out of memory"
LONGEST = 2**18  # positions that a shape allows; published ones allow fewer, which changes no weight


def _qwen3(**sizes: Any) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151936, head_dim=128, num_key_value_heads=8, max_position_embeddings=LONGEST, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **sizes,
    )  # fmt: skip


def _8b(layers: int) -> Qwen3Config:
    return _qwen3(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=layers, num_attention_heads=32,
        tie_word_embeddings=False,
    )  # fmt: skip


def _30b_a3b(layers: int) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        max_position_embeddings=LONGEST, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip


def _moonlight(layers: int) -> DeepseekV3Config:
    return DeepseekV3Config(
        vocab_size=163840, hidden_size=2048, intermediate_size=11264, moe_intermediate_size=1408,
        num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=16, n_shared_experts=2,
        n_routed_experts=64, num_experts_per_tok=6, routed_scaling_factor=2.446, n_group=1, topk_group=1,
        norm_topk_prob=True, first_k_dense_replace=1, kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128, rms_norm_eps=1e-5, max_position_embeddings=LONGEST,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4}, num_nextn_predict_layers=0,
        # Read by vLLM, which otherwise chooses experts by a softmax without a balancing bias.
        scoring_func="sigmoid", topk_method="noaux_tc",
    )  # fmt: skip


def _gpt_oss(layers: int) -> GptOssConfig:
    yarn = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096}
    return GptOssConfig(
        vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=layers, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4, sliding_window=128,
        max_position_embeddings=131072, tie_word_embeddings=False,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1.5e5, "factor": 32.0, **yarn},
    )  # fmt: skip


def _qwen3_next(layers: int) -> Qwen3NextConfig:
    return Qwen3NextConfig(
        vocab_size=151936, hidden_size=2048, num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=2,
        head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4, num_experts=512, num_experts_per_tok=10,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, norm_topk_prob=True,
        max_position_embeddings=LONGEST, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    )  # fmt: skip


def _nemotron_h(pattern: str) -> NemotronHConfig:
    blocks = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
    return NemotronHConfig(
        vocab_size=131072, hidden_size=4096, layers_block_type=[blocks[symbol] for symbol in pattern],
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, intermediate_size=21504, mamba_num_heads=128,
        mamba_head_dim=64, ssm_state_size=128, n_groups=8, conv_kernel=4, chunk_size=128,
        max_position_embeddings=LONGEST, tie_word_embeddings=False,
    )  # fmt: skip


SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "0.6b": lambda: _qwen3(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, tie_word_embeddings=True
    ),
    "8b": lambda: _8b(10),  # cut: all 36 layers with their AdamW state in fp32 are 122 GiB without an activation
    "8b-whole": lambda: _8b(36),
    "30b-a3b": lambda: _30b_a3b(6),
    "30b-a3b-12": lambda: _30b_a3b(12),
    "moonlight": lambda: _moonlight(8),  # of 27 layers
    "gpt-oss-20b": lambda: _gpt_oss(8),  # of 24
    "qwen3-next-80b": lambda: _qwen3_next(8),  # of 48
    "nemotron-h-8b": lambda: _nemotron_h("M-M-M-M*-M-M-M-M"),  # the first 16 of 52
    "smollm2": lambda: LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, max_position_embeddings=LONGEST, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    ),
    "smoke": lambda: Qwen3Config(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=1024, tie_word_embeddings=True,
    ),
    "smoke-moe": lambda: Qwen3MoeConfig(
        vocab_size=128, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
        max_position_embeddings=1024, tie_word_embeddings=True,
    ),
}  # fmt: skip


def changed(shape: str, **sizes: int) -> PretrainedConfig:
    """Returns the config of a shape with other sizes."""
    config = SHAPES[shape]()
    others = {config.attribute_map.get(name, name) for name in sizes}  # by which a config may keep what it is given
    items = config.to_dict().items()
    unchanged = {
        name: value for name, value in items if name not in {*others, "layer_types"}
    }  # those follow from the rest
    return type(config)(**{**unchanged, **sizes})


def log_normal(count: int, median: float, sigma: float, longest: int, seed: int = 0) -> list[int]:
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    return (drawn * sigma + math.log(median)).exp().long().clamp(1, longest).tolist()


MIXES: dict[str, Callable[[], list[int]]] = {
    "log-normal": lambda: log_normal(64, 550, 0.9, 4096),  # 55,399 tokens
    "long-tail": lambda: log_normal(64, 550, 1.4, 16384),  # 101,947 tokens, the two longest 13,808 and 16,384
    "smoke": lambda: log_normal(6, 12, 0.8, 32),
}


def forward_flops(config: PretrainedConfig, lengths: Sequence[int]) -> float:
    """FLOPs of one forward over sequences of these lengths: a third of an update's."""
    heads, width = config.num_attention_heads, config.head_dim
    attention = config.hidden_size * width * (2 * heads + 2 * config.num_key_value_heads)
    if hasattr(config, "num_experts_per_tok"):
        expert = 3 * config.hidden_size * config.moe_intermediate_size
        mlp = config.num_experts_per_tok * expert + config.hidden_size * config.num_experts
    else:
        mlp = 3 * config.hidden_size * config.intermediate_size
    matrices = config.num_hidden_layers * (attention + mlp) + config.hidden_size * config.vocab_size
    pairs = sum(length**2 for length in lengths)
    return 2.0 * sum(lengths) * matrices + 2.0 * config.num_hidden_layers * heads * width * pairs


@dataclass(frozen=True)
class Sample:
    """Sequences to learn from, with what a policy gradient asks of each."""

    sequences: list[Tensor]
    advantages: list[float]
    old_logprob: float
    """Of every token: what a model knows that has learned nothing, so that ratios are near 1."""

    @classmethod
    def of(cls, lengths: Sequence[int], vocabulary: int, seed: int = 0) -> Sample:
        generator = torch.Generator().manual_seed(seed)
        sequences = [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]
        return cls(sequences, torch.randn(len(lengths), generator=generator).tolist(), -math.log(vocabulary))

    @property
    def lengths(self) -> list[int]:
        return [len(sequence) for sequence in self.sequences]

    @property
    def learned(self) -> int:
        """The number of trained tokens: all but the first of each sequence, which nothing predicts."""
        return sum(self.lengths) - len(self.sequences)


@dataclass
class Clock:
    """Times a function: to warm up, then `repeats` times, or fewer where these take longer than `enough`."""

    device: str
    repeats: int = 3
    enough: float = 8.0
    warm_up: int = 1
    seconds: list[float] = field(default_factory=list)

    def __call__(self, step: Callable[[], Any]) -> float:
        """The median."""
        self.seconds = []
        for _ in range(self.warm_up):
            self.once(step)
        while len(self.seconds) < self.repeats and sum(self.seconds) < self.enough:
            self.seconds.append(self.once(step))
        return statistics.median(self.seconds)

    def once(self, step: Callable[[], Any]) -> float:
        self.wait()
        began = time.perf_counter()
        step()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def free_memory(device: str) -> None:
    """Frees memory that nothing refers to any more, and resets the peak."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: str) -> float | None:
    return round(torch.cuda.max_memory_allocated() / GIB, 2) if device == "cuda" else None


def result_or_failure(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the result of `measure`, or {"failed": reason} if it raises."""
    try:
        return measure()
    except torch.OutOfMemoryError:
        return {"failed": OUT_OF_MEMORY}
    except ModuleNotFoundError as error:
        return {"failed": f"{error.name} is not installed"}
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}


def profile(step: Callable[[], Any], device: str, rows: int = 25) -> dict[str, Any]:
    """Print the kernels that take longest, and how long the GPU works in a step that the host drives."""
    if device != "cuda":
        return {"profiled": "no GPU"}
    from torch.profiler import ProfilerActivity

    clock = Clock(device)
    wall = min(clock.once(step) for _ in range(2))
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    calls: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            calls[event.name()] += 1
            spent[event.name()] += event.duration_ns()
    total = sum(spent.values())
    busy = total / 1e9 / wall
    print(
        f"    wall {wall * 1e3:.0f} ms, GPU {total / 1e6:.0f} ms ({busy:.0%}), {sum(calls.values())} kernels and copies"
    )
    for name, nanoseconds in spent.most_common(rows):
        print(f"    {nanoseconds / 1e6:9.2f} ms {nanoseconds / total:6.1%} {calls[name]:6d}  {name[:110]}")
    return {
        "wall_ms": round(wall * 1e3, 1),
        "gpu_ms": round(total / 1e6, 1),
        "kernels": sum(calls.values()),
        "top": [[name[:80], round(spent[name] / 1e6, 2), calls[name]] for name, _ in spent.most_common(8)],
    }


def versions(device: str, commit: str | None = None) -> dict[str, str]:
    """Returns the versions of what a figure depends on. `commit` is for a copy of the tree without its repository."""

    def output(*words: str) -> str:
        try:
            return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"

    installed = {name: installed_version(name) for name in ("torch", "triton", "transformers", "liger_kernel", "peft")}
    driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if device == "cuda" else "none"
    head = commit or output("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD")
    return {**installed, "driver": driver, "commit": head}


def installed_version(name: str) -> str:
    try:
        return str(torch.__version__) if name == "torch" else metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


@dataclass
class Results:
    """All that was found, written after each case, so that a run that is stopped leaves what it had."""

    command: str
    device: str
    path: Path | None = None
    cases: list[dict[str, Any]] = field(default_factory=list)
    machine: str = ""
    torch_version: str = str(torch.__version__)
    day: str = str(date.today())
    commit: str | None = None
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.versions = versions(self.device, self.commit)
        self.machine = torch.cuda.get_device_name() if self.device == "cuda" else "cpu"

    def add(self, case: dict[str, Any]) -> None:
        self.cases.append(case)
        self.write()

    def write(self) -> None:
        """Writes all of it, if there is a file to write to. A write that is cut off leaves the one before."""
        if self.path:
            unfinished = self.path.with_name(f"{self.path.name}.part")
            unfinished.write_text(json.dumps(self.to_json(), indent=1) + "\n")
            unfinished.replace(self.path)

    def to_json(self) -> dict[str, Any]:
        """Returns what `write` writes."""
        return {name: value for name, value in asdict(self).items() if name not in ("path", "commit")}

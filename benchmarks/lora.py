"""Measures LoRA training on one GPU beside peft + transformers and beside full training: tokens/s and peak memory.

    PYTHONPATH=src python benchmarks/lora.py --json benchmarks/results/lora_h200.json
    PYTHONPATH=src python benchmarks/lora.py --cases lora lora-recompute --shape 30b-a3b
    PYTHONPATH=src python benchmarks/lora.py --smoke          # tiny, on any machine

Every case is SFT on the same sequences with adapters on all linear layers of the decoder, and steps its AdamW. Base
weights are bf16, adapters fp32 and products bf16; "bf16" in a case's name means adapters in bf16, which peft computes
fastest. `planned_gib` is what preflight and `postlude plan` estimate for ours. Full training of a whole 8B model keeps
bf16 weights with the other sixteen bits of fp32 in the optimizer's state, and 8-bit moments: it does not fit otherwise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig
from workloads import GIB, MIXES, SHAPES, Clock, Results, Sample, free_memory, peak_gib, result_or_failure

import peers
from postlude import AdamW, Batch, Engine, ranks
from postlude.data.bins import plan_bins
from postlude.hf.linear_layers import adapter_configs
from postlude.hf.read_model import read_model
from postlude.lora import LoRA
from postlude.objectives import SFT
from postlude.plan.memory import estimate_memory
from postlude.plan.parameter_count import count_parameters
from postlude.training_options import TrainingOptions

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FULL = {"weights": "split"}
PADDED_ROWS = 8


@dataclass(frozen=True)
class CaseInputs:
    """The arguments of every case."""

    config: PretrainedConfig
    sample: Sample
    device: str
    budget: int
    rank: int

    @property
    def dtype(self) -> torch.dtype:
        """That of the base weights."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32


@dataclass(frozen=True)
class Case:
    """One line of the table. `make` returns the step to time, and the estimate of its memory if there is one."""

    description: str
    make: Callable[[CaseInputs], tuple[Callable[[], Any], int | None]]


def postlude_case(*, lora: bool, **options: Any) -> Callable[[CaseInputs], tuple[Callable[[], Any], int | None]]:
    def make(inputs: CaseInputs) -> tuple[Callable[[], Any], int | None]:
        chosen = LoRA(rank=inputs.rank) if lora else None
        optimizer = AdamW(lr=1e-5, moments="fp32" if lora else "8bit")
        engine = Engine(
            inputs.config, device=inputs.device, budget=inputs.budget, optimizer=optimizer, lora=chosen, **options
        )
        batch = Batch(inputs.sample.sequences, {"response_mask": [1.0] * len(inputs.sample.sequences)})

        def step() -> None:
            engine.forward_backward(batch, SFT())
            engine.optimizer_step()

        return step, planned_bytes(inputs, chosen, optimizer, **options)

    return make


def planned_bytes(inputs: CaseInputs, lora: LoRA | None, optimizer: AdamW, **options: Any) -> int:
    """Returns the planner's estimate for one rank whose largest microbatch is that of the sample."""
    family, config = read_model(inputs.config)
    adapters = {} if lora is None else adapter_configs(lora, config, family)
    bins = plan_bins(inputs.sample.lengths, inputs.budget)
    (estimate,) = estimate_memory(
        config,
        TrainingOptions(
            budget=max(sum(inputs.sample.lengths[member] for member in members) for members in bins),
            optimizer=optimizer,
            **options,
        ),
        compute_bytes=inputs.dtype.itemsize,
        device=inputs.device,
        sizes=count_parameters(config, adapters=adapters),
    )
    return estimate.total


def peft_case(
    attention: str, *, padded: bool = False, checkpointing: bool = False, bf16_adapters: bool = False
) -> Callable[[CaseInputs], tuple[Callable[[], Any], int | None]]:
    def make(inputs: CaseInputs) -> tuple[Callable[[], Any], int | None]:
        import peft

        if attention == "flash_attention_2":
            import flash_attn  # noqa: F401
        base = peers.build_model(inputs.config, inputs.device, inputs.dtype, attention)
        chosen = peft.LoraConfig(r=inputs.rank, lora_alpha=inputs.rank, target_modules=MODULES, task_type="CAUSAL_LM")
        model = peft.get_peft_model(base, chosen, autocast_adapter_dtype=not bf16_adapters)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        sample, device = inputs.sample, inputs.device
        rows: Sequence[Any] = (
            list(peers.padded(sample, PADDED_ROWS, device)) if padded else peers.packed(sample, inputs.budget, device)
        )
        loss = peers.sft(sample) if padded else peers.packed_sft(sample)
        autocast = device == "cuda" and not bf16_adapters
        return peers.Update(model, rows, loss, autocast=autocast), None

    return make


CASES = {
    "lora": Case("Postlude, LoRA", postlude_case(lora=True)),
    "lora-selective": Case("Postlude, LoRA, recompute selective", postlude_case(lora=True, recompute="selective")),
    "lora-recompute": Case("Postlude, LoRA, recompute full", postlude_case(lora=True, recompute="full")),
    "full": Case("Postlude, all weights", postlude_case(lora=False, **FULL)),
    "full-recompute": Case(
        "Postlude, all weights, recompute full", postlude_case(lora=False, recompute="full", **FULL)
    ),
    "peft-padded": Case("peft, rows padded", peft_case("sdpa", padded=True)),
    "peft-padded-checkpointing": Case(
        "peft, rows padded, gradient checkpointing", peft_case("sdpa", padded=True, checkpointing=True)
    ),
    "peft-sdpa": Case("peft, packed, sdpa", peft_case("sdpa")),
    "peft-sdpa-checkpointing": Case(
        "peft, packed, sdpa, gradient checkpointing", peft_case("sdpa", checkpointing=True)
    ),
    "peft-flash": Case("peft, packed, flash attention", peft_case("flash_attention_2")),
    "peft-flash-checkpointing": Case(
        "peft, packed, flash attention, gradient checkpointing", peft_case("flash_attention_2", checkpointing=True)
    ),
    "peft-flex": Case("peft, packed, flex attention", peft_case("flex_attention")),
    "peft-flex-bf16": Case(
        "peft, packed, flex attention, bf16 adapters", peft_case("flex_attention", bf16_adapters=True)
    ),
    "peft-flex-checkpointing": Case(
        "peft, packed, flex attention, gradient checkpointing", peft_case("flex_attention", checkpointing=True)
    ),
}


def run(case: Case, inputs: CaseInputs, clock: Clock) -> dict[str, Any]:
    """Makes it, times it, and lets go of it."""
    try:
        step, planned = case.make(inputs)
        seconds = clock(step)
        return {
            "tokens_per_second": round(sum(inputs.sample.lengths) / seconds),
            "peak_gib": peak_gib(inputs.device),
            "planned_gib": None if planned is None else round(planned / GIB, 2),
            "seconds": [round(duration, 4) for duration in clock.seconds],
        }
    finally:
        step = None
        free_memory(inputs.device)


def result_line(name: str, result: dict[str, Any]) -> str:
    if "failed" in result:
        return f"  {name:<26} {result['failed']}"
    memory = "" if result["peak_gib"] is None else f"{result['peak_gib']:7.1f} GiB"
    planned = "" if result["planned_gib"] is None else f"  ({result['planned_gib']:.1f} planned)"
    return f"  {name:<26} {result['tokens_per_second']:>9,} tokens/s {memory}{planned}"


def options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="8b-whole")
    parser.add_argument("--mix", choices=list(MIXES), default="log-normal", help="the sequences' lengths")
    parser.add_argument("--budget", type=int, default=8192, help="most tokens of a microbatch, ours and packed rows")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repeats", type=int, default=3, help="the median counts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true", help="tiny, on any machine")
    parser.add_argument("--json", type=Path, help="written after each case")
    arguments = parser.parse_args(words)
    if arguments.smoke:
        smoke = {"shape": "smoke", "mix": "smoke", "budget": 64, "rank": 4, "repeats": 1}
        vars(arguments).update(smoke)
    return arguments


def main(words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    arguments = options(words)
    results = Results(" ".join(sys.argv), arguments.device, arguments.json)
    config = SHAPES[arguments.shape]()
    sample = Sample.of(MIXES[arguments.mix](), config.vocab_size)
    budget = max(arguments.budget, *sample.lengths)
    print(f"{arguments.shape}, {arguments.mix}: {len(sample.lengths)} sequences, {sum(sample.lengths):,} tokens")
    inputs, clock = (
        CaseInputs(config, sample, arguments.device, budget, arguments.rank),
        Clock(arguments.device, arguments.repeats),
    )
    with ranks(device=arguments.device):
        for name in arguments.cases:
            case = CASES[name]
            free_memory(arguments.device)
            result = result_or_failure(lambda case=case: run(case, inputs, clock))
            labels = {"case": name, "description": case.description, "shape": arguments.shape, "mix": arguments.mix}
            results.add(labels | {"budget": budget, "rank": arguments.rank} | result)
            print(result_line(name, result), flush=True)
    return results.cases


if __name__ == "__main__":
    main()

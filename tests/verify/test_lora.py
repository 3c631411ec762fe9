"""LoRA: every layout has one rank's loss, log-probs and adapter gradients, and one rank has those of peft."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig

from postlude.hf.linear_layers import adapter_configs
from postlude.hf.read_model import read_model
from postlude.layout import Layout
from postlude.lora import LoRA
from postlude.options import Overlap, Recompute
from postlude.verify.adapters import compare_adapters
from postlude.verify.cases import Case
from postlude.verify.compare import Report
from tests.conftest import Ranks
from tests.equality import TOLERANCE
from tests.hf.families import CONFIGS
from tests.meshes import verify
from tests.verify.test_layouts import HEADS, SIZES, VARIANTS

SHARED, PER_EXPERT = LoRA(rank=3, alpha=5), LoRA(rank=2, alpha=1.5, experts="per_expert", rslora=True)
MODELS = {
    "llama": LlamaConfig(**SIZES, **HEADS),
    **{name: VARIANTS[name] for name in ("qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3", "nemotron_h", "qwen3_next")},
}


def with_four_layers(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the config with one layer for each of four stages; Nemotron-H has four already."""
    deeper = copy.deepcopy(config)
    if config.num_hidden_layers == 2:
        deeper.num_hidden_layers = 4
        if getattr(config, "layer_types", None):
            deeper.layer_types = 2 * config.layer_types
    return deeper


@dataclass(frozen=True)
class Run:
    """A layout with its options, and the families for `make test`; the others are thorough."""

    layout: str
    families: tuple[str, ...]
    objective: str = "grpo"
    lora: LoRA = SHARED
    recompute: Recompute = "none"
    overlap: Overlap = False
    dtype: torch.dtype = torch.float32

    def case(self, family: str) -> Case:
        """Returns the comparison of one family."""
        layout = Layout.parse(self.layout)
        return Case(
            MODELS[family] if layout.vpp == 1 else with_four_layers(MODELS[family]),
            layout=layout,
            objective=self.objective,
            recompute=self.recompute,
            overlap=self.overlap,
            compute_dtype=self.dtype,
            initializer_range=0.1,
            lora=self.lora,
        )

    @property
    def fitting_families(self) -> list[str]:
        """Returns the families that the layout divides; expert parallelism needs experts."""
        layout = Layout.parse(self.layout)
        return [name for name in MODELS if layout.ep == 1 or name not in ("llama", "qwen3")]


RUNS = [
    Run("tp=2", ("llama", "nemotron_h")),
    Run("pp=2", ("qwen3", "deepseek_v3"), recompute="full"),
    Run("pp=2,vpp=2", ("gpt_oss", "qwen3_next"), "dpo"),
    Run("cp=2", ("llama", "nemotron_h"), "gspo", recompute="selective"),
    Run("dp_shard=2", ("qwen3", "deepseek_v3"), "sft", dtype=torch.bfloat16),
    Run("dp_shard=2,ep=2", ("qwen3_moe", "gpt_oss"), lora=PER_EXPERT),
    Run("tp=2,ep=2", ("qwen3_moe", "deepseek_v3"), "sft", PER_EXPERT),
    Run("pp=2,dp_shard=2,ep=2", ("gpt_oss", "qwen3_next"), overlap="zero_bubble"),
]
OFTEN = ("cp=2", "tp=2,ep=2", "pp=2,dp_shard=2,ep=2")  # every axis, and every kind of block
LARGER = Run("pp=2,cp=2,tp=2", ("llama", "qwen3", "qwen3_moe"), recompute="selective")


def verify_all(group: Any, cases: list[Case]) -> list[Report | None]:
    return [verify(group, case) for case in cases]


def runs() -> list[Any]:
    parameters = []
    for run in RUNS:
        remaining = replace(run, families=tuple(name for name in run.fitting_families if name not in run.families))
        mark = pytest.mark.slow if run.layout in OFTEN else pytest.mark.thorough
        parameters.append(pytest.param(run, id=f"{run.layout}-{'-'.join(run.families)}", marks=mark))
        parameters.append(
            pytest.param(remaining, id=f"{run.layout}-{'-'.join(remaining.families)}", marks=pytest.mark.thorough)
        )
    return [*parameters, pytest.param(LARGER, id=LARGER.layout, marks=pytest.mark.thorough)]


@pytest.mark.parametrize("run", runs())
def test_adapters_in_a_layout_equal_those_of_one_rank(ranks: Ranks, run: Run) -> None:
    cases = [run.case(family) for family in run.families]
    reports = ranks(cases[0].layout.world_size, verify_all, cases)[0]
    for family, report in zip(run.families, reports, strict=True):
        assert all(".adapter." in name for name in report.gradients)
        assert report.passes(), (family, report.loss, report.logprob, report.entropy, report.worst)


def test_each_family_is_tested_in_two_layouts_and_each_layout_with_two_families() -> None:
    assert min(sum(family in run.families for run in RUNS) for family in MODELS) >= 2
    assert min(len(set(run.families)) for run in RUNS) >= 2
    assert all(set(run.families) <= set(run.fitting_families) for run in RUNS)


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        pytest.param(
            name,
            lora,
            id=f"{name}-{kind}",
            marks=()
            if kind == "shared_outer" or name == "gpt_oss"
            else pytest.mark.thorough,  # each family, both kinds
        )
        for name in ("llama-biases", *(name for name in MODELS if name != "llama"))
        for kind, lora in (("shared_outer", SHARED), ("per_expert", PER_EXPERT))
    ],
)
def test_one_rank_equals_the_merged_model_and_peft(name: str, lora: LoRA) -> None:
    pytest.importorskip("peft")
    merged, peft = compare_adapters(CONFIGS[name](), lora)
    assert merged.passes(TOLERANCE), merged.logprob
    assert peft.gradients.keys() == {
        f"{layer}.adapter.{side}" for layer in adapted_layers(name, lora) for side in ("a", "b")
    }
    assert peft.passes(TOLERANCE), (peft.logprob, peft.worst)


def adapted_layers(name: str, lora: LoRA) -> set[str]:
    family, config = read_model(CONFIGS[name]())
    return set(adapter_configs(lora, config, family))

"""FP8 products: every layout rounds what one rank rounds.

The rest is computed in float64. In fp32 the last bits of two layouts differ, and where a number lies between two values
of e4m3 such a bit decides which one it becomes. In float64 that happens to one number in 10¹², so no tolerance is wider
than that of fp32.
"""

from typing import Any

import pytest
import torch

from postlude.cli import main
from postlude.layout import Layout
from postlude.lora import LoRA
from postlude.options import LayerChoice, Overlap, Recompute
from postlude.verify.cases import Case
from postlude.verify.choices import TOLERANCES
from tests.meshes import verify

RUNS: tuple[tuple[str, str, str, Recompute, Overlap, LoRA | None, LayerChoice], ...] = (
    ("tiny-moe", "tp=2", "grpo", "none", False, None, True),
    ("tiny-moe", "tp=2", "sft", "selective", False, LoRA(rank=4), True),
    ("tiny-dense", "cp=2", "sft", "none", False, None, True),
    ("tiny-moe", "pp=2", "dpo", "full", "zero_bubble", None, True),
    ("tiny-moe", "dp_shard=2,ep=2", "grpo", "selective", True, None, True),
    ("tiny-dense", "cp=2", "sft", "selective", False, LoRA(rank=4), True),
    ("tiny-hybrid", "tp=2", "grpo", "full", False, None, True),
    ("tiny-hybrid", "pp=2,vpp=2", "sft", "none", False, None, "1:-1"),
)


@pytest.mark.parametrize(  # the hybrid has experts, too
    ("model", "layout", "objective", "recompute", "overlap", "lora", "fp8"),
    [*(pytest.param(*run, marks=pytest.mark.thorough) for run in RUNS[:3]), *RUNS[3:]],
)
def test_a_layout_equals_one_rank(
    ranks: Any,
    model: str,
    layout: str,
    objective: str,
    recompute: Recompute,
    overlap: Overlap,
    lora: LoRA | None,
    fp8: LayerChoice,
) -> None:
    case = Case(
        model,
        layout=Layout.parse(layout),
        objective=objective,
        recompute=recompute,
        overlap=overlap,
        compute_dtype=torch.float64,
        initializer_range=0.1,
        lora=lora,
        fp8=fp8,
    )
    report = ranks(case.layout.world_size, verify, case)[0]
    assert report.passes(TOLERANCES["float32"]), (report.loss, report.logprob, report.entropy, report.worst)


def test_shared_tokens_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "tiny-dense", "--layout", "cp=2", "--share-prefixes", "--fp8"]) == 2
    assert "--share-prefixes cannot be compared with --fp8" in capsys.readouterr().err

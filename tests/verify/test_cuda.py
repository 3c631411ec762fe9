"""Layouts equal one rank with the CUDA kernels. Ranks may share a GPU over gloo."""

import pytest
import torch

from postlude import Layout
from postlude.lora import LoRA
from postlude.verify.cases import Case
from postlude.verify.compare import compare_all
from postlude.world.launcher import launch

pytestmark = pytest.mark.gpu

TENSOR, CONTEXT, EXPERTS, STAGES = Layout(tp=2), Layout(cp=2), Layout(dp_shard=2, ep=2), Layout(pp=2)


def test_two_ranks_on_a_gpu_equal_one() -> None:
    """In fp32 with the Triton epilogues; in bf16 with flash attention, grouped products and the fused head.

    In bf16 only where layouts round alike: tensor parallelism sums in another order, and differs by as much as one rank
    in bf16 differs from fp32.
    """
    wide = [Case("tiny-moe", layout=layout, initializer_range=0.1) for layout in (TENSOR, CONTEXT, EXPERTS, STAGES)]
    half = [
        Case("tiny-moe", layout=layout, compute_dtype=torch.bfloat16, initializer_range=0.1)
        for layout in (CONTEXT, EXPERTS)
    ]
    adapted = [
        Case("tiny-moe", layout=layout, initializer_range=0.1, lora=LoRA(rank=4)) for layout in (TENSOR, EXPERTS)
    ]
    reports = launch(compare_all, [*wide, *half, *adapted], "cuda", nproc=2, timeout=120.0, device="cuda")[0]
    assert len(reports) == 8
    for report in reports:
        print(report.case.layout, report.case.compute_dtype, report.loss, report.logprob, report.entropy, report.worst)
        assert report.passes(), (report.case, report.loss, report.logprob, report.entropy, report.worst)

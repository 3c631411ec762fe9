"""Every layout equals one rank over NCCL: losses, log-probs, entropy and every gradient."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from postlude.layout import Layout
from postlude.model.blocks import MoEConfig
from postlude.verify.cases import Case
from postlude.verify.compare import Report, compare
from tests.conftest import Ranks
from tests.model.small import small_config
from tests.nccl.conftest import mesh

EXPERTS = {"E": MoEConfig(experts=6, top_k=2, intermediate_size=12)}
MTP = small_config("[*-][GE][*E]*/[*E]", tied_head=True, blocks=EXPERTS)
HYBRID = small_config("[M-][*E][G-][*E]", blocks=EXPERTS)


def verify(group: dist.ProcessGroup, case: Case) -> Report | None:
    return compare(case, mesh=mesh(case.layout), device=torch.device("cuda", torch.cuda.current_device()))


def check(nccl_ranks: Ranks, source: Any, layout: str, **options: Any) -> None:
    if isinstance(source, str):
        options["initializer_range"] = 0.1
    case = Case(source, layout=Layout.parse(layout), **options)
    report = nccl_ranks(case.layout.world_size, verify, case)[0]
    assert report.passes(), (report.loss, report.logprob, report.entropy, report.worst)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("tiny-dense", "tp=2"),
        ("tiny-hybrid", "cp=2"),
        ("tiny-dense", "dp_shard=2"),
        ("tiny-dense", "dp_replicate=2"),
        ("tiny-moe", "dp_shard=2,ep=2"),
        ("tiny-dense", "pp=2"),
        ("tiny-moe", "pp=2,vpp=2"),
        ("tiny-dense", "pp=4"),
        ("tiny-hybrid", "cp=2,tp=2"),
        ("tiny-dense", "pp=2,tp=2"),
        ("tiny-hybrid", "pp=2,cp=2"),
        ("tiny-moe", "pp=2,vpp=2,dp_shard=2,ep=2"),
        ("tiny-dense", "dp_replicate=2,dp_shard=2"),
        ("tiny-moe", "pp=2,cp=2,tp=2,ep=2"),
    ],
)
def test_layout_equals_one_rank(nccl_ranks: Ranks, model: str, layout: str) -> None:
    check(nccl_ranks, model, layout)


@pytest.mark.parametrize(
    ("source", "layout", "options"),
    [
        pytest.param("tiny-moe", "pp=2", {"overlap": "zero_bubble"}, id="zero bubble"),
        pytest.param("tiny-moe", "dp_shard=2,ep=2", {"overlap": True}, id="experts"),
        pytest.param("tiny-moe", "pp=2,vpp=2", {"overlap": True}, id="interleaved"),
        pytest.param("tiny-moe", "pp=2,dp_shard=2,ep=2", {"overlap": True}, id="pipeline, experts and FSDP"),
        pytest.param("tiny-moe", "pp=2,dp_shard=2", {"overlap": "zero_bubble"}, id="zero bubble and FSDP"),
        pytest.param(MTP, "pp=2,dp_shard=2,ep=2", {"overlap": True, "recompute": "full"}, id="multi-token prediction"),
        pytest.param(HYBRID, "pp=2,cp=2,ep=2", {"overlap": True, "recompute": "selective"}, id="hybrid"),
    ],
)
def test_overlapped_layout_equals_one_rank(
    nccl_ranks: Ranks, source: Any, layout: str, options: dict[str, Any]
) -> None:
    check(nccl_ranks, source, layout, **options)


@pytest.mark.parametrize(("source", "layout"), [("tiny-dense", "pp=2"), (MTP, "pp=2,vpp=2"), ("tiny-dense", "cp=2")])
def test_bf16_layout_equals_one_rank(nccl_ranks: Ranks, source: Any, layout: str) -> None:
    check(nccl_ranks, source, layout, compute_dtype=torch.bfloat16)

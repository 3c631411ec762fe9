"""The comparison can fail: a fault injected into each axis is detected, and without it the same case passes."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partialmethod
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate
from transformers import Qwen3MoeConfig

from postlude import Layout
from postlude.engine import gradients, unsharded
from postlude.engine.normalizer import LossNormalizer
from postlude.engine.pass_metrics import LayerMetrics
from postlude.hf.read_model import Source
from postlude.model import context as context_module
from postlude.ops import all_to_all as exchange
from postlude.ops import collectives
from postlude.pipeline import executor
from postlude.verify.cases import Case
from postlude.verify.compare import Report, report, run_in_layout, run_on_one_rank
from tests.engine.training import config
from tests.meshes import mesh

Fault = Callable[[], AbstractContextManager[Any]]


def own_part(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
    run_back = collectives._part if ctx.run_back is collectives._scatter else ctx.run_back
    return run_back(gradients[0], ctx.group), None, None, None


def doubled(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
    factor = 2 if ctx.run_back is collectives._scatter else 1
    return factor * ctx.run_back(gradients[0], ctx.group), None, None, None


def lost(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
    return gradients[0].new_zeros(sum(ctx.plan.sent), *gradients[0].shape[1:]), None, None, None


def unshared(self: LossNormalizer, microbatches: Any, counts: Any = None, *, cp_size: int = 1) -> None:
    self.microbatches, self.cp_size, self.counts_are_global = microbatches, 1, counts is not None
    self.counts = dict(counts or {})


SUMS_REPLICAS = FSDPModule.set_requires_all_reduce


def never(module: Any, switch: Any, needed: bool) -> None:
    switch(module, False)


TAKES_SUMS = LayerMetrics.take_sums


def of_the_last_stage(self: LayerMetrics, blocks: Any, device: Any) -> Tensor:
    sums = TAKES_SUMS(self, blocks, device)
    return sums if any(block.name.startswith("layers.1.") for block in blocks) else torch.zeros_like(sums)


def nothing(entered: Tensor) -> Tensor:
    return torch.zeros_like(entered)


DENSE, MOE = config("tiny-dense", num_hidden_layers=2), config("tiny-moe", num_hidden_layers=2)
BALANCED = Qwen3MoeConfig(
    vocab_size=37,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    moe_intermediate_size=12,
    num_experts=6,
    num_experts_per_tok=2,
    output_router_logits=True,
    router_aux_loss_coef=0.1,
)
"""A model with a balance loss, and nothing that is costly."""


def one_sequence(self: context_module.ForwardContext) -> Tensor:
    """Treats all tokens of a microbatch as one sequence."""
    return torch.zeros(len(self.microbatch) // self.mesh.tp.size, dtype=torch.int64)


FAULTS: dict[str, tuple[Layout, Source, str, Fault]] = {
    "tp: the gradient of gathered tokens is not summed": (
        Layout(tp=2),
        DENSE,
        "sft",
        lambda: patch.object(collectives._Collective, "backward", staticmethod(own_part)),
    ),
    "tp: the gradient of what ranks hold alike is not summed": (
        Layout(tp=2),
        DENSE,
        "sft",
        lambda: patch.object(unsharded, "all_reduce_replicated", lambda parameters: None),
    ),
    "tp: the gradient of what ranks hold alike is not summed before it is sharded": (
        Layout(tp=2, dp_shard=2),
        DENSE,
        "sft",
        lambda: patch.object(torch.distributed.tensor, "Partial", Replicate),  # where `local` takes it from
    ),
    "cp: the gradient of gathered keys is doubled": (
        Layout(cp=2),
        DENSE,
        "sft",
        lambda: patch.object(collectives._Collective, "backward", staticmethod(doubled)),
    ),
    "cp: every rank counts a sequence's loss": (
        Layout(cp=2),
        DENSE,
        "dpo",
        lambda: patch.object(LossNormalizer, "__init__", unshared),
    ),
    "cp: a sequence's sum is not summed over ranks": (
        Layout(cp=2),
        DENSE,
        "dpo",
        lambda: patch("postlude.data.microbatch.sum_over_group", lambda tensor, group: tensor),
    ),
    "dp: gradients are averaged": (
        Layout(dp_shard=2),
        DENSE,
        "sft",
        lambda: patch.object(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None),
    ),
    "dp: replicas do not sum": (
        Layout(dp_replicate=2),
        DENSE,
        "sft",
        lambda: patch.object(FSDPModule, "set_requires_all_reduce", partialmethod(never, SUMS_REPLICAS)),
    ),
    "pp: the two ends of a tied embedding are not summed": (
        Layout(pp=2),
        DENSE,
        "sft",
        lambda: patch.object(gradients, "all_reduce_shared", lambda gradient, mesh: None),
    ),
    "pp: gradients do not reach the stage before": (
        Layout(pp=2),
        DENSE,
        "sft",
        lambda: patch.object(executor, "_input_gradient", nothing),
    ),
    "pp: what the layers of the first stage measure is lost": (
        Layout(pp=2),
        MOE,
        "sft",
        lambda: patch.object(LayerMetrics, "take_sums", of_the_last_stage),
    ),
    "ep: gradients are lost on the way to the experts": (
        Layout(dp_shard=2, ep=2),
        MOE,
        "sft",
        lambda: patch.object(exchange._AllToAll, "backward", staticmethod(lost)),
    ),
    "ep: an expert's share is that of one rank's tokens": (
        Layout(cp=2, ep=2),
        MOE,
        "sft",
        lambda: patch.object(context_module.ForwardContext, "total", lambda self, values: values),
    ),
    "dp: an expert's share is that of a microbatch, which another layout packs otherwise": (
        Layout(dp_shard=2),
        BALANCED,
        "sft",
        lambda: patch.object(context_module.ForwardContext, "sequence_index", property(one_sequence)),
    ),
    "scale: the loss is a sum": (
        Layout(dp_shard=2),
        DENSE,
        "sft",
        lambda: patch.object(LossNormalizer, "count", lambda self, over, depth=0: 1.0),
    ),
}


def verify_with(group: Any, case: Case, fault: str | None) -> Report | None:
    if fault is None:
        result = run_in_layout(case, mesh(case.layout), "cpu")
    else:
        with FAULTS[fault][-1]():
            result = run_in_layout(case, mesh(case.layout), "cpu")
    return report(case, result, run_on_one_rank(case, "cpu")) if dist.get_rank() == 0 else None


MORE_RANKS = ("tp: the gradient of what ranks hold alike is not summed before it is sharded",)
QUICK = (
    "cp: every rank counts a sequence's loss",
    "dp: an expert's share is that of a microbatch, which another layout packs otherwise",
    "scale: the loss is a sum",
)


@pytest.fixture(scope="module")
def sound_cases() -> set[str]:
    """The cases that pass without a fault."""
    return set()


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            fault, marks=() if fault in QUICK else pytest.mark.thorough if fault in MORE_RANKS else pytest.mark.slow
        )
        for fault in FAULTS
    ],
)
@pytest.mark.slow
def test_fault_is_detected(ranks: Any, fault: str, sound_cases: set[str]) -> None:
    layout, model, objective, _ = FAULTS[fault]
    case = Case(model, layout=layout, objective=objective, initializer_range=0.1)
    broken = ranks(layout.world_size, verify_with, case, fault)[0]
    assert not broken.passes(), f"nobody noticed that, {fault}: {broken.worst}"
    if str(case) not in sound_cases:
        sound = ranks(layout.world_size, verify_with, case, None)[0]
        assert sound.passes(), sound.worst
        sound_cases.add(str(case))

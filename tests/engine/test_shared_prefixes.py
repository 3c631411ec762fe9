"""Tokens that sequences share are computed once: every layout equals one rank that computes every sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from postlude import Batch, Engine, Layout, Loss, ModelConfig, OutputInputs
from postlude.data.prefix_tree import SharePrefixes
from postlude.engine.batch_sharding import shard_batch
from postlude.lora import LoRA
from postlude.model.blocks import AttentionConfig, MoEConfig, SlidingAttentionConfig
from postlude.verify.cases import Case, batches
from tests.engine.test_batch_sharding import part
from tests.equality import assert_equal
from tests.meshes import mesh, verify
from tests.model.small import small_config

HEADS = {"heads": 4, "kv_heads": 2, "head_dim": 6}
BALANCED = MoEConfig(
    experts=6, top_k=2, intermediate_size=12, balance_coefficient=0.3, z_coefficient=0.1, scores="sigmoid",
    selection_bias=True, selection_bias_rate=0.1,
)  # fmt: skip
ATTENTION = small_config(
    "[*-][S-]",
    blocks={
        "*": AttentionConfig(**HEADS, softcap=2.0),
        "S": SlidingAttentionConfig(**HEADS, sliding_window=4, sinks=True),
    },
)
SEQUENCE_BALANCE = small_config("[+-][*E]/[*E]", blocks={"E": BALANCED})
BATCH_BALANCE = small_config("[*E][*E]", blocks={"E": replace(BALANCED, balance="batch")})
FOUR_STAGES = small_config("[*E]|[*E]|[ME]|[*E]/[*E]", blocks={"E": BALANCED})
UNBIASED = small_config("[M-][GE][*-]M")
HYBRID = small_config("[M-][GE][*-]M", blocks={"E": BALANCED})


@pytest.mark.parametrize(
    ("layout", "config", "objective", "options"),
    [
        ("", ATTENTION, "grpo", {}),
        ("", SEQUENCE_BALANCE, "gspo", {"recompute": "full"}),
        ("", HYBRID, "dpo", {"recompute": "selective"}),
        ("", UNBIASED, "grpo", {"lora": LoRA(rank=2)}),
        ("", ATTENTION, "grpo", {"compute_dtype": torch.bfloat16}),
        ("cp=2", SEQUENCE_BALANCE, "grpo", {}),
        ("cp=2", HYBRID, "dpo", {}),
        ("pp=2,tp=2,ep=2", SEQUENCE_BALANCE, "gspo", {}),
        ("tp=2", HYBRID, "grpo", {}),
        ("pp=2,vpp=2,ep=2,dp_shard=2", FOUR_STAGES, "grpo", {"overlap": True}),
        pytest.param("pp=2", HYBRID, "dpo", {"overlap": "zero_bubble"}, marks=pytest.mark.thorough),
        pytest.param("tp=2,cp=2,ep=2", SEQUENCE_BALANCE, "sft", {"recompute": "selective"}, marks=pytest.mark.thorough),
        pytest.param("cp=4", ATTENTION, "dpo", {}, marks=pytest.mark.thorough),
        pytest.param("dp_replicate=2,dp_shard=2", UNBIASED, "grpo", {"steps": True}, marks=pytest.mark.thorough),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_layout_that_shares_equals_one_rank_that_does_not(
    ranks: Any, layout: str, config: ModelConfig, objective: str, options: dict[str, Any]
) -> None:
    options = {"layout": Layout.parse(layout) if layout else Layout(), "share_prefixes": "always", "seed": 3, **options}
    case = Case(config, objective, **options)
    report = ranks(case.layout.world_size, verify, case)[0]
    assert report.passes(), (report.loss, report.logprob, report.entropy, report.worst)


OWNERS = (1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0)


def critic_loss(inputs: OutputInputs) -> Loss:
    """A loss of log-probs, of values and of their sums over sequences."""
    microbatch = inputs.microbatch
    stats = inputs.head.logprobs(inputs.hidden, microbatch.targets, entropy=True)
    errors = (inputs.head.values(inputs.hidden) - microbatch.column("returns")).square()
    sums = microbatch.sequence_sum(stats.logprob)
    tokens = Loss(errors - stats.entropy - microbatch.column("advantages") * stats.logprob, over="response_mask")
    return tokens + Loss(torch.nn.functional.softplus(0.1 * sums), over="sequences")


def everything(config: ModelConfig, layout: str, share: SharePrefixes, sharded: bool) -> dict[str, Any]:
    """Returns what an engine computes of a batch whose sequences share tokens."""
    engine = Engine(config, mesh=mesh(Layout.parse(layout)), budget=32, critic=True, share_prefixes=share, seed=5)
    batch = batches("grpo", config, 3, share_prefixes=True)["many"]
    batch = part(batch, engine.mesh.dp.rank, OWNERS) if sharded else batch
    result = engine.forward_backward(batch, critic_loss)
    gradients = [gradient.clone() for _, gradient in engine.gradients()]
    values: dict[str, Sequence[Tensor]] = {
        "loss": [torch.tensor(result.loss)],
        "gradients": gradients,
        "metrics": [torch.tensor(value) for _, value in sorted(result.metrics.items())],
        "values": engine.values(batch),
        "top log-probs": engine.topk(batch, 3)[0],
    }
    engine.optimizer_step()
    return values | {"log-probs after a step": engine.logprobs(batch).logprob}


def compare_sharing(group: dist.ProcessGroup, config: ModelConfig, layout: str, sharded: bool) -> None:
    expected = everything(config, layout, "off", sharded)
    for name, values in everything(config, layout, "always", sharded).items():
        for actual, value in zip(values, expected[name], strict=True):
            assert_equal(actual, value, name)


@pytest.mark.parametrize(
    ("layout", "config", "sharded"), [("dp_shard=2,ep=2", BATCH_BALANCE, True), ("cp=2", BATCH_BALANCE, False)]
)
@pytest.mark.slow
def test_sharing_changes_no_result(ranks: Any, layout: str, config: ModelConfig, sharded: bool) -> None:
    ranks(2, compare_sharing, config, layout, sharded)


def computed_tokens(group: dist.ProcessGroup) -> tuple[int, list[int], list[int]]:
    """Returns the tokens of the sequences and those computed, of two prompts with four completions each."""
    generator, sequences = torch.Generator().manual_seed(0), []
    for _ in range(2):
        prompt = torch.randint(37, (100,), generator=generator)
        sequences += [torch.cat((prompt, torch.randint(37, (25,), generator=generator))) for _ in range(4)]
    results = []
    for share in ("auto", "off"):
        local = shard_batch(
            Batch(sequences), mesh(Layout()), ATTENTION, budget=256, device=torch.device("cpu"), share_prefixes=share
        )
        results.append([len(microbatch.layer_microbatch) for microbatch in local.microbatches])
    return sum(map(len, sequences)), results[0], results[1]


def test_prompts_are_computed_once(ranks: Any) -> None:
    total, shared, alone = ranks(1, computed_tokens)[0]
    assert shared == [200, 200]
    assert sum(alone) == total == 1000

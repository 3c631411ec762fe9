"""Tokens that sequences share are computed once: every layout equals one rank that computes every sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from postlude import Batch, Engine, LanguageModel, Layout, Loss, ModelConfig, OutputInputs
from postlude.data import plan_bins, scatter_add, shard_context
from postlude.data.bins import BinPlan, find_shared_prefixes
from postlude.data.packing import build_microbatches, read_content
from postlude.engine import EngineOptions
from postlude.engine.batch_sharding import shard_batch, supported_sharing
from postlude.lora import LoRA
from postlude.model.blocks import BLOCKS, Attention, AttentionConfig, Block, MoEConfig, SlidingAttentionConfig
from postlude.model.context import ForwardContext
from postlude.objectives import Distill
from postlude.objectives.distill import TEACHER_IDS, TEACHER_LOGPROBS
from postlude.options import SharePrefixes
from postlude.verify.cases import Case, batches
from postlude.world.mesh import Axis
from tests.engine.test_batch_sharding import part
from tests.equality import assert_equal
from tests.meshes import mesh, verify
from tests.model.small import VOCABULARY, small_config

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
        ("", HYBRID, "grpo", {"compute_dtype": torch.bfloat16}),
        ("cp=2", HYBRID, "dpo", {}),
        ("tp=2", HYBRID, "grpo", {}),
        ("pp=2,vpp=2,ep=2,dp_shard=2", FOUR_STAGES, "grpo", {"overlap": True}),
        pytest.param("pp=2", HYBRID, "dpo", {"overlap": "zero_bubble"}, marks=pytest.mark.thorough),
        pytest.param("tp=2,cp=2,ep=2", SEQUENCE_BALANCE, "sft", {"recompute": "selective"}, marks=pytest.mark.thorough),
        pytest.param("cp=4", ATTENTION, "dpo", {}, marks=pytest.mark.thorough),
        pytest.param("cp=2", SEQUENCE_BALANCE, "grpo", {}, marks=pytest.mark.thorough),
        pytest.param("pp=2,tp=2,ep=2", SEQUENCE_BALANCE, "gspo", {}, marks=pytest.mark.thorough),
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


def distilled(layout: str, share: SharePrefixes) -> list[Tensor]:
    """Returns loss, metrics and gradients of a student. Its teacher shares tokens as it does."""
    teacher, student = (
        Engine(ATTENTION, mesh=mesh(Layout.parse(layout)), budget=32, share_prefixes=share, seed=seed)
        for seed in (6, 5)
    )
    batch = batches("grpo", ATTENTION, 3, share_prefixes=True)["many"]
    logprobs, ids = teacher.topk(batch, 4)
    batch = replace(batch, columns={**batch.columns, TEACHER_IDS: ids, TEACHER_LOGPROBS: logprobs})
    result = student.forward_backward(batch, Distill(forward=0.5, nll=0.2))
    assert (result.shared_tokens > 0) == (share == "always")
    metrics = [torch.tensor(value) for _, value in sorted(result.metrics.items())]
    return [torch.tensor(result.loss), *metrics, *(gradient.clone() for _, gradient in student.gradients())]


def compare_distillation(group: dist.ProcessGroup, layout: str) -> None:
    for index, values in enumerate(zip(distilled(layout, "always"), distilled(layout, "off"), strict=True)):
        assert_equal(*values, f"{layout}, value {index}")


@pytest.mark.slow
def test_sharing_changes_no_distillation(ranks: Any) -> None:
    ranks(2, compare_distillation, "cp=2")


# --- any tree, in one process

EVERY_BLOCK = small_config("[*-][SE][+-][M-][GE]/[*E]", blocks={**ATTENTION.blocks, "E": BALANCED})
COLUMNS = ("advantages", "returns", "response_mask")


@st.composite
def forests(draw: st.DrawFn) -> list[Tensor]:
    """Sequences along the branches of random trees, some of which end where others go on, or twice."""
    beginnings: list[list[int]] = [[]]
    for _ in range(draw(st.integers(2, 9))):
        start = draw(st.sampled_from(beginnings[-4:]))  # so that trees become deep
        beginnings.append([*start, *draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4))])
    chosen = draw(st.lists(st.sampled_from(beginnings[1:]), min_size=1, max_size=4))
    return [torch.tensor(tokens) for tokens in [*chosen, beginnings[-1], beginnings[-2]]]


def results(model: LanguageModel, sequences: list[Tensor], share: SharePrefixes) -> dict[str, Tensor]:
    """Returns log-probs, entropies, values and gradients of a batch in one process."""
    lengths = list(map(len, sequences))
    prefixes = find_shared_prefixes(sequences, lengths, share)
    plan = BinPlan(lengths, plan_bins(lengths, 40, prefixes=prefixes), prefixes)
    generator = torch.Generator().manual_seed(len(sequences))
    columns = {name: [torch.randn(length, generator=generator) for length in lengths] for name in COLUMNS}
    indices = range(len(plan.bins))
    members = plan.members(indices)
    content = read_content(sequences, columns, members, members, lengths)
    stats: dict[str, Tensor] = {
        name: torch.zeros(sum(lengths), dtype=torch.float64) for name in ("logprob", "entropy", "value")
    }
    model.zero_grad()

    def processor(inputs: OutputInputs, context: None) -> Tensor:
        loss, microbatch = torch.zeros(()), inputs.microbatch
        for depth in (inputs, *inputs.depths()):
            scores = depth.head.logprobs(depth.hidden, depth.microbatch.targets, entropy=True)
            values = depth.head.values(depth.hidden)
            tokens = scores.logprob * depth.microbatch.column("advantages") + 0.1 * scores.entropy
            tokens = tokens + (values - depth.microbatch.column("returns")).square()
            loss = loss + (tokens * depth.microbatch.column("response_mask")).sum()
            loss = loss + depth.microbatch.sequence_sum(scores.logprob).square().sum()
        for name, value in zip(stats, (scores.logprob, scores.entropy, values), strict=True):
            scatter_add(microbatch, value.detach().double(), stats[name], shifted=False)
        return loss / sum(lengths)

    for packed in build_microbatches(plan, indices, content, depths=1):
        microbatch = shard_context(packed, Axis())
        assert (microbatch.segments is None) == (plan.tree(microbatch.index) is None)
        model(microbatch, output_processor=processor).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return stats | {name: torch.zeros(1) if grad is None else grad.clone() for name, grad in gradients.items()}


@settings(max_examples=15)
@given(forests())
def test_any_tree_equals_its_sequences_alone(sequences: list[Tensor]) -> None:
    torch.manual_seed(0)
    model = LanguageModel(EVERY_BLOCK, value_head=True, dtype=torch.float64)
    torch.nn.init.normal_(model.value_head.weight)
    expected = results(model, sequences, "off")
    # Some gradients are exactly zero, as that of queries whose keys are all equal: what remains of them is rounding.
    scale = 1e-3 * torch.stack([value.abs().max() for value in expected.values()]).max().view(1)
    for name, actual in results(model, sequences, "always").items():
        assert_equal(*(torch.cat((values.flatten(), scale)) for values in (actual, expected[name])), name)


class Recent(Attention):
    """An attention of its own, which may read other tokens in another way."""

    def sublayer(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        return super().sublayer(hidden, context)


class Declared(Recent):
    shares_prefixes = True


def test_a_block_with_methods_of_its_own_shares_only_if_it_says_so() -> None:
    def sharing(share: SharePrefixes, attention: type[Block], **options: Any) -> SharePrefixes:
        table = {**BLOCKS, "*": attention}
        return supported_sharing(EngineOptions(blocks=table, share_prefixes=share, **options), HYBRID)

    assert sharing("auto", Attention) == sharing("auto", Declared) == "auto"
    assert sharing("auto", Recent) == sharing("auto", Attention, batch_invariant=True) == "off"
    with pytest.raises(ValueError, match="computes common tokens once, but Recent does not take them"):
        sharing("always", Recent)
    with pytest.raises(ValueError, match="batch_invariant keeps the bits of every sequence computed alone"):
        sharing("always", Attention, batch_invariant=True)


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

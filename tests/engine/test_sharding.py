"""Sharding: experts are spread evenly, gradients accumulate in fp32, and results do not change."""

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

from postlude import LanguageModel, Layout
from postlude.data import pack
from postlude.engine import Engine
from postlude.engine.normalizer import LossNormalizer
from postlude.engine.unsharded import Unsharded
from postlude.hf.read_model import model_from_hf
from postlude.model.parallel import local_shard
from postlude.ops.experts import alternating_view
from postlude.verify.cases import Case
from tests.engine.training import (
    BUDGET,
    DAMPED,
    batch,
    bitwise_equal,
    build,
    config,
    optimizer_state,
    policy,
    train,
    weights,
)
from tests.equality import assert_equal
from tests.meshes import equal_to_one_rank
from tests.model.small import small_model


def few(experts: int) -> Any:
    return config("tiny-moe", num_hidden_layers=2, num_experts=experts, num_experts_per_tok=2)


def sizes(engine: Engine) -> set[int]:
    """Returns the number of elements that this rank holds of each expert matrix."""
    experts = [
        part.module for stage in engine.stage_models.values() for part in stage.sharded_separately() if part.experts
    ]
    return {local_shard(parameter).numel() for module in experts for parameter in module.parameters()}


def train_and_reload(
    group: Any, layout: str, other: str, experts: int, directory: str
) -> tuple[set[int], Any, Any, bool]:
    """Returns elements held, weights before and after a step, and whether another layout loads the same from disk."""
    engine = build(layout, few(experts))
    first = weights(engine)
    train(engine, [1])
    engine.save(directory)
    same_layout, other_layout = build(layout, few(experts), seed=1), build(other, few(experts), seed=1)
    same_layout.load(directory)
    other_layout.load(directory)
    is_equal = bitwise_equal(weights(other_layout), weights(engine)) and bitwise_equal(
        optimizer_state(same_layout), optimizer_state(engine)
    )
    return sizes(engine), first, weights(engine), is_equal


LAYOUTS = [
    pytest.param("dp_shard=2", "dp_replicate=2", 3, marks=pytest.mark.slow),  # neither divides the experts
    pytest.param("dp_shard=4", "dp_shard=4,ep=2", 2, marks=pytest.mark.thorough),  # more ranks than experts
    pytest.param("dp_shard=4,ep=2", "tp=2,dp_shard=2", 2, marks=pytest.mark.thorough),  # two ranks share one expert
]


@pytest.mark.parametrize(("layout", "other", "experts"), LAYOUTS)
def test_few_experts_are_spread_evenly_streamed_and_saved(
    ranks: Any, tmp_path: Any, layout: str, other: str, experts: int
) -> None:
    ((sizes, first, _, _),) = ranks(1, train_and_reload, "", "", experts, str(tmp_path / "one"))
    size = Layout.parse(layout).world_size
    outputs = ranks(size, train_and_reload, layout, other, experts, str(tmp_path / "many"))
    for held_here, streamed, stepped, is_equal in outputs:
        assert held_here == {number // size for number in sizes}
        assert bitwise_equal(streamed, first)
        assert bitwise_equal(stepped, outputs[0][2])
        assert is_equal


@pytest.mark.parametrize(("layout", "other", "experts"), LAYOUTS)
def test_few_experts_train_like_one_rank(ranks: Any, layout: str, other: str, experts: int) -> None:
    case = Case(few(experts), layout=Layout.parse(layout), objective="grpo")
    equal_to_one_rank(ranks, case)


def exchanges(group: Any) -> dict[str, int]:
    """Returns the number of all-to-alls of a forward and backward."""
    counts, exchange = Counter[str](), dist.all_to_all_single
    for recompute in ("none", "selective", "full"):
        engine = build("dp_shard=2,ep=2", few(4), recompute=recompute)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_to_all_single", lambda *a, **k: (counts.update([recompute]), exchange(*a, **k))[1])  # noqa: B023
            train(engine, [1])
    return dict(counts)


@pytest.mark.slow
def test_selective_recompute_repeats_no_exchange_and_full_repeats_them(ranks: Any) -> None:
    for counts in ranks(2, exchanges):
        assert 0 < counts["none"] == counts["selective"] < counts["full"]


FEW = (20, 17, 6)


def gradients_of_two_batches(group: Any, model: str, overlap: bool) -> dict[str, torch.Tensor]:
    """Returns the gradients of two batches, in bf16."""
    engine = build("", config(model, num_hidden_layers=1), compute_dtype=torch.bfloat16, overlap=overlap)
    stored = {name: (parameter, local_shard(parameter).clone()) for name, parameter in engine.parameters.items()}
    for seed in (1, 2):
        engine.forward_backward(batch(seed, FEW), policy)
        engine.logprobs(batch(3, FEW))
    assert not any(
        isinstance(module, FSDPModule) for stage in engine.stage_models.values() for module in stage.modules()
    )
    for name, parameter in engine.parameters.items():
        assert parameter is stored[name][0]
        assert torch.equal(parameter, stored[name][1])
        assert parameter.dtype == parameter.grad.dtype == torch.float32
    return {name: parameter.grad for name, parameter in engine.parameters.items()}


@pytest.mark.parametrize(
    ("model", "overlap"),
    [("tiny-dense", False), *(pytest.param("tiny-moe", each, marks=pytest.mark.thorough) for each in (False, True))],
)
@pytest.mark.slow
def test_one_rank_accumulates_gradients_in_fp32(ranks: Any, model: str, overlap: bool) -> None:
    """Equals casting and adding each microbatch's bf16 gradients bit for bit, except norms, which are not cast."""
    model_bf16 = LanguageModel(model_from_hf(config(model, num_hidden_layers=1))[1], dtype=torch.bfloat16)
    expected = {name: torch.zeros(parameter.shape) for name, parameter in model_bf16.named_parameters()}
    for seed in (1, 2):
        data = batch(seed, FEW)
        microbatches = pack(data.sequences, budget=BUDGET, columns=data.columns)
        scale = LossNormalizer(microbatches)
        for microbatch in microbatches:
            model_bf16.zero_grad()
            model_bf16(
                microbatch,
                output_processor=lambda inputs, _, scale=scale: scale.loss(policy(inputs), inputs.microbatch),
            ).backward()
            for name, parameter in model_bf16.named_parameters():
                expected[name] += parameter.grad
    (gradients,) = ranks(1, gradients_of_two_batches, model, overlap)
    assert gradients.keys() == expected.keys()
    for name, total in expected.items():
        if total.ndim > 1:
            assert torch.equal(gradients[name], total), name
        else:
            assert_equal(gradients[name], total, name, 2.0**-8)


def test_gate_and_up_of_experts_are_interleaved_in_compute_copies() -> None:
    """They then are one product. The stored weights are not interleaved, and the copies follow them at every pass."""
    model = small_model("[*E]")
    layers = [layer for name, layer in model.named_modules() if name.endswith(("gate_proj", "up_proj"))]
    sharding = Unsharded(model, torch.bfloat16)
    for shift in (0.0, 1.0):
        with torch.no_grad():
            stored = [layer.weight.add_(shift).clone() for layer in layers]
        assert alternating_view([layer.weight for layer in layers]) is None
        sharding.begin_pass(train=True)
        copies = alternating_view([layer.weight for layer in layers])
        assert copies is not None
        assert torch.equal(copies, torch.cat(stored, 1).bfloat16())
        sharding.end_pass()
        assert all(map(torch.equal, stored, (layer.weight for layer in layers)))


def reduce_once_and_per_microbatch(group: Any, layout: str, overlap: bool) -> tuple[Any, ...]:
    """Returns losses, norms and weights, and the reductions per step: per microbatch, or once."""
    results = []
    for once in (False, True):
        engine = build(
            layout, config("tiny-moe", num_hidden_layers=2), gather_once=once, overlap=overlap, optimizer=DAMPED
        )
        train(engine, [1])
        sums = mock.Mock(side_effect=groups.foreach_reduce)
        with mock.patch.object(groups, "foreach_reduce", sums):
            losses = [engine.forward_backward(batch(seed), policy).loss for seed in (2, 3)]
        norm = engine.optimizer_step().grad_norm
        results.append((torch.tensor([*losses, norm]), weights(engine), sums.call_count))
    return tuple(results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "overlap"), [("dp_shard=2", True), pytest.param("dp_shard=2,ep=2", False, marks=pytest.mark.thorough)]
)
def test_gradients_reduced_once_equal_those_reduced_per_microbatch(ranks: Any, layout: str, overlap: bool) -> None:
    for (numbers, moved, often), (numbers_once, moved_once, once) in ranks(
        2, reduce_once_and_per_microbatch, layout, overlap
    ):
        assert_equal(numbers_once, numbers, "losses and norm")
        for name, expected in moved.items():
            assert_equal(moved_once[name], expected, name)
        assert 0 < once < often

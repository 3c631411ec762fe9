"""The vocabulary-parallel head equals one rank, with one collective per call for any number of slabs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from postlude import launch
from postlude.ops.collectives import copy_to_group, gather_from_sequence
from postlude.ops.kernels.capabilities import HOPPER
from postlude.ops.linear_logprobs import linear_logprobs
from postlude.ops.linear_objective import linear_objective
from tests.conftest import Ranks
from tests.ops.dense_head import Operands, assert_close, dense

TOKENS, FEATURES, VOCABULARY = 12, 6, 37
REAL = 33  # the last four rows are padding

# Rows each rank holds. Uneven; in the last, one rank holds padding alone and one no row at all.
SHARDS = {1: [(37,)], 2: [(20, 17), (3, 34)], 4: [(10, 9, 9, 9), (1, 20, 12, 4), (30, 3, 0, 4)]}
LAYOUTS = [(size, shards) for size, every in SHARDS.items() for shards in every]


def operands() -> Operands:
    drawn = Operands.random(TOKENS, FEATURES, VOCABULARY, bias=True, seed=5)
    drawn.targets %= REAL
    drawn.targets[[2, 7]] = -100
    return drawn


OPTIONS = {"temperature": torch.linspace(0.6, 1.4, TOKENS), "logit_scale": 1.2, "softcap": 5.0, "vocab_size": REAL}


@contextmanager
def counted_collectives() -> Iterator[list[str]]:
    names = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast")
    calls: list[str] = []

    def counting(name: str) -> Any:
        real = getattr(dist, name)
        return lambda *args, **kwargs: (calls.append(name), real(*args, **kwargs))[1]

    with mock.patch.multiple(dist, **{name: counting(name) for name in names}):
        yield calls


def shard(group: dist.ProcessGroup, shards: tuple[int, ...]) -> tuple[int, slice]:
    rank = dist.get_rank(group)
    start = sum(shards[:rank])
    return rank, slice(start, start + shards[rank])


def run(group: dist.ProcessGroup, shards: tuple[int, ...], form: str, computed: dict[str, Any]) -> dict[str, Any]:
    """Returns one rank's results and gradients of the head, and the collectives used."""
    full_operands = operands()
    rank, rows = shard(group, shards)
    size = len(shards)
    weight = full_operands.weight.detach()[rows].clone().requires_grad_()
    bias = full_operands.bias.detach()[rows].clone().requires_grad_()
    hidden = full_operands.hidden.detach().clone()
    if form == "sequence":
        hidden = hidden.chunk(size)[rank].clone()
    hidden.requires_grad_()
    gathered = copy_to_group(hidden, group) if form == "replicated" else gather_from_sequence(hidden, group)
    with counted_collectives() as forward:
        stats = linear_logprobs(
            gathered,
            weight,
            full_operands.targets,
            bias=bias,
            vocab_start=rows.start,
            group=group,
            entropy=True,
            lse=True,
            top1=True,
            topk=4,
            **computed,
            **OPTIONS,
        )
    results = (stats.logprob, stats.entropy, stats.lse)
    total = sum((row * up).sum() for row, up in zip(results, full_operands.upstream, strict=True))
    with counted_collectives() as backward:
        gradients = torch.autograd.grad(total, (hidden, weight, bias))
    return {
        "results": [row.detach() for row in results],
        "top1": stats.top1,
        "topk": (stats.topk_ids, stats.topk_logprobs),
        "gradients": gradients,
        "forward": forward,
        "backward": backward,
    }


@pytest.mark.parametrize("form", ["replicated", "sequence"])
@pytest.mark.parametrize("computed", [{}, {"memory_budget": 600}, {"backend": "logits"}], ids=str)
@pytest.mark.parametrize(("size", "shards"), LAYOUTS)
def test_equals_one_rank(ranks: Ranks, size: int, shards: tuple[int, ...], computed: dict[str, Any], form: str) -> None:
    full_operands = operands()
    exact = dense(*full_operands.head, bias=full_operands.bias, **OPTIONS)
    expected = full_operands.gradients(exact)
    single = linear_logprobs(*full_operands.head, bias=full_operands.bias, topk=4, top1=True, **OPTIONS)
    outputs = ranks(size, run, shards, form, computed)
    for answer in outputs:
        for name, result, want in zip(("logprob", "entropy", "lse"), answer["results"], exact, strict=True):
            assert_close(result, want, name)
        assert torch.equal(answer["top1"], single.top1)
        assert torch.equal(answer["topk"][0], single.topk_ids)
        assert_close(answer["topk"][1], single.topk_logprobs, "top-k")
    for part in (1, 2):
        assert_close(torch.cat([answer["gradients"][part] for answer in outputs]), expected[part], "shards' gradients")
    hiddens: list[Tensor] = [answer["gradients"][0] for answer in outputs]
    if form == "sequence":
        hiddens = [torch.cat(hiddens)]
    for gradient in hiddens:
        assert_close(gradient, expected[0], "gradient of hidden")


@pytest.mark.parametrize("memory_budget", [None, 600, 1])
def test_one_collective_for_any_number_of_slabs(ranks: Ranks, memory_budget: int | None) -> None:
    for answer in ranks(2, run, (20, 17), "replicated", {"memory_budget": memory_budget}):
        assert answer["forward"] == ["all_gather_into_tensor"]
        assert answer["backward"] == ["all_reduce"]  # the sum of hidden's gradient, copy_to_group's own


def run_ignored(group: dist.ProcessGroup) -> tuple[list[str], Tensor]:
    full_operands = operands()
    _, rows = shard(group, (20, 17))
    with counted_collectives() as calls:
        stats = linear_logprobs(
            full_operands.hidden,
            full_operands.weight[rows],
            torch.full((TOKENS,), -100),
            vocab_start=rows.start,
            group=group,
            vocab_size=REAL,
        )
    return calls, stats.logprob.detach()


def test_batch_without_targets_needs_no_collective(ranks: Ranks) -> None:
    for calls, logprob in ranks(2, run_ignored):
        assert calls == []
        assert not logprob.any()


def policy(logprob: Tensor, entropy: Tensor | None, columns: Tensor) -> Tensor:
    assert entropy is not None
    return logprob.exp() * columns - 0.1 * entropy


def run_objective(group: dist.ProcessGroup, shards: tuple[int, ...]) -> dict[str, Any]:
    full_operands = operands()
    _, rows = shard(group, shards)
    weight = full_operands.weight.detach()[rows].clone().requires_grad_()
    hidden = full_operands.hidden.detach().clone().requires_grad_()
    with counted_collectives() as calls:
        result = linear_objective(
            copy_to_group(hidden, group),
            weight,
            full_operands.targets,
            policy,
            full_operands.upstream[0],
            bias=full_operands.bias.detach()[rows],
            vocab_start=rows.start,
            group=group,
            entropy=True,
            memory_budget=600,
            **OPTIONS,
        )
    gradients = torch.autograd.grad(result.loss, (hidden, weight))
    return {"loss": result.loss.detach(), "gradients": gradients, "calls": calls}


@pytest.mark.parametrize(("size", "shards"), LAYOUTS)
def test_objective_equals_one_rank(ranks: Ranks, size: int, shards: tuple[int, ...]) -> None:
    full_operands = operands()
    single = linear_objective(
        *full_operands.head, policy, full_operands.upstream[0], bias=full_operands.bias, entropy=True, **OPTIONS
    )
    expected = torch.autograd.grad(single.loss, (full_operands.hidden, full_operands.weight))
    outputs = ranks(size, run_objective, shards)
    for answer in outputs:
        assert_close(answer["loss"], single.loss, "loss")
        assert_close(answer["gradients"][0], expected[0], "gradient of hidden")
        assert answer["calls"] == (["all_gather_into_tensor"] if size > 1 else [])
    assert_close(torch.cat([answer["gradients"][1] for answer in outputs]), expected[1], "gradient of weight")


def run_error(group: dist.ProcessGroup) -> str:
    try:
        linear_logprobs(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([1]), group=group)
    except ValueError as error:
        return str(error)
    return ""


def test_a_group_needs_the_vocabulary_size(ranks: Ranks) -> None:
    for message in ranks(2, run_error):
        assert "vocab_size is needed with group" in message


HALVES = (5000, 4000)  # of a vocabulary of 9000


def half_precision() -> Operands:
    """Large enough for several tiles of the fused kernels, in bf16, without every fifth target."""
    drawn = Operands.random(384, 512, sum(HALVES), seed=3, device="cuda")
    drawn.hidden = drawn.hidden.detach().bfloat16().requires_grad_()
    drawn.weight = drawn.weight.detach().bfloat16().requires_grad_()
    drawn.targets[::5] = -100
    return drawn


def fused_head(softcap: float | None) -> dict[str, Any]:
    """Runs this rank's shard of the head on the GPU. Returns its results and the number of fused kernel launches."""
    from postlude.ops.kernels import linear_logprobs_fused as fused

    full_operands, group = half_precision(), dist.group.WORLD
    assert group is not None
    _, rows = shard(group, HALVES)
    hidden, weight = (
        full_operands.hidden.detach().requires_grad_(),
        full_operands.weight.detach()[rows].clone().requires_grad_(),
    )
    with (
        mock.patch.object(fused, "accumulate", wraps=fused.accumulate) as forward,
        mock.patch.object(fused, "differentiate", wraps=fused.differentiate) as backward,
    ):
        stats = linear_logprobs(
            *(copy_to_group(hidden, group), weight, full_operands.targets),
            entropy=True,
            lse=True,
            softcap=softcap,
            vocab_start=rows.start,
            vocab_size=sum(HALVES),
            group=group,
        )
        results = (stats.logprob, stats.entropy, stats.lse)
        total = sum((row * up).sum() for row, up in zip(results, full_operands.upstream, strict=True))
        gradients = torch.autograd.grad(total, (hidden, weight))
    return {
        "results": [row.detach().cpu() for row in results],
        "gradients": [gradient.cpu() for gradient in gradients],
        "fused": (forward.call_count, backward.call_count),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_two_ranks_in_bf16_through_the_fused_head_equal_float64(softcap: float | None) -> None:
    """As accurate as one rank is: see `test_linear_logprobs_kernels.py`."""
    outputs = launch(fused_head, softcap, nproc=2, timeout=120.0, device="cuda")
    full_operands = half_precision()
    exact = dense(*full_operands.head, softcap=softcap)
    of_hidden, of_weight = full_operands.gradients(exact)

    def off(actual: Tensor, want: Tensor) -> float:
        return float((actual.double() - want.detach().cpu().double()).norm() / want.detach().cpu().double().norm())

    for answer in outputs:
        assert all(off(result, want) <= 1e-6 for result, want in zip(answer["results"], exact, strict=True))
        assert off(answer["gradients"][0], of_hidden) <= 5e-3  # two parts, each rounded to bf16, and so is their sum
        if torch.cuda.get_device_capability()[0] == HOPPER:
            assert min(answer["fused"]) > 0
    assert off(torch.cat([answer["gradients"][1] for answer in outputs]), of_weight) <= 3e-3

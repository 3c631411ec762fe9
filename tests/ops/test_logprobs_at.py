"""Log-probs of given ids equal the dense head's, on one rank and with a sharded vocabulary."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from postlude.ops import logprobs_at
from postlude.ops.collectives import copy_to_group
from postlude.ops.logprobs_at import linear_logprobs_at
from tests.conftest import Ranks
from tests.equality import assert_equal
from tests.ops.dense_head import Operands
from tests.ops.watch import Waits

TOKENS, FEATURES, VOCABULARY, REAL, K = 12, 6, 37, 33, 4
SHARDS = [(37,), (20, 17), (10, 9, 9, 9), (30, 3, 0, 4)]  # the last: a rank of padding alone, and one without rows
OPTIONS = {"temperature": torch.linspace(0.6, 1.4, TOKENS), "logit_scale": 1.2, "softcap": 5.0, "vocab_size": REAL}


def operands() -> tuple[Operands, Tensor, Tensor]:
    drawn = Operands.random(TOKENS, FEATURES, VOCABULARY, bias=True, seed=5)
    drawn.targets %= REAL
    drawn.targets[[2, 7]] = -100
    generator = torch.Generator().manual_seed(6)
    ids = torch.randint(REAL, (TOKENS, K), generator=generator)
    ids[2] = -1  # nothing is asked of an ignored token's ids
    ids[3, 1] = ids[3, 0]
    return drawn, ids, torch.randn(TOKENS, K, generator=generator)


def dense(full_operands: Operands, ids: Tensor) -> Tensor:
    logits = OPTIONS["logit_scale"] * (
        full_operands.hidden.double() @ full_operands.weight.double().T + full_operands.bias.double()
    )
    logits = OPTIONS["softcap"] * torch.tanh(logits / OPTIONS["softcap"]) / OPTIONS["temperature"].double()[:, None]
    has_target = (full_operands.targets != -100)[:, None]
    return logits[:, :REAL].log_softmax(-1).gather(1, ids.clamp_min(0)).where(has_target, 0.0)


def run(group: dist.ProcessGroup, shards: tuple[int, ...]) -> dict[str, Any]:
    full_operands, ids, upstream = operands()
    rank = dist.get_rank(group) if len(shards) > 1 else 0
    rows = slice(sum(shards[:rank]), sum(shards[: rank + 1]))
    joined = group if len(shards) > 1 else None
    hidden, weight, bias = (
        tensor.detach().clone().requires_grad_()
        for tensor in (full_operands.hidden, full_operands.weight[rows], full_operands.bias[rows])
    )
    stats, logprobs = linear_logprobs_at(
        copy_to_group(hidden, joined), weight, full_operands.targets, ids, bias=bias, vocab_start=rows.start,
        group=joined, **OPTIONS,
    )  # fmt: skip
    ((logprobs * upstream).sum() + stats.logprob.sum()).backward()
    return {"rows": rows, "found": logprobs.detach(), "hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad}


@pytest.mark.parametrize("shards", SHARDS)
def test_equals_the_dense_head(ranks: Ranks, shards: tuple[int, ...]) -> None:
    full_operands, ids, upstream = operands()
    expected = dense(full_operands, ids)
    target = dense(full_operands, full_operands.targets.clamp_min(0)[:, None])
    (expected.mul(upstream).sum() + target.sum()).backward()
    for rank_result in ranks(len(shards), run, shards) if len(shards) > 1 else [run(None, shards)]:
        assert_equal(rank_result["found"], expected, "log-probs")
        assert_equal(rank_result["hidden"], full_operands.hidden.grad, "gradient of hidden")
        for name in ("weight", "bias"):
            full = getattr(full_operands, name).grad
            if rank_result[name].numel():
                off = (rank_result[name] - full[rank_result["rows"]]).abs().max() / full.abs().max()
                assert off < 1e-5, f"gradient of {name} is off by {off}"


def test_chunk_size_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(None, (37,))
    monkeypatch.setattr(logprobs_at, "LOOKUP_ELEMENTS", 2 * K * FEATURES)
    for name, value in run(None, (37,)).items():
        if name != "rows":
            assert_equal(value, first[name], name, tolerance=1e-6)


def test_frozen_operands_and_half_precision() -> None:
    full_operands, ids, _ = operands()
    frozen = full_operands.weight.detach()
    _, logprobs = linear_logprobs_at(full_operands.hidden, frozen, full_operands.targets, ids, vocab_size=REAL)
    logprobs.sum().backward()
    assert frozen.grad is None
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in (full_operands.hidden, full_operands.weight)]
    _, rounded = linear_logprobs_at(*half, full_operands.targets, ids, vocab_size=REAL)
    exact = [tensor.detach().float() for tensor in half]
    assert rounded.dtype == torch.float32
    assert_equal(rounded, linear_logprobs_at(*exact, full_operands.targets, ids, vocab_size=REAL)[1])
    rounded.sum().backward()
    assert {tensor.grad.dtype for tensor in half} == {torch.bfloat16}


def test_invalid_arguments_are_refused() -> None:
    full_operands, ids, _ = operands()
    with pytest.raises(ValueError, match="id 33 is outside the vocabulary, 0 to 32"):
        linear_logprobs_at(*full_operands.head, ids.clamp_min(33), vocab_size=REAL)
    with pytest.raises(ValueError, match="integers of shape"):
        linear_logprobs_at(*full_operands.head, ids.float(), vocab_size=REAL)


def test_given_count_avoids_synchronisation_and_invalid_id_gives_nan() -> None:
    full_operands, ids, _ = operands()
    count = int((full_operands.targets != -100).sum())
    _, expected = linear_logprobs_at(*full_operands.head, ids, vocab_size=REAL)
    with Waits() as watch:
        _, logprobs = linear_logprobs_at(*full_operands.head, ids, vocab_size=REAL, target_count=count)
        wrong = ids.clone()
        wrong[:, 0] = REAL
        _, spoilt = linear_logprobs_at(*full_operands.head, wrong, vocab_size=REAL, target_count=count)
        spoilt.sum().backward()
    assert watch.sites == []
    assert torch.equal(logprobs, expected)
    has_target = full_operands.targets != -100
    assert spoilt[has_target, 0].isnan().all()
    assert full_operands.hidden.grad[has_target].isnan().all()

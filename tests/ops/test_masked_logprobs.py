"""Log-probs among the tokens of sampling masks equal a dense head whose other logits are -inf, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from postlude.ops.collectives import copy_to_group
from postlude.ops.linear_logprobs import LogitConfig
from postlude.ops.logprobs_at import masked_logprobs
from tests.conftest import Ranks
from tests.equality import assert_equal
from tests.ops.dense_head import Operands

TOKENS, FEATURES, VOCABULARY, REAL, K = 12, 6, 37, 33, 5
SHARDS = [(37,), (20, 17), (30, 3, 0, 4)]  # the last: a rank of padding alone, and one without rows
OPTIONS: dict[str, Any] = {
    "temperature": torch.linspace(0.6, 1.4, TOKENS), "logit_scale": 1.2, "softcap": 5.0, "vocab_size": REAL
}  # fmt: skip


def operands() -> tuple[Operands, Tensor, Tensor]:
    """Two ignored positions, one mask of the target alone, two empty ones, the others of 1 to K tokens."""
    drawn = Operands.random(TOKENS, FEATURES, VOCABULARY, bias=True, seed=5)
    drawn.targets %= REAL
    generator = torch.Generator().manual_seed(6)
    ids = torch.stack([torch.randperm(REAL, generator=generator)[:K] for _ in range(TOKENS)])
    for row, target in enumerate(drawn.targets.tolist()):
        ids[row][ids[row] == target] = ids[row, 0]
        ids[row, 0] = target
    count = torch.randint(1, K + 1, (TOKENS, 1), generator=generator)
    count[[3, 4, 5]] = torch.tensor([[1], [0], [0]])
    masks = (ids + 1).masked_fill(torch.arange(K) >= count, 0).int().roll(2, 1)
    drawn.targets[[2, 7]] = -100
    masks[7] = 0
    return drawn, masks, torch.randn(3, TOKENS, generator=generator)


def dense(full: Operands, masks: Tensor) -> Tensor:
    """Log-prob, entropy and logsumexp, [3, TOKENS]; 0 where the target is ignored."""
    logits = full.hidden.double() @ full.weight.double().T + full.bias.double()
    logits = OPTIONS["softcap"] * torch.tanh(OPTIONS["logit_scale"] * logits / OPTIONS["softcap"])
    logits = (logits / OPTIONS["temperature"].double()[:, None])[:, :REAL]
    rows = []
    for row, target in enumerate(full.targets.tolist()):
        kept = masks[row][masks[row] > 0].long() - 1
        kept = kept.unique() if len(kept) else torch.arange(REAL)
        chosen = logits[row, kept]
        logprobs = chosen.log_softmax(0)
        if target == -100:
            rows.append(torch.zeros(3, dtype=torch.float64))
        else:
            (place,) = (kept == target).nonzero()[:, 0].tolist()
            rows.append(torch.stack([logprobs[place], -(logprobs.exp() * logprobs).sum(), chosen.logsumexp(0)]))
    return torch.stack(rows, 1)


def run(group: dist.ProcessGroup | None, shards: tuple[int, ...]) -> dict[str, Any]:
    full, masks, upstream = operands()
    rank = dist.get_rank(group) if len(shards) > 1 else 0
    rows = slice(sum(shards[:rank]), sum(shards[: rank + 1]))
    joined = group if len(shards) > 1 else None
    hidden, weight, bias = (
        tensor.detach().clone().requires_grad_() for tensor in (full.hidden, full.weight[rows], full.bias[rows])
    )
    logit_config = LogitConfig(bias=bias, vocab_start=rows.start, group=joined, **OPTIONS)
    stats = masked_logprobs(
        copy_to_group(hidden, joined), weight, full.targets, masks, entropy=True, lse=True, logit_config=logit_config
    )
    results = torch.stack([stats.logprob, stats.entropy, stats.lse])
    (results * upstream).sum().backward()
    gradients = {"hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad}
    return {"rows": rows, "results": results.detach(), **gradients}


@pytest.mark.parametrize("shards", SHARDS)
def test_equals_the_dense_head(ranks: Ranks, shards: tuple[int, ...]) -> None:
    full, masks, upstream = operands()
    expected = dense(full, masks)
    (expected * upstream).sum().backward()
    for result in ranks(len(shards), run, shards) if len(shards) > 1 else [run(None, shards)]:
        assert_equal(result["results"], expected.detach(), "log-probs, entropies and logsumexps")
        assert_equal(result["hidden"], full.hidden.grad, "gradient of hidden")
        for name in ("weight", "bias"):
            gradient = getattr(full, name).grad
            if result[name].numel():
                off = (result[name] - gradient[result["rows"]]).abs().max() / gradient.abs().max()
                assert off < 1e-5, f"gradient of {name} is off by {off}"


def test_a_target_outside_of_its_mask_is_refused() -> None:
    full, masks, _ = operands()
    masks[0] = (full.targets[0] + 2) % REAL + 1
    with pytest.raises(ValueError, match=r"target \d+ at position 0 is not in its sampling mask \(1 such\)"):
        masked_logprobs(full.hidden, full.weight, full.targets, masks, logit_config=LogitConfig(vocab_size=REAL))


def test_a_token_outside_of_the_vocabulary_is_refused() -> None:
    """Its logit would be 0, as a good token's."""
    full, masks, _ = operands()
    masks = torch.cat((masks, torch.zeros_like(masks[:, :1])), 1)
    masks[0, -1] = REAL + 1
    with pytest.raises(
        ValueError, match=rf"token {REAL} of a sampling mask is outside the vocabulary, 0 to {REAL - 1}"
    ):
        masked_logprobs(full.hidden, full.weight, full.targets, masks, logit_config=LogitConfig(vocab_size=REAL))

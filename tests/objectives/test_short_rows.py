"""Completions without tokens and sequences of one token count as the formulas say, in every layout."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from postlude import Batch, Engine, Layout
from postlude.objectives import KTO, BradleyTerry, Preference, ValueLoss
from tests.meshes import mesh
from tests.model.small import sequences, small_config

LAYOUTS = ["", "cp=2"]


def engine_in(layout: str) -> Engine:
    engine = Engine(small_config("[*-]{2}"), mesh=mesh(Layout.parse(layout)), budget=64, critic=True)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in engine.parameters.items():
        if name.startswith("value_head"):
            with torch.no_grad():
                parameter.normal_(std=0.3, generator=generator)
    return engine


def sigmoid(number: float) -> float:
    return 1 / (1 + math.exp(-number))


def scores(engine: Engine, batch: Batch) -> list[float]:
    """Returns the value at the last token of each sequence."""
    values = engine.evaluate_tokens(batch, lambda i: {"value": i.head.values(i.hidden)}, shifted=False)["value"]
    return [float(row[-1]) for row in values]


def kto_of_empty_rows(group: Any, layout: str) -> tuple[float, float]:
    engine, beta, z = engine_in(layout), 1.0, 0.4
    tokens = sequences(6, 5, 7)
    masks = [torch.zeros(6), torch.tensor([0.0, 0, 1, 1, 1]), torch.zeros(7)]
    columns = {"response_mask": masks, "desirable": [1.0, 0.0, 0.0], "batch_kl": [z] * 3}
    batch = Batch(tokens, {**columns, "reference_logprobs": [torch.full((len(row),), -3.0) for row in tokens]})
    gain = float((engine.logprobs(batch).logprob[1] + 3.0)[2:].sum())
    losses = [2.0 * (1 - sigmoid(beta * -z)), 1 - sigmoid(beta * (z - gain)), 1 - sigmoid(beta * z)]
    return engine.evaluate_loss(batch, KTO(beta=beta, desirable_weight=2.0)).loss, sum(losses) / 3


def margins_of_one_token(group: Any, layout: str) -> tuple[float, float]:
    engine, margins = engine_in(layout), [2.0, -0.5, 0.7]
    pairs = [index // 2 for index in range(6)]
    batch = Batch(sequences(1, 3, 4, 1, 1, 1), {"margins": [margins[pair] for pair in pairs]}, groups=pairs)
    values = scores(engine, batch)
    leads = [values[2 * pair] - values[2 * pair + 1] - margin for pair, margin in enumerate(margins)]
    expected = sum(-math.log(sigmoid(lead)) for lead in leads) / 3
    return engine.evaluate_loss(batch, BradleyTerry(margins=True)).loss, expected


def preference_of_one_token(group: Any, layout: str) -> tuple[float, float]:
    engine, pairs = engine_in(layout), [0, 0]
    batch = Batch(sequences(1, 4), {"margins": [1.5, 1.5], "response_mask": [1.0, 1.0]}, groups=pairs)
    rejected = float(engine.logprobs(batch).logprob[1].sum())
    expected = -math.log(sigmoid(0.5 * (0.0 - rejected) - 1.5))
    return engine.evaluate_loss(batch, Preference(reference=False, beta=0.5, margins=True)).loss, expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("compute", [kto_of_empty_rows, margins_of_one_token, preference_of_one_token])
def test_rows_without_tokens_have_their_labels_and_margins(ranks: Any, layout: str, compute: Any) -> None:
    for actual, expected in ranks(Layout.parse(layout).world_size, compute, layout):
        assert actual == pytest.approx(expected, rel=1e-4)


def clipped_values(group: Any, offsets: Sequence[float]) -> list[tuple[float, float, float]]:
    """Returns value_clipped and the loss for old values that differ by each offset, and the loss without clipping."""
    engine, tokens = engine_in(""), sequences(30, 30)
    masks = [torch.ones(30), torch.ones(30)]
    values = engine.values(Batch(tokens))
    results = []
    for offset in offsets:
        columns: dict[str, list[Tensor]] = {
            "response_mask": masks,
            "returns": [row + 0.1 for row in values],
            "old_values": [row - offset for row in values],
        }
        batch = Batch(tokens, columns)
        clipped, unclipped = (engine.evaluate_loss(batch, ValueLoss(clip=clip)) for clip in (0.2, None))
        results.append((clipped.metrics["value_clipped"], clipped.loss, unclipped.loss))
    return results


def test_a_value_within_its_bounds_is_not_clipped(ranks: Any) -> None:
    (inside, outside), *_ = ranks(1, clipped_values, [0.15, 0.5])
    assert inside[0] == 0.0
    assert inside[1] == inside[2]
    assert outside[0] == 1.0
    assert outside[1] > outside[2]

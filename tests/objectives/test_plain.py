"""Every setting of every objective equals its plain formula, in loss and in every parameter's gradient."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from postlude import LanguageModel
from postlude.data import Batch, pack
from postlude.engine.normalizer import LossNormalizer
from postlude.engine.pass_metrics import LossRecord, MetricIndex, reduce_pass
from postlude.objectives import Objective, PolicyGradient, ReferenceKL, RolloutCorrection
from tests.equality import assert_equal, difference
from tests.model.small import small_config
from tests.objectives import plain
from tests.objectives.cases import CASES, OBJECTIVES, SETTINGS, batch_for, with_critic

Gradients = dict[str, Tensor]


@functools.cache
def model_and_batch() -> tuple[LanguageModel, Batch]:
    model = with_critic(small_config("[*-][S-][*E]"))
    return model, batch_for(model)


def run(model: LanguageModel, batch: Batch, objective: Objective, budget: int) -> tuple[Tensor, dict[str, float]]:
    """Computes loss and gradients as the engine does on one rank."""
    microbatches = pack(batch.sequences, budget=budget, columns=batch.columns, temperature=batch.temperature)
    scale = LossNormalizer(microbatches)
    tally = LossRecord(scale)
    losses = []
    for microbatch in microbatches:
        loss = model(microbatch, output_processor=lambda inputs, _: objective(inputs))
        losses.append(scale.loss(loss, microbatch))
        for part in loss.terms():
            for name, metric in part.metrics.items():
                tally.metrics.add(name, metric, microbatch)
    return torch.stack(losses).sum(), dict(reduce_pass(tally, MetricIndex(), reports_results=True).metrics)


def gradients(model: LanguageModel, loss: Tensor) -> Gradients:
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients_found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for name, parameter, gradient in zip(names, parameters, gradients_found, strict=True)
    }


@functools.cache
def expected(kind: str, name: str) -> tuple[Tensor, Gradients]:
    model, batch = model_and_batch()
    loss = plain.PLAIN[kind](model, batch, **SETTINGS[kind][name])
    return loss.detach(), gradients(model, loss)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_equals_the_plain_formula(kind: str, name: str) -> None:
    model, batch = model_and_batch()
    objective = OBJECTIVES[kind](**SETTINGS[kind][name])
    # Pairs must share a microbatch; everything else is cut into several.
    loss, _ = run(model, batch, objective, budget=64 if kind in ("preference", "reward", "orpo") else 20)
    expected_values, wanted_gradients = expected(kind, name)
    assert_equal(loss, expected_values, "loss")
    for parameter, gradient in gradients(model, loss).items():
        assert_equal(gradient, wanted_gradients[parameter], f"gradient of {parameter}")


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_every_setting_changes_the_result(kind: str, name: str) -> None:
    first = next(iter(SETTINGS[kind]))
    if name == first:
        return
    (loss, gradient), (other_loss, other_gradient) = expected(kind, name), expected(kind, first)
    off = max(difference(gradient[parameter_name], other_gradient[parameter_name]) for parameter_name in gradient)
    assert off > 1e-3, f"{name} gives the gradients of {first}, so no test would see it ignored"
    if name not in ("NLL of the positive", "value head alone"):  # values may be alike, gradients are not
        assert abs(loss - other_loss) > 1e-5


@pytest.mark.parametrize("settings", [{}, {"ratio": "sequence"}, {"entropy": 0.2}])
def test_log_probs_are_at_the_temperature_of_the_batch(settings: dict[str, Any]) -> None:
    model, batch = model_and_batch()
    cool = replace(batch, temperature=0.7)
    loss, _ = run(model, cool, PolicyGradient(**settings), budget=20)
    expected = plain.PLAIN["policy"](model, cool, **settings)
    assert_equal(loss, expected, "loss")
    assert abs(float((expected - plain.PLAIN["policy"](model, batch, **settings)).detach())) > 1e-5
    wanted_gradients = gradients(model, expected)
    for parameter, gradient in gradients(model, loss).items():
        assert_equal(gradient, wanted_gradients[parameter], f"gradient of {parameter}")


ALL: dict[str, Any] = {
    "dual_clip": 1.3,
    "clip_high": 0.3,
    "correction": RolloutCorrection(truncate=(0.0, 1.2)),
    "kl": ReferenceKL(coefficient=0.3),
}


@pytest.mark.parametrize(
    "settings", [ALL, {}, ALL | {"over": "sequence_weights"}, ALL | {"ratio": "sequence"}, ALL | {"ratio": "on_policy"}]
)
def test_metrics_equal_the_plain_ones(settings: dict[str, Any]) -> None:
    model, batch = model_and_batch()
    _, metrics = run(model, batch, PolicyGradient(**settings), budget=20)
    with torch.no_grad():
        _, expected = plain.policy_with_metrics(model, batch, **settings)
    if not settings:
        assert not metrics.keys() & {"correction", "corrected", "kl", "clip_ratio/dual"}
    if settings == ALL:
        fractions = ("clip_ratio/low", "clip_ratio/high", "clip_ratio/dual", "corrected")
        assert all(0 < metrics[name] < 1 for name in fractions)
    for name, number in metrics.items():
        assert number == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_tokens_with_zero_weight_are_not_projected() -> None:
    """Columns may hold anything where the weight is zero; the gradient stays finite and the same."""
    model, batch = model_and_batch()
    for settings in ({}, ALL, ALL | {"ratio": "sequence"}, {"surrogate": "cispo", "ratio": "on_policy"}):
        objective = PolicyGradient(**settings)
        loss, _ = run(model, batch, objective, budget=20)
        spoilt = dict(batch.columns)
        for name in ("old_logprobs", "rollout_logprobs", "reference_logprobs", "advantages"):
            spoilt[name] = [
                entry.where(mask > 0, torch.nan)
                for entry, mask in zip(batch.columns[name], batch.columns["response_mask"], strict=True)
            ]
        unchanged, _ = run(model, Batch(batch.sequences, spoilt), objective, budget=20)
        assert_equal(unchanged, loss)
        expected_gradients = gradients(model, loss)
        for name, gradient in gradients(model, unchanged).items():
            assert_equal(gradient, expected_gradients[name], name)


def test_losses_of_microbatches_add_up_for_any_split() -> None:
    model, batch = model_and_batch()
    for settings in (ALL, ALL | {"ratio": "sequence", "length": 3.0}):
        full_loss, metrics = run(model, batch, PolicyGradient(**settings), budget=64)
        parts, same_metrics = run(model, batch, PolicyGradient(**settings), budget=11)
        assert_equal(parts, full_loss)
        assert same_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)

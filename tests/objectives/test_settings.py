"""Invalid settings, missing columns and split pairs are refused with clear errors."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from postlude import LanguageModel, OutputInputs, pack
from postlude.engine.normalizer import LossNormalizer
from postlude.objectives import (
    SFT,
    Distill,
    Loss,
    PolicyGradient,
    Preference,
    ReferenceKL,
    RolloutCorrection,
    ValueLoss,
    load_objective,
    weights,
)
from postlude.objectives.kl import estimate_kl
from tests.model.small import sequences, small_config, small_model


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: SFT(over="sequences"), "this loss has a value for each token"),
        (lambda: SFT(z_loss=-1.0), "z_loss is -1"),
        (lambda: Preference(loss_type="hinge"), "loss_type is 'hinge', but the choices are 'sigmoid', 'ipo'"),
        (lambda: Preference(beta=0.0), "beta is 0, but it must be a number above 0"),
        (lambda: Preference(label_smoothing=0.5), "Swap the completions"),
        (lambda: Preference(loss_type="ipo", margin=1.0), "a margin of its own"),
        (lambda: PolicyGradient(surrogate="trpo"), "'clip', 'cispo', 'reinforce'"),
        (lambda: PolicyGradient(ratio="none"), "'token', 'sequence', 'on_policy'"),
        (lambda: PolicyGradient(clip_low=1.5), "a ratio is never below 0"),
        (lambda: PolicyGradient(clip_high=-0.1), "clip_high is -0.1"),
        (lambda: PolicyGradient(dual_clip=1.0), "dual_clip is 1, but it must be a number above 1"),
        (lambda: PolicyGradient(surrogate="cispo", dual_clip=3.0), "bounds the clipped surrogate"),
        (lambda: PolicyGradient(surrogate="reinforce", ratio="sequence"), "uses no ratio"),
        (lambda: PolicyGradient(length=0), "length is 0"),
        (lambda: ReferenceKL(coefficient=0.1, estimator="k1", gradient="estimator"), "restrains nothing"),
        (lambda: ReferenceKL(coefficient=float("nan")), "coefficient is nan"),
        (lambda: RolloutCorrection(truncate=(2.0, 1.0)), "0 ≤ low < high"),
        (lambda: RolloutCorrection(level="group"), "'token', 'sequence'"),
        (lambda: ValueLoss(clip=0.0), "clip is 0"),
        (lambda: Distill(forward=1.5), "of at least 0 and of at most 1"),
        (lambda: Distill(forward=0.5, outside="ignore"), "moving the student away"),
        (lambda: weights([[1]], "mean"), "'tokens', 'sequences', 'groups'"),
        (lambda: weights([[1]], "groups"), "needs the group of each of 1 sequences"),
    ],
)
def test_invalid_settings_are_refused(build: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        build()


def run(objective: Any, budget: int = 64, **columns: Any) -> list[Loss]:
    model = LanguageModel(small_config("[*-]"), value_head=True)
    microbatches = pack(sequences(5, 4, 6, 3), budget=budget, columns=columns)
    return [model(microbatch, output_processor=lambda inputs, _: objective(inputs)) for microbatch in microbatches]


def test_error_names_missing_columns() -> None:
    ones = [1.0] * 4
    for objective, column in [
        (SFT(over="loss_mask"), "loss_mask"),
        (PolicyGradient(over="tokens"), "advantages"),
        (Preference(), "response_mask"),
        (ValueLoss(over="tokens"), "returns"),
        (Distill(), "teacher_ids"),
    ]:
        with pytest.raises(LookupError, match=f'no column "{column}"'):
            run(objective)
    with pytest.raises(LookupError, match='no column "old_logprobs"'):
        run(PolicyGradient(over="tokens"), advantages=ones)
    run(PolicyGradient(over="tokens", ratio="on_policy"), advantages=ones)
    with pytest.raises(LookupError, match='no column "rollout_logprobs"'):
        run(PolicyGradient(over="tokens", correction=RolloutCorrection()), advantages=ones, old_logprobs=ones)


def test_columns_of_the_wrong_shape_are_refused() -> None:
    two = [torch.ones(length, 2) for length in (5, 4, 6, 3)]
    with pytest.raises(ValueError, match=r"weights are \[18\], one per token"):
        run(SFT(over="mask"), mask=two)
    with pytest.raises(ValueError, match=r"must both be \[tokens, k\]"):
        run(Distill(), teacher_ids=two, teacher_logprobs=[1.0] * 4)


def test_error_of_a_missing_critic_says_how_to_add_one() -> None:
    model = small_model("[*-]")
    (microbatch,) = pack(sequences(5, 4), budget=64, columns={"returns": [1.0, 2.0]})
    with pytest.raises(ValueError, match=r"no value head: make it with Engine\(\.\.\., critic=True\)"):
        model(microbatch, output_processor=lambda inputs, _: ValueLoss(clip=None, over="tokens")(inputs))


def test_a_split_pair_is_refused() -> None:
    objective = Preference(reference=False, mask="tokens")
    (loss,) = run(objective)
    first, two = run(objective, budget=9)  # by luck, a pair in each
    torch.testing.assert_close(torch.cat([first.values, two.values]).sort().values, loss.values.sort().values)
    with pytest.raises(ValueError, match=r"sequence \d, the .* completion of pair \d, is in microbatch \d without"):
        run(objective, budget=7)
    model = small_model("[*-]")
    (odd,) = pack(sequences(5, 4, 6), budget=64)
    with pytest.raises(ValueError, match=r"sequence 2, the chosen completion of pair 1.*sequence 3"):
        model(odd, output_processor=lambda inputs, _: objective(inputs))


def test_an_empty_microbatch_adds_nothing() -> None:
    model = small_model("[*-]")
    columns = {"advantages": [1.0, 2.0], "old_logprobs": [-1.0, -2.0]}
    *_, empty = microbatches = pack(sequences(5, 4), budget=9, columns=columns, multiple_of=3)
    assert len(empty) == 0
    scale = LossNormalizer(microbatches)
    for objective in (
        SFT(),
        Preference(reference=False, mask="tokens"),
        PolicyGradient(over="tokens"),
        PolicyGradient(over="tokens", ratio="sequence", length=2.0),
    ):
        loss = model(empty, output_processor=lambda inputs, _, objective=objective: objective(inputs))
        assert float(scale.loss(loss, empty).detach()) == 0.0


def test_weights_count_what_their_names_state() -> None:
    masks = [[1, 1, 0, 1], [0, 1, 1, 1], [0, 0, 0], [0, 1, 0, 0, 1]]
    tokens = weights(masks)
    assert [mask.tolist() for mask in tokens[:2]] == [[0, 1, 0, 1], [0, 1, 1, 1]]  # nothing predicts the first
    by_sequence = weights(masks, "sequences")
    assert [float(weights.sum()) for weights in by_sequence] == pytest.approx([1, 1, 0, 1])
    assert by_sequence[0].tolist() == [0, 0.5, 0, 0.5]
    by_prompt = weights(masks, "groups", groups=["a", "a", "b", "c"])
    assert [float(weights.sum()) for weights in by_prompt] == pytest.approx([0.4, 0.6, 0.0, 1.0])


def test_gradient_of_kl_estimators_is_that_of_the_expected_kl() -> None:
    """Summed over the vocabulary with probabilities, it is the gradient of Σ p · log(p / q)."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    p = logprobs.exp().detach()

    def gradient_of(estimator: Any, gradient: Any) -> torch.Tensor:
        penalty = ReferenceKL(coefficient=1.0, estimator=estimator, gradient=gradient)
        old = logprobs.detach()  # the tokens are the policy's own
        return torch.autograd.grad((p * penalty(logprobs, reference, old)).sum(), logits, retain_graph=True)[0]

    for estimator, gradient in (
        ("k1", "expectation"),
        ("k3", "expectation"),
        ("k3", "importance"),
        ("k2", "estimator"),
    ):
        torch.testing.assert_close(gradient_of(estimator, gradient), expected)
    assert (gradient_of("k3", "estimator") - expected).abs().max() > 0.01  # biased, as documented
    exact = (p * (logprobs - reference)).sum()
    torch.testing.assert_close((p * estimate_kl(logprobs, reference, "k3")).sum(), exact)
    torch.testing.assert_close((p * estimate_kl(logprobs, reference, "k1")).sum(), exact)


@pytest.mark.parametrize("gap", [-45.0, -19.0, -3.0, 0.5, 5.0, 18.0, 19.75, 20.25, 25.0, 60.0])
def test_kl_penalty_gradient_points_to_the_reference_at_any_distance(gap: float) -> None:
    """In fp32, where e²⁰ would swallow the difference; beyond the bound the gradient is that at the bound."""
    clamped = max(-20.0, min(20.0, gap))
    for estimator, gradient, pull in (
        ("k3", "expectation", clamped),
        ("k3", "importance", clamped * math.exp(0.25)),
        ("k3", "estimator", math.expm1(clamped)),
        ("k2", "estimator", clamped),
        ("k1", "expectation", clamped - 1.0),
    ):
        logprob = torch.tensor([-70.0], requires_grad=True)
        penalty = ReferenceKL(coefficient=2.0, estimator=estimator, gradient=gradient)
        value = penalty(logprob, logprob.detach() + gap, logprob.detach() - 0.25)
        value.backward()
        expected = estimate_kl(logprob.detach(), logprob.detach() + gap, estimator)
        torch.testing.assert_close(value.detach(), 2.0 * expected * (math.exp(0.25) if gradient == "importance" else 1))
        torch.testing.assert_close(logprob.grad, torch.tensor([-2.0 * pull]), msg=f"{estimator} {gradient}")


@pytest.mark.parametrize("clip", [None, 0.2])
def test_critic_ignores_tokens_with_zero_weight(clip: float | None) -> None:
    results = []
    for filler in (0.0, float("nan")):
        model = LanguageModel(small_config("[*-]"), value_head=True)
        columns = {
            "response_mask": [[0.0, 0.0, 1.0, 1.0, 0.0]],
            "returns": [[filler, filler, 1.0, 0.5, filler]],
            "old_values": [[filler, filler, 0.1, -0.1, filler]],
        }
        (microbatch,) = pack(sequences(5), budget=8, columns=columns)
        loss = model(microbatch, output_processor=lambda inputs, _: ValueLoss(clip=clip)(inputs))
        LossNormalizer([microbatch]).loss(loss, microbatch).backward()
        results.append(model.value_head.weight.grad)
    assert results[0].abs().max() > 0
    assert torch.equal(*results)


OWN = """
from __future__ import annotations
from dataclasses import dataclass
from postlude.objectives import Loss

@dataclass(frozen=True)
class Scaled:
    factor: float = 1.0
    def __call__(self, inputs):
        return self.factor * half(inputs)

def half(inputs, factor=0.5):
    return Loss(-factor * inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets).logprob)

def two(inputs, context):
    return None

number = 3
"""


def test_objective_is_loaded_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    (plain,) = run(lambda inputs: Loss(-inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets).logprob))
    for objective, factor in [
        (load_objective(f"{path}:half"), 0.5),
        (load_objective(f"{path}:half", {"factor": 2.0}), 2.0),
        (load_objective(f"{path}:Scaled", {"factor": 3.0}), 1.5),
    ]:
        (loss,) = run(objective)
        torch.testing.assert_close(loss.values, factor * plain.values)
    with pytest.raises(ValueError, match="names no function of OutputInputs that returns a Loss"):
        load_objective(str(path))
    with pytest.raises(TypeError, match="missing a required argument: 'context'"):
        load_objective(f"{path}:two")
    with pytest.raises(TypeError, match='has no setting "facter"; did you mean "factor"'):
        load_objective(f"{path}:Scaled", {"facter": 3.0})


def test_an_objective_is_a_function_of_the_output_inputs() -> None:
    def custom_objective(inputs: OutputInputs) -> Loss:
        return SFT()(inputs) + 0.5 * SFT(over="mask")(inputs)

    (loss,) = run(custom_objective, mask=[1.0, 0.0, 1.0, 1.0])
    assert [part.over for part in loss.terms()] == ["tokens", "mask"]

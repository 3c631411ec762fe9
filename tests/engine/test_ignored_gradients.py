"""Values without a weight may be NaN or infinite: gradients equal those with any other number in their place."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from postlude import Batch, Engine, Layout, Loss, OutputInputs
from postlude.objectives import MTP, SFT, ActorCritic, Distill, PolicyGradient, ValueLoss
from postlude.objectives.mtp import MTPProcessor
from tests.equality import assert_equal
from tests.meshes import mesh
from tests.model.small import sequences, small_config

AHEAD = small_config("[*-][*-]/[*-]", tied_head=False)
LENGTHS, PROMPTS = (9, 6, 12, 7), (4, 3, 5, 3)


def score(inputs: OutputInputs) -> Tensor:
    return inputs.microbatch.column("score")


def logprobs(inputs: OutputInputs) -> Loss:
    stats = inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets, entropy=True, lse=True)
    assert stats.entropy is not None
    assert stats.lse is not None
    return Loss(score(inputs) * (stats.logprob + stats.entropy + stats.lse), "mask")


def divided(inputs: OutputInputs) -> Loss:
    """A quotient whose derivative is not finite where the score is zero."""
    stats = inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets)
    return Loss(stats.logprob / score(inputs).nan_to_num(0.0), "mask")


def logprobs_at(inputs: OutputInputs) -> Loss:
    targets = inputs.microbatch.targets
    _, values = inputs.head.logprobs_at(inputs.hidden, targets, targets.clamp_min(0)[:, None])
    return Loss(score(inputs) * values[:, 0], "mask")


def logits(inputs: OutputInputs) -> Loss:
    return Loss(score(inputs) * inputs.head.logits(inputs.hidden).float().logsumexp(-1), "mask")


def states(inputs: OutputInputs) -> Loss:
    return Loss(score(inputs) * inputs.gather(inputs.hidden.float().square().mean(-1)), "mask")


def values(inputs: OutputInputs) -> Loss:
    return Loss(score(inputs) * inputs.head.values(inputs.hidden).exp(), "mask") + logprobs(inputs)


def with_sequences(inputs: OutputInputs) -> Loss:
    logprob = inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets).logprob
    return logprobs(inputs) + Loss(-inputs.microbatch.sequence_sum(logprob), "sequences")


def at_depth(depth: int, inputs: OutputInputs, context: Any) -> Tensor:
    return score(inputs) * inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets).logprob


PROCESSOR: MTPProcessor = at_depth
OBJECTIVES: dict[str, Any] = {
    **{function.__name__: function for function in (logprobs, divided, logprobs_at, logits, states, values)},
    "with sequences": with_sequences,
    "depths": MTP(objective=SFT(over="mask"), over="mask", processor=PROCESSOR),
    "policy and value": ActorCritic(policy=PolicyGradient(over="mask"), value=ValueLoss(over="mask")),
    "distill": Distill(over="mask", nll=0.1),
}


def with_prompts_of(filler: float) -> Batch:
    """Returns a batch whose columns are arbitrary where the mask is 0."""
    generator = torch.Generator().manual_seed(0)
    masks = [torch.arange(length) >= prompt for length, prompt in zip(LENGTHS, PROMPTS, strict=True)]
    columns: dict[str, list[Tensor]] = {"mask": [mask.float() for mask in masks]}
    for name in ("score", "advantages", "old_logprobs", "returns", "old_values"):
        numbers = [-1 - torch.rand(length, generator=generator) for length in LENGTHS]
        columns[name] = [row.where(mask, filler) for row, mask in zip(numbers, masks, strict=True)]
    teacher = [torch.randn(length, 3, generator=generator).log_softmax(-1) - 0.5 for length in LENGTHS]
    columns["teacher_logprobs"] = [row.where(mask[:, None], filler) for row, mask in zip(teacher, masks, strict=True)]
    columns["teacher_ids"] = [torch.arange(3).expand(length, 3).clone() for length in LENGTHS]
    return Batch(sequences(*LENGTHS), columns)


def gradients(group: Any, layout: str, names: list[str], options: dict[str, Any]) -> list[list[dict[str, Tensor]]]:
    """Returns loss and gradients of each objective, with numbers, NaN and infinity at the tokens of prompts."""
    engine = Engine(AHEAD, mesh=mesh(Layout.parse(layout)), budget=24, critic=True, mtp=True, **options)
    for name, parameter in engine.parameters.items():
        if name.startswith("value_head"):
            torch.nn.init.constant_(parameter, 0.1)
    results = []
    for name in names:
        steps = []
        for filler in (0.5, math.nan, math.inf):
            result = engine.forward_backward(with_prompts_of(filler), OBJECTIVES[name])
            step = {parameter: tensor.clone() for parameter, tensor in engine.gradients()}
            steps.append({"loss": torch.tensor(result.loss), "norm": torch.tensor(engine.grad_norm()), **step})
            engine.zero_grad()
        results.append(steps)
    return results


@pytest.mark.parametrize(
    ("layout", "names", "options"),
    [
        ("", list(OBJECTIVES), {}),
        ("tp=2", ["states", "values", "depths"], {}),
        ("cp=2", ["values"], {}),
        ("pp=2", ["logprobs"], {}),
        ("dp_shard=2", ["depths"], {"overlap": True}),
    ],
)
def test_what_has_no_weight_has_no_gradient(ranks: Any, layout: str, names: list[str], options: dict[str, Any]) -> None:
    for results in ranks(Layout.parse(layout).world_size, gradients, layout, names, options):
        for name, (expected, *others) in zip(names, results, strict=True):
            for actual in others:
                for key, tensor in expected.items():
                    assert_equal(actual[key], tensor, f"{name}: {key}")


def weighted_nan(group: Any) -> tuple[float, bool]:
    engine = Engine(AHEAD, mesh=mesh(Layout()), budget=64)
    batch = with_prompts_of(0.5)
    batch.columns["score"][0][-1] = math.nan
    engine.forward_backward(batch, logprobs)
    step = engine.optimizer_step()
    return step.grad_norm, step.skipped


def test_a_weighted_nan_is_not_hidden(ranks: Any) -> None:
    ((norm, skipped),) = ranks(1, weighted_nan)
    assert math.isnan(norm)
    assert skipped

"""Summed losses over given targets equal their float64 formulas: loss, log-probs and every gradient."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from postlude import LanguageModel, Layout, Loss, OutputInputs, pack
from postlude.data import Batch
from postlude.engine import Engine
from postlude.hf.read_model import model_from_hf
from postlude.model.parallel import local_shard, region
from postlude.objectives import MTP, ActorCritic, Objective, ValueLoss
from postlude.objectives.summed import SUM, SUMMED_LOSSES
from tests.conftest import Ranks
from tests.equality import TOLERANCE
from tests.meshes import mesh
from tests.model.small import sequences, small_config
from tests.objectives.test_layouts import tiny

LENGTHS = (9, 6, 1, 8, 11, 5)  # positions; a sequence has one more token
K = 3
Columns = dict[str, Tensor]


def clipped(ratio: Tensor, columns: Columns, low: float, high: float) -> Tensor:
    low_bounds = columns.get("clip_low_threshold", torch.full_like(ratio, low))
    high_bounds = columns.get("clip_high_threshold", torch.full_like(ratio, high))
    return torch.stack([r.clamp(float(a), float(b)) for r, a, b in zip(ratio, low_bounds, high_bounds, strict=True)])


def cross_entropy(p: Tensor, c: Columns) -> Tensor:
    return -(c["weights"] * p).sum()


def importance_sampling(p: Tensor, c: Columns) -> Tensor:
    return -((p - c["logprobs"]).exp() * c["advantages"]).sum()


def ppo(p: Tensor, c: Columns, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2) -> Tensor:
    ratio = (p - c["logprobs"]).exp()
    bounded = clipped(ratio, c, clip_low_threshold, clip_high_threshold)
    return -torch.minimum(ratio * c["advantages"], bounded * c["advantages"]).sum()


def cispo(p: Tensor, c: Columns, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2) -> Tensor:
    bounded = clipped((p - c["logprobs"]).exp().detach(), c, clip_low_threshold, clip_high_threshold)
    return -(bounded * p * c["advantages"]).sum()


def dro(p: Tensor, c: Columns, beta: float = 0.05) -> Tensor:
    return -(p * c["advantages"] - 0.5 * beta * (p - c["logprobs"]) ** 2).sum()


def gspo(p: Tensor, c: Columns, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2) -> Tensor:
    in_mask = c["sequence_ratio_mask"] != 0
    log_s = (p.detach() - c["logprobs"])[in_mask].mean() if in_mask.any() else torch.zeros((), dtype=p.dtype)
    ratio = (log_s + p - p.detach()).exp()
    bounded = clipped(ratio, c, clip_low_threshold, clip_high_threshold)
    return -torch.minimum(ratio * c["advantages"], bounded * c["advantages"]).sum()


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {  # the loss, its settings, whether bounds are given per token
    "cross_entropy": ("cross_entropy", {}, False),
    "several targets": ("cross_entropy", {}, False),
    "importance_sampling": ("importance_sampling", {}, False),
    "ppo": ("ppo", {}, False),
    "ppo narrow": ("ppo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.02}, False),
    "ppo bounds per token": ("ppo", {}, True),
    "cispo": ("cispo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}, False),
    "cispo bounds per token": ("cispo", {}, True),
    "dro": ("dro", {"beta": 0.7}, False),
    "gspo": ("gspo", {}, False),
    "gspo narrow": ("gspo", {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}, False),
}


@functools.cache
def full_model() -> LanguageModel:
    model = LanguageModel(model_from_hf(tiny())[1])
    model.reset(0)
    return model.double()


@functools.cache
def make_inputs(case: str) -> tuple[list[Tensor], list[Columns]]:
    """Returns inputs [length] and columns [length], or [length, K], of each sequence, with random targets."""
    generator = torch.Generator().manual_seed(7)
    model = full_model()

    def random(length: int) -> Tensor:
        return torch.randn((length, K) if case == "several targets" else (length,), generator=generator)

    inputs, columns = [], []
    for length in LENGTHS:
        tokens = torch.randint(model.config.vocab_size, (length,), generator=generator)
        shape = (length, K) if case == "several targets" else (length,)
        targets = torch.randint(model.config.vocab_size, shape, generator=generator)
        row = {"target_tokens": targets, "weights": random(length), "advantages": random(length)}
        with torch.no_grad():
            row["logprobs"] = logprobs(tokens, targets).float() + 0.3 * random(length)
        row["sequence_ratio_mask"] = (random(length) > 0).float()
        if CASES[case][2]:
            row["clip_low_threshold"] = 0.8 + 0.1 * random(length).abs()
            row["clip_high_threshold"] = 1.2 + 0.1 * random(length).abs()
        inputs.append(tokens)
        columns.append(row)
    return inputs, columns


def logprobs(tokens: Tensor, targets: Tensor) -> Tensor:
    (alone,) = pack([tokens], budget=len(tokens))
    rows = full_model()(alone).log_softmax(-1)
    assert rows.dtype == torch.float64
    return rows.gather(1, targets.view(len(tokens), -1)).view(targets.shape)


@functools.cache
def expected(case: str) -> tuple[float, list[Tensor], dict[str, Tensor]]:
    loss_name, settings, _ = CASES[case]
    model, total, outputs = full_model(), torch.zeros((), dtype=torch.float64), []
    for tokens, columns in zip(*make_inputs(case), strict=True):
        p = logprobs(tokens, columns["target_tokens"])
        outputs.append(p.detach())
        total = total + FORMULAS[loss_name](p, {name: column.double() for name, column in columns.items()}, **settings)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return float(total.detach()), outputs, dict(zip(names, torch.autograd.grad(total, parameters), strict=True))


def batch_of(case: str) -> Batch:
    """Returns a batch whose sequences have one more token: a target becomes the next token, with its columns."""
    inputs, rows = make_inputs(case)

    def shifted(values: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(values[:1]), values])

    columns = {name: [shifted(row[name]) for row in rows] for name in rows[0]}
    return Batch([torch.cat([tokens, tokens[-1:]]) for tokens in inputs], columns)


@functools.cache
def engine_of(layout: str) -> Engine:
    return Engine(tiny(), mesh=mesh(Layout.parse(layout)), budget=24)


def compare(group: dist.ProcessGroup, layout: str) -> dict[str, dict[str, float]]:
    """Returns the errors of loss, log-probs and gradients of each case relative to float64."""
    engine, differences = engine_of(layout), {}
    for case, (loss_name, settings, _) in CASES.items():
        loss, expected_rows, gradients = expected(case)
        batch, objective = batch_of(case), SUMMED_LOSSES[loss_name](**settings)
        engine.zero_grad()
        evaluated = engine.evaluate_loss(batch, objective, counts=SUM)
        assert all(parameter.grad is None for parameter in engine.parameters.values())
        result = engine.forward_backward(batch, objective, counts=SUM)
        off = {"loss": abs(result.loss - loss) / abs(loss), "evaluated": abs(evaluated.loss - loss) / abs(loss)}
        for outputs in (result.outputs, evaluated.outputs):
            returned = torch.cat([rows[1:].flatten() for rows in outputs["logprobs"]])
            expected_outputs = torch.cat([rows.flatten() for rows in expected_rows])
            off["logprobs"] = max(
                off.get("logprobs", 0.0),
                float((returned - expected_outputs).abs().max() / expected_outputs.abs().max()),
            )
        assert [len(rows) for rows in result.outputs["logprobs"]] == [length + 1 for length in LENGTHS]
        for name, parameter in engine.parameters.items():
            assert parameter.grad is not None
            expected_gradient = gradients[name]
            off[name] = float(
                (local_shard(parameter.grad) - expected_gradient[region(parameter)]).abs().max()
                / expected_gradient.abs().max()
            )
        differences[case] = off
    assert len({round(expected(case)[0], 6) for case in CASES}) == len(CASES)  # every setting and bound has an effect
    return differences


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        ("tp=1", 1),
        ("cp=2", 2),
        *(pytest.param(layout, 2, marks=pytest.mark.thorough) for layout in ("tp=2", "pp=2", "dp_shard=2")),
    ],
)
def test_equals_the_float64_formula(ranks: Ranks, layout: str, size: int) -> None:
    for differences in ranks(size, compare, layout):
        for case, off in differences.items():
            assert max(off.values()) <= TOLERANCE, (
                case,
                {name: value for name, value in off.items() if value > TOLERANCE},
            )


def test_a_setting_out_of_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match="clip_low_threshold is -1, but it must be a number of at least 0"):
        SUMMED_LOSSES["ppo"](clip_low_threshold=-1.0)  # type: ignore[call-arg]


def wrapped_outputs(group: dist.ProcessGroup) -> list[list[Tensor]]:
    """Returns the outputs of an objective, of what wraps it, and of a sum in which it is the second."""
    engine = Engine(small_config("[*-]/[*-]"), budget=32, critic=True)
    tokens = sequences(9, 5)
    ones = [torch.ones(len(sequence)) for sequence in tokens]
    batch = Batch(tokens, {"target_tokens": tokens, "weights": ones, "returns": ones})
    inner, value = SUMMED_LOSSES["cross_entropy"](), ValueLoss(clip=None, over="tokens")
    critic = ActorCritic(policy=inner, value=value)
    objectives = [inner, critic, MTP(objective=critic), ValueFirst(value, inner)]
    counts = {"tokens": 1.0, "tokens +1": 1.0}
    return [engine.evaluate_loss(batch, objective, counts).outputs["logprobs"] for objective in objectives]


@dataclass(frozen=True)
class ValueFirst:
    value: ValueLoss
    policy: Objective
    has_outputs: ClassVar[bool] = True

    def __call__(self, inputs: OutputInputs) -> Loss:
        return self.value(inputs) + self.policy(inputs)


def test_outputs_of_wrapped_and_added_losses_are_returned(ranks: Ranks) -> None:
    ((expected_outputs, *others),) = ranks(1, wrapped_outputs)
    assert [len(values) for values in expected_outputs] == [9, 5]
    for outputs in others:
        assert all(torch.equal(*pair) for pair in zip(outputs, expected_outputs, strict=True))

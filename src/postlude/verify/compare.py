"""compare: run one case in its layout and on one rank, and measure how far apart they are.

The one rank is no engine: a plain model, each microbatch in turn, autograd alone. What both share is the objective.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from postlude.data import Batch, pack, unpack
from postlude.engine import Engine
from postlude.engine.scale import Scale
from postlude.hf.load import Source, adapt, experts_in, load_model, read_config
from postlude.layout import Mesh
from postlude.model import LanguageModel
from postlude.verify.cases import BUDGET, Case, batches, objective_named

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Report:
    """How far a layout is from one rank, relative to the largest value: the loss, per-token results, every gradient."""

    case: Case
    loss: float
    logprob: float
    entropy: float
    gradients: Mapping[str, float]

    @property
    def worst(self) -> tuple[str, float]:
        """The gradient that is furthest off. One that is not a number is as far off as can be."""
        return max(self.gradients.items(), key=lambda item: float("inf") if item[1] != item[1] else item[1])

    def passes(self, tolerance: float = TOLERANCE) -> bool:
        """Whether everything is within the tolerance."""
        return all(off <= tolerance for off in (self.loss, self.logprob, self.entropy, *self.gradients.values()))


@dataclass(frozen=True)
class Answer:
    """What is compared of one batch."""

    loss: float
    logprob: Tensor
    entropy: Tensor
    gradients: Mapping[str, Tensor]


def compare(case: Case, *, mesh: Mesh | None = None, device: torch.device | str = "cpu") -> Report | None:
    """On every rank of the case's layout. The first rank gets the report, the others None."""
    source = _source(case)
    mesh = mesh or Mesh(case.layout, torch.device(device).type)
    engine = Engine(
        source,
        mesh=mesh,
        device=device,
        budget=BUDGET,
        compute_dtype=torch.float32,
        recompute=case.recompute,
        seed=case.seed,
    )
    todo = batches(engine.config.vocab_size, case.seed)
    found = {name: _in_layout(engine, batch, case.objective) for name, batch in todo.items()}
    if dist.get_rank() != 0:
        return None
    expected = {name: _on_one_rank(source, batch, case, device) for name, batch in todo.items()}
    return _report(case, found, expected)


def _source(case: Case) -> Source:
    """The source, with the case's changes to its config; a fresh model's weights then follow them."""
    if case.tied is None and case.initializer_range is None:
        return case.source
    hf: PretrainedConfig = read_config(case.source)
    if case.tied is not None:
        hf.tie_word_embeddings = case.tied
    if case.initializer_range is not None:
        hf.initializer_range = case.initializer_range
    return hf


def _in_layout(engine: Engine, batch: Batch, objective: str) -> Answer:
    engine.zero_grad()
    result = engine.forward_backward(batch, objective_named(objective))
    gradients = {name: tensor.cpu() for name, tensor in engine.gradients()}
    scores = engine.logprobs(batch, entropy=True)
    assert scores.entropy is not None
    return Answer(result.loss, torch.cat(scores.logprob), torch.cat(scores.entropy), gradients)


def _on_one_rank(source: Source, batch: Batch, case: Case, device: torch.device | str) -> Answer:
    model = load_model(source, dtype=torch.float32, device=device, seed=case.seed)
    objective = objective_named(case.objective)
    microbatches = pack(batch.sequences, budget=BUDGET, columns=batch.columns, multiple_of=case.layout.dp)
    scale = Scale(microbatches)
    loss = 0.0
    for microbatch in (each.to(device) for each in microbatches):
        added = model(microbatch, output_processor=lambda inputs, _: scale.loss(objective(inputs), inputs.microbatch))
        added.backward()
        loss += float(added.detach())
    gradients = _gradients(model, source)
    model.eval()
    logprobs, entropies = [], []
    with torch.no_grad():
        for microbatch in (each.to(device) for each in microbatches):
            stats = model(
                microbatch,
                output_processor=lambda inputs, _: inputs.head.logprobs(
                    inputs.hidden, inputs.microbatch.targets, entropy=True
                ),
            )
            logprobs.append(stats.logprob.cpu())
            entropies.append(stats.entropy.cpu())
    logprob, entropy = (torch.cat(unpack(microbatches, values)) for values in (logprobs, entropies))
    return Answer(loss, logprob, entropy, gradients)


def _gradients(model: LanguageModel, source: Source) -> dict[str, Tensor]:
    """By Hugging Face names; zero where nothing depends on a parameter."""
    family, config = adapt(read_config(source))
    found = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for expert, theirs in family.pieces(name, experts_in(config)):
            found[theirs] = (gradient if expert is None else gradient[expert]).cpu()
    return found


def _report(case: Case, found: Mapping[str, Answer], expected: Mapping[str, Answer]) -> Report:
    loss = logprob = entropy = 0.0
    gradients: dict[str, float] = {}
    for name, answer in expected.items():
        ours = found[name]
        loss = max(loss, _off(torch.tensor(ours.loss), torch.tensor(answer.loss)))
        logprob = max(logprob, _off(ours.logprob, answer.logprob))
        entropy = max(entropy, _off(ours.entropy, answer.entropy))
        for parameter, gradient in answer.gradients.items():
            off = _off(ours.gradients[parameter], gradient)
            gradients[parameter] = max(gradients.get(parameter, 0.0), off)
    return Report(case, loss, logprob, entropy, gradients)


def _off(found: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest expected magnitude."""
    if not torch.isfinite(found).all():
        return float("inf")
    scale = expected.double().abs().max().clamp_min(1e-12)
    return float((found.double() - expected.double()).abs().max() / scale)

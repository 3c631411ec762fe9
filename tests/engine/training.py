"""Small models, batches and steps for the engine's tests. Weights are large, so that outputs depend on the tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from postlude import Layout
from postlude.data import Batch, pack
from postlude.engine import AdamW, Engine, LRSchedule
from postlude.engine.normalizer import LossNormalizer
from postlude.hf.export import hf_tensors
from postlude.hf.read_model import Source, model_from_hf, read_description
from postlude.model import LanguageModel, OutputInputs
from postlude.objectives import Loss, Objective, mean
from tests.meshes import mesh

BUDGET = 32
LENGTHS = (20, 17, 3, 25, 6, 11, 9, 14, 2, 12)  # four microbatches, whatever the layout
SCHEDULE = LRSchedule(shape="cosine", warmup=2, steps=20, floor=0.1)
ADAMW = AdamW(lr=1e-3, weight_decay=0.1, max_grad_norm=1.0, schedule=SCHEDULE)
# A step divides a gradient by its own size. With an eps as large as most gradients here, the rounding of small ones,
# which is another on every CPU, stays as small in the step.
DAMPED = replace(ADAMW, max_grad_norm=0.5, eps=1e-3)


def config(model: str, **changes: Any) -> PretrainedConfig:
    hf = read_description(model)
    for name, value in {"initializer_range": 0.1, **changes}.items():
        setattr(hf, name, value)
    return hf


def build(layout: str, source: Source, **options: Any) -> Engine:
    return Engine(source, mesh=mesh(Layout.parse(layout)), budget=BUDGET, **{"optimizer": ADAMW, **options})


def batch(seed: int, lengths: Sequence[int] = LENGTHS, vocab_size: int = 256) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        [torch.randint(vocab_size, (length,), generator=generator) for length in lengths],
        {
            "mask": [(torch.arange(length) >= length // 3).float() for length in lengths],
            "advantages": [float(torch.randn((), generator=generator)) for _ in lengths],
        },
    )


def policy(inputs: OutputInputs) -> Loss:
    """A weighted log-prob of tokens, plus one of whole sequences."""
    microbatch = inputs.microbatch
    logprob = inputs.head.logprobs(inputs.hidden, microbatch.targets).logprob
    scores = microbatch.sequence_sum(logprob * microbatch.column("mask"))
    tokens = Loss(-logprob * (1 + microbatch.column("advantages")), over="mask", metrics={"nll": mean(-logprob)})
    return tokens + 0.1 * Loss(-torch.nn.functional.logsigmoid(0.1 * scores), over="sequences")


def infinite_gradient(inputs: OutputInputs) -> Loss:
    """One token of the batch has an infinite gradient."""
    logprob = inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets).logprob
    spoilt = (inputs.microbatch.batch_indices == 7) * torch.tensor(1e38) * 1e38
    return Loss(logprob * torch.where(spoilt > 0, spoilt, 1.0))


def train(engine: Engine, seeds: Sequence[int], objective: Objective = policy) -> list[float]:
    """Runs one step per seed. Returns the losses."""
    losses = []
    for seed in seeds:
        losses.append(engine.forward_backward(batch(seed), objective).loss)
        engine.optimizer_step()
    return losses


def weights(engine: Engine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.stream_weights()}


def optimizer_state(engine: Engine) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": (value.to_local() if hasattr(value, "to_local") else value).clone()
        for name, parameter in engine.parameters.items()
        for key, value in engine.optimizer.state.get(parameter, {}).items()
    }


def bitwise_equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Returns whether the tensors are bit-identical and in the same order."""
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


class PlainTrainer:
    """The engine's reference: a full model, each microbatch in turn, torch's optimizer and clipping."""

    def __init__(self, hf: PretrainedConfig, optimizer: AdamW = ADAMW, seed: int = 0, value_head: bool = False) -> None:
        self.family, model = model_from_hf(hf)
        self.model = LanguageModel(model, value_head=value_head)
        self.model.reset(seed)
        self.config = optimizer
        decayed = [parameter for name, parameter in self.model.named_parameters() if name in self.model.matrices]
        not_matrices = [
            parameter for name, parameter in self.model.named_parameters() if name not in self.model.matrices
        ]
        groups = [
            {"params": decayed, "weight_decay": optimizer.weight_decay},
            {"params": not_matrices, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps)
        self.norms: list[float] = []
        self.rates: list[float] = []

    def backward(self, input_batch: Batch, objective: Objective = policy, multiple_of: int = 1) -> float:
        microbatches = pack(input_batch.sequences, budget=BUDGET, columns=input_batch.columns, multiple_of=multiple_of)
        scale, loss = LossNormalizer(microbatches), 0.0
        for microbatch in microbatches:
            added = self.model(
                microbatch, output_processor=lambda inputs, _: scale.loss(objective(inputs), inputs.microbatch)
            )
            added.backward()
            loss += float(added.detach())
        return loss

    def step(self, rate: float) -> None:
        limit = self.config.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), float("inf") if limit is None else limit)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.norms.append(float(norm))
        self.rates.append(rate)

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in hf_tensors(self.model, self.family)}


def error_text(action: Callable[[], Any]) -> str:
    """Returns type and message of the error that an action raises, or "nothing"."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def assert_refused(calls: Mapping[str, Callable[[], Any]]) -> None:
    """Asserts that each call raises an error with its sentence."""
    for sentence, call in calls.items():
        assert sentence in error_text(call), (sentence, error_text(call))

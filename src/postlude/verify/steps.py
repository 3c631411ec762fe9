"""Two optimizer steps of a comparison, with a value head and a checkpoint between them, and the scores after them.

The layout takes the second step in another engine, which gathers weights once per step and loads the checkpoint. The
one rank uses torch's own AdamW and clipping.
"""

from __future__ import annotations

import functools
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.data import Batch, Microbatch, unpack
from postlude.engine import Engine
from postlude.engine.adapters import stream_adapters
from postlude.engine.normalizer import LossNormalizer
from postlude.engine.result import topk_processor
from postlude.model import LanguageModel, MTPOptions, OutputInputs
from postlude.model.adapters import is_adapter
from postlude.model.parallel import local_shard, region
from postlude.objectives import Loss, Objective, ValueLoss
from postlude.optimizer import AdamW
from postlude.verify.adapters import pack_batch

# With an eps this large a step is nearly linear in the gradient, and does not magnify its rounding.
OPTIMIZER = AdamW(lr=0.5, eps=1.0, weight_decay=0.1, max_grad_norm=0.5)
VALUE_HEAD = "value_head.weight"
TOP = 5
CRITIC = ValueLoss(clip=None, over="response_mask")

Values = dict[str, Tensor]
"""What is compared: the gradient's norm at each step, and log-probs of the likeliest tokens, values and weights."""


@dataclass(frozen=True)
class WithCritic:
    """An objective plus the loss of a critic."""

    objective: Objective

    @property
    def mtp_options(self) -> MTPOptions | None:
        return getattr(self.objective, "mtp_options", None)

    def __call__(self, inputs: OutputInputs) -> Loss:
        return self.objective(inputs) + 0.5 * CRITIC(inputs)


@torch.no_grad()
def fill_value_head(parameters: Iterable[tuple[str, Tensor]], seed: int) -> None:
    """Fills the value head, whose zeros would hide its gradient to the trunk: the same in every layout."""
    for name, parameter in parameters:
        if name == VALUE_HEAD:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            full = torch.empty(parameter.shape).normal_(0.0, 0.1, generator=generator)
            local_shard(parameter).copy_(full[region(parameter)])


def steps_in_layout(build: Callable[..., Engine], objective: Objective, batch: Batch, seed: int) -> Values:
    """Returns what the engine computes. `build` makes an engine with further options, on every rank."""
    results: Values = {}
    with ExitStack() as stack:
        on_rank0 = dist.get_rank() == 0
        directory = [stack.enter_context(tempfile.TemporaryDirectory(prefix="postlude-verify-")) if on_rank0 else ""]
        dist.broadcast_object_list(directory)
        first = build(optimizer=OPTIMIZER)
        fill_value_head(first.parameters.items(), seed)
        results["gradient norm 1"] = _engine_step(first, objective, batch)
        first.save(f"{directory[0]}/checkpoint")
        del first
        second = build(optimizer=OPTIMIZER, gather_once=True)
        second.load(f"{directory[0]}/checkpoint")
        dist.barrier()
    results["gradient norm 2"] = _engine_step(second, objective, batch)
    results["top-k"] = torch.cat(second.topk(batch, TOP)[0])
    if second.options.critic:
        results["values"] = torch.cat(second.values(batch))
    weights = second.stream_weights() if not second.adapters.enabled else stream_adapters(second)
    return results | {name: tensor.cpu() for name, tensor in weights}


def _engine_step(engine: Engine, objective: Objective, batch: Batch) -> Tensor:
    engine.forward_backward(batch, objective)
    return torch.tensor(engine.optimizer_step().grad_norm)


def steps_on_one_rank(
    model: LanguageModel,
    objective: Objective,
    batch: Batch,
    seed: int,
    device: torch.device | str,
    to_streamed: Callable[[LanguageModel], Mapping[str, Tensor]],
) -> Values:
    """Returns what one rank computes. `to_streamed` returns the model's weights by the names of streamed ones."""
    fill_value_head(model.named_parameters(), seed)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    decayed = [parameter for name, parameter in trained.items() if name in model.matrices]
    others = [parameter for name, parameter in trained.items() if name not in model.matrices]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    config = OPTIMIZER
    optimizer = torch.optim.AdamW(
        groups, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )
    packed = pack_batch(batch, depths=len(model.config.pattern.mtp))
    microbatches = [microbatch.to(device) for microbatch in packed]
    results: Values = {}
    assert config.max_grad_norm is not None
    for step in (1, 2):
        _differentiate(model, microbatches, packed, objective)
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), config.max_grad_norm)
        results[f"gradient norm {step}"] = norm.cpu()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        score = topk_processor(TOP, model.config.vocab_size)
        run = functools.partial(_run, model, microbatches, packed)
        results["top-k"] = run(lambda inputs: score(inputs)["logprobs"])
        if model.value_head is not None:
            results["values"] = run(lambda inputs: inputs.head.values(inputs.hidden))
    return results | dict(to_streamed(model))


def _differentiate(
    model: LanguageModel, microbatches: list[Microbatch], packed: list[Microbatch], objective: Objective
) -> None:
    scale = LossNormalizer(packed)
    model.train()
    for microbatch in microbatches:
        loss = model(microbatch, output_processor=lambda inputs, _: objective(inputs))
        scale.loss(loss, microbatch).backward()


def _run(
    model: LanguageModel,
    microbatches: list[Microbatch],
    packed: list[Microbatch],
    compute: Callable[[OutputInputs], Tensor],
) -> Tensor:
    """Returns values of all tokens, in the batch's order."""
    values = [model(microbatch, output_processor=lambda inputs, _: compute(inputs)) for microbatch in microbatches]
    return torch.cat(unpack(packed, [value.cpu() for value in values]))


def adapter_weights(model: LanguageModel) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in model.named_parameters() if is_adapter(name)}

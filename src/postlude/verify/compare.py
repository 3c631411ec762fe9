"""compare: runs one case in its layout and on one rank, and measures the difference.

The one rank uses no engine: a plain model, one microbatch after the other, packed for one rank, and plain autograd.
Both share only the objective.

The layout takes its second optimizer step in another engine, which gathers weights once per step and loads the
checkpoint of the first. The one rank uses torch's own AdamW and clipping.
"""

from __future__ import annotations

import functools
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.data import Batch, Microbatch, unpack
from postlude.engine import Engine
from postlude.engine.adapters import stream_adapters
from postlude.engine.normalizer import LossNormalizer
from postlude.engine.options import EngineOptions
from postlude.engine.pass_metrics import LayerMetrics
from postlude.engine.result import topk_processor
from postlude.hf.family import map_to_hf
from postlude.hf.load import load_model
from postlude.hf.read_model import Recast, Source, read_description, read_model, with_mtp
from postlude.layout import Layout
from postlude.model import LanguageModel, ModelConfig, MTPOptions, OutputInputs
from postlude.model.adapters import is_adapter
from postlude.model.blocks import BLOCKS
from postlude.model.fp8 import use_fp8
from postlude.model.parallel import local_shard, region
from postlude.objectives import MTP, Loss, Objective, ValueLoss
from postlude.ops.linear_logprobs import TokenStats
from postlude.optimizer import AdamW
from postlude.verify.adapters import (
    AdapterReport,
    adapted_model,
    adapter_gradients,
    compare_adapters,
    difference,
    pack_batch,
    randomize_b,
)
from postlude.verify.cases import Case, case_batches
from postlude.verify.choices import MOST_ROUNDING, OBJECTIVES, ROUNDINGS, TOLERANCES, WIDER
from postlude.world.mesh import Mesh

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


@dataclass(frozen=True)
class Report:
    """The difference of a layout from one rank, relative to the largest value.

    Loss, per-token results, gradients, and what layers measure (`layer_metrics`), such as the load of every expert.
    """

    case: Case
    loss: float
    logprob: float
    entropy: float
    gradients: Mapping[str, float]
    layer_metrics: Mapping[str, float] = field(default_factory=dict)
    steps: Mapping[str, float] = field(default_factory=dict)
    """The differences of what `steps_in_layout` computes."""
    rounding: Mapping[str, float] = field(default_factory=dict)
    """How far one rank is from itself in a wider dtype, by the names of `offs`; empty if all is within tolerance."""

    @property
    def offs(self) -> dict[str, float]:
        """The differences of a pass by name: loss, logprob, entropy, gradients and metrics of layers."""
        single = {"loss": self.loss, "logprob": self.logprob, "entropy": self.entropy}
        return single | dict(self.gradients) | dict(self.layer_metrics)

    @property
    def worst_of_steps(self) -> tuple[str, float]:
        """The result of the optimizer steps with the largest difference; ("", 0.0) if none were taken."""
        return max(self.steps.items(), key=lambda item: item[1], default=("", 0.0))

    @property
    def worst(self) -> tuple[str, float]:
        """The gradient with the largest difference. NaN counts as infinite."""
        return max(self.gradients.items(), key=lambda item: float("inf") if item[1] != item[1] else item[1])

    @property
    def worst_layer_metric(self) -> tuple[str, float]:
        """The metric of a layer with the largest difference; ("", 0.0) if the model has none."""
        return max(self.layer_metrics.items(), key=lambda item: item[1], default=("", 0.0))

    def passes(self, tolerance: float | None = None) -> bool:
        """Returns whether everything is within the tolerance: by default that of the dtype, or one rank's rounding."""
        rounding = self.rounding if tolerance is None else {}
        if tolerance is None:
            tolerance = TOLERANCES.get(_dtype_name(self.case), TOLERANCES["float32"])  # float64, for FP8
        limits = {name: min(ROUNDINGS * off, MOST_ROUNDING * tolerance) for name, off in rounding.items()}
        steps = all(off <= tolerance for off in self.steps.values())
        return steps and all(off <= max(tolerance, limits.get(name, 0.0)) for name, off in self.offs.items())


@dataclass(frozen=True)
class ComputedValues:
    """The values of one batch that are compared."""

    loss: float
    logprob: Tensor
    entropy: Tensor
    gradients: Mapping[str, Tensor]
    layer_metrics: Mapping[str, Tensor]


def compare(case: Case, *, mesh: Mesh | None = None, device: torch.device | str = "cpu") -> Report | None:
    """Compares one case, on every rank of its layout. Returns the report on rank 0, None on the others."""
    mesh = mesh or Mesh(case.layout, torch.device(device).type)
    values = run_in_layout(case, mesh, device)
    steps = _steps_in_layout(case, mesh, device) if case.steps else {}
    if dist.get_rank() != 0:
        return None
    one_rank = run_on_one_rank(case, device)
    result = report(case, values, one_rank)
    if not result.passes() and _dtype_name(case) in WIDER:
        wider = run_on_one_rank(case, device, getattr(torch, WIDER[_dtype_name(case)]))
        result = replace(result, rounding=report(case, one_rank, wider).offs)
    expected = _steps_on_one_rank(case, device) if case.steps else {}
    return replace(result, steps={name: difference(steps[name], value) for name, value in expected.items()})


def compare_all(cases: Sequence[Case], device: str) -> list[Report]:
    """Compares cases of one number of ranks, on every rank. Returns the reports on rank 0."""
    meshes: dict[Layout, Mesh] = {}
    rank_device = torch.device(device if device != "cuda" else f"cuda:{torch.cuda.current_device()}")
    reports = []
    for case in cases:
        if case.layout not in meshes:
            meshes[case.layout] = Mesh(case.layout, rank_device.type)
        reports.append(compare(case, mesh=meshes[case.layout], device=rank_device))
    return [report for report in reports if report is not None]


def compare_adapters_of(case: Case) -> list[AdapterReport]:
    """Compares the adapters of a case on one rank with the merged model and with peft's own. Its layout is not used."""
    assert case.lora is not None
    return compare_adapters(_source(case), case.lora, objective=case.objective, seed=case.seed)


def _source(case: Case) -> Source:
    if case.tied is None and case.initializer_range is None:
        return case.source
    if isinstance(case.source, Recast):
        raise TypeError("a case changes the config of a source, but a Recast has none of its own; change its source's.")
    description = read_description(case.source, case.blocks or BLOCKS)
    if isinstance(description, ModelConfig):
        changes = {"tied_head": case.tied, "initializer_range": case.initializer_range}
        return replace(description, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]
    if case.tied is not None:
        description.tie_word_embeddings = case.tied
    if case.initializer_range is not None:
        description.initializer_range = case.initializer_range
    return description


def run_in_layout(case: Case, mesh: Mesh, device: torch.device | str) -> dict[str, ComputedValues]:
    engine = _engine(case, mesh, device)
    objective = _objective(case, engine.config)
    values = {}
    for name, batch in case_batches(case, engine.config).items():
        engine.zero_grad()
        result = engine.forward_backward(batch, objective)
        streamed = engine.gradients() if case.lora is None else stream_adapters(engine, gradients=True)
        gradients = {parameter: tensor.cpu() for parameter, tensor in streamed}
        scores = engine.logprobs(batch, entropy=True)
        assert scores.entropy is not None
        layers = _tensors({**result.metrics, **result.layer_vectors})
        values[name] = ComputedValues(
            result.loss, torch.cat(scores.logprob), torch.cat(scores.entropy), gradients, layers
        )
    return values


def _engine(case: Case, mesh: Mesh, device: torch.device | str, **options: Any) -> Engine:
    settings = {"compute_dtype": case.compute_dtype, "blocks": case.blocks or BLOCKS, "mtp": True, **options}
    engine = Engine(_source(case), **vars(EngineOptions.of(case, mesh=mesh, device=device, **settings)))
    randomize_b(engine.parameters.items(), case.seed)
    return engine


def _steps_in_layout(case: Case, mesh: Mesh, device: torch.device | str) -> dict[str, Tensor]:
    config, critic = read_model(_source(case), blocks=case.blocks or BLOCKS)[1], case.lora is None
    objective, batch = _objective(case, config), case_batches(case, config)["many"]
    build = partial(_engine, case, mesh, device, critic=critic)
    return steps_in_layout(build, WithCritic(objective) if critic else objective, batch, case.seed)


def _steps_on_one_rank(case: Case, device: torch.device | str) -> dict[str, Tensor]:
    source = with_mtp(_source(case), blocks=case.blocks or BLOCKS)
    critic = case.lora is None
    model = _plain_model(case, source, device, value_head=critic)
    objective, batch = _objective(case, model.config), case_batches(case, model.config)["many"]
    streamed = partial(_weights, source=source) if critic else adapter_weights
    return steps_on_one_rank(model, WithCritic(objective) if critic else objective, batch, case.seed, device, streamed)


def _dtype_name(case: Case) -> str:
    return str(case.compute_dtype).removeprefix("torch.")


def run_on_one_rank(
    case: Case, device: torch.device | str, dtype: torch.dtype | None = None
) -> dict[str, ComputedValues]:
    """Returns what one rank computes: every microbatch in turn, with plain autograd, in `dtype` or the case's."""
    source = with_mtp(_source(case), blocks=case.blocks or BLOCKS)  # as an engine with mtp
    model = _plain_model(case if dtype is None else replace(case, compute_dtype=dtype), source, device)
    objective, layer_metrics = _objective(case, model.config), LayerMetrics(model.config)
    values = {}
    for name, batch in case_batches(case, model.config).items():
        packed = pack_batch(batch, depths=len(model.config.pattern.mtp))
        microbatches = [microbatch.to(device) for microbatch in packed]
        scale = LossNormalizer(packed)
        model.train()
        model.zero_grad()
        loss = 0.0
        for microbatch in microbatches:
            added = scale.loss(model(microbatch, output_processor=lambda inputs, _: objective(inputs)), microbatch)
            added.backward()
            loss += float(added.detach())
        layers = layer_metrics.compute(layer_metrics.take_sums(model.blocks, torch.device(device)).tolist())
        model.eval()
        with torch.no_grad():
            stats = [model(microbatch, output_processor=_score) for microbatch in microbatches]
        logprob = torch.cat(unpack(packed, [result.logprob.cpu() for result in stats]))
        entropy = torch.cat(unpack(packed, [result.entropy.cpu() for result in stats]))
        measured = _tensors({**layers.numbers, **layers.vectors})
        gradients = _gradients(model, source) if case.lora is None else adapter_gradients(model)
        values[name] = ComputedValues(loss, logprob, entropy, gradients, measured)
    return values


def _plain_model(case: Case, source: Source, device: torch.device | str, *, value_head: bool = False) -> LanguageModel:
    blocks, dtype, seed = case.blocks or BLOCKS, case.compute_dtype, case.seed
    if case.lora is None:
        model = load_model(source, dtype=dtype, device=device, seed=seed, value_head=value_head, blocks=blocks)
    else:
        model = adapted_model(source, case.lora, seed=seed, dtype=dtype, device=device, blocks=blocks)
    if case.fp8:
        use_fp8(model, case.fp8, tp=1)
    return model


def _tensors(values: Mapping[str, float | list[float]]) -> dict[str, Tensor]:
    """Returns metrics as tensors, without the share of given experts that a router would not have chosen."""
    compared = {name: value for name, value in values.items() if "routing_changed" not in name}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in compared.items()}


def _objective(case: Case, config: ModelConfig) -> Objective:
    """Returns the case's objective, with multi-token prediction if the model has depths."""
    if case.objective not in OBJECTIVES:
        raise ValueError(f"objective {case.objective!r} is unknown; there are {', '.join(OBJECTIVES)}.")
    objective = OBJECTIVES[case.objective]
    return MTP(objective=objective, weight=0.3) if config.pattern.mtp else objective


def _score(inputs: OutputInputs, context: None) -> TokenStats:
    return inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets, entropy=True)


def _gradients(model: LanguageModel, source: Source) -> dict[str, Tensor]:
    """Returns gradients by the names of streamed weights; zeros if nothing depends on a parameter."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return _to_streamed(model, source, {name: tensor for name, tensor in gradients.items() if tensor is not None})


def _weights(model: LanguageModel, source: Source) -> dict[str, Tensor]:
    return _to_streamed(model, source, {name: parameter.detach() for name, parameter in model.named_parameters()})


def _to_streamed(model: LanguageModel, source: Source, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    family, config = read_model(source, blocks=model.block_types)
    shapes = ((name, parameter.shape) for name, parameter in model.named_parameters() if name != VALUE_HEAD)
    streamed = {}
    for hf_tensor in map_to_hf(family, config, shapes).values():
        full = streamed[hf_tensor.name] = torch.zeros(hf_tensor.shape)
        for name, mapping in hf_tensor.parts:
            if name in tensors:
                mapping.write(full, tensors[name][mapping.region].float().cpu())
    return streamed


def report(case: Case, actual: Mapping[str, ComputedValues], expected: Mapping[str, ComputedValues]) -> Report:
    loss = logprob = entropy = 0.0
    gradients: dict[str, float] = {}
    layer_metrics: dict[str, float] = {}
    for name, reference in expected.items():
        result = actual[name]
        loss = max(loss, difference(torch.tensor(result.loss), torch.tensor(reference.loss)))
        logprob = max(logprob, difference(result.logprob, reference.logprob))
        entropy = max(entropy, difference(result.entropy, reference.entropy))
        for parameter, gradient in reference.gradients.items():
            off = difference(result.gradients[parameter], gradient)
            gradients[parameter] = max(gradients.get(parameter, 0.0), off)
        for metric, value in reference.layer_metrics.items():
            off = difference(result.layer_metrics.get(metric, torch.tensor(float("nan"))), value)
            layer_metrics[metric] = max(layer_metrics.get(metric, 0.0), off)
    return Report(case, loss, logprob, entropy, gradients, layer_metrics)

"""The models that clients train, on one rank. Every rank makes the same calls (SPMD).

`check_memory` refuses to train all weights of another copy of a base model where its ranks have no room for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from postlude.engine import Engine
from postlude.engine.adapters import add_adapter, export_adapter, remove_adapter, stream_adapters
from postlude.engine.base_weights import load_adapter_state, save_adapter_state
from postlude.engine.checkpoint import CheckpointWriter
from postlude.engine.result import PassResult
from postlude.hf.linear_layers import linear_layers, shared_use
from postlude.lora import AdapterConfig, LoRA
from postlude.optimizer import AdamW
from postlude.plan.memory import estimate_memory
from postlude.plan.parameter_count import total_parameters
from postlude.tinker.backend import (
    AdamParams,
    CreateModel,
    DiscardGradients,
    LoadState,
    LoRAConfig,
    ModelLost,
    ModelSpec,
    OptimStep,
    RemoveModel,
    SaveForSampler,
    SaveState,
    TrainingCommand,
)
from postlude.tinker.datums import Pass
from postlude.tinker.settings import WorkerSettings
from postlude.world.agreement import gather_and_decide

_log = logging.getLogger(__name__)
ALPHA = 32.0
"""The alpha of all adapters, whose scale is alpha / rank."""
STATE = "state"
"""The subdirectory of a checkpoint that has the training state."""
GIB = 1024**3


class AdapterModel:
    """An adapter on an engine that others share."""

    def __init__(self, engine: Engine, name: str, lora: LoRA, seed: int) -> None:
        self.engine, self.name = engine, name
        add_adapter(engine, name, lora, seed=seed)

    @contextlib.contextmanager
    def activated(self) -> Iterator[Engine]:
        """Yields the engine with this model's adapter active."""
        self.engine.set_adapter(self.name)
        try:
            yield self.engine
        finally:
            if self.engine.failure_state.refusal is None:
                self.engine.set_adapter(None)

    def save(self, directory: Path) -> None:
        save_adapter_state(self.engine, directory)

    def load(self, directory: Path) -> None:
        load_adapter_state(self.engine, directory)

    def export(self, directory: Path) -> None:
        export_adapter(self.engine, directory)

    def free(self) -> None:
        remove_adapter(self.engine, self.name)


class FullModel:
    """A model of which all weights are trained, with an engine of its own."""

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerBase) -> None:
        self.engine, self.tokenizer = engine, tokenizer

    @contextlib.contextmanager
    def activated(self) -> Iterator[Engine]:
        yield self.engine

    def save(self, directory: Path) -> None:
        """Writes weights and optimizer state. Unlike `Engine.save`, keeps no host memory for the next time."""
        writer = CheckpointWriter()
        writer.save(self.engine, directory, None)
        writer.finish()
        writer.close()

    def load(self, directory: Path) -> None:
        self.engine.load(directory)

    def export(self, directory: Path) -> None:
        self.engine.export_model(directory, tokenizer=self.tokenizer)

    def free(self) -> None:
        self.engine.training_state.free()


class RankModels:
    """Adapters on one frozen base, and models of which all weights are trained.

    Each model has its own gradients, optimizer and steps.
    """

    def __init__(self, settings: WorkerSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self.engine = self._engine(lora={})
        self.models: dict[str, AdapterModel | FullModel] = {}
        config = self.engine.config
        self._groups = {layer.group for layer in linear_layers(config, self.engine.block_types).values()}
        if config.shared_parameters:
            self._groups.discard("head")

    def _engine(self, **options: Any) -> Engine:
        settings = self.settings
        return Engine(
            settings.source,
            layout=settings.layout,
            budget=settings.budget,
            compute_dtype=None if settings.dtype is None else getattr(torch, settings.dtype),
            optimizer=to_adamw(AdamParams()),
            **options,
        )

    @property
    def refusal(self) -> str | None:
        """Why these ranks cannot be used any more; None if they can."""
        engines = [self.engine]
        if dist.get_world_size() > 1:  # after a failed pass the ranks may be in different places
            engines += [model.engine for model in self.models.values()]
        return next((engine.failure_state.refusal for engine in engines if engine.failure_state.refusal), None)

    def is_full(self, model_id: str) -> bool:
        """Returns whether all weights of a model are trained."""
        return isinstance(self.models.get(model_id), FullModel)

    def create_model(self, model_id: str, spec: ModelSpec) -> None:
        """Makes a model with fresh adapters, or with a copy of the base's weights."""
        lora = spec.lora
        if lora is None:
            check_memory(self.engine, free_memory(self.engine.device))
            self.models[model_id] = FullModel(self._engine(mesh=self.engine.mesh), self.tokenizer)
            return
        if lora.train_unembed and "head" not in self._groups:
            _log.warning("train_unembed of %s is not applied: %s", model_id, shared_use(self.engine.config))
        self.models[model_id] = AdapterModel(self.engine, model_id, to_lora(lora, self._groups), lora.seed or 0)

    def remove_model(self, model_id: str) -> None:
        model = self.models.pop(model_id, None)
        if model is not None:
            model.free()

    @contextlib.contextmanager
    def using(self, model_id: str) -> Iterator[AdapterModel | FullModel]:
        """Yields a model, whose adapter is active inside. If the model's own engine fails, the model is lost."""
        if model_id not in self.models:
            raise ValueError(f"there is no model {model_id!r}: create it first.")
        model = self.models[model_id]
        try:
            with model.activated():
                yield model
        except Exception as error:
            reason = model.engine.failure_state.refusal
            if reason is None or self.refusal is not None:
                raise
            self.remove_model(model_id)
            raise ModelLost(f"model {model_id} is lost: {reason}") from error

    def run_pass(self, model_id: str, request: Pass) -> PassResult:
        """Runs forward, and unless `forward_only` backward, which adds to the gradients."""
        with self.using(model_id) as model:
            run = model.engine.evaluate_loss if request.forward_only else model.engine.forward_backward
            return run(request.batch, request.objective, counts=request.counts)

    def run(self, command: TrainingCommand[Any]) -> dict[str, float] | None:
        """Runs a command that all ranks run alike."""
        match command:
            case CreateModel():
                self.create_model(command.model_id, command.spec)
            case RemoveModel():
                self.remove_model(command.model_id)
            case _:
                with self.using(command.model_id) as model:
                    return _run(command, model)
        return None

    def adapter(self, model_id: str) -> tuple[Mapping[str, AdapterConfig], dict[str, tuple[Tensor, Tensor]]]:
        """Returns the configs and the whole matrices of a model's adapter, by layer, on every rank."""
        with self.using(model_id) as model:
            tensors = {name: tensor.clone() for name, tensor in stream_adapters(model.engine)}
            configs = dict(model.engine.adapters.configs)
        return configs, {name: (tensors[f"{name}.adapter.a"], tensors[f"{name}.adapter.b"]) for name in configs}


def _run(command: TrainingCommand[Any], model: AdapterModel | FullModel) -> dict[str, float] | None:
    """Runs a command on the model that it names."""
    match command:
        case OptimStep(adam=adam):
            result = model.engine.optimizer_step(to_adamw(adam))
            return {
                "grad_norm": result.grad_norm,
                "lr": result.lr,
                "step": result.step,
                "skipped": float(result.skipped),
            }
        case DiscardGradients():
            model.engine.zero_grad()
        case SaveState(directory=directory):
            model.save(directory / STATE)
        case LoadState(directory=directory, optimizer=optimizer):
            model.load(directory / STATE)
            if not optimizer:
                model.engine.set_optimizer(to_adamw(AdamParams()))
        case SaveForSampler(directory=directory):
            model.export(directory)
        case _:
            raise TypeError(f"{type(command).__name__} is no command of a model.")
    return None


def to_lora(lora: LoRAConfig, groups: Collection[str]) -> LoRA:
    """Returns the adapters that a client asks for, of a model whose layers are in `groups`.

    Raises ValueError if nothing would be trained.
    """
    trained_groups = {"attention": lora.train_attn, "mlp": lora.train_mlp, "experts": lora.train_mlp}
    targets = [group for group, trained in trained_groups.items() if trained and group in groups]
    if lora.train_unembed and "head" in groups:
        targets.append("lm_head")
    if not targets:
        raise ValueError(
            f"lora_config would train nothing: train_attn is {lora.train_attn}, train_mlp is {lora.train_mlp}, and "
            f"train_unembed is {lora.train_unembed}{'' if 'head' in groups else ' with a head that takes no adapter'}. "
            "Set train_attn or train_mlp."
        )
    return LoRA(rank=lora.rank, alpha=ALPHA, targets=tuple(targets))


def to_adamw(adam: AdamParams) -> AdamW:
    """Returns the optimizer settings of one step."""
    return AdamW(
        lr=adam.learning_rate,
        betas=(adam.beta1, adam.beta2),
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        max_grad_norm=adam.grad_clip_norm if adam.grad_clip_norm > 0 else None,
    )


def check_memory(engine: Engine, free: int) -> None:
    """Raises ValueError on every rank if one has too few bytes `free`. Every rank calls it.

    A rank needs its part of weights, gradients and moments, and a whole copy in the compute dtype that samples.
    """
    estimates = estimate_memory(
        engine.config,
        replace(engine.options, lora=None),
        compute_bytes=engine.compute_dtype.itemsize,
    )
    trained = max(estimate.lasting for estimate in estimates)
    needed = trained + total_parameters(engine.config) * engine.compute_dtype.itemsize
    smallest = min(gather_and_decide(lambda: free, list))
    if needed > smallest:
        raise ValueError(
            f"training all weights of this model needs {needed / GIB:.3g} GiB on each rank, but {smallest / GIB:.3g} "
            "GiB are free. Give a lora_config, end other models, or start the server with a --layout that shards more."
        )


def free_memory(device: torch.device) -> int:
    """Returns the bytes that this rank may still use."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        sizes = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(sizes["MemAvailable"].split()[0]) * 1024
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return free // dist.get_world_size()

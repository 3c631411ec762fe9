"""The models that clients train, on one rank. Every rank makes the same calls (SPMD)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from postlude.engine import Engine
from postlude.engine.adapter_state import load_adapter_state, save_adapter_state
from postlude.engine.adapters import add_adapter, export_adapter, remove_adapter, stream_adapters
from postlude.engine.checkpoint import CheckpointWriter
from postlude.engine.result import Result
from postlude.hf.linear_layers import linear_layers, shared_use
from postlude.lora import AdapterConfig, LoRA
from postlude.optimizer import AdamW
from postlude.tinker.backend import AdamParams, LoRAConfig, ModelLost
from postlude.tinker.datums import Pass
from postlude.tinker.memory import check_memory, free_memory
from postlude.tinker.settings import WorkerSettings

_log = logging.getLogger(__name__)
ALPHA = 32.0
"""Of all adapters: the scale is alpha / rank."""
STATE = "state"
"""The directory of the training state in that of a checkpoint."""


class RankModels:
    """Adapters on one frozen base, and models of which all weights are trained, each with an engine of its own.

    Each model has its own gradients, optimizer and steps.
    """

    def __init__(self, settings: WorkerSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self.engine = self._engine(lora={})
        self.full: dict[str, Engine] = {}
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
            engines += self.full.values()
        return next((engine.failure_state.refusal for engine in engines if engine.failure_state.refusal), None)

    def create(self, model_id: str, lora: LoRAConfig | None) -> None:
        """Makes a model with fresh adapters, or with a copy of the base's weights."""
        if lora is None:
            check_memory(self.engine, free_memory(self.engine.device))
            self.full[model_id] = self._engine(mesh=self.engine.mesh)
            return
        if lora.train_unembed and "head" not in self._groups:
            _log.warning("train_unembed of %s is not applied: %s", model_id, shared_use(self.engine.config))
        add_adapter(self.engine, model_id, to_lora(lora, self._groups), seed=lora.seed or 0)

    def remove(self, model_id: str) -> None:
        """Frees a model, if it exists."""
        if model_id in self.engine.adapters.names:
            remove_adapter(self.engine, model_id)
        elif (engine := self.full.pop(model_id, None)) is not None:
            engine.training.free()

    @contextlib.contextmanager
    def using(self, model_id: str) -> Iterator[Engine]:
        """Gives the engine of a model, with its adapter in use if it has one."""
        if model_id in self.full:
            yield from self._using_full(model_id)
            return
        if model_id not in self.engine.adapters.names:
            raise ValueError(f"there is no model {model_id!r}: create it first.")
        self.engine.use(model_id)
        try:
            yield self.engine
        finally:
            if self.refusal is None:
                self.engine.use(None)

    def _using_full(self, model_id: str) -> Iterator[Engine]:
        engine = self.full[model_id]
        try:
            yield engine
        except Exception as error:
            reason = engine.failure_state.refusal
            if reason is None or self.refusal is not None:
                raise
            self.remove(model_id)
            raise ModelLost(f"model {model_id} is lost: {reason}") from error

    def run_pass(self, model_id: str, request: Pass) -> Result:
        """Runs forward, and unless `forward_only` backward, which adds to the gradients."""
        with self.using(model_id) as engine:
            run = engine.evaluate_loss if request.forward_only else engine.forward_backward
            return run(request.batch, request.objective, counts=request.counts)

    def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        """Updates the weights, and frees the gradients."""
        config = to_adamw(adam)
        with self.using(model_id) as engine:
            result = engine.optimizer_step(config)
        return {"grad_norm": result.grad_norm, "lr": result.lr, "step": result.step, "skipped": float(result.skipped)}

    def discard_gradients(self, model_id: str) -> None:
        """Frees the gradients."""
        with self.using(model_id) as engine:
            engine.zero_grad()

    def save_state(self, model_id: str, directory: Path) -> None:
        """Writes weights and optimizer state."""
        with self.using(model_id) as engine:
            if model_id in self.full:
                save_all_weights(engine, directory / STATE)
            else:
                save_adapter_state(engine, directory / STATE)

    def load_state(self, model_id: str, directory: Path, optimizer: bool) -> None:
        """Reads weights and, if `optimizer`, the optimizer state."""
        with self.using(model_id) as engine:
            if model_id in self.full:
                engine.load(directory / STATE)
            else:
                load_adapter_state(engine, directory / STATE)
            if not optimizer:
                engine.set_optimizer(to_adamw(AdamParams()))

    def save_for_sampler(self, model_id: str, directory: Path) -> None:
        """Writes a PEFT adapter, or a model directory with all weights."""
        with self.using(model_id) as engine:
            if model_id in self.full:
                engine.export_model(directory, tokenizer=self.tokenizer)
            else:
                export_adapter(engine, directory)

    def adapter(self, model_id: str) -> tuple[Mapping[str, AdapterConfig], dict[str, tuple[Tensor, Tensor]]]:
        """Returns the configs and the whole matrices of a model's adapter, by layer, on every rank."""
        with self.using(model_id) as engine:
            tensors = {name: tensor.clone() for name, tensor in stream_adapters(engine)}
            configs = dict(engine.adapters.configs)
        return configs, {name: (tensors[f"{name}.adapter.a"], tensors[f"{name}.adapter.b"]) for name in configs}


def save_all_weights(engine: Engine, directory: Path) -> None:
    """Writes the training state of an engine. Unlike `Engine.save`, keeps no host memory for the next time."""
    writer = CheckpointWriter()
    writer.save(engine, directory, None)
    writer.finish()
    writer.close()


def to_lora(lora: LoRAConfig, groups: Collection[str]) -> LoRA:
    """Returns the adapters that a client asks for, of a model whose layers are in `groups`.

    Raises ValueError if nothing would be trained.
    """
    wanted = {"attention": lora.train_attn, "mlp": lora.train_mlp, "experts": lora.train_mlp}
    targets = [group for group, trained in wanted.items() if trained and group in groups]
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
        max_grad_norm=adam.grad_clip_norm or None,
    )

"""The frozen model and the adapters of an engine apart from each other, for samplers that apply adapters unmerged.

The training state of one adapter has a directory of its own: weights, moments and step counts, which any layout loads.
It is a checkpoint of an engine whose only adapter it is (`checkpoint.py`), without the states of random generators.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from postlude.engine import checkpoint
from postlude.engine.adapters import AdaptedModel, stream_adapters
from postlude.engine.export import Exported, Untied, export
from postlude.engine.streaming import WeightDelta, copy_into, plan_buckets, plan_tensors, stream
from postlude.lora import AdapterConfigs
from postlude.model import LanguageModel

if TYPE_CHECKING:
    from postlude.engine.engine import Engine


class WithoutAdapters:
    def __init__(self, model: Exported) -> None:
        self.config, self.families, self.block_types = model.config, model.families, model.block_types
        self.generation_config, self.mesh = model.generation_config, model.mesh
        self.base_fingerprint = model.base_fingerprint
        self.tensors, self.shared_parameters, self.low_bits = model.tensors, model.shared_parameters, model.low_bits

    def weight_deltas(self) -> Mapping[str, WeightDelta]:
        return {}


def copy_base(engine: Engine, model: LanguageModel) -> None:
    """Copies the frozen weights into an unsharded model on every rank. Every rank calls it."""
    engine.failure_state.check()
    planned, dtype = plan_tensors(engine.config, engine.family, engine.block_types), engine.compute_dtype
    buckets, shared = plan_buckets(planned, dtype), engine.shared_parameters
    copy_into(model, planned, stream(buckets, engine.tensors, engine.mesh, dtype, shared=shared))


def export_base(engine: Engine, directory: str | os.PathLike[str], *, untied: bool = False) -> Path:
    """Writes the frozen model as `Engine.export_hf` does, without adapters. Every rank calls it; rank 0 writes."""
    engine.failure_state.check()
    base = WithoutAdapters(engine)
    model = Untied(base) if untied else base
    return export(model, directory, None, engine.compute_dtype, card=None, overwrite=False)


def adapter_matrices(engine: Engine) -> tuple[AdapterConfigs, dict[str, tuple[Tensor, Tensor]]]:
    """Returns config, A and B of every adapted layer, whole, in fp32, by the layers' global names. Every rank calls it.

    They are of the active adapter, and on the engine's device.
    """
    tensors, configs = dict(stream_adapters(engine)), engine.adapters.configs
    return configs, {name: (tensors[f"{name}.adapter.a"], tensors[f"{name}.adapter.b"]) for name in configs}


def save_adapter_state(
    engine: AdaptedModel,
    directory: str | os.PathLike[str],
    *,
    name: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes the training state of an adapter, by default the active one, to a new directory. Every rank calls it."""
    engine.failure_state.check()
    writer = checkpoint.CheckpointWriter()
    writer.save(engine, directory, extra, adapter=engine.training_states[engine.adapters.resolve(name)])
    writer.finish()
    writer.close()


def load_adapter_state(
    engine: AdaptedModel, directory: str | os.PathLike[str], *, name: str | None = None
) -> dict[str, Any]:
    """Restores the training state of an adapter, by default the active one. Returns the saved `extra`.

    The name may be another than it was saved under. If there is no such adapter, it is made as it was saved. Its
    gradients are freed. Other adapters and random generators do not change. Every rank calls it.
    """
    engine.failure_state.check()
    return checkpoint.load(engine, directory, adapter=engine.adapters.resolve_or_new(name))

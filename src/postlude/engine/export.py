"""Writes a distributed model to a directory: all ranks stream it, and rank 0 writes."""

from __future__ import annotations

import logging
import os
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from postlude.engine.streaming import (
    DistributedModel,
    InterruptibleStream,
    StreamedTensor,
    plan_buckets,
    plan_tensors,
)
from postlude.hf.export import (
    TOKENIZER,
    ModelCard,
    ModelFiles,
    as_classifier,
    export_config,
    untied,
    write_model_directory,
)
from postlude.hf.family import VALUE_HEAD, Families, map_to_hf
from postlude.hf.postlude_format import PostludeConfig
from postlude.hf.read_model import read_model_with_mtp
from postlude.model import ModelConfig
from postlude.model.blocks import BlockTable
from postlude.model.recast import RecastPlan, plan_recast
from postlude.safetensors_file import TensorInfo
from postlude.world.agreement import gather_and_decide, on_rank0

LOG = logging.getLogger("postlude")
EMBEDDING, HEAD = "embedding.weight", "head.weight"


class Exported(DistributedModel, Protocol):
    config: ModelConfig
    families: Families
    block_types: BlockTable
    generation_config: dict[str, Any]

    def base_fingerprint(self) -> str | None:
        """Returns a digest of a frozen model, of which adapters are trained; None if all weights are."""
        ...


class Untied:
    """A model with the embedding repeated as its head, for readers that do not support a tied one."""

    def __init__(self, model: Exported) -> None:
        self.config = untied(model.config)
        self.families, self.block_types = model.families, model.block_types
        self.generation_config, self.mesh = model.generation_config, model.mesh
        self.tensors, self.shared_parameters, self.low_bits = model.tensors, model.shared_parameters, model.low_bits
        self.weight_deltas, self.base_fingerprint = model.weight_deltas, model.base_fingerprint
        if model.config.tied_head:
            self.shared_parameters = {*model.shared_parameters, HEAD}
            if EMBEDDING in model.tensors:  # else another stage holds it
                self.tensors = {**model.tensors, HEAD: model.tensors[EMBEDDING]}
            if EMBEDDING in model.low_bits:
                self.low_bits = {**model.low_bits, HEAD: model.low_bits[EMBEDDING]}


def warn_without_tokenizer(directory: Path) -> None:
    if dist.get_rank() == 0 and not any((directory / name).exists() for name in TOKENIZER):
        LOG.warning("%s has no tokenizer: give the export one, tokenizer=load_tokenizer(MODEL).", directory)


def recast_plan(model: Exported, directory: str | os.PathLike[str]) -> RecastPlan:
    """Returns how tensors of a checkpoint of another pattern become the model's."""
    saved = on_rank0(lambda: read_model_with_mtp(Path(directory), model.families, model.block_types)[1])
    return plan_recast(saved, model.config, model.block_types)


def model_files(model: Exported, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase | None) -> ModelFiles:
    """Returns the files next to a checkpoint's weights, without a config if a custom block's is not JSON.

    A checkpoint of adapters has no config either, since it cannot be loaded as a model.
    """
    config = None
    if model.base_fingerprint() is None:
        with suppress(ValueError):
            _, config = export_config(model.config, dtype, model.families, model.block_types)
    return ModelFiles(config, tokenizer, model.generation_config)


def export(
    model: Exported,
    directory: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype,
    *,
    card: ModelCard | None,
    overwrite: bool,
    classifier: bool = False,
) -> Path:
    """Writes the directory. If rank 0 cannot, every rank raises before the next bucket.

    `classifier` writes a reward model that transformers' AutoModelForSequenceClassification reads: the value head is
    its `score.weight`. The output head is written too, so that Postlude can load the directory as a model too.
    """
    family, config = export_config(model.config, dtype, model.families, model.block_types)
    # By the family that describes it: a model that was read out of a larger one is written as itself.
    tensors = plan_tensors(model.config, family, model.block_types)
    if classifier:
        if isinstance(config, PostludeConfig):
            raise ValueError(
                "no Hugging Face family describes this model, so that transformers cannot read a reward model of it. "
                "Set export to false, and load its checkpoint with Engine(..., critic=True)."
            )
        config = as_classifier(config)
        for head in map_to_hf(family, model.config, [(VALUE_HEAD, (model.config.hidden_size,))]).values():
            tensors.append(StreamedTensor(head.name, head.shape, head.parts, torch.float32))
    stream = InterruptibleStream(plan_buckets(tensors, dtype), model, dtype)

    def write() -> None:
        infos = {tensor.name: TensorInfo(tensor.dtype(dtype), tensor.shape) for tensor in tensors}
        files = ModelFiles(config, tokenizer, model.generation_config)
        write_model_directory(directory, files, infos, iter(stream), card=card or ModelCard(), overwrite=overwrite)

    def stream_and_write() -> None:
        try:
            if dist.get_rank() == 0:
                write()
            else:
                deque(stream, maxlen=0)
        finally:
            stream.end()

    gather_and_decide(stream_and_write, lambda _: None, raise_cause=True)
    return Path(directory)

"""A model that is spread over ranks as a directory: all ranks stream it, and the first one writes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from postlude.engine.streaming import InterruptibleStream, plan_buckets, plan_tensors
from postlude.hf.export import ModelFiles, export_config, untied, write_model_directory
from postlude.hf.family import Family
from postlude.hf.model_card import ModelCard
from postlude.model import ModelConfig
from postlude.model.blocks import Block
from postlude.safetensors_file import TensorInfo
from postlude.world.agreement import RankFailure, gather_and_decide
from postlude.world.mesh import Mesh

BUCKET_BYTES = 1 << 30
EMBEDDING, HEAD = "embedding.weight", "head.weight"


class Exported(Protocol):
    """A model in parts, and what there is to say of it: an engine."""

    config: ModelConfig
    families: Mapping[str, Family]
    block_types: Mapping[str, type[Block]]
    generation: dict[str, Any]
    mesh: Mesh

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """This rank's parameters and persistent buffers by their global names."""
        ...

    @property
    def shared(self) -> Collection[str]:
        """The names of what both ends of a pipeline hold."""
        ...

    @property
    def low_bits(self) -> Mapping[str, Tensor]:
        """What bf16 tensors of split weights lack of fp32."""
        ...


class Untied:
    """A model as one with a head of its own, the embedding again: for readers that lose sight of a tied one."""

    def __init__(self, model: Exported) -> None:
        self.config = untied(model.config)
        self.families, self.block_types = model.families, model.block_types
        self.generation, self.mesh = model.generation, model.mesh
        self.tensors = model.tensors
        self.shared = model.shared
        self.low_bits = model.low_bits
        if model.config.tied_head:
            self.shared = {*model.shared, HEAD}
            if EMBEDDING in model.tensors:  # else it is another stage's
                self.tensors = {**model.tensors, HEAD: model.tensors[EMBEDDING]}
            if EMBEDDING in model.low_bits:
                self.low_bits = {**model.low_bits, HEAD: model.low_bits[EMBEDDING]}


def description(model: Exported, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase | None) -> ModelFiles:
    """What stands beside the weights, in a checkpoint. No config where one of your own blocks' is none for JSON."""
    try:
        _, config = export_config(model.config, dtype, model.families, model.block_types)
    except ValueError:
        return ModelFiles(None, tokenizer, model.generation)
    return ModelFiles(config, tokenizer, model.generation)


def export(
    model: Exported,
    directory: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype,
    *,
    card: ModelCard,
    overwrite: bool,
) -> Path:
    """Write the directory. Where the first rank cannot, every rank hears of it before the next bucket."""
    family, config = export_config(model.config, dtype, model.families, model.block_types)
    # By the family that describes it: a model that was read out of a larger one is written as itself.
    pieces = plan_tensors(model.config, family, model.block_types)
    buckets = plan_buckets(pieces, BUCKET_BYTES, dtype)
    stream = InterruptibleStream(buckets, model.tensors, model.mesh, dtype, shared=model.shared, low=model.low_bits)

    def write() -> None:
        entries = {piece.theirs: TensorInfo(piece.dtype(dtype), piece.shape) for piece in pieces}
        found = ModelFiles(config, tokenizer, model.generation)
        write_model_directory(directory, found, entries, iter(stream), card=card, overwrite=overwrite)

    def take() -> None:
        try:
            if dist.get_rank() == 0:
                write()
            else:
                deque(stream, maxlen=0)
        finally:
            stream.end()

    try:
        gather_and_decide(take, lambda _: None)
    except RankFailure as failure:
        raise failure.cause from None
    return Path(directory)

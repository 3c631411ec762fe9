"""export_hf: a LanguageModel as a directory that transformers loads."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from postlude.hf.families import FAMILIES
from postlude.hf.family import Family, pieces
from postlude.hf.tensors import INDEX, SINGLE, hf_config
from postlude.model import LanguageModel, ModelConfig

MAX_SHARD_BYTES = 5 * 1024**3
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def export_hf(
    model: LanguageModel,
    directory: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    families: Mapping[str, Family] = FAMILIES,
) -> Path:
    """Write config.json, safetensors (sharded past `max_shard_bytes`) and, if given, the tokenizer.

    Everything is written beside the target and moved in when complete, so an export that fails while it writes leaves
    an older one as it was. Files that are not a model's are left alone. Returns the directory.
    """
    if model.stage.count != 1 or model.layout.world_size != 1:
        raise ValueError(
            f"stage {model.stage.index} of {model.stage.count} in {model.layout} is a part of a model; export_hf "
            "writes whole ones. Use Engine.export_hf."
        )
    dtype = next(model.parameters()).dtype
    family, hf = describe(model.config, dtype, families)
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in hf_tensors(model, family)}
    return write_hf(directory, hf, sizes, hf_tensors(model, family), tokenizer, max_shard_bytes)


def write_hf(
    directory: str | os.PathLike[str],
    hf: PretrainedConfig,
    sizes: Mapping[str, int],
    tensors: Iterator[tuple[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write a model directory from its config and its tensors, which come in the order of `sizes` (bytes of each)."""
    target = Path(directory).expanduser().resolve()
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target} is a file; export_hf writes a directory.")
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        write_description(aside, hf, tokenizer)
        _write_tensors(sizes, tensors, aside, max_shard_bytes)
        _move_in(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def write_description(directory: Path, hf: PretrainedConfig | None, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """What a model directory holds beside its weights."""
    if hf is not None:
        hf.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def hf_tensors(model: LanguageModel, family: Family) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its Hugging Face name, as views of the model's own memory."""
    for name, tensor in model.state_dict().items():
        for expert, theirs in pieces(family, name, tensor.shape):
            yield theirs, tensor if expert is None else tensor[expert]


def describe(
    config: ModelConfig, dtype: torch.dtype, families: Mapping[str, Family] = FAMILIES
) -> tuple[Family, PretrainedConfig]:
    """The family and the transformers config to export a model as."""
    hf = hf_config(config)
    family = families[hf.model_type]
    if not is_described(config, families):
        raise ValueError(
            "the model's config was changed after it was read from its Hugging Face config, so the two describe "
            "different models; change the transformers config and load from that instead."
        )
    hf.dtype = dtype
    if not hf.architectures:  # by which other tools pick the class
        hf.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[hf.model_type]]
    return family, hf


def is_described(config: ModelConfig, families: Mapping[str, Family] = FAMILIES) -> bool:
    """Whether a transformers config still says all that this one does: it has a family, and nothing was changed."""
    family = families.get(config.family or "")
    return family is not None and bool(config.hf_config) and family.to_model(hf_config(config)) == config


def _write_tensors(
    sizes: Mapping[str, int], tensors: Iterator[tuple[str, Tensor]], directory: Path, max_shard_bytes: int
) -> None:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    numbers = range(1, len(shards) + 1)
    names = [SINGLE] if len(shards) == 1 else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in numbers]
    for name, shard in zip(names, shards, strict=True):
        content = {theirs: tensor.detach().cpu().contiguous() for theirs, tensor in islice(tensors, len(shard))}
        save_file(content, directory / name, metadata={"format": "pt"})
    if len(shards) > 1:
        weight_map = {theirs: name for name, shard in zip(names, shards, strict=True) for theirs in shard}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _move_in(aside: Path, target: Path) -> None:
    if not target.exists():
        aside.rename(target)
        target.chmod(0o755)  # a temporary directory is its maker's alone
        return
    new = {path.name for path in aside.iterdir()}
    for name in sorted(new):
        (aside / name).replace(target / name)
    for path in target.iterdir():
        if path.name not in new and WEIGHTS.fullmatch(path.name):
            path.unlink()  # weights of the older export

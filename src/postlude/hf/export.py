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

from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from postlude.hf import FAMILIES, Family
from postlude.hf.load import experts_in
from postlude.hf.tensors import INDEX, SINGLE
from postlude.model import LanguageModel

WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def export_hf(
    model: LanguageModel,
    directory: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_shard_bytes: int = 5 * 1024**3,
    families: Mapping[str, Family] = FAMILIES,
) -> Path:
    """Write config.json, safetensors (sharded past `max_shard_bytes`) and, if given, the tokenizer.

    Everything is written beside the target and moved in when complete, so an export that fails while it writes leaves
    an older one as it was. Files that are not a model's are left alone. Returns the directory.
    """
    target = Path(directory).expanduser().resolve()
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target} is a file; export_hf writes a directory.")
    if model.stage.count != 1:
        raise ValueError(
            f"stage {model.stage.index} of {model.stage.count} is a part of a model; export_hf writes whole ones."
        )
    family, hf = _hf_config(model, families)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        hf.save_pretrained(aside)
        _write_tensors(model, family, aside, max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
        _move_in(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def hf_tensors(model: LanguageModel, family: Family) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its Hugging Face name, as views of the model's own memory."""
    for name, tensor in model.state_dict().items():
        for expert, theirs in family.pieces(name, experts_in(model.config)):
            yield theirs, tensor if expert is None else tensor[expert]


def _hf_config(model: LanguageModel, families: Mapping[str, Family]) -> tuple[Family, PretrainedConfig]:
    config = model.config
    if config.family is None or not config.hf_config:
        raise ValueError(
            "this model's config did not come from a Hugging Face config, so there is none to export; load the model "
            "from a transformers config to give it a family."
        )
    family = families[config.family]
    settings = {
        key: value for key, value in config.hf_config.items() if key not in ("model_type", "transformers_version")
    }
    hf = AutoConfig.for_model(config.family, **settings)
    if family.to_model(hf) != config:
        raise ValueError(
            "the model's config was changed after it was read from its Hugging Face config, so the two describe "
            "different models; change the transformers config and load from that instead."
        )
    hf.dtype = next(model.parameters()).dtype
    if not hf.architectures:  # by which other tools pick the class
        hf.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.family]]
    return family, hf


def _write_tensors(model: LanguageModel, family: Family, directory: Path, max_shard_bytes: int) -> None:
    shards: list[list[str]] = [[]]
    sizes, filled = {}, 0
    for name, tensor in hf_tensors(model, family):
        sizes[name] = tensor.numel() * tensor.element_size()
        if shards[-1] and filled + sizes[name] > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += sizes[name]
    numbers = range(1, len(shards) + 1)
    names = [SINGLE] if len(shards) == 1 else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in numbers]
    tensors = hf_tensors(model, family)
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

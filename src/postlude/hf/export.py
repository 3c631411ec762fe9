"""Writes a LanguageModel as a directory that transformers loads, or as Postlude's own format if it cannot be one.

`ModelCard` is its README.md: what the model is, what it was made from, how, and its scores.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from postlude.durable_files import sync, sync_tree
from postlude.hf.families import FAMILIES
from postlude.hf.family import Families, Family, copy_to_hf, map_to_hf
from postlude.hf.postlude_format import POSTLUDE_CONFIG, PostludeConfig
from postlude.hf.read_model import CONFIG, GENERATION, SPECIAL_TOKENS, end_tokens, read_generation_config
from postlude.hf.tensor_sources import INDEX, SINGLE, hf_config
from postlude.model import LanguageModel, ModelConfig
from postlude.model.blocks import BLOCKS, BlockTable
from postlude.model.parallel import region
from postlude.safetensors_file import TensorInfo, write
from postlude.sharded_tensors import STATE

MARK = "<!-- written by postlude: a new export replaces this file; take this line out to keep yours -->"
HUB = re.compile(r"[\w.-]+/[\w.-]+")  # a name on the hub, such as org/model


@dataclass(frozen=True)
class ModelCard:
    """The caller's description of a model. Facts from its config are added when the card is written."""

    base: str = ""
    """The model it was made from: a name on the hub, or a path."""
    method: str = ""
    """The way it was made, in a sentence or a command."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Training settings by name."""
    scores: Mapping[str, Any] = field(default_factory=dict)
    """Scores by name."""

    def text(self, title: str, facts: Mapping[str, Any], *, library: str = "transformers") -> str:
        """Returns the card as Markdown. `facts` come from the model's config, `library` loads the model."""
        front = [f"library_name: {library}", "pipeline_tag: text-generation", "tags:", "- postlude"]
        if HUB.fullmatch(self.base):
            front.append(f"base_model: {self.base}")
        parts = ["---", *front, "---", MARK, "", f"# {title}", ""]
        if self.base:
            parts += [f"Made from `{self.base}`.", ""]
        if self.method:
            parts += [self.method, ""]
        for heading, table in (("What it is", facts), ("Training", self.settings), ("Scores", self.scores)):
            if table:
                parts += [f"## {heading}", "", "| | |", "|---|---|"]
                parts += [f"| {_cell(name)} | {_cell(value)} |" for name, value in table.items()]
                parts.append("")
        return "\n".join(parts)


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text.replace("|", "\\|").replace("\n", " ")


MAX_SHARD_BYTES = 5 * 1024**3
CONFIGS, CARD = (CONFIG, POSTLUDE_CONFIG), "README.md"
TOKENIZER = frozenset({
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json",
    "chat_template.jinja", "chat_template.json", "additional_chat_templates",
})  # fmt: skip
"""The files of a tokenizer."""
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def export_hf(
    model: LanguageModel,
    directory: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    families: Families = FAMILIES,
    generation_config: Mapping[str, Any] | None = None,
    card: ModelCard | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes config.json, safetensors (sharded past `max_shard_bytes`), a model card and, if given, the tokenizer.

    `generation_config` is the content of generation_config.json, by default the config's special tokens. Everything
    is written aside and moved in when complete, so a failed export leaves an older one as it was. A directory that
    holds a model is only replaced with `overwrite`; files that do not belong to a model stay. Returns the directory.
    """
    hf_export_config(model.config, next(model.parameters()).dtype, families)  # raises if it cannot
    return export_model(
        model,
        directory,
        tokenizer=tokenizer,
        max_shard_bytes=max_shard_bytes,
        families=families,
        generation_config=generation_config,
        card=card,
        overwrite=overwrite,
    )


def export_model(
    model: LanguageModel,
    directory: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    families: Families = FAMILIES,
    generation_config: Mapping[str, Any] | None = None,
    card: ModelCard | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes what `export_hf` writes if a Hugging Face family describes the model, else Postlude's own format.

    That has the same files, but `postlude.json` instead of config.json, and tensors under our names. `load_model`,
    `Engine` and every command read it, transformers does not. See `hf/postlude_format.py`. A model with a value head
    becomes a reward model that transformers' AutoModelForSequenceClassification reads.
    """
    if model.stage.count != 1 or model.layout.world_size != 1:
        raise ValueError(
            f"stage {model.stage.index} of {model.stage.count} in {model.layout} is a part of a model; export_hf "
            "writes whole ones. Use Engine.export_hf."
        )
    family, written = export_config(model.config, next(model.parameters()).dtype, families, model.block_types)
    if model.value_head is not None and isinstance(written, PretrainedConfig):
        written = as_classifier(written)
    settings = read_generation_config(model.config) if generation_config is None else generation_config
    return write_model_directory(
        directory,
        ModelFiles(written, tokenizer, settings),
        _entries(model, family),
        hf_tensors(model, family),
        max_shard_bytes,
        card=card or ModelCard(),
        overwrite=overwrite,
    )


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model directory besides its weights: config, tokenizer and generation config."""

    hf: PretrainedConfig | PostludeConfig | None
    """Our own config if transformers has none for the model; None if that cannot be written either."""
    tokenizer: PreTrainedTokenizerBase | None
    generation_config: Mapping[str, Any]

    def write(self, directory: Path) -> None:
        if self.hf is not None:
            self.hf.save_pretrained(directory)
        generation_config = dict(self.generation_config)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(directory)
            for name in SPECIAL_TOKENS:
                if generation_config.get(name) is None and getattr(self.tokenizer, name, None) is not None:
                    generation_config[name] = getattr(self.tokenizer, name)
            ends = end_tokens(generation_config, self.tokenizer)
            if len(ends) > 1:
                generation_config["eos_token_id"] = list(ends)
        (directory / GENERATION).write_text(json.dumps(generation_config, indent=2, sort_keys=True) + "\n")


def check_export_target(directory: str | os.PathLike[str], overwrite: bool) -> Path:
    """Returns the directory of an export. Refuses a file, and a model unless it may be overwritten."""
    target = Path(directory).expanduser().resolve()
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target} is a file; export_hf writes a directory.")
    if (target / STATE).is_file():
        raise FileExistsError(f"{target} is a training checkpoint; export to another directory.")
    model_files = _model_files(target)
    if model_files and not overwrite:
        raise FileExistsError(
            f"{target} holds a model already ({model_files[0]}); export to another directory, or allow overwriting "
            "(overwrite=True, --overwrite)."
        )
    return target


def write_model_directory(
    directory: str | os.PathLike[str],
    description: ModelFiles,
    entries: Mapping[str, TensorInfo],
    tensors: Iterator[tuple[str, Tensor]],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    card: ModelCard,
    overwrite: bool = False,
) -> Path:
    target = check_export_target(directory, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside, old = (target.parent / f".{target.name}.{kind}" for kind in ("partial", "replaced"))
    shutil.rmtree(aside, ignore_errors=True)  # an export that was killed left it
    if old.is_dir():  # an export was killed while it replaced the target
        if target.exists():
            _keep_other_files(old, target)
        else:
            old.rename(target)
    try:
        aside.mkdir()
        description.write(aside)
        _write_tensors(entries, tensors, aside, max_shard_bytes)
        library = "postlude" if isinstance(description.hf, PostludeConfig) else "transformers"
        text = card.text(target.name, _facts(description.hf, _total(entries)), library=library)
        (aside / CARD).write_text(text, encoding="utf-8")
        sync_tree(aside)
        _replace(target, aside, old)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _total(entries: Mapping[str, TensorInfo]) -> int:
    return sum(entry.bytes for entry in entries.values())


def _facts(hf: PretrainedConfig | PostludeConfig | None, total: int) -> dict[str, str]:
    if hf is None:
        return {}
    if isinstance(hf, PostludeConfig):
        architecture = f"Postlude's own, `{hf.config.pattern}`"
    else:
        architecture = ", ".join(hf.architectures or ())
    dtype = str(hf.dtype).removeprefix("torch.")
    return {"architecture": architecture, "weights": f"{total:,} bytes, {dtype}"}


def hf_tensors(model: LanguageModel, family: Family | None) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor by Hugging Face name (Postlude name without a family); a view of the model if possible."""
    state_dict = model.state_dict()
    for tensor in map_to_hf(family, model.config, ((name, value.shape) for name, value in state_dict.items())).values():
        (name, mapping), *more_parts = tensor.parts
        if mapping.is_whole and not more_parts:
            yield tensor.name, state_dict[name][mapping.region].view(tensor.shape)
            continue
        full = torch.empty(tensor.shape, dtype=state_dict[name].dtype, device=state_dict[name].device)
        for name, mapping in tensor.parts:
            copy_to_hf(full, mapping, state_dict[name], region(state_dict[name]))
        yield tensor.name, full


def _entries(model: LanguageModel, family: Family | None) -> dict[str, TensorInfo]:
    state_dict = model.state_dict()
    tensors = map_to_hf(family, model.config, ((name, value.shape) for name, value in state_dict.items()))
    return {name: TensorInfo(state_dict[tensor.parts[0][0]].dtype, tensor.shape) for name, tensor in tensors.items()}


def hf_export_config(
    config: ModelConfig, dtype: torch.dtype, families: Families = FAMILIES
) -> tuple[Family, PretrainedConfig]:
    """Returns the family and the transformers config to export a model as."""
    hf = hf_config(config)
    family = families[hf.model_type]
    if not has_hf_config(config, families):
        raise ValueError(
            "the model's config was changed after it was read from its Hugging Face config, so the two describe "
            "different models; change the transformers config and load from that instead."
        )
    hf.dtype = dtype
    depths = len(config.pattern.mtp)
    if depths and family.mtp is not None and getattr(hf, family.mtp.config_key, family.mtp.default_count) != depths:
        setattr(hf, family.mtp.config_key, depths)
    if not hf.architectures:  # other tools pick the class by it
        hf.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[hf.model_type]]
    return family, hf


def untied(config: ModelConfig) -> ModelConfig:
    if not config.tied_head:
        return config
    return replace(config, tied_head=False, hf_config={**config.hf_config, "tie_word_embeddings": False})


def export_config(
    config: ModelConfig, dtype: torch.dtype, families: Families = FAMILIES, blocks: BlockTable = BLOCKS
) -> tuple[Family | None, PretrainedConfig | PostludeConfig]:
    """Returns the config that `describe` returns, or Postlude's own for a model that no family describes."""
    if has_hf_config(config, families):
        return hf_export_config(config, dtype, families)
    postlude_config = PostludeConfig(config, dtype, blocks)
    postlude_config.to_json()  # raises if it cannot
    return None, postlude_config


def has_hf_config(config: ModelConfig, families: Families = FAMILIES) -> bool:
    """Whether a transformers config describes this one: it has a family, and nothing was changed."""
    family = families.get(config.family or "")
    if family is None or not config.hf_config:
        return False
    return family.with_mtp(family.to_model(hf_config(config)), len(config.pattern.mtp)) == config


def _write_tensors(
    entries: Mapping[str, TensorInfo], tensors: Iterator[tuple[str, Tensor]], directory: Path, max_shard_bytes: int
) -> None:
    shards: list[dict[str, TensorInfo]] = [{}]
    filled = 0
    for name, entry in entries.items():
        if shards[-1] and filled + entry.bytes > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = entry
        filled += entry.bytes
    numbers = range(1, len(shards) + 1)
    names = [SINGLE] if len(shards) == 1 else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in numbers]
    for name, shard in zip(names, shards, strict=True):
        write(directory / name, shard, islice(tensors, len(shard)))
    if len(shards) > 1:
        weight_map = {tensor_name: name for name, shard in zip(names, shards, strict=True) for tensor_name in shard}
        index = {"metadata": {"total_size": _total(entries)}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _replace(target: Path, new: Path, old: Path) -> None:
    """Replaces `target` by the complete directory `new`, by renaming, so that two models never mix.

    The replaced directory becomes `old`, and files that do not belong to a model are moved back from it. A directory
    without a model stays and gets the new files, the config last.
    """
    inside = target.exists() and Path.cwd() == target
    if target.exists():
        if (target / CARD).is_file() and MARK not in (target / CARD).read_text(encoding="utf-8", errors="replace"):
            (new / CARD).unlink()  # written by the user
        if not _model_files(target) and not any((target / name).exists() for name in TOKENIZER):
            for path in sorted(new.iterdir(), key=lambda path: path.name in CONFIGS):
                path.replace(target / path.name)
            sync(target)
            return
        shutil.copymode(target, new)
        target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        if old.is_dir():
            old.rename(target)
        raise
    sync(target.parent)
    if old.is_dir():
        _keep_other_files(old, target)
    if inside:
        os.chdir(target)  # this process would be in the removed directory


def _model_files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*") if path.name in CONFIGS or WEIGHTS.fullmatch(path.name))


def _keep_other_files(old: Path, target: Path) -> None:
    """Moves files that do not belong to a model from a replaced directory to the new one, and deletes the rest."""
    has_tokenizer = any((target / name).exists() for name in TOKENIZER)
    for path in old.iterdir():
        stale = path.name in (*CONFIGS, GENERATION) or WEIGHTS.fullmatch(path.name)
        if not (stale or (has_tokenizer and path.name in TOKENIZER) or (target / path.name).exists()):
            path.rename(target / path.name)
    sync(target)
    shutil.rmtree(old)


def as_classifier(hf: PretrainedConfig) -> PretrainedConfig:
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(hf.model_type)
    if name is None:
        raise ValueError(
            f"transformers has no model of type {hf.model_type!r} that classifies sequences, so a reward model of it "
            "cannot be exported. Set export to false, and load its checkpoint with Engine(..., critic=True)."
        )
    hf.architectures, hf.num_labels = [name], 1
    end = hf.eos_token_id
    if hf.pad_token_id is not None and hf.pad_token_id in (end if isinstance(end, list) else [end]):
        # transformers scores the last token that is not padding, which would be the one before the end.
        hf.pad_token_id = None
    return hf

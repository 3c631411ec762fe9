"""Reading: what a source says its model is, in its config and the names of its tensors. No weight is touched."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from postlude.hf.builtin import BUILTIN, PACKAGED, packaged
from postlude.hf.families import FAMILIES
from postlude.hf.family import Family
from postlude.hf.model_source import PlainSource, Recast, Source
from postlude.hf.postlude_format import POSTLUDE_CONFIG, read_postlude_config
from postlude.hf.tensor_source import TensorSource
from postlude.hf.tensor_sources import CheckpointSource, SafetensorsSource, hf_config
from postlude.model import ModelConfig
from postlude.model.blocks import BLOCKS, Block
from postlude.model.recast import RecastPlan, plan_recast, recast
from postlude.sharded_tensors import STATE

CONFIG = "config.json"
GENERATION = "generation_config.json"
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
GGUF_NEEDS = "reading GGUF needs the packages gguf and accelerate: pip install 'postlude[gguf]'."


def read_model(
    source: Source, families: Mapping[str, Family] = FAMILIES, blocks: Mapping[str, type[Block]] = BLOCKS
) -> tuple[Family | None, ModelConfig]:
    """The family and the config of any source; no family, and so our own names, for a model that none describes.

    Of a Hugging Face directory it is the model that transformers makes of it, without multi-token prediction.
    """
    if isinstance(source, Recast):
        moved = read_recast_plan(source, families, blocks)
        if moved.after.family is not None and moved.after.family == moved.before.family:
            return read_model(source.source, families, blocks)[0], moved.after  # that of a larger model, it may be
        found: PretrainedConfig | ModelConfig = moved.after
    else:
        found = read_description(source, blocks)
    if not isinstance(found, ModelConfig):
        return model_from_hf(found, families)
    return None if found.family is None else _known(found.family, families), found


def read_description(source: PlainSource, blocks: Mapping[str, type[Block]] = BLOCKS) -> PretrainedConfig | ModelConfig:
    """What a source says that its model is, without touching its weights: in transformers' words, or in ours."""
    if isinstance(source, PretrainedConfig | ModelConfig):
        return source
    if isinstance(source, str) and source in BUILTIN:
        return BUILTIN[source]()
    path = existing(source)
    if path.is_dir():
        theirs, ours = (path / CONFIG).is_file(), (path / POSTLUDE_CONFIG).is_file()
        if theirs and ours:
            raise ValueError(
                f"{path} has both {CONFIG} and {POSTLUDE_CONFIG}; take away the one that is not of its weights."
            )
        if not (theirs or ours):
            raise FileNotFoundError(f"{path} has no {CONFIG} and no {POSTLUDE_CONFIG}, so it is not a model directory.")
        if ours:
            return read_postlude_config(path, blocks)
        try:
            return AutoConfig.from_pretrained(path)
        except Exception as error:  # whatever transformers' own validation raises
            raise ValueError(f"{path / CONFIG} cannot be read as a model config: {first_line(error)}") from error
    try:
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except ImportError as error:
        raise ImportError(GGUF_NEEDS) from error
    except Exception as error:  # a GGUF cut short fails in its parser, in ways of its own
        raise ValueError(f"{path} cannot be read as GGUF: {first_line(error)}") from error


def read_config(source: PlainSource) -> PretrainedConfig:
    """The transformers config of a source whose model a Hugging Face family describes."""
    found = read_description(source)
    return hf_config(found) if isinstance(found, ModelConfig) else found


def read_model_with_mtp(
    source: PlainSource, families: Mapping[str, Family] = FAMILIES, blocks: Mapping[str, type[Block]] = BLOCKS
) -> tuple[Family | None, ModelConfig]:
    """As `read_model`, with the multi-token-prediction depths that the source's files hold, by the names in them."""
    family, config = read_model(source, families, blocks)
    path = weights_at(source)
    if family is None or family.mtp is None or config.pattern.mtp or path is None or not path.is_dir():
        return family, config
    try:
        names = set(tensors_in(path, family, config).names())
    except FileNotFoundError:  # a directory without weights can be described; who needs them will say so
        return family, config
    return family, family.with_mtp(config, family.mtp.count_in(config, names))


def with_mtp(
    source: Source, families: Mapping[str, Family] = FAMILIES, blocks: Mapping[str, type[Block]] = BLOCKS
) -> Source:
    """The source with the multi-token-prediction depths that its files hold, if it would be read without."""
    if isinstance(source, Recast) or read_model(source, families, blocks)[1].pattern.mtp:
        return source
    pattern = read_model_with_mtp(source, families, blocks)[1].pattern
    return Recast(source, pattern) if pattern.mtp else source


def read_recast_plan(
    source: Recast, families: Mapping[str, Family] = FAMILIES, blocks: Mapping[str, type[Block]] = BLOCKS
) -> RecastPlan:
    """What becomes of every tensor of a source that is given another pattern."""
    before = read_model_with_mtp(source.source, families, blocks)[1]
    after = recast(before, source.pattern, source.blocks)
    return plan_recast(before, _as_its_family(after, families), blocks)


def _as_its_family(config: ModelConfig, families: Mapping[str, Family]) -> ModelConfig:
    """The config as a model of the family that it once was of, if that describes it again."""
    family = families.get(config.hf_config.get("model_type", ""))
    if config.family is not None or family is None:
        return config
    theirs = family.to_model(hf_config(replace(config, family=family.model_type)))
    theirs = family.with_mtp(theirs, len(config.pattern.mtp))
    used = replace(theirs, blocks={symbol: theirs.blocks[symbol] for symbol in theirs.symbols})
    return theirs if replace(config, family=theirs.family) == used else config


def read_generation(source: Source, blocks: Mapping[str, type[Block]] = BLOCKS) -> dict[str, Any]:
    """How a model is to generate: what the source's generation_config.json says, or its config of special tokens."""
    if isinstance(source, Recast):
        return read_generation(source.source, blocks)
    if isinstance(source, str | os.PathLike) and source not in BUILTIN and (path := existing(source)).is_dir():
        file = path / GENERATION
        if file.is_file():
            try:
                found: dict[str, Any] = json.loads(file.read_text())
            except ValueError as error:
                raise ValueError(f"{file} is not JSON ({error}); mend it, or take it away.") from error
            return found
    described = read_description(source, blocks)
    settings = described.hf_config if isinstance(described, ModelConfig) else described.to_dict()
    return {name: settings[name] for name in SPECIAL_TOKENS if settings.get(name) is not None}


def end_tokens(generation: Mapping[str, Any], eos_token_id: int | None) -> tuple[int, ...]:
    """The tokens that end an answer: those of a `read_generation`, where there may be several, and the tokenizer's."""
    stated = generation.get("eos_token_id")
    found = list(stated) if isinstance(stated, list | tuple) else [stated]
    return tuple(sorted({int(token) for token in (*found, eos_token_id) if token is not None}))


def model_from_hf(hf: PretrainedConfig, families: Mapping[str, Family] = FAMILIES) -> tuple[Family, ModelConfig]:
    """The family of a transformers config, and our config of the same model."""
    family = _known(hf.model_type, families)
    quantised = getattr(hf, "quantization_config", None)
    if not quantised:
        return family, family.to_model(hf)
    method = (quantised if isinstance(quantised, dict) else quantised.to_dict()).get("quant_method")
    if method not in family.dequantize:
        known = f" or {', '.join(family.dequantize)}" if family.dequantize else ""
        raise ValueError(
            f"the weights are quantised by {method!r} (quantization_config in config.json); load a version in bf16, "
            f"fp32{known}."
        )
    config = family.to_model(hf)  # which holds the weights unpacked
    settings = {name: value for name, value in config.hf_config.items() if name != "quantization_config"}
    return family, replace(config, hf_config=settings)


def _known(model_type: str, families: Mapping[str, Family]) -> Family:
    family = families.get(model_type)
    if family is None:
        raise ValueError(f"model_type {model_type!r} has no adapter; there are {', '.join(sorted(families))}.")
    return family


def tensors_in(path: Path, family: Family | None, config: ModelConfig) -> TensorSource:
    """The tensors of a model directory or a checkpoint, unpacked and as transformers names them."""
    if (path / STATE).is_file():
        return CheckpointSource(path, family, config)
    tensors: TensorSource = SafetensorsSource(path)
    if family is None:
        return tensors
    for unpack in family.dequantize.values():
        tensors = unpack(tensors)  # which leaves alone what is not packed
    return tensors if family.adapt_source is None else family.adapt_source(tensors)


def weights_at(source: PlainSource) -> Path | None:
    """Where a source's weights are; None where it is a config alone, and they are drawn afresh."""
    if isinstance(source, PretrainedConfig | ModelConfig) or (isinstance(source, str) and source in BUILTIN):
        return None
    return existing(source)


def existing(source: str | os.PathLike[str]) -> Path:
    """Where a source is that is a directory or a GGUF file; a sentence where it is neither."""
    path = packaged(source) if isinstance(source, str) and source in PACKAGED else Path(source).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    built_in = f"a built-in model ({', '.join([*BUILTIN, *PACKAGED])})"
    if path.is_file():
        raise ValueError(f"{path} is a file, but not a .gguf; give a model directory, a GGUF file or {built_in}.")
    said, mend = str(source), ""
    if near := difflib.get_close_matches(said, [*BUILTIN, *PACKAGED], 1):
        mend = f" Did you mean {near[0]}?"
    elif re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", said) and not path.parent.is_dir():  # a name on the Hugging Face Hub
        here = f"models/{path.name}"
        mend = (
            f" If it is on the Hugging Face Hub, `hf download {said} --local-dir {here}` brings it; then give {here}."
        )
    raise FileNotFoundError(f"{said!r} is neither a model directory, nor a GGUF file, nor {built_in}.{mend}")


def first_line(error: BaseException) -> str:
    """Of what an exception says, which may be a page."""
    return str(error).strip().split("\n", 1)[0]

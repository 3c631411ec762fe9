"""Source: what a model can be read from. Reads its config and the names of its tensors, but no weight."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from transformers import AutoConfig, PretrainedConfig

from postlude.data.chat_tokenizer import AnyTokenizer
from postlude.data.hub import HubRepo, hub_repo
from postlude.data.turn_encoding import turn_ends
from postlude.hf.builtin import BUILTIN, PACKAGED, packaged
from postlude.hf.families import FAMILIES
from postlude.hf.family import SCORE, Families, Family, TensorSource
from postlude.hf.postlude_format import POSTLUDE_CONFIG, read_postlude_config
from postlude.hf.tensor_sources import CheckpointSource, SafetensorsSource, hf_config
from postlude.model import ModelConfig, Pattern
from postlude.model.block_config import BlockConfig
from postlude.model.blocks import BLOCKS, BlockTable
from postlude.model.recast import RecastPlan, plan_recast, recast
from postlude.sharded_tensors import STATE

CONFIG = "config.json"
GENERATION = "generation_config.json"
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
SMALL_FILES = (".json", ".txt", ".model", ".jinja")  # of configs and tokenizers
COUNTED, MAX_COUNT = re.compile(r"(^|_)(num|n)_\w*(layer|expert|head)"), 10_000
CHAT_TEMPLATES = "additional_chat_templates/"
GGUF_NEEDS = "reading GGUF needs the packages gguf and accelerate: pip install 'postlude[gguf]'."
PlainSource: TypeAlias = str | os.PathLike[str] | PretrainedConfig | ModelConfig


@dataclass(frozen=True)
class Recast:
    """The model of a source under another pattern: `Recast("path/of/a-llama", "[M-][*-]{3}", {"M": MambaConfig(…)})`.

    Blocks are matched by position, however they are grouped, and the new pattern has as many. A block with the same
    symbol keeps its weights, under its new name. Any other is new: it is initialised, and needs a config in `blocks` if
    the source has none for its symbol. Multi-token-prediction depths may be added or left out at the end; those in the
    source's files stay. `postlude.hf.read_model.read_recast_plan` returns what stays, what is new and what is dropped.
    """

    source: PlainSource
    pattern: str | Pattern
    blocks: Mapping[str, BlockConfig] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.source, Recast):
            raise TypeError("a Recast of a Recast was given: name the source itself, and the last of the patterns.")


Source: TypeAlias = PlainSource | Recast


def read_model(
    source: Source, families: Families = FAMILIES, blocks: BlockTable = BLOCKS
) -> tuple[Family | None, ModelConfig]:
    """Returns the family and the config of any source; no family, and so our own names, if none describes the model.

    A Hugging Face directory is read as transformers reads it, without multi-token prediction.
    """
    if isinstance(source, Recast):
        moved = read_recast_plan(source, families, blocks)
        if moved.after.family is not None and moved.after.family == moved.before.family:
            family, _ = read_model(source.source, families, blocks)  # it may be that of a vision model
            return family, moved.after
        description: PretrainedConfig | ModelConfig = moved.after
    else:
        description = read_description(source, blocks)
    if not isinstance(description, ModelConfig):
        try:
            return model_from_hf(description, families)
        except (ValueError, TypeError) as error:
            if not isinstance(source, str | os.PathLike) or source in BUILTIN:
                raise
            path = resolve_path(source)
            file = path / CONFIG if path.is_dir() else path
            raise ValueError(f"{file} cannot be used: {error}") from error
    return None if description.family is None else _known(description.family, families), description


def read_description(source: PlainSource, blocks: BlockTable = BLOCKS) -> PretrainedConfig | ModelConfig:
    if isinstance(source, PretrainedConfig | ModelConfig):
        return source
    if isinstance(source, str) and source in BUILTIN:
        return BUILTIN[source]()
    path = resolve_path(source)
    if path.is_dir():
        has_hf_config, has_postlude_config = (path / CONFIG).is_file(), (path / POSTLUDE_CONFIG).is_file()
        if has_hf_config and has_postlude_config:
            raise ValueError(
                f"{path} has both {CONFIG} and {POSTLUDE_CONFIG}; remove the one that does not belong to its weights."
            )
        if not (has_hf_config or has_postlude_config):
            adapter = (path / "adapter_config.json").is_file()
            hint = f" It is an adapter: merge it with `postlude convert {path} BASE DST`." if adapter else ""
            raise FileNotFoundError(
                f"{path} has no {CONFIG} and no {POSTLUDE_CONFIG}, so it is not a model directory.{hint}"
            )
        if has_postlude_config:
            return read_postlude_config(path, blocks)
        try:
            _check_counts(json.loads((path / CONFIG).read_text("utf-8")))
            return AutoConfig.from_pretrained(path, trust_remote_code=False)
        except Exception as error:  # transformers' validation raises many types
            reason = first_line(error)
            if isinstance(error, ZeroDivisionError):  # which does not name the number
                values = json.loads((path / CONFIG).read_text())
                zeros = [name for name, value in values.items() if value == 0 and name.startswith("num_")]
                reason = f"{' and '.join(zeros)} must not be 0" if zeros else reason
            raise ValueError(f"{path / CONFIG} cannot be read as a model config: {reason}") from error
    try:
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    except ImportError as error:
        raise ImportError(GGUF_NEEDS) from error
    except Exception as error:  # the parser raises many types on a truncated GGUF
        raise ValueError(f"{path} cannot be read as GGUF: {first_line(error)}") from error


def _check_counts(values: Any) -> None:
    """Refuses a number of layers, heads or experts that transformers or we would take hours and all memory to list."""
    for name, value in values.items() if isinstance(values, dict) else ():
        _check_counts(value)
        if COUNTED.search(name) and isinstance(value, int) and value > MAX_COUNT:
            raise ValueError(f"{name} is {value}, but at most {MAX_COUNT} are supported.")


def read_model_with_mtp(
    source: PlainSource, families: Families = FAMILIES, blocks: BlockTable = BLOCKS
) -> tuple[Family | None, ModelConfig]:
    """Returns what `read_model` returns, with the multi-token-prediction depths whose names the source's files have."""
    family, config = read_model(source, families, blocks)
    path = weights_path(source)
    if family is None or family.mtp is None or config.pattern.mtp or path is None or not path.is_dir():
        return family, config
    try:
        names = set(tensors_in(path, family, config).names())
    except FileNotFoundError:  # a directory may have a config and no weights
        return family, config
    return family, family.with_mtp(config, family.mtp.count_in(config, names))


def with_mtp(source: Source, families: Families = FAMILIES, blocks: BlockTable = BLOCKS) -> Source:
    """Returns the source with the multi-token-prediction depths of its files, which it is otherwise read without."""
    if isinstance(source, Recast) or read_model(source, families, blocks)[1].pattern.mtp:
        return source
    pattern = read_model_with_mtp(source, families, blocks)[1].pattern
    return Recast(source, pattern) if pattern.mtp else source


def read_recast_plan(source: Recast, families: Families = FAMILIES, blocks: BlockTable = BLOCKS) -> RecastPlan:
    """Returns what becomes of every tensor of a source under another pattern."""
    before = read_model_with_mtp(source.source, families, blocks)[1]
    after = recast(before, source.pattern, source.blocks)
    return plan_recast(before, _as_its_family(after, families), blocks)


def _as_its_family(config: ModelConfig, families: Families) -> ModelConfig:
    """Returns the config with the family that it was first read from, if that describes it again."""
    family = families.get(config.hf_config.get("model_type", ""))
    if config.family is not None or family is None:
        return config
    family_config = family.to_model(hf_config(replace(config, family=family.model_type)))
    family_config = family.with_mtp(family_config, len(config.pattern.mtp))
    used = replace(family_config, blocks={symbol: family_config.blocks[symbol] for symbol in family_config.symbols})
    return family_config if replace(config, family=family_config.family) == used else config


def read_generation_config(source: Source, blocks: BlockTable = BLOCKS) -> dict[str, Any]:
    """Returns the source's generation_config.json, or the special tokens of its config."""
    if isinstance(source, Recast):
        return read_generation_config(source.source, blocks)
    if isinstance(source, str | os.PathLike) and source not in BUILTIN and (path := resolve_path(source)).is_dir():
        file = path / GENERATION
        if file.is_file():
            try:
                values: dict[str, Any] = json.loads(file.read_text())
                end_tokens(values, None)  # raises if they are not token ids
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                raise ValueError(f"{file} cannot be read ({error}); fix it, or remove it.") from error
            return values
    described = read_description(source, blocks)
    settings = described.hf_config if isinstance(described, ModelConfig) else described.to_dict()
    return {name: settings[name] for name in SPECIAL_TOKENS if settings.get(name) is not None}


def end_tokens(generation_config: Mapping[str, Any], tokenizer: AnyTokenizer | None) -> tuple[int, ...]:
    """Returns the tokens that end a completion: those of `read_generation_config`, the tokenizer's, the template's."""
    stated = generation_config.get("eos_token_id")
    tokens = list(stated) if isinstance(stated, list | tuple) else [stated]
    if tokenizer is not None:
        tokens += [tokenizer.eos_token_id, *turn_ends(tokenizer)]
    return tuple(dict.fromkeys(int(token) for token in tokens if token is not None))


def model_from_hf(hf: PretrainedConfig, families: Families = FAMILIES) -> tuple[Family, ModelConfig]:
    """Returns the family of a transformers config, and our config of the same model."""
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
    config = family.to_model(hf)  # for dequantised weights
    settings = {name: value for name, value in config.hf_config.items() if name != "quantization_config"}
    return family, replace(config, hf_config=settings)


def _known(model_type: str, families: Families) -> Family:
    family = families.get(model_type)
    if family is None:
        raise ValueError(f"model_type {model_type!r} has no adapter; there are {', '.join(sorted(families))}.")
    return family


def tensors_in(path: Path, family: Family | None, config: ModelConfig, *, all_bits: bool = True) -> TensorSource:
    """Returns the tensors of a model directory or a checkpoint, dequantised and with transformers' names.

    `all_bits` is that of `CheckpointSource`.
    """
    if (path / STATE).is_file():
        return CheckpointSource(path, family, config, all_bits=all_bits)
    tensors: TensorSource = SafetensorsSource(path)
    if family is None:
        return tensors
    for dequantize in family.dequantize.values():
        tensors = dequantize(tensors)  # other tensors stay as they are
    return tensors if family.adapt_source is None else family.adapt_source(tensors)


def weights_path(source: PlainSource) -> Path | None:
    """Returns where a source's weights are; None if it is only a config, so that weights are initialised.

    Those of a model of the Hugging Face Hub are downloaded.
    """
    if isinstance(source, PretrainedConfig | ModelConfig) or (isinstance(source, str) and source in BUILTIN):
        return None
    return resolve_path(source, weights=True)


def resolve_path(source: str | os.PathLike[str], *, weights: bool = False) -> Path:
    """Returns the path of a source that is a directory or a GGUF file. Raises if it is neither.

    A name on the Hugging Face Hub is the directory of its cached copy, which has the weights only if `weights` is true.
    """
    path = packaged(source) if isinstance(source, str) and source in PACKAGED else Path(source).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    built_in = f"a built-in model ({', '.join([*BUILTIN, *PACKAGED])})"
    if path.is_file():
        raise ValueError(f"{path} is a file, but not a .gguf; give a model directory, a GGUF file or {built_in}.")
    if (repo := hub_repo(source, "model")) is not None:
        return _download(repo, weights=weights)
    near = difflib.get_close_matches(str(source), [*BUILTIN, *PACKAGED], 1)
    fix = f" Did you mean {near[0]}?" if near else ""
    if not fix and len(path.parts) > 1:
        fix = f" The directory {[part for part in (path, *path.parents) if not part.exists()][-1]} does not exist."
    raise FileNotFoundError(
        f"{str(source)!r} is neither a model directory, nor a GGUF file, nor {built_in}, nor ORG/NAME on the "
        f"Hugging Face Hub.{fix}"
    )


def _download(repo: HubRepo, *, weights: bool) -> Path:
    """Returns the directory of a model of the Hub with its config and tokenizer and, if asked for, its weights."""
    snapshot = repo.snapshot()
    files = [file for file in snapshot.files if "/" not in file or file.startswith(CHAT_TEMPLATES)]
    small = [file for file in files if file.endswith(SMALL_FILES)]
    large = [file for file in files if file.endswith(".safetensors") and not file.startswith("consolidated")]
    if weights and not large:
        kinds = ", ".join(sorted({Path(file).suffix for file in snapshot.files if Path(file).suffix}))
        raise FileNotFoundError(
            f"model {repo.id} of the Hugging Face Hub has no .safetensors; its files are: {kinds}. Convert its "
            "weights, or download a .gguf file and give its path."
        )
    repo.download(snapshot, [*small, *large] if weights else small)
    return snapshot.folder


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, which may be a page; with the second if it ends in a colon."""
    first, *more = str(error).strip().split("\n", 2)
    return f"{first} {more[0].strip()}" if first.endswith(":") and more else first


def has_value_head(source: Source) -> bool:
    base = source.source if isinstance(source, Recast) else source
    path = weights_path(base)
    return path is not None and path.is_dir() and SCORE in tensors_in(path, *read_model(base)).names()


def check_value_head(source: str) -> None:
    """Raises ValueError if a model directory has no `score.weight`, and so is not a reward model."""
    if not has_value_head(source):
        raise ValueError(
            f"{source} has no tensor {SCORE}, so it is not a reward model. Give the model/ directory of a run of "
            "postlude rm, or one that transformers' AutoModelForSequenceClassification reads with num_labels=1."
        )


SCALED = ("linear", "dynamic", "yarn")
"""RoPE scalings whose factor is not yet in `max_position_embeddings`."""


def context_length(config: ModelConfig) -> int | None:
    """Returns the maximum number of tokens that a model reads, prompt and completion together; None without a limit.

    It is `max_position_embeddings`, extended by the RoPE scaling as vLLM understands it: with YaRN, the factor
    multiplies the original length. A model without attention has no limit.
    """
    settings: Mapping[str, Any] = config.hf_config.get("text_config") or config.hf_config
    positions, rope = settings.get("max_position_embeddings"), settings.get("rope_parameters") or {}
    attends = any(config.blocks[symbol].attention_flops(1.0) for symbol in config.symbols)
    if not isinstance(positions, int) or not attends:
        return None
    if str(settings.get("model_type")).startswith("gemma3"):
        return positions  # which is stated as extended, whatever the scaling
    by_layer_type = all(isinstance(value, Mapping) for value in rope.values())
    for parameters in rope.values() if by_layer_type else [rope]:
        kind, factor = parameters.get("rope_type"), parameters.get("factor")
        if kind in SCALED and factor:
            original = parameters.get("original_max_position_embeddings") if kind == "yarn" else None
            return int((original or positions) * factor)
    return positions

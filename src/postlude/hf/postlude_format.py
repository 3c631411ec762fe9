"""Postlude's own model directories, for models that no Hugging Face family describes.

Such a directory has `postlude.json` instead of config.json, and its tensors have Postlude's names. The rest is as
in a Hugging Face directory: safetensors, sharded with an index if they are large, generation_config.json, a tokenizer
and a model card.

    {"format": 1, "dtype": "bfloat16", "config": {"pattern": "[M-][*-]", …}, "hf_config": {…}}

`config` is the ModelConfig (`model/config_json.py`). `hf_config` is the config.json that the model was first read
from, if any: with its original pattern, it is a model of that family again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any

import torch

from postlude.model import ModelConfig
from postlude.model.blocks import BLOCKS, BlockTable
from postlude.model.config_json import config_from_json, config_to_json

POSTLUDE_CONFIG = "postlude.json"
FORMAT = 1
NOT_FINITE = "__float__"
ENTRIES = ("format", "dtype", "config", "hf_config")


@dataclass(frozen=True)
class PostludeConfig:
    """The content of `postlude.json`: a model's config and the dtype of its weights."""

    config: ModelConfig
    dtype: torch.dtype
    blocks: BlockTable

    def save_pretrained(self, directory: Path) -> None:
        (directory / POSTLUDE_CONFIG).write_text(
            json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns its entries. Raises if JSON cannot hold the config."""
        return {
            "format": FORMAT,
            "dtype": str(self.dtype).removeprefix("torch."),
            "config": config_to_json(self.config, self.blocks),
            "hf_config": _plain(self.config.hf_config),
        }


def read_postlude_config(directory: Path, blocks: BlockTable = BLOCKS) -> ModelConfig:
    """Returns the config of a model in Postlude's own format; `blocks` is the table of blocks, with yours added."""
    file = directory / POSTLUDE_CONFIG
    try:
        data = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse, object_hook=_decode_float)
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(f"{file} is not JSON that can be read ({error}); fetch or write it again.") from error
    try:
        return _read(data, blocks)
    except ValueError as error:
        raise ValueError(f"{file} describes no model: {error}") from error


def _plain(value: Any) -> Any:
    """Returns a config's value as JSON; a number that is not finite is written as transformers writes it."""
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {NOT_FINITE: str(value)}
    return value if isinstance(value, str | int | float | NoneType) else str(value)


def _decode_float(entries: dict[str, Any]) -> Any:
    """Returns the number that `_plain` wrote as an object, or the object."""
    return float(entries[NOT_FINITE]) if entries.keys() == {NOT_FINITE} else entries


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON's")


def _read(data: Any, blocks: BlockTable) -> ModelConfig:
    if not isinstance(data, dict):
        raise ValueError(f"it holds {data!r}, but it must be an object with the entries {', '.join(ENTRIES)}.")
    if data.get("format") != FORMAT:
        raise ValueError(f"its format is {data.get('format')!r}, but this version of postlude reads format {FORMAT}.")
    missing, unknown = set(ENTRIES) - set(data), set(data) - set(ENTRIES)
    if missing or unknown:
        problem = f"lacks {min(missing)!r}" if missing else f"has {min(unknown)!r}"
        raise ValueError(f"it {problem}, but its entries are {', '.join(ENTRIES)}.")
    dtype = getattr(torch, data["dtype"], None) if isinstance(data["dtype"], str) else None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"its dtype is {data['dtype']!r}, but it must be one of floating point, such as 'bfloat16'.")
    if not isinstance(data["hf_config"], dict):
        raise ValueError(f"its hf_config is {data['hf_config']!r}, but it must be an object, if an empty one.")
    return replace(config_from_json(data["config"], blocks), hf_config={**data["hf_config"], "dtype": data["dtype"]})

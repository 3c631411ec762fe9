"""Source: what a model can be loaded from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from transformers import PretrainedConfig

from postlude.model import ModelConfig, Pattern
from postlude.model.block_config import BlockConfig

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

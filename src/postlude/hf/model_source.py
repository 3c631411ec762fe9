"""What a model can be loaded from."""

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

    Its blocks are counted one by one, however they are grouped, and the new pattern has as many. One whose symbol is
    the same at its place keeps its weights, under the name it has now. Any other is new: it needs a config in `blocks`,
    if the source has none for its symbol, and starts from fresh weights. Multi-token-prediction depths may be added or
    left out at the end; those that the source's files hold stay. `postlude.hf.read_model.read_recast_plan` tells what
    stays, what is fresh and what is dropped.
    """

    source: PlainSource
    pattern: str | Pattern
    blocks: Mapping[str, BlockConfig] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.source, Recast):
            raise TypeError("a Recast of a Recast was given: name the source itself, and the last of the patterns.")


Source: TypeAlias = PlainSource | Recast

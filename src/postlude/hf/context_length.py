"""The context length of a model, from the config that it was read from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from postlude.model import ModelConfig

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

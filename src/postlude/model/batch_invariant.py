"""Checks that a model can run in the batch-invariant mode, which `ops/batch_invariant.py` explains."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from postlude.layout import Layout
from postlude.model.blocks import BLOCKS, BlockTable
from postlude.model.config import ModelConfig

OFF = "Set batch_invariant to false"


def check_batch_invariant(
    config: ModelConfig,
    layout: Layout,
    options: Mapping[str, object] = MappingProxyType({}),
    blocks: BlockTable = BLOCKS,
) -> None:
    """Raises ValueError for a model, a layout or an option by name, if set, whose results depend on the batch."""
    for name in ("pp", "cp", "tp", "ep"):
        if (degree := getattr(layout, name)) > 1:
            raise ValueError(
                f"batch_invariant needs {name}=1, but {name} is {degree}: sums over ranks have no fixed order. "
                f"{OFF}, or use data parallelism."
            )
    for symbol in config.symbols:
        if not blocks[symbol].batch_invariant:
            raise ValueError(
                f"batch_invariant needs blocks that decode with the bits of their forward, but pattern "
                f"{config.pattern} has {symbol!r} ({blocks[symbol].__name__}). {OFF}, or use a model of "
                f"{', '.join(repr(other) for other, block in blocks.items() if block.batch_invariant)}."
            )
    if config.logit_softcap is not None or config.logit_scale != 1.0:
        raise ValueError(
            f"batch_invariant needs plain logits, but this model's have logit_softcap={config.logit_softcap} and "
            f"logit_scale={config.logit_scale:g}. {OFF}."
        )
    for name, value in options.items():
        if value:
            raise ValueError(f"batch_invariant is not possible with {name}={value}. {OFF}, or leave {name} out.")

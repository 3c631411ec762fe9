"""What is compared: a model in a layout, on batches that are hard to divide."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from postlude.data import Batch
from postlude.hf.builtin import BUILTIN
from postlude.hf.model_source import Source
from postlude.hf.postlude_format import POSTLUDE_CONFIG
from postlude.hf.read_model import CONFIG, read_description
from postlude.layout import Layout
from postlude.model import ModelConfig
from postlude.model.blocks import Block
from postlude.options import Overlap, Recompute
from postlude.verify.choices import GRID

BUDGET = 32
FRESH_RANGE = 0.1  # fresh weights this wide give outputs that tell tokens apart


@dataclass(frozen=True)
class Case:
    """One comparison. `initializer_range` widens a fresh model's weights, so that its outputs tell tokens apart.

    `blocks` is a table with blocks of your own, by default the built-in ones'.
    """

    source: Source
    layout: Layout
    objective: str = "grpo"
    recompute: Recompute = "none"
    overlap: Overlap = False
    compute_dtype: torch.dtype = torch.float32
    tied: bool | None = None
    initializer_range: float | None = None
    seed: int = 0
    blocks: Mapping[str, type[Block]] | None = None


def resolve_source(model: str) -> tuple[Source, float | None]:
    """What to load for a model named on the command line, and how wide to draw weights where it has none.

    A built-in name, a directory, a GGUF file; or a directory, a config.json or a postlude.json without weights, which
    get fresh ones.
    """
    path = Path(model).expanduser()
    if model in BUILTIN:
        return model, FRESH_RANGE
    if path.name in (CONFIG, POSTLUDE_CONFIG) and path.is_file():
        path = path.parent
    elif path.suffix == ".json" and path.is_file():
        raise ValueError(
            f"{path} is known by its name: call it {CONFIG} if it is Hugging Face's, {POSTLUDE_CONFIG} if Postlude's."
        )
    if path.is_dir() and not any(path.glob("*.safetensors*")):
        return read_description(path), FRESH_RANGE
    return str(path), None


def fitting_layouts(config: ModelConfig) -> list[Layout]:
    """The layouts of the grid that this model can be divided by."""
    found = []
    experts = any(block.has_experts for block in config.blocks.values())
    for layout in GRID:
        with suppress(ValueError):
            config.check_layout(layout)
            found += [layout] if experts or layout.ep == 1 else []
    return found


def batches(objective: str, vocab_size: int, seed: int) -> dict[str, Batch]:
    """By name: unequal lengths of which one fills a microbatch, and fewer sequences than any layout has places for.

    For preferences, pairs of them.
    """
    pairs = objective == "dpo"
    many = (5, 3, 8, 2, 12, 7, 9, 4, 20, BUDGET - 20) if pairs else (5, 1, 8, 3, 12, 2, 7, 9, 4, 11, BUDGET)
    few = (6, 4) if pairs else (6,)
    return {
        name: _batch(lengths, vocab_size, seed + index, pairs)
        for index, (name, lengths) in enumerate({"many": many, "few": few}.items())
    }


def _batch(lengths: tuple[int, ...], vocab_size: int, seed: int, pairs: bool) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    # Near what a model says of random tokens. Far from it most ratios are clipped, and a KL is mostly rounding.
    guess = -math.log(vocab_size)

    def normal(length: int) -> Tensor:
        return torch.randn(length, generator=generator)

    return Batch(
        [torch.randint(vocab_size, (length,), generator=generator) for length in lengths],
        {
            "response_mask": [(torch.arange(length) >= length // 3).float() for length in lengths],
            "advantages": [normal(1).expand(length) for length in lengths],
            "old_logprobs": [guess + 0.5 * normal(length) for length in lengths],
            "reference_logprobs": [guess + 0.5 * normal(length) for length in lengths],
        },
        groups=[index // 2 for index in range(len(lengths))] if pairs else None,
    )

"""`postlude convert`: any source as a model directory, by another pattern if asked."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console

from postlude.checks import check_place
from postlude.hf.card import ModelCard
from postlude.hf.export import export_model, refuse_overwriting
from postlude.hf.load import load_model, load_tokenizer
from postlude.hf.reading import read_generation, read_model, read_moves, with_depths
from postlude.hf.source import Recast, Source
from postlude.model import ModelConfig, Pattern
from postlude.model.block_config import BlockConfig
from postlude.model.blocks import BLOCKS
from postlude.model.recast import Moves


def run(options: argparse.Namespace) -> None:
    """Read any source and write a model directory, tokenizer included."""
    console = Console()

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    check_place("DST", Path(options.target), "it")
    refuse_overwriting(options.target, options.overwrite)
    source: Source = options.source
    how = "Converted by `postlude convert`."
    if options.mtp:
        source = with_depths(options.source)
    if options.pattern is not None:
        config = read_model(options.source)[1]
        pattern = Pattern.parse(options.pattern)
        blocks = fitting_blocks(config, pattern)
        for symbol, block in blocks.items():
            say(f"{symbol} is {block}")
        source = Recast(options.source, pattern, blocks)
        for line in (lines := told(read_moves(source))):
            say(line)
        how = " ".join((f"Converted by `postlude convert --pattern '{options.pattern}'`.", *lines))
    try:
        tokenizer = load_tokenizer(options.source)
    except FileNotFoundError as error:
        read_model(options.source)  # a source that is not there is no reason to go on
        tokenizer = None
        print(f"postlude convert: {error} The weights are written without one.", file=sys.stderr)
    model = load_model(source, dtype=options.dtype and getattr(torch, options.dtype), seed=options.seed)
    target = export_model(
        model,
        options.target,
        tokenizer=tokenizer,
        generation=read_generation(options.source),
        card=ModelCard(base=str(options.source), how=how),
        overwrite=options.overwrite,
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    say(f"wrote {count:,} parameters to {target}")


def fitting_blocks(config: ModelConfig, pattern: Pattern) -> dict[str, BlockConfig]:
    """Configs for the symbols of a pattern that a model has none for, of sizes that go with its own."""
    others = list(config.blocks.values())
    return {
        symbol: BLOCKS[symbol].Config.like(config.hidden_size, others)
        for symbol in pattern.kinds
        if symbol not in config.blocks and symbol in BLOCKS
    }


def told(moved: Moves) -> list[str]:
    """What is fresh and what is dropped, a sentence each."""
    lines = []
    if moved.fresh_parts:
        lines.append(f"Freshly initialised, and to be trained: {', '.join(moved.fresh_parts)}.")
    if moved.dropped_parts:
        lines.append(f"Left out: {', '.join(moved.dropped_parts)}.")
    return lines

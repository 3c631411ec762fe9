"""`postlude convert`: any source as a model directory, by another pattern if asked."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console

from postlude.checks import check_writable
from postlude.hf.export import check_export_target, export_model
from postlude.hf.load import load_model, load_tokenizer
from postlude.hf.model_card import ModelCard
from postlude.hf.model_source import Recast, Source
from postlude.hf.read_model import read_generation, read_model, read_recast_plan, with_mtp
from postlude.model import ModelConfig, Pattern
from postlude.model.block_config import BlockConfig
from postlude.model.blocks import BLOCKS
from postlude.model.recast import RecastPlan


def run(options: argparse.Namespace) -> None:
    """Read any source and write a model directory, tokenizer included."""
    console = Console()

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    check_writable("DST", Path(options.target), "it")
    check_export_target(options.target, options.overwrite)
    source: Source = options.source
    how = "Converted by `postlude convert`."
    if options.mtp:
        source = with_mtp(options.source)
    if options.pattern is not None:
        config = read_model(options.source)[1]
        pattern = Pattern.parse(options.pattern)
        blocks = fitting_blocks(config, pattern)
        for symbol, block in blocks.items():
            say(f"{symbol} is {block}")
        source = Recast(options.source, pattern, blocks)
        for line in (lines := told(read_recast_plan(source))):
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
        symbol: BLOCKS[symbol].Config.default_for(config.hidden_size, others)
        for symbol in pattern.kinds
        if symbol not in config.blocks and symbol in BLOCKS
    }


def told(moved: RecastPlan) -> list[str]:
    """What is fresh and what is dropped, a sentence each."""
    lines = []
    if moved.fresh_parts:
        lines.append(f"Freshly initialised, and to be trained: {', '.join(moved.fresh_parts)}.")
    if moved.dropped_parts:
        lines.append(f"Left out: {', '.join(moved.dropped_parts)}.")
    return lines

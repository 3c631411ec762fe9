"""`postlude convert`: write any model source as a model directory; also with another pattern, or an adapter merged."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console

from postlude.checks import check_writable
from postlude.engine.adapters import base_fingerprint
from postlude.hf.export import ModelCard, check_export_target, export_model
from postlude.hf.load import load_model, load_tokenizer, weights_dtype
from postlude.hf.read_model import (
    Recast,
    Source,
    has_value_head,
    read_generation_config,
    read_model,
    read_recast_plan,
    with_mtp,
)
from postlude.hf.read_peft import (
    SavedAdapter,
    is_adapter_directory,
    merge_adapter,
    read_saved_adapter,
    rounded_to,
)
from postlude.layout import Layout
from postlude.model import LanguageModel, ModelConfig, Pattern
from postlude.model.block_config import BlockConfig
from postlude.model.blocks import BLOCKS
from postlude.model.recast import RecastPlan
from postlude.world.mesh import Mesh


def run(options: argparse.Namespace) -> None:
    """Reads any source and writes a model directory with its tokenizer."""
    console = Console()

    def print_line(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    check_writable("DST", Path(options.target), "it")
    check_export_target(options.target, options.overwrite)
    source: Source = options.source
    description = "Converted by `postlude convert`."
    if options.adapter is None and is_adapter_directory(options.source):
        raise ValueError(
            f"{options.source} is an adapter, which has no weights of a model: give its base too, as postlude convert "
            f"{options.source} BASE {options.target}."
        )
    if options.adapter is not None and options.pattern is not None:
        raise ValueError("--pattern changes the model that an adapter was made for: merge first, then convert again.")
    if options.mtp:
        source = with_mtp(options.source)
    if options.pattern is not None:
        config = read_model(options.source)[1]
        pattern = Pattern.parse(options.pattern)
        blocks = fitting_blocks(config, pattern)
        for symbol, block in blocks.items():
            print_line(f"{symbol} is {block}")
        source = Recast(options.source, pattern, blocks)
        for line in (lines := describe_changes(read_recast_plan(source))):
            print_line(line)
        description = " ".join((f"Converted by `postlude convert --pattern '{options.pattern}'`.", *lines))
    adapter = None if options.adapter is None else read_saved_adapter(options.adapter, *read_model(source))
    try:
        tokenizer = load_tokenizer(options.source, trust_remote_code=options.trust_remote_code)
    except FileNotFoundError as error:
        read_model(options.source)  # raises if the source itself does not exist
        tokenizer = None
        print(f"postlude convert: {error} The weights are written without one.", file=sys.stderr)
    dtype = options.dtype and getattr(torch, options.dtype)
    value_head = has_value_head(source) or (adapter is not None and adapter.value_head is not None)
    if value_head:
        value_head = not options.without_value_head
        print_line(
            "Writes the value head too, and so a model that classifies sequences; --without-value-head leaves it out."
            if value_head
            else "Leaves out the value head."
        )
    load_dtype = dtype if adapter is None else torch.float32
    model = load_model(source, dtype=load_dtype, seed=options.seed, value_head=value_head)
    if adapter is not None:
        _check_base(adapter, model, str(options.source))
        merge_adapter(model, adapter)
        model = rounded_to(model, dtype or weights_dtype(model.config))
        description = f"Base {options.source} with the adapter {options.adapter} merged in by `postlude convert`."
        print_line(f"merged {adapter.parameters:,} parameters of adapters into {len(adapter.pairs)} layers")
    target = export_model(
        model,
        options.target,
        tokenizer=tokenizer,
        generation_config=read_generation_config(options.source),
        card=ModelCard(base=str(options.source), method=description),
        overwrite=options.overwrite,
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    print_line(f"wrote {count:,} parameters to {target}")


def _check_base(adapter: SavedAdapter, model: LanguageModel, source: str) -> None:
    """Raises ValueError if the adapter is known to be of another base."""
    if adapter.base is None:
        return
    present = base_fingerprint(model.state_dict(), Mesh.without_processes(Layout()), ())
    if present != adapter.base:
        raise ValueError(
            f"{adapter.path} has adapters of another base model: its weights have the fingerprint {adapter.base}, and "
            f"those of {source} {present}. Give the model that the run started from, and --mtp if the run trained "
            "multi-token prediction."
        )


def fitting_blocks(config: ModelConfig, pattern: Pattern) -> dict[str, BlockConfig]:
    """Returns configs of the blocks that a pattern adds to a model, with fitting sizes."""
    others = list(config.blocks.values())
    return {
        symbol: BLOCKS[symbol].Config.default_for(config.hidden_size, others)
        for symbol in pattern.kinds
        if symbol not in config.blocks and symbol in BLOCKS
    }


def describe_changes(moved: RecastPlan) -> list[str]:
    """Returns a sentence about new weights and one about dropped weights."""
    lines = []
    if moved.fresh_parts:
        lines.append(f"Freshly initialised, and to be trained: {', '.join(moved.fresh_parts)}.")
    if moved.dropped_parts:
        lines.append(f"Left out: {', '.join(moved.dropped_parts)}.")
    return lines

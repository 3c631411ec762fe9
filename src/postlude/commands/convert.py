"""`postlude convert`: any source as a Hugging Face directory."""

from __future__ import annotations

import argparse
import sys

import torch
from rich.console import Console

from postlude.hf.card import ModelCard
from postlude.hf.export import export_hf, refuse_overwriting
from postlude.hf.load import load_model, load_tokenizer, read_config, read_generation


def run(options: argparse.Namespace, console: Console) -> None:
    """Read any source and write a Hugging Face directory, tokenizer included."""
    refuse_overwriting(options.target, options.overwrite)
    try:
        tokenizer = load_tokenizer(options.source)
    except FileNotFoundError as error:
        read_config(options.source)  # a source that is not there is no reason to go on
        tokenizer = None
        print(f"postlude convert: {error}; the weights are written without one.", file=sys.stderr)
    model = load_model(options.source, dtype=options.dtype and getattr(torch, options.dtype))
    target = export_hf(
        model,
        options.target,
        tokenizer=tokenizer,
        generation=read_generation(options.source),
        card=ModelCard(base=str(options.source), how="Converted by `postlude convert`."),
        overwrite=options.overwrite,
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"wrote {count:,} parameters to {target}", markup=False, highlight=False, soft_wrap=True)

"""`postlude info`: pattern, parameters and memory of a model; or base, rank and targets of an adapter."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from rich.table import Table

from postlude.hf.builtin import BUILTIN, FIELDS
from postlude.hf.families import FAMILIES
from postlude.hf.peft import CONFIG, read_adapter
from postlude.hf.read_peft import check_supported
from postlude.model import LanguageModel, ModelConfig
from postlude.model.stack import LogicalLayer
from postlude.recipes.report.formatting import format_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(options: argparse.Namespace) -> None:
    """Prints pattern, parameters by block and memory by dtype. Reads only the config."""
    console = Console()
    if (Path(options.model) / CONFIG).is_file():
        _print_adapter(console, options.model)
        return
    config = _config(options.model)
    with torch.device("meta"):
        model = LanguageModel(config)
    counts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        counts[parts[2] if parts[0] == "layers" else parts[0]] += parameter.numel()
    blocks = Counter(name for layer in model.layers.values() for name in cast(LogicalLayer, layer).block_names)
    total = sum(counts.values())

    tied = "tied to the embedding" if config.tied_head else "its own"
    for line in (
        f"{options.model}  {config.family or 'of no family'}, {total:,} parameters",
        f"pattern  {config.pattern}",
        *_mtp_line(options.model, config),
        f"layers   {len(config.pattern)}, hidden {config.hidden_size}, vocabulary {config.vocab_size}, head {tied}",
    ):
        console.print(line, markup=False, highlight=False)  # the brackets of a pattern are not markup
    table = Table("part", "count", "parameters each", "parameters", "share", title="Parameters")
    for name, size in counts.items():
        number = blocks.get(name, 1)
        table.add_row(name, str(number), f"{size // number:,}", f"{size:,}", f"{size / total:.1%}")
    console.print(table)
    memory = Table("dtype", "weights", "trained by AdamW", title="Memory, without activations")
    for dtype in DTYPES:
        label, weight_bytes = str(dtype).removeprefix("torch."), dtype.itemsize
        # Weights, gradients and two moments in fp32, and a copy to compute with in another dtype: docs/optimizer.md.
        training_bytes = 16 + (weight_bytes if weight_bytes < 4 else 0)
        memory.add_row(label, format_bytes(total * weight_bytes), format_bytes(total * training_bytes))
    console.print(memory)


def _print_adapter(console: Console, path: str) -> None:
    """Prints what an adapter of peft says of itself. Its base is not needed."""
    config, tensors = read_adapter(path)
    check_supported(config)
    ranks = sorted({config["r"], *(config.get("rank_pattern") or {}).values()})
    modules = config.get("target_modules") or []
    targets = [modules] if isinstance(modules, str) else [*modules, *(config.get("target_parameters") or ())]
    scale = "alpha / √rank" if config.get("use_rslora") else "alpha / rank"
    adapted = sum(name.endswith("lora_A.weight") for name in tensors)
    count = sum(tensor.numel() for tensor in tensors.values())
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    for line in (
        f"{path}  a {config.get('peft_type', 'LORA')} adapter, {count:,} parameters in {', '.join(dtypes)}",
        f"base     {config.get('base_model_name_or_path') or 'not named'}",
        f"rank     {', '.join(map(str, ranks))}, alpha {config['lora_alpha']:g}, scaled by {scale}",
        f"targets  {', '.join(targets)}: {adapted} matrices",
        f"merge    postlude convert {path} BASE DST",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _mtp_line(model: str, config: ModelConfig) -> list[str]:
    """Returns a line about the multi-token-prediction depths of its files, which are read if mtp is on."""
    if config.family is None or FAMILIES[config.family].mtp is None or model in BUILTIN:
        return []
    from postlude.hf.read_model import read_model_with_mtp

    pattern = read_model_with_mtp(model)[1].pattern
    return [f"mtp      {pattern}, where mtp is on"] if pattern.mtp and not config.pattern.mtp else []


def _config(model: str) -> ModelConfig:
    """Returns the config of any source. A built-in model needs no transformers, which is slow to import."""
    if model in FIELDS:
        fields = FIELDS[model]
        return FAMILIES[fields.model_type].to_model(fields)
    if model in BUILTIN:
        return cast(ModelConfig, BUILTIN[model]())
    from postlude.hf.read_model import read_model

    return read_model(model)[1]

"""Checks of a checkpoint before it is loaded: its files, its base model, its adapters and its tensors.

Every rank calls them, and all raise the same ValueError before anything changes.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from postlude.hf.family import VALUE_HEAD
from postlude.hf.tensor_sources import MODEL
from postlude.lora import AdapterConfigs
from postlude.sharded_tensors import TensorShard, damaged_files
from postlude.world.agreement import gather_and_decide

CRITIC = f"{MODEL}{VALUE_HEAD}"


def check_files(source: Path, files: Mapping[str, Mapping[str, int]]) -> None:
    """Checks the files, divided among the ranks. All ranks raise if one file is damaged."""

    def damaged() -> list[str]:
        names = sorted(files)[dist.get_rank() :: dist.get_world_size()]
        return damaged_files(source, {name: files[name] for name in names})

    def refuse(names_by_rank: list[list[str]]) -> None:
        refuse_damaged(source, [name for names in names_by_rank for name in names])

    gather_and_decide(damaged, refuse, raise_cause=True)


def refuse_damaged(source: Path, names: list[str]) -> None:
    if names:
        raise ValueError(
            f"{source} is damaged: {', '.join(names)} is not what was saved there. Load another checkpoint."
        )


def check_tensors(
    source: Path, shards: Mapping[str, TensorShard], saved: Mapping[str, Any], optional: Container[str]
) -> None:
    """Checks that the ranks' `shards` together are exactly the saved tensors, except for `optional` ones.

    Each rank sends only a short comparison.
    """
    numbers = {name: number for number, name in enumerate(saved)}

    def compare() -> tuple[int, list[str], list[str]]:
        used = sum(1 << numbers[name] for name in shards if name in numbers)
        missing = [name for name in shards if name not in numbers]
        shapes = [
            f"{name} is {tuple(saved[name]['shape'])} there, but {shard.shape} here"
            for name, shard in shards.items()
            if name in saved and tuple(saved[name]["shape"]) != shard.shape
        ]
        return used, missing, shapes[:1]

    def decide(comparisons: list[tuple[int, list[str], list[str]]]) -> None:
        used_by_any = 0
        for used, _, _ in comparisons:
            used_by_any |= used
        missing = list(dict.fromkeys(name for _, names, _ in comparisons for name in names))
        unused = [name for name, number in numbers.items() if not used_by_any >> number & 1 and name not in optional]
        _refuse_other_model(source, missing, unused, [shape for _, _, shapes in comparisons for shape in shapes])

    gather_and_decide(compare, decide, raise_cause=True)


def _refuse_other_model(source: Path, missing: list[str], unused: list[str], shapes: list[str]) -> None:
    if CRITIC in missing:
        raise ValueError(
            f"{source} was saved without a critic, but this engine has one. Load it with critic=False, or export that "
            "engine and start this one from the export."
        )
    if CRITIC in unused:
        raise ValueError(f"{source} was saved with a critic, but this engine has none. Give the engine critic=True.")
    if missing:
        raise ValueError(
            f"{source} is of another model: it lacks {len(missing)} tensor(s) of this model and optimizer, such as "
            f"{missing[0]}."
        )
    if unused:
        raise ValueError(
            f"{source} is of another model: it holds {len(unused)} tensor(s) this model and optimizer do not have, "
            f"such as {min(unused)}."
        )
    if shapes:
        raise ValueError(f"{source} is of another model: {shapes[0]}.")


def check_base(source: Path, saved: str | None, present: str | None) -> None:
    """Raises ValueError unless a checkpoint has what this engine trains: adapters of the same model, or a model."""
    if saved is not None and present is None:
        raise ValueError(
            f"{source} holds LoRA adapters only, but this engine trains all weights. Give it the same lora."
        )
    if saved is None and present is not None:
        raise ValueError(
            f"{source} holds a whole model, but this engine trains LoRA adapters. Export it and start from the export."
        )
    if saved != present:
        raise ValueError(
            f"{source} holds adapters of another base model: its weights have the fingerprint {saved}, and this "
            f"model's {present}. Start from the model that the adapters were trained on."
        )


def check_adapter(source: Path, name: str, saved: AdapterConfigs, present: AdapterConfigs) -> None:
    """Raises ValueError unless an adapter of a checkpoint has the layers, ranks and scales of the engine's."""
    for layer in sorted(saved.keys() | present.keys()):
        stored, current = saved.get(layer), present.get(layer)
        if stored != current:
            raise ValueError(
                f'{source} has another adapter "{name}" of {layer}: {stored or "none"} there, {current or "none"} '
                "here. Give the engine the lora that it was made with."
            )

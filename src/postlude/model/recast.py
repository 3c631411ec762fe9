"""Recasting a model to another pattern: its new config, and which of its tensors stay.

Blocks are counted physically, so how they are grouped into layers only changes names: `*-*-` and `[*-][*-]` hold the
same tensors. A block with another symbol is a new one at the same position. What is outside the layers stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from postlude.model.block_config import BlockConfig
from postlude.model.blocks import BLOCKS, BlockTable
from postlude.model.config import ModelConfig
from postlude.model.language_model import LanguageModel
from postlude.model.pattern import Pattern

Shapes = Mapping[str, tuple[int, ...]]
TRUNK = "the trunk"


@dataclass(frozen=True)
class RecastPlan:
    """The mapping of a model's tensors to those of another pattern, all by our names."""

    before: ModelConfig
    after: ModelConfig
    old_names: Mapping[str, str]
    """The old name of each tensor that stays, by its new name."""
    new_tensors: tuple[str, ...]
    """New tensors."""
    dropped: tuple[str, ...]
    """Old tensors without a place in the new pattern."""
    fresh_parts: tuple[str, ...]
    """The blocks and MTP depths of the new tensors."""
    dropped_parts: tuple[str, ...]
    """The blocks and MTP depths of the dropped tensors."""


def recast(config: ModelConfig, pattern: str | Pattern, blocks: Mapping[str, BlockConfig] | None = None) -> ModelConfig:
    """Returns the config with another pattern and no family. `blocks` has configs for symbols that it lacks."""
    new_blocks = dict(blocks or {})
    if isinstance(pattern, str):
        pattern = Pattern.parse(pattern, symbols=config.pattern.symbols)
    if pattern == config.pattern and not new_blocks:
        return config
    all_blocks = {**config.blocks, **new_blocks}
    after = replace(config, pattern=pattern, blocks=all_blocks, family=None)
    unused = [symbol for symbol in new_blocks if symbol not in after.symbols]
    if unused:
        raise ValueError(f"`blocks` has a config for {unused[0]!r}, but the pattern {pattern} has no such block.")
    return replace(after, blocks={symbol: all_blocks[symbol] for symbol in after.symbols})


def plan_recast(before: ModelConfig, after: ModelConfig, blocks: BlockTable = BLOCKS) -> RecastPlan:
    """Returns what happens to every tensor of a model that gets another config of the same sizes.

    A block stays if the old block at its position has the same symbol, or another symbol with the same name and tensors
    (`*` and `S`). `blocks` is the table of blocks, including your own.
    """
    old, new = _shapes(before, blocks), _shapes(after, blocks)
    parts = _matched(before, old, after, new)
    old_names, new_tensors = {}, []
    for name, shape in new.items():
        part = _part_of(name, parts)
        old_part = name if part is None else parts[part]
        if old_part is None:
            new_tensors.append(name)
            continue
        old_name = old_part if part is None else old_part + name.removeprefix(part)
        if old.get(old_name) != shape:
            raise ValueError(
                f"{name} is {shape} in {after.pattern}, but {old.get(old_name, 'not there')} in {before.pattern}: the "
                "two differ in more than their pattern."
            )
        old_names[name] = old_name
    used_names, used_parts = set(old_names.values()), {part for part in parts.values() if part is not None}
    dropped_parts = [part for part in _parts(before) if part not in used_parts]
    return RecastPlan(
        before,
        after,
        old_names,
        tuple(new_tensors),
        tuple(name for name in old if name not in used_names),
        tuple(part for part, old_part in parts.items() if old_part is None),
        tuple(
            part for part in dropped_parts if part.rpartition(".layers.")[0] not in dropped_parts
        ),  # a depth stands for its blocks
    )


def _matched(before: ModelConfig, old: Shapes, after: ModelConfig, new: Shapes) -> dict[str, str | None]:
    """Returns the old name of each block and depth by its new name; None for a new one."""
    old_names: dict[str, str | None] = {}
    old_sections = _sections(before)
    for section, blocks in _sections(after).items():
        if section not in old_sections:
            old_names[section] = None
            continue
        if section != TRUNK:
            old_names[section] = section
        if len(blocks) != len(old_sections[section]):
            raise ValueError(
                f"{section} has {len(old_sections[section])} blocks in {before.pattern}, but {len(blocks)} in "
                f"{after.pattern}: blocks are matched by position, so write one for each."
            )
        for (symbol, name), (old_symbol, old_name) in zip(blocks, old_sections[section], strict=True):
            same_tensors = _inside(new, name) == _inside(old, old_name)
            if symbol == old_symbol and not same_tensors:
                raise ValueError(
                    f"{old_name} has other tensors than {name} of the config that is given for {symbol!r}. Leave that "
                    "out to keep the block, or use another symbol for a new block."
                )
            same_name = after.pattern.symbols[symbol] == before.pattern.symbols[old_symbol]
            old_names[name] = old_name if same_tensors and same_name else None
    return old_names


def _sections(config: ModelConfig) -> dict[str, list[tuple[str, str]]]:
    """Returns (symbol, name) of every block in order, for the trunk and for each MTP depth."""
    sections: dict[str, list[tuple[str, str]]] = {TRUNK: []}
    for name, symbol in config.block_symbols.items():
        depth = name.rpartition(".layers.")[0]
        sections.setdefault(depth or TRUNK, []).append((symbol, name))
    return sections


def _parts(config: ModelConfig) -> list[str]:
    sections = _sections(config)
    depths = [section for section in sections if section != TRUNK]
    return [*depths, *(name for blocks in sections.values() for _, name in blocks)]


def _part_of(name: str, parts: Mapping[str, str | None]) -> str | None:
    """Returns the block, or else the depth, that a tensor belongs to."""
    while "." in name:
        name = name.rpartition(".")[0]
        if name in parts:
            return name
    return None


def _inside(shapes: Shapes, part: str) -> dict[str, tuple[int, ...]]:
    return {name.removeprefix(f"{part}."): shape for name, shape in shapes.items() if name.startswith(f"{part}.")}


def _shapes(config: ModelConfig, blocks: BlockTable) -> Shapes:
    with torch.device("meta"):
        tensors = LanguageModel(config, blocks=blocks).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}

"""Another pattern for the same model: what its config then is, and which of its tensors stay.

Blocks are counted physically, so how they are grouped into layers changes names alone: `*-*-` and `[*-][*-]` hold the
same tensors. A block of another symbol is a new one at the same place. What is outside the layers stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from postlude.model.block_config import BlockConfig
from postlude.model.blocks import BLOCKS, Block
from postlude.model.config import ModelConfig
from postlude.model.language_model import LanguageModel
from postlude.model.pattern import Layer, Pattern

Shapes = Mapping[str, tuple[int, ...]]
TRUNK = "the trunk"


@dataclass(frozen=True)
class RecastPlan:
    """Where the tensors of a model were under another pattern, all by our names."""

    before: ModelConfig
    after: ModelConfig
    kept: Mapping[str, str]
    """What stays: its name now, and its name before."""
    fresh: tuple[str, ...]
    """Tensors that were not there before."""
    dropped: tuple[str, ...]
    """Tensors that were there before, and have no place now."""
    fresh_parts: tuple[str, ...]
    """The blocks and multi-token-prediction depths that are made of the fresh ones."""
    dropped_parts: tuple[str, ...]
    """The blocks and depths that were made of the dropped ones."""


def recast(config: ModelConfig, pattern: str | Pattern, blocks: Mapping[str, BlockConfig] | None = None) -> ModelConfig:
    """The config with another pattern, which no family has. `blocks` are configs of the symbols it has none for."""
    given = dict(blocks or {})
    if isinstance(pattern, str):
        pattern = Pattern.parse(pattern, symbols=config.pattern.symbols)
    if pattern == config.pattern and not given:
        return config
    known = {**config.blocks, **given}
    after = replace(config, pattern=pattern, blocks=known, family=None)
    useless = [symbol for symbol in given if symbol not in after.symbols]
    if useless:
        raise ValueError(f"`blocks` has a config for {useless[0]!r}, but the pattern {pattern} has no such block.")
    return replace(after, blocks={symbol: known[symbol] for symbol in after.symbols})


def plan_recast(before: ModelConfig, after: ModelConfig, blocks: Mapping[str, type[Block]] = BLOCKS) -> RecastPlan:
    """What becomes of every tensor of a model that gets another config of the same sizes.

    A block stays if there was one of its symbol at its place; of another symbol, too, where both go by one name and
    have the same tensors (`*` and `S`). `blocks` is the table of blocks, with your own added.
    """
    old, new = _shapes(before, blocks), _shapes(after, blocks)
    parts = _matched(before, old, after, new)
    kept, fresh = {}, []
    for name, shape in new.items():
        part = _part_of(name, parts)
        then = name if part is None else parts[part]
        if then is None:
            fresh.append(name)
            continue
        earlier = then if part is None else then + name.removeprefix(part)
        if old.get(earlier) != shape:
            raise ValueError(
                f"{name} is {shape} in {after.pattern}, but {old.get(earlier, 'not there')} in {before.pattern}: the "
                "two differ in more than their pattern."
            )
        kept[name] = earlier
    stayed, there = set(kept.values()), {part for part in parts.values() if part is not None}
    gone = [part for part in _parts(before) if part not in there]
    return RecastPlan(
        before,
        after,
        kept,
        tuple(fresh),
        tuple(name for name in old if name not in stayed),
        tuple(part for part, then in parts.items() if then is None),
        tuple(part for part in gone if part.rpartition(".layers.")[0] not in gone),  # a depth stands for its blocks
    )


def _matched(before: ModelConfig, old: Shapes, after: ModelConfig, new: Shapes) -> dict[str, str | None]:
    """The blocks and depths of a config, by name: what each was called before, or None."""
    found: dict[str, str | None] = {}
    earlier = _sections(before)
    for section, now in _sections(after).items():
        if section not in earlier:
            found[section] = None
            continue
        if section != TRUNK:
            found[section] = section
        if len(now) != len(earlier[section]):
            raise ValueError(
                f"{section} has {len(earlier[section])} blocks in {before.pattern}, but {len(now)} in {after.pattern}: "
                "blocks are matched by their places, so write one for each."
            )
        for (symbol, name), (symbol_then, name_then) in zip(now, earlier[section], strict=True):
            alike = _inside(new, name) == _inside(old, name_then)
            if symbol == symbol_then and not alike:
                raise ValueError(
                    f"{name_then} has other tensors than {name} of the config that is given for {symbol!r}. Leave that "
                    "out to keep the block, or use another symbol to make it anew."
                )
            named_alike = after.pattern.symbols[symbol] == before.pattern.symbols[symbol_then]
            found[name] = name_then if alike and named_alike else None
    return found


def _sections(config: ModelConfig) -> dict[str, list[tuple[str, str]]]:
    """The symbol and the name of every block, in order: those of the trunk, and of each depth by its name."""

    def named(within: str, layers: Iterable[Layer]) -> list[tuple[str, str]]:
        return [
            (symbol, f"{within}.{layer.index}.{name}")
            for layer in layers
            for symbol, name in zip(layer.blocks, layer.names, strict=True)
        ]

    pattern = config.pattern
    found = {TRUNK: named("layers", map(pattern.layer, range(len(pattern))))}
    for depth in range(config.mtp_module_count):
        found[f"mtp.{depth}"] = named(f"mtp.{depth}.layers", pattern.depth_layers(depth))
    return found


def _parts(config: ModelConfig) -> list[str]:
    sections = _sections(config)
    depths = [section for section in sections if section != TRUNK]
    return [*depths, *(name for blocks in sections.values() for _, name in blocks)]


def _part_of(name: str, parts: Mapping[str, str | None]) -> str | None:
    """The block or, outside of one, the depth that a tensor is of."""
    while "." in name:
        name = name.rpartition(".")[0]
        if name in parts:
            return name
    return None


def _inside(shapes: Shapes, part: str) -> dict[str, tuple[int, ...]]:
    return {name.removeprefix(f"{part}."): shape for name, shape in shapes.items() if name.startswith(f"{part}.")}


def _shapes(config: ModelConfig, blocks: Mapping[str, type[Block]]) -> Shapes:
    with torch.device("meta"):
        whole = LanguageModel(config, blocks=blocks).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in whole.items()}

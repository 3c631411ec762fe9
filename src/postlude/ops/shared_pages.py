"""SharedPages: which rows of a page table begin with the same pages, so that attention reads these once for all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

TILE_ROWS = 32
"""Rows that read shared pages together at most."""


@dataclass(frozen=True)
class Tile:
    """Rows whose first `pages` pages are the same."""

    rows: list[int]
    pages: int

    @property
    def saved(self) -> int:
        """How many pages need not be read again."""
        return (len(self.rows) - 1) * self.pages


@dataclass(frozen=True, eq=False)
class SharedPages:
    """Tiles of rows whose first pages are the same. All of it is on the device, of a fixed size.

    `tiles` [tiles, TILE_ROWS] int32 are the rows of each tile, then -1 where it has fewer; an unused tile has none.
    `pages` [n] int32 is how many first pages a row has in common with the others of its tile; 0 if it is in none.
    """

    tiles: Tensor
    pages: Tensor

    @staticmethod
    def none(rows: int, device: torch.device) -> SharedPages:
        """Returns room for the tiles of so many rows, which share nothing."""
        return SharedPages(
            torch.full((most_tiles(rows), TILE_ROWS), -1, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )

    @staticmethod
    def of(rows: int, tiles: Sequence[Tile]) -> SharedPages:
        """Returns these tiles of so many rows, on the host."""
        shared = SharedPages.none(rows, torch.device("cpu"))
        for place, tile in enumerate(tiles):
            shared.tiles[place, : len(tile.rows)] = torch.tensor(tile.rows, dtype=torch.int32)
            shared.pages[tile.rows] = tile.pages
        return shared

    def of_first(self, rows: int) -> SharedPages:
        """Returns those of the first rows, which share pages with each other only."""
        return SharedPages(self.tiles[: most_tiles(rows)], self.pages[:rows])

    def read_through(self, table: Tensor) -> Tensor:
        """Returns the table with each row's shared pages taken from the first row of its tile, as kernels read them."""
        table = table.clone()
        for tile in self.tiles.tolist():
            for row in (row for row in tile if row >= 0):
                shared = int(self.pages[row])
                table[row, :shared] = table[tile[0], :shared]
        return table


def most_tiles(rows: int) -> int:
    """Returns how many tiles rows can have: each group has at least two rows."""
    return rows // 2


def shared_tiles(pages_by_row: Mapping[int, Sequence[int]]) -> list[Tile]:
    """Returns the tiles of rows with these pages. Rows share pages if their first page is the same."""
    groups: dict[int, list[int]] = {}
    for row, pages in pages_by_row.items():
        if pages:
            groups.setdefault(pages[0], []).append(row)
    tiles = []
    for rows in (rows for rows in groups.values() if len(rows) > 1):
        shared = _common(pages_by_row[row] for row in rows)
        tiles += [Tile(rows[start : start + TILE_ROWS], shared) for start in range(0, len(rows), TILE_ROWS)]
    return tiles


def _common(sequences: Iterable[Sequence[int]]) -> int:
    """Returns how many first entries all sequences have in common."""
    return sum(1 for _ in takewhile(lambda entries: len(set(entries)) == 1, zip(*sequences, strict=False)))

"""SharedPages: which rows of a page table begin with the same pages, so that attention reads these once for all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from postlude.ops.packing import to_device

TILE_ROWS = 32
"""Rows that read shared pages together at most."""
TileShape = tuple[int, int]
"""The number of tiles, and of rows in each."""


@dataclass(frozen=True)
class SharedTile:
    """Rows whose first `pages` pages are the same."""

    rows: list[int]
    pages: int

    @property
    def saved(self) -> int:
        """The number of pages that are not read again."""
        return (len(self.rows) - 1) * self.pages


@dataclass(frozen=True, eq=False)
class SharedPages:
    """Tiles of rows whose first pages are the same, on the device.

    `tiles` [tiles, members] int32 are the rows of each tile, then -1 where it has fewer; an unused tile has none. Both
    sizes are powers of two, and at most `TILE_ROWS` rows are in a tile.
    `pages` [n] int32 is how many first pages a row has in common with the others of its tile; 0 if it is in none.
    """

    tiles: Tensor
    pages: Tensor

    @staticmethod
    def none(rows: int, device: torch.device) -> SharedPages:
        """Returns room for all tiles that so many rows can have: each group has at least two rows."""
        return SharedPages(
            torch.full((_power_of_two(rows // 2), TILE_ROWS), -1, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )

    @staticmethod
    def of(rows: int, tiles: Sequence[SharedTile]) -> SharedPages:
        """Returns these tiles of so many rows, on the host."""
        members = _power_of_two(max(len(tile.rows) for tile in tiles))
        shared = torch.full((_power_of_two(len(tiles)), members), -1, dtype=torch.int32)
        pages = torch.zeros(rows, dtype=torch.int32)
        for place, tile in enumerate(tiles):
            shared[place, : len(tile.rows)] = torch.tensor(tile.rows, dtype=torch.int32)
            pages[tile.rows] = tile.pages
        return SharedPages(shared, pages)

    @property
    def shape(self) -> TileShape:
        return self.tiles.shape[0], self.tiles.shape[1]

    def copy_(self, host: SharedPages) -> None:
        """Copies tiles of any shape from the host."""
        self.part(host.shape, len(self.pages)).tiles.copy_(to_device(host.tiles, self.tiles.device))
        self.pages.copy_(to_device(host.pages, self.pages.device))

    def part(self, shape: TileShape, rows: int) -> SharedPages:
        """Returns the tiles of this shape that `copy_` wrote, of the first rows."""
        return SharedPages(self.tiles.view(-1)[: shape[0] * shape[1]].view(shape), self.pages[:rows])

    def read_through(self, table: Tensor) -> Tensor:
        """Returns the table with each row's shared pages taken from the first row of its tile, as kernels read them."""
        table = table.clone()
        for tile in self.tiles.tolist():
            for row in (row for row in tile if row >= 0):
                shared = int(self.pages[row])
                table[row, :shared] = table[tile[0], :shared]
        return table


def _power_of_two(minimum: int) -> int:
    return 1 << max(minimum - 1, 0).bit_length()


def shared_tiles(pages_by_row: Mapping[int, Sequence[int]]) -> list[SharedTile]:
    """Returns the tiles of rows with these pages. Rows share pages if their first page is the same."""
    groups: dict[int, list[int]] = {}
    for row, pages in pages_by_row.items():
        if pages:
            groups.setdefault(pages[0], []).append(row)
    tiles = []
    for rows in (rows for rows in groups.values() if len(rows) > 1):
        shared = _common(pages_by_row[row] for row in rows)
        tiles += [SharedTile(rows[start : start + TILE_ROWS], shared) for start in range(0, len(rows), TILE_ROWS)]
    return tiles


def _common(sequences: Iterable[Sequence[int]]) -> int:
    """Returns how many first entries all sequences have in common."""
    return sum(1 for _ in takewhile(lambda entries: len(set(entries)) == 1, zip(*sequences, strict=False)))

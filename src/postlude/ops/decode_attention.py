"""Attention of the newest tokens of each row to the keys of its row in a store [rows, capacity, ...]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.ops.attention import FLASH_STEP, FLASH_WIDTH, ScoreConfig, flash_supports, softmax, with_sinks
from postlude.ops.batch_invariant import is_batch_invariant
from postlude.ops.invariant_attention import attend_in_rows


class DecodeAttention:
    """Attention of the newest `tokens_per_row` tokens of n rows. Row i of a store has `lengths[i]` keys with theirs.

    A token sees the keys up to its own. All layers of a forward share an instance, so masks and sequence borders are
    computed once for each window.
    """

    def __init__(self, lengths: Tensor, longest: int, tokens_per_row: int = 1) -> None:
        """`lengths` [n] int64 are at least `tokens_per_row`; none is larger than `longest`."""
        self.lengths = lengths
        self.longest = longest
        self.tokens_per_row = tokens_per_row
        self._masks: dict[tuple[int | None, torch.dtype, int], Tensor] = {}
        self._borders: dict[tuple[int | None, int, int], Tensor] = {}

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, score_config: ScoreConfig) -> Tensor:
        """Query [n · tokens_per_row, heads, width], keys [rows, capacity, kv_heads, width], values [..., v] -> [.., v].

        The queries of a row are adjacent, the newest last.
        """
        if is_batch_invariant():
            return attend_in_rows(query, keys.flatten(0, 1), values.flatten(0, 1), score_config, *self._rows(keys))
        width = query.shape[-1]
        # The store is not padded to a width that flash attention takes, since that would copy all of it.
        flash_width = width == values.shape[-1] and width <= FLASH_WIDTH and width % FLASH_STEP == 0
        # The heads that share a key head become queries of it: they see the same keys, so no key is repeated.
        grouped = query.view(-1, self.tokens_per_row, keys.shape[2], query.shape[1] // keys.shape[2], width)
        attention = self.flash if flash_width and flash_supports(query, score_config) else self.padded
        return attention(grouped, keys, values, score_config).reshape(*query.shape[:2], values.shape[-1])

    def padded(self, grouped: Tensor, keys: Tensor, values: Tensor, score_config: ScoreConfig) -> Tensor:
        """Attends in one call over all rows up to the longest, with keys past the end of a row masked. Copies no key.

        `grouped` [n, tokens_per_row, kv_heads, group, width] -> [..., v]. Every key in the store must be finite.
        """
        count, tokens_per_row, kv_heads, group, width = grouped.shape
        query = grouped.transpose(1, 2).reshape(count, kv_heads, tokens_per_row * group, width)
        key, value = (store[:count, : self.longest].transpose(1, 2) for store in (keys, values))
        mask = self._mask(score_config.window, query.dtype, group)
        if score_config.softcap is None and score_config.sinks is None:
            output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=score_config.scale)
        else:
            scores = query @ key.transpose(-1, -2) * score_config.scale
            if score_config.softcap is not None:
                scores = score_config.softcap * torch.tanh(scores / score_config.softcap)
            sinks = (
                None
                if score_config.sinks is None
                else score_config.sinks.view(-1, group).repeat(1, self.tokens_per_row)[..., None]
            )
            output = softmax(scores + mask, sinks).to(value.dtype) @ value
        return output.view(count, kv_heads, tokens_per_row, group, -1).transpose(1, 2)

    def flash(self, grouped: Tensor, keys: Tensor, values: Tensor, score_config: ScoreConfig) -> Tensor:
        """Flash attention on the store without a copy. CUDA, bf16 or fp16.

        The kernel gets the whole store, row after row, as packed keys. Keys that no query sees are sequences without
        queries. The tokens of a row see different keys, so each of them is a call.
        """
        return torch.stack(
            [self._flash(grouped[:, index], keys, values, score_config, index) for index in range(self.tokens_per_row)],
            1,
        )

    def _flash(self, grouped: Tensor, keys: Tensor, values: Tensor, score_config: ScoreConfig, index: int) -> Tensor:
        """One token of each row: [n, kv_heads, group, width] -> [n, kv_heads, group, v]."""
        from torch.nn.attention.varlen import AuxRequest, varlen_attn  # initialises CUDA kernels

        count, _, group, _ = grouped.shape
        key_borders = self._key_borders(score_config.window, keys.shape[1], index)
        query_borders = (
            torch.arange(2 * count + 1, device=key_borders.device, dtype=torch.int32) // 2 * group
        )  # 0, 0, g, g, 2g, …
        output, lse = varlen_attn(
            grouped.transpose(1, 2).flatten(0, 1),  # [n · group, kv_heads, width]
            keys.flatten(0, 1),
            values.flatten(0, 1),
            query_borders,
            key_borders,
            group,
            self.longest,
            scale=score_config.scale,
            return_aux=AuxRequest(lse=True),
        )
        if score_config.sinks is not None:
            output, _ = with_sinks(output, lse, score_config.sinks.view(-1, group).repeat(1, count))
        return output.view(count, group, *output.shape[1:]).transpose(1, 2)

    def _mask(self, window: int | None, dtype: torch.dtype, group: int) -> Tensor:
        """[n, 1, tokens_per_row · group, longest]: 0 where a key is seen, else -inf. [n, 1, 1, longest] for one."""
        if window is not None and window >= self.longest:
            window = None
        group = group if self.tokens_per_row > 1 else 1  # one row of the mask serves all heads
        if (window, dtype, group) not in self._masks:
            positions = torch.arange(self.longest, device=self.lengths.device)
            key_counts = consecutive_positions(self.lengths - self.tokens_per_row + 1, self.tokens_per_row).view(
                -1, 1, self.tokens_per_row, 1
            )
            masked = (
                positions >= key_counts
                if window is None
                else (positions >= key_counts) | (positions < key_counts - window)
            )
            mask = torch.zeros(masked.shape, dtype=dtype, device=masked.device)
            mask.masked_fill_(masked, float("-inf"))
            self._masks[window, dtype, group] = mask if group == 1 else mask.repeat_interleave(group, dim=2)
        return self._masks[window, dtype, group]

    def _key_borders(self, window: int | None, capacity: int, index: int = 0) -> Tensor:
        """[2n + 1] int32: the start of the store, then the start and end of the keys that each row's token sees."""
        if (window, capacity, index) not in self._borders:
            lengths = self._visible_keys(index)
            stops = torch.arange(len(lengths), device=lengths.device) * capacity + lengths
            key_counts = lengths if window is None else lengths.clamp(max=window)
            borders = torch.stack((stops - key_counts, stops), dim=1).flatten()
            self._borders[window, capacity, index] = F.pad(borders, (1, 0)).to(torch.int32)
        return self._borders[window, capacity, index]

    def _rows(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the first row of each query's keys in a flattened store, and the query's position, [queries] each."""
        rows = torch.arange(len(self.lengths), device=self.lengths.device).repeat_interleave(self.tokens_per_row)
        return rows * keys.shape[1], consecutive_positions(self.lengths - self.tokens_per_row, self.tokens_per_row)

    def _visible_keys(self, index: int) -> Tensor:
        """[n]: the number of keys that token `index` of the newest `tokens_per_row` sees in its row."""
        return self.lengths - (self.tokens_per_row - 1 - index)


def consecutive_positions(starts: Tensor, count: int) -> Tensor:
    """Returns `count` consecutive positions from each of `starts` [n]: [n · count]."""
    return starts if count == 1 else (starts[:, None] + torch.arange(count, device=starts.device)).flatten()

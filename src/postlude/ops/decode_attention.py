"""Attention of the newest tokens of each sequence to its keys in a store that has room for more."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.ops.attention import FLASH_STEP, FLASH_WIDTH, ScoreConfig, flash_supports, softmax, with_sinks


class DecodeAttention:
    """The newest `each` tokens of n rows: row i of a store has `lengths[i]` keys, theirs the last of them.

    A token sees the keys up to its own. One forward asks the same of every layer, so what tells the keys apart is made
    once here, for each window.
    """

    def __init__(self, lengths: Tensor, longest: int, each: int = 1) -> None:
        """`lengths` [n] int64, at least `each`; `longest` is their maximum, on the host."""
        self.lengths = lengths
        self.longest = longest
        self.each = each
        self._masks: dict[tuple[int | None, torch.dtype, int], Tensor] = {}
        self._borders: dict[tuple[int | None, int, int], Tensor] = {}

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, score_config: ScoreConfig) -> Tensor:
        """Query [n · each, heads, width], keys [rows, capacity, kv_heads, width], values [..., v] -> [..., heads, v].

        The queries of a row stand side by side, the newest last.
        """
        width = query.shape[-1]
        # A store is read as it lies: to widen it would copy all of it.
        lies_right = width == values.shape[-1] and width <= FLASH_WIDTH and width % FLASH_STEP == 0
        # The heads that share a key head become its queries: they see the same keys, and nothing has to be repeated.
        grouped = query.view(-1, self.each, keys.shape[2], query.shape[1] // keys.shape[2], width)
        attention = self.flash if lies_right and flash_supports(query, score_config) else self.padded
        return attention(grouped, keys, values, score_config).reshape(*query.shape[:2], values.shape[-1])

    def padded(self, grouped: Tensor, keys: Tensor, values: Tensor, score_config: ScoreConfig) -> Tensor:
        """All rows up to the longest in one call, what lies past each row's end masked. Copies no key.

        `grouped` [n, each, kv_heads, group, width] -> [..., v]. Every key in the store must be finite.
        """
        count, each, kv_heads, group, width = grouped.shape
        asked = grouped.transpose(1, 2).reshape(count, kv_heads, each * group, width)
        key, value = (store[:count, : self.longest].transpose(1, 2) for store in (keys, values))
        mask = self._mask(score_config.window, asked.dtype, group)
        if score_config.softcap is None and score_config.sinks is None:
            seen = F.scaled_dot_product_attention(asked, key, value, attn_mask=mask, scale=score_config.scale)
        else:
            scores = asked @ key.transpose(-1, -2) * score_config.scale
            if score_config.softcap is not None:
                scores = score_config.softcap * torch.tanh(scores / score_config.softcap)
            sinks = (
                None
                if score_config.sinks is None
                else score_config.sinks.view(-1, group).repeat(1, self.each)[..., None]
            )
            seen = softmax(scores + mask, sinks).to(value.dtype) @ value
        return seen.view(count, kv_heads, each, group, -1).transpose(1, 2)

    def flash(self, grouped: Tensor, keys: Tensor, values: Tensor, score_config: ScoreConfig) -> Tensor:
        """Flash attention on the store as it lies. CUDA, bf16 or fp16.

        The store, row after row, is one packed run: seen keys alternate with stretches that nobody asks about, and the
        kernel gets those as sequences without queries. Tokens of one row see different keys, so each is a call.
        """
        return torch.stack(
            [self._flash(grouped[:, place], keys, values, score_config, place) for place in range(self.each)], 1
        )

    def _flash(self, grouped: Tensor, keys: Tensor, values: Tensor, score_config: ScoreConfig, place: int) -> Tensor:
        """One token of each row: [n, kv_heads, group, width] -> [n, kv_heads, group, v]."""
        from torch.nn.attention.varlen import AuxRequest, varlen_attn  # initialises CUDA kernels

        count, _, group, _ = grouped.shape
        asked = self._key_borders(score_config.window, keys.shape[1], place)
        asking = torch.arange(2 * count + 1, device=asked.device, dtype=torch.int32) // 2 * group  # 0, 0, g, g, 2g, …
        output, lse = varlen_attn(
            grouped.transpose(1, 2).flatten(0, 1),  # [n · group, kv_heads, width]
            keys.flatten(0, 1),
            values.flatten(0, 1),
            asking,
            asked,
            group,
            self.longest,
            scale=score_config.scale,
            return_aux=AuxRequest(lse=True),
        )
        if score_config.sinks is not None:
            output, _ = with_sinks(output, lse, score_config.sinks.view(-1, group).repeat(1, count))
        return output.view(count, group, *output.shape[1:]).transpose(1, 2)

    def _mask(self, window: int | None, dtype: torch.dtype, group: int) -> Tensor:
        """[n, 1, each · group, longest], 0 where the key is seen, else -inf; [n, 1, 1, longest] of one token."""
        if window is not None and window >= self.longest:
            window = None
        group = group if self.each > 1 else 1  # one row of the mask serves all heads
        if (window, dtype, group) not in self._masks:
            places = torch.arange(self.longest, device=self.lengths.device)
            seen = consecutive_positions(self.lengths - self.each + 1, self.each).view(-1, 1, self.each, 1)
            hidden = places >= seen if window is None else (places >= seen) | (places < seen - window)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            mask.masked_fill_(hidden, float("-inf"))
            self._masks[window, dtype, group] = mask if group == 1 else mask.repeat_interleave(group, dim=2)
        return self._masks[window, dtype, group]

    def _key_borders(self, window: int | None, capacity: int, place: int = 0) -> Tensor:
        """[2n + 1] int32: where the store starts, then where the keys that a token of each row sees start and stop."""
        if (window, capacity, place) not in self._borders:
            lengths = self._seen(place)
            stops = torch.arange(len(lengths), device=lengths.device) * capacity + lengths
            seen = lengths if window is None else lengths.clamp(max=window)
            borders = torch.stack((stops - seen, stops), dim=1).flatten()
            self._borders[window, capacity, place] = F.pad(borders, (1, 0)).to(torch.int32)
        return self._borders[window, capacity, place]

    def _seen(self, place: int) -> Tensor:
        """[n]: how many keys of its row the token at `place` of the newest `each` may see."""
        return self.lengths - (self.each - 1 - place)


def consecutive_positions(firsts: Tensor, each: int) -> Tensor:
    """`firsts` [n] and those after them, `each` in all of every one: [n · each]."""
    return firsts if each == 1 else (firsts[:, None] + torch.arange(each, device=firsts.device)).flatten()

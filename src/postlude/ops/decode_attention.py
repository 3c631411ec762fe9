"""Attention of one new token a sequence to its keys in a store that has room for more."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.ops.attention import FLASH_STEP, FLASH_WIDTH, Scores, flash_fits, softmax, with_sinks


class DecodeAttention:
    """Query i of n sees the first `lengths[i]` keys of row i of a store, its own the last of them.

    One forward asks the same of every layer, so what tells the keys apart is made once here, for each window.
    """

    def __init__(self, lengths: Tensor, longest: int) -> None:
        """`lengths` [n] int64, at least 1; `longest` is their maximum, on the host."""
        self.lengths = lengths
        self.longest = longest
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}
        self._borders: dict[tuple[int | None, int], Tensor] = {}

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
        """Query [n, heads, width], keys [rows, capacity, kv_heads, width], values [..., v] -> [n, heads, v]."""
        width = query.shape[-1]
        # A store is read as it lies: to widen it would copy all of it.
        lies_right = width == values.shape[-1] and width <= FLASH_WIDTH and width % FLASH_STEP == 0
        # The heads that share a key head become its queries: they see the same keys, and nothing has to be repeated.
        grouped = query.unflatten(1, (keys.shape[2], -1))  # [n, kv_heads, group, width]
        attention = self.flash if lies_right and flash_fits(query, scores) else self.padded
        return attention(grouped, keys, values, scores).flatten(1, 2)

    def padded(self, grouped: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
        """All rows up to the longest in one call, what lies past each row's end masked. Copies no key.

        `grouped` [n, kv_heads, group, width] -> [n, kv_heads, group, v]. Every key in the store must be finite.
        """
        key, value = (store[: len(grouped), : self.longest].transpose(1, 2) for store in (keys, values))
        mask = self._mask(scores.window, grouped.dtype)
        if scores.softcap is None and scores.sinks is None:
            return F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scores.scale)
        rated = grouped @ key.transpose(-1, -2) * scores.scale
        if scores.softcap is not None:
            rated = scores.softcap * torch.tanh(rated / scores.softcap)
        sinks = None if scores.sinks is None else scores.sinks.view(*grouped.shape[1:3], 1)
        return softmax(rated + mask, sinks).to(value.dtype) @ value

    def flash(self, grouped: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
        """Flash attention on the store as it lies. CUDA, bf16 or fp16.

        The store, row after row, is one packed run: seen keys alternate with stretches that nobody asks about, and the
        kernel gets those as sequences without queries.
        """
        from torch.nn.attention.varlen import AuxRequest, varlen_attn  # noqa: PLC0415 - initialises CUDA kernels, so only where used

        count, _, group, _ = grouped.shape
        asked = self._key_borders(scores.window, keys.shape[1])
        asking = torch.arange(2 * count + 1, device=asked.device, dtype=torch.int32) // 2 * group  # 0, 0, g, g, 2g, …
        output, lse = varlen_attn(
            grouped.transpose(1, 2).flatten(0, 1),  # [n · group, kv_heads, width]
            keys.flatten(0, 1),
            values.flatten(0, 1),
            asking,
            asked,
            group,
            self.longest,
            scale=scores.scale,
            return_aux=AuxRequest(lse=True),
        )
        if scores.sinks is not None:
            output, _ = with_sinks(output, lse, scores.sinks.view(-1, group).repeat(1, count))
        return output.view(count, group, *output.shape[1:]).transpose(1, 2)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[n, 1, 1, longest], 0 where the key is seen and -inf elsewhere."""
        if window is not None and window >= self.longest:
            window = None
        if (window, dtype) not in self._masks:
            past = torch.arange(self.longest, device=self.lengths.device) - self.lengths[:, None]  # own key: -1
            hidden = past >= 0 if window is None else (past >= 0) | (past < -window)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._masks[window, dtype] = mask.masked_fill_(hidden, float("-inf"))[:, None, None, :]
        return self._masks[window, dtype]

    def _key_borders(self, window: int | None, capacity: int) -> Tensor:
        """[2n + 1] int32: where the store starts, then where each row's seen keys start and stop."""
        if (window, capacity) not in self._borders:
            stops = torch.arange(len(self.lengths), device=self.lengths.device) * capacity + self.lengths
            seen = self.lengths if window is None else self.lengths.clamp(max=window)
            borders = torch.stack((stops - seen, stops), dim=1).flatten()
            self._borders[window, capacity] = F.pad(borders, (1, 0)).to(torch.int32)
        return self._borders[window, capacity]

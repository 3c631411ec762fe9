"""The bytes that a decode step of any model must read, and those of its cache, from the model's config."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from postlude import LanguageModel
from postlude.hf.families import FAMILIES
from postlude.model.blocks import AttentionConfig, GatedDeltaConfig, LatentAttentionConfig, MambaConfig, MoEConfig

BYTES = 2  # of a weight, a number of the cache or an input of a convolution
STATE_BYTES = 4  # of a number of a recurrent state


@dataclass(frozen=True)
class DecodeBytes:
    """Bytes by what they depend on. Routing is taken as uniform."""

    dense_weights: int
    """All weights but the experts', the head included. An embedding that is only looked up is not read."""
    expert_weights: dict[float, int]
    """By the share of the experts that a token chooses, the weights of all of them."""
    token_bytes: dict[int | None, int]
    """Keys and values of a token, by the window of the blocks that read them; None for those that read all."""
    state_bytes: int
    """The recurrent states of a row."""

    @classmethod
    def of(cls, config: Any) -> DecodeBytes:
        """Returns the bytes of the model of a transformers config."""
        ours = FAMILIES[config.model_type].to_model(config)
        with torch.device("meta"):
            model = LanguageModel(ours)
        sizes = {name: parameter.numel() * BYTES for name, parameter in model.named_parameters()}
        dense = sum(sizes.values()) - (0 if ours.tied_head else sizes["embedding.weight"])
        experts: Counter[float] = Counter()
        tokens: Counter[int | None] = Counter()
        states = 0
        for name, block in ours.named_blocks.items():
            if isinstance(block, MoEConfig):
                weights = sum(size for parameter, size in sizes.items() if parameter.startswith(f"{name}.experts."))
                experts[block.top_k / block.experts] += weights
                dense -= weights
            elif isinstance(block, AttentionConfig):
                tokens[block.window] += 2 * block.kv_heads * block.head_dim * BYTES
            elif isinstance(block, LatentAttentionConfig):
                tokens[None] += (block.latent_size + block.rope_dim) * BYTES
            elif isinstance(block, MambaConfig):
                inner = block.heads * block.head_dim
                channels = inner + 2 * block.groups * block.state_size
                states += inner * block.state_size * STATE_BYTES + (block.conv_kernel - 1) * channels * BYTES
            elif isinstance(block, GatedDeltaConfig):
                values = block.value_heads * block.value_dim
                channels = values + 2 * block.key_heads * block.key_dim
                states += values * block.key_dim * STATE_BYTES + (block.conv_kernel - 1) * channels * BYTES
        return cls(dense, dict(experts), dict(tokens), states)

    def weights(self, rows: int) -> float:
        """Returns the bytes of the weights that a step of so many rows reads."""
        chosen = sum(size * (1 - (1 - share) ** rows) for share, size in self.expert_weights.items())
        return self.dense_weights + chosen

    def completion(self, tokens: Tensor, prompt: int, group: int) -> Tensor:
        """Returns what a step reads of the caches of `group` rows that share a prompt, after `tokens` of their own.

        States are read and written.
        """
        total = torch.zeros(tokens.shape, dtype=torch.float64)
        for window, size in self.token_bytes.items():
            own = tokens if window is None else tokens.clamp(max=window)
            shared = prompt if window is None else (window - own).clamp(max=prompt)
            total += size * (group * own + shared)
        return total + 2 * group * self.state_bytes

    def cache(self, rows: int, tokens: int) -> int:
        """Returns the bytes of a cache for so many rows and tokens that keeps every token of every block."""
        return rows * self.state_bytes + tokens * sum(self.token_bytes.values())

"""The blocks a pattern is made of, one file each. A new block is a file here and a line in this table."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

from postlude.model.block_config import BlockConfig
from postlude.model.blocks.attention import Attention, AttentionConfig, SlidingAttention, SlidingAttentionConfig
from postlude.model.blocks.block import Block, SeparateUnit
from postlude.model.blocks.gated_delta import GatedDelta, GatedDeltaConfig
from postlude.model.blocks.latent_attention import LatentAttention, LatentAttentionConfig
from postlude.model.blocks.mamba import Mamba, MambaConfig
from postlude.model.blocks.mlp import MLP, MLPConfig
from postlude.model.blocks.moe import MoE, MoEConfig

BlockTable: TypeAlias = Mapping[str, type[Block]]
"""The class of each block symbol."""

BLOCKS: BlockTable = MappingProxyType(
    {
        "*": Attention,
        "S": SlidingAttention,
        "M": Mamba,
        "G": GatedDelta,
        "+": LatentAttention,
        "-": MLP,
        "E": MoE,
    }
)

__all__ = [
    "BLOCKS",
    "MLP",
    "Attention",
    "AttentionConfig",
    "Block",
    "BlockConfig",
    "BlockTable",
    "GatedDelta",
    "GatedDeltaConfig",
    "LatentAttention",
    "LatentAttentionConfig",
    "MLPConfig",
    "Mamba",
    "MambaConfig",
    "MoE",
    "MoEConfig",
    "SeparateUnit",
    "SlidingAttention",
    "SlidingAttentionConfig",
]

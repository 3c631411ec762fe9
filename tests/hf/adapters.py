"""Random adapters of small models."""

from collections.abc import Mapping

import torch
from torch import Tensor

from postlude.hf.families import FAMILIES
from postlude.hf.family import Family
from postlude.hf.linear_layers import linear_layers
from postlude.lora import AdapterConfig
from postlude.model import ModelConfig
from postlude.model.blocks import BLOCKS
from tests.hf.families import CONFIGS

Pair = tuple[Tensor, Tensor]


def small_model(name: str) -> tuple[Family, ModelConfig]:
    """Returns a family and one of its small models."""
    hf = CONFIGS[name]()
    family = FAMILIES[hf.model_type]
    return family, family.to_model(hf)


def random_adapters(config: ModelConfig, configs: Mapping[str, AdapterConfig], seed: int = 0) -> dict[str, Pair]:
    """Returns random A and B of every adapted layer."""
    generator, layers = torch.Generator().manual_seed(seed), linear_layers(config, BLOCKS)
    adapters = {}
    for name, adapter in configs.items():
        *experts, rows, columns = layers[name].shape
        a = torch.randn(*([] if adapter.shared == "a" else experts), adapter.rank, columns, generator=generator)
        b = torch.randn(*([] if adapter.shared == "b" else experts), rows, adapter.rank, generator=generator)
        adapters[name] = (a * 0.2, b * 0.2)
    return adapters

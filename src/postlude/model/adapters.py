"""The adapters of a model: adding them to its layers, their first values, and the model without them.

The adapter of one layer is `parallel.Adapter`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from postlude.lora import AdapterConfig, AdapterConfigs
from postlude.model.parallel import Adapter


class AdaptableLayer(Protocol):
    adapter: Adapter | None

    def add_adapter(self, config: AdapterConfig) -> None: ...


def add_adapters(module: nn.Module, adapters: AdapterConfigs, *, prefix: str = "") -> None:
    """Gives each layer of a model, or of its part of the global name `prefix`, its adapter.

    Adapters of other layers are of other pipeline stages.
    """
    for name, layer in list(module.named_modules(prefix=prefix)):
        if config := adapters.get(name):
            cast(AdaptableLayer, layer).add_adapter(config)


def meta_adapter(layer: nn.Module, config: AdapterConfig) -> Adapter:
    """Returns an adapter of this layer without storage. The layer stays as it is."""
    adaptable = cast(AdaptableLayer, layer)
    before = adaptable.adapter
    with torch.device("meta"):
        adaptable.add_adapter(config)
    adapter, adaptable.adapter = adaptable.adapter, before
    assert adapter is not None
    return adapter


def attach_adapters(model: nn.Module, before: Mapping[str, Adapter], after: Mapping[str, Adapter]) -> None:
    """Gives the layers of `after` these adapters, and those of `before` that are not among them none."""
    for name in (*before, *after):
        cast(AdaptableLayer, model.get_submodule(name)).adapter = after.get(name)


def is_adapter(name: str) -> bool:
    return name.split(".")[-2:-1] == ["adapter"]


def freeze_base(model: nn.Module, *, value_head: bool) -> None:
    """Makes the adapters, and the `value_head` if there is one, the only trained parameters."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name) or (value_head and name.startswith("value_head.")))


def base_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if not is_adapter(name)}


def reset_adapter(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Initialises A uniformly, as torch's linear layers, and B with zero: a new adapter changes nothing."""
    if name.endswith(".a"):
        bound = tensor.shape[-1] ** -0.5
        tensor.uniform_(-bound, bound, generator=generator)
    else:
        tensor.zero_()

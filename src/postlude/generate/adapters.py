"""NamedAdapters: the LoRA adapters that a generator's model can sample with, one at a time, without merging them.

Adapters of the same shape (the same layers, and ranks that are equal after padding) share a slot: the memory that the
layers read. Choosing an adapter copies its values there, so CUDA graphs of that slot are valid for all of them, and
stay valid when one is replaced. The weights of the model do not move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from postlude.lora import AdapterConfig
from postlude.model import LanguageModel
from postlude.model.adapters import attach_adapters, meta_adapter
from postlude.model.parallel import Adapter, region

RANK_MULTIPLE = 16
"""Ranks are padded with zeros to a multiple of this, which grouped products and tiles of tensor cores need."""
MatrixPairs = Mapping[str, tuple[Tensor, Tensor]]
"""A and B by the global names of their layers, whole, as `hf.read_peft.from_peft` returns them."""


@dataclass(frozen=True)
class _Matrix:
    """One matrix of an adapter: its full shape, and this rank's part of it."""

    full_shape: tuple[int, ...]
    part: tuple[slice, ...]
    stored: tuple[int, ...]
    """The shape of this rank's part with a padded rank."""


class AdapterSlot:
    """The memory from which the layers of a model read an adapter of one shape. B is stored multiplied by the scale.

    Two slots are equal only if they are the same object.
    """

    def __init__(self, layers: Mapping[str, tuple[_Matrix, _Matrix]], device: torch.device, dtype: torch.dtype) -> None:
        self.layers = layers
        self.size = sum(prod(matrix.stored) for matrices in layers.values() for matrix in matrices)
        self.values = torch.zeros(self.size, device=device, dtype=dtype)
        self.loaded: str | None = None
        """The name of the adapter whose values it holds."""
        self.adapters = {
            name: Adapter(AdapterConfig(a.shape[-2], 1.0), a, b) for name, (a, b) in self.views(self.values).items()
        }

    def views(self, values: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns A and B of each layer as views of flat `values`. All A's come first, in the order of the layers."""
        matrices = [a for a, _ in self.layers.values()] + [b for _, b in self.layers.values()]
        parts = values.split([prod(matrix.stored) for matrix in matrices])
        shaped = [part.view(matrix.stored) for part, matrix in zip(parts, matrices, strict=True)]
        half = len(self.layers)
        return dict(zip(self.layers, zip(shaped[:half], shaped[half:], strict=True), strict=True))

    @torch.no_grad()
    def flatten(
        self, layers: Mapping[str, tuple[_Matrix, _Matrix]], configs: Mapping[str, AdapterConfig], pairs: MatrixPairs
    ) -> Tensor:
        """Returns this rank's part of an adapter as the slot stores it."""
        values = torch.zeros_like(self.values)
        for name, (stored_a, stored_b) in self.views(values).items():
            if name not in configs:
                continue  # it has the memory only for others of its group
            (a, b), (in_a, in_b), config = pairs[name], layers[name], configs[name]
            stored_a[..., : config.rank, :] = a[in_a.part].to(values.device)
            stored_b[..., : config.rank] = config.scale * b[in_b.part].to(values.device).float()
        return values


@dataclass(frozen=True)
class _Loaded:
    slot: AdapterSlot
    values: Tensor


class NamedAdapters:
    """The adapters of a model, by name. Every rank of the model makes the same calls with whole tensors."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.base = AdapterSlot({}, torch.device("cpu"), torch.float32)
        self.slot = self.base
        """The active slot; `base` if the model runs without an adapter."""
        self._loaded: dict[str, _Loaded] = {}
        self._layers: dict[frozenset[tuple[str, AdapterConfig]], dict[str, tuple[_Matrix, _Matrix]]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the adapters, in the order of loading."""
        return tuple(self._loaded)

    def check(self, name: str | None) -> None:
        """Raises ValueError for the name of no adapter. None is the model without one."""
        if name is not None and name not in self._loaded:
            raise ValueError(f"adapter {name!r} is not loaded; there {self._described()}. Load it, or name none.")

    def load(self, name: str, configs: Mapping[str, AdapterConfig], pairs: MatrixPairs) -> None:
        """Loads an adapter, or replaces the one of this name. If it raises ValueError, nothing has changed.

        `configs` and `pairs` are by the global names of the layers. The active adapter is replaced in place.
        """
        layers = self._layers_of(name, configs, pairs)
        slot = self._slot(layers)
        loaded = _Loaded(slot, slot.flatten(layers, configs, pairs))
        previous = self._loaded.get(name)
        if previous is not None and previous.slot is not slot:
            self._leave(previous.slot, name)
        self._loaded[name] = loaded
        if slot.loaded == name:
            slot.values.copy_(loaded.values)

    def remove(self, name: str) -> None:
        """Removes an adapter. Raises ValueError if there is none of this name."""
        self.check(name)
        self._leave(self._loaded.pop(name).slot, name)

    def activate(self, name: str | None) -> None:
        """Makes the model compute with this adapter, or with none, until the next call."""
        self.check(name)
        loaded = None if name is None else self._loaded[name]
        slot = self.base if loaded is None else loaded.slot
        if slot is not self.slot:
            attach_adapters(self.model, self.slot.adapters, slot.adapters)
            self.slot = slot
        if loaded is not None and slot.loaded != name:
            slot.values.copy_(loaded.values)
            slot.loaded = name

    def _leave(self, slot: AdapterSlot, name: str) -> None:
        if slot.loaded == name:
            slot.loaded = None
            if slot is self.slot:
                self.activate(None)

    def _slot(self, layers: Mapping[str, tuple[_Matrix, _Matrix]]) -> AdapterSlot:
        """Returns the slot of loaded adapters with these shapes, or a new one."""
        for loaded in self._loaded.values():
            if _stored(loaded.slot.layers) == _stored(layers):
                return loaded.slot
        weight = self.model.embedding.weight
        return AdapterSlot(layers, weight.device, weight.dtype)

    def _layers_of(
        self, name: str, configs: Mapping[str, AdapterConfig], pairs: MatrixPairs
    ) -> Mapping[str, tuple[_Matrix, _Matrix]]:
        key = frozenset(configs.items())
        if key not in self._layers:
            self._layers[key] = self._plan(name, configs)
        layers = self._layers[key]
        if configs.keys() != pairs.keys():
            odd = min(configs.keys() ^ pairs.keys())
            raise ValueError(f"adapter {name!r} has only one of config and matrices for {odd}.")
        for layer, pair in pairs.items():
            for letter, matrix, tensor in zip("AB", layers[layer], pair, strict=True):
                if tuple(tensor.shape) != matrix.full_shape:
                    raise ValueError(
                        f"adapter {name!r} has {letter} of {list(tensor.shape)} for {layer}, but its config and the "
                        f"model ask for {list(matrix.full_shape)}."
                    )
        return layers

    def _plan(self, name: str, configs: Mapping[str, AdapterConfig]) -> dict[str, tuple[_Matrix, _Matrix]]:
        """Returns the matrices of every layer. Layers of a fused projection are adjacent and have one rank.

        So that decoding kernels can take them as one, such a layer without an adapter gets one of zeros.
        """
        if not configs:
            raise ValueError(f"adapter {name!r} adapts no layer.")
        modules = dict(self.model.named_modules())
        if any(isinstance(module, Adapter) for module in modules.values()) and self.slot is self.base:
            raise ValueError("the model has adapters of its own; make it without them, and load them by name.")
        for layer in configs:
            if not hasattr(modules.get(layer), "add_adapter"):
                raise ValueError(f"adapter {name!r} is for {layer}, but the model has no such layer.")
        names = {id(module): path for path, module in modules.items()}
        fused = [[names[id(layer)] for layer in group] for b in self.model.blocks for group in b.fused_projections()]
        grouped = {layer for group in fused for layer in group}
        layers = {}
        for group in (*fused, *([layer] for layer in configs if layer not in grouped)):
            present = [configs[layer] for layer in group if layer in configs]
            rank = max((_padded(config.rank) for config in present), default=0)
            for layer in group if present else ():
                layers[layer] = _matrices(modules[layer], configs.get(layer, AdapterConfig(rank, 1.0)), rank)
        return layers

    def _described(self) -> str:
        return f"are {', '.join(map(repr, self._loaded))}" if self._loaded else "are none"


def _padded(rank: int) -> int:
    return rank + -rank % RANK_MULTIPLE


def _matrices(layer: nn.Module, config: AdapterConfig, stored_rank: int) -> tuple[_Matrix, _Matrix]:
    adapter, padding = meta_adapter(layer, config), stored_rank - config.rank
    return _matrix(adapter.a, -2, padding), _matrix(adapter.b, -1, padding)


def _matrix(parameter: Tensor, rank_dim: int, padding: int) -> _Matrix:
    part = region(parameter)
    stored = [dimension.stop - dimension.start for dimension in part]
    stored[rank_dim] += padding
    return _Matrix(tuple(parameter.shape), part, tuple(stored))


def _stored(layers: Mapping[str, tuple[_Matrix, _Matrix]]) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return [(name, a.stored, b.stored) for name, (a, b) in layers.items()]

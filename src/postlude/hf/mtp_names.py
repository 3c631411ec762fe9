"""MTPNames: how a family's files name multi-token prediction, which transformers' models do not have.

In every family a depth projects the embedding and the hidden state after the trunk's final norm, side by side, in this
order. So only names differ.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from postlude.model import ModelConfig

LAYER, FIRST, LAST = "{layer}", "{first}", "{last}"


def _zero(config: ModelConfig) -> int:
    return 0


@dataclass(frozen=True)
class MTPNames:
    """The names of one family's MTP depths."""

    layers: Callable[[ModelConfig], tuple[str, ...]]
    """The layers of one depth, given the model."""
    layer: str
    """The name of a layer. Layers of all depths are numbered one after another."""
    names: Mapping[str, str]
    """Hugging Face modules by Postlude modules, outside the layers. `{first}` and `{last}` are a depth's first and last
    layer."""
    first_layer: Callable[[ModelConfig], int] = _zero
    """The number of the first layer."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Names of the copies of the model's embedding and head in the model files."""
    max_depths: int | None = None
    """The number of depths that the names can distinguish."""
    config_key: str = "num_nextn_predict_layers"
    """The config's entry for the number of depths."""
    default_count: int = 0
    """The number of depths where the config has no such entry."""
    prefix: str | None = None
    """The prefix of all depths' tensors, if no other tensor has it."""

    def add_to(self, config: ModelConfig, count: int) -> ModelConfig:
        """Returns the config with `count` depths; unchanged if files could not hold them."""
        if self.max_depths is not None and count > self.max_depths:
            return config
        return replace(config, pattern=replace(config.pattern, mtp=(self.layers(config),) * count))

    def layer_name(self, config: ModelConfig, depth: int, layer: int) -> str:
        """Returns the Hugging Face name of one layer of a depth."""
        number = self.first_layer(config) + depth * len(self.layers(config)) + layer
        return self.layer.replace(LAYER, str(number))

    def module_name(self, config: ModelConfig, depth: int, name: str) -> str | None:
        """Returns the Hugging Face name of a module outside the layers, such as `proj`; None if there is none."""
        return self._fill(config, depth, self.names[name]) if name in self.names else None

    def copies_of(self, config: ModelConfig, module: str) -> Iterator[str]:
        """Yields where the model's embedding or head is repeated, for each depth."""
        modules = (module, "head") if module == "embedding" and config.tied_head else (module,)
        for depth in range(config.mtp_module_count):
            for name in modules:
                if name in self.copies:
                    yield self._fill(config, depth, self.copies[name])

    def count_in(self, config: ModelConfig, names: Collection[str]) -> int:
        """Returns the number of depths that have at least one of the tensors `names`.

        Only modules outside the layers count: a layer may belong to a trunk that is longer than the config says.
        """
        count = 0
        while self.max_depths is None or count < self.max_depths:
            tensors = {f"{self._fill(config, count, name)}.weight" for name in self.names.values()}
            if tensors.isdisjoint(names):
                break
            count += 1
        if count == 0 and self.prefix is not None:
            return int(any(name.startswith(self.prefix) for name in names))
        return count

    def prefixes(self, config: ModelConfig, names: Collection[str]) -> tuple[str, ...]:
        """Returns the prefixes of those of `names` that belong to depths."""
        if self.prefix is not None:
            return (self.prefix,)
        layers = range(len(self.layers(config)))
        depths = range(self.count_in(config, names))
        return tuple(f"{self.layer_name(config, depth, layer)}." for depth in depths for layer in layers)

    def _fill(self, config: ModelConfig, depth: int, name: str) -> str:
        last = len(self.layers(config)) - 1
        name = name.replace(FIRST, self.layer_name(config, depth, 0))
        return name.replace(LAST, self.layer_name(config, depth, last))

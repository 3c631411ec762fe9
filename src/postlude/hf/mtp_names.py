"""Depths: where a family's files keep multi-token prediction, for which transformers' models have no place.

Everywhere a depth makes its first state of the embedding's half and then the hidden state's, and what goes in is what
the trunk's final norm left; so there is nothing to turn around, and names are all that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from postlude.model import ModelConfig

LAYER, FIRST, LAST = "{layer}", "{first}", "{last}"


def _from_zero(config: ModelConfig) -> int:
    return 0


@dataclass(frozen=True)
class MTPNames:
    """How one family names its depths.

    `layers` says what one depth is made of, given the model. They go by the name `layer`, counted on from `start`, all
    depths' one after another. `names` maps what else a depth has to theirs, where `{first}` and `{last}` stand for the
    name of its first and last layer. `copies` likewise names what their files repeat of the model's own embedding and
    head. `most` is how many depths can be told apart. `count` is the config's entry that says how many there are, and
    `unsaid` how many there are where it has none. `begin` is what the names of all depths' tensors begin with, if no
    other's do.
    """

    layers: Callable[[ModelConfig], tuple[str, ...]]
    layer: str
    names: Mapping[str, str]
    start: Callable[[ModelConfig], int] = _from_zero
    copies: Mapping[str, str] = field(default_factory=dict)
    most: int | None = None
    count: str = "num_nextn_predict_layers"
    unsaid: int = 0
    begin: str | None = None

    def added(self, config: ModelConfig, count: int) -> ModelConfig:
        """The config of a model of the family with so many depths; as it is, where its files could not hold them."""
        if self.most is not None and count > self.most:
            return config
        return replace(config, pattern=replace(config.pattern, mtp=(self.layers(config),) * count))

    def layer_name(self, config: ModelConfig, depth: int, layer: int) -> str:
        """Theirs of one layer of a depth."""
        number = self.start(config) + depth * len(self.layers(config)) + layer
        return self.layer.replace(LAYER, str(number))

    def name(self, config: ModelConfig, depth: int, ours: str) -> str | None:
        """Theirs of a module of a depth outside its layers, such as `proj`; None if it has no such."""
        return self._filled(config, depth, self.names[ours]) if ours in self.names else None

    def copied(self, config: ModelConfig, module: str) -> Iterator[str]:
        """Where the model's own embedding or head stands once more, for each of its depths."""
        modules = (module, "head") if module == "embedding" and config.tied_head else (module,)
        for depth in range(config.mtp_module_count):
            for each in modules:
                if each in self.copies:
                    yield self._filled(config, depth, self.copies[each])

    def held(self, config: ModelConfig, names: Collection[str]) -> int:
        """How many depths there are among tensors of these names, if not all of each.

        By what only a depth has: a layer alone may be one of a trunk that is longer than the config says.
        """
        count = 0
        while self.most is None or count < self.most:
            own = {f"{self._filled(config, count, each)}.weight" for each in self.names.values()}
            if own.isdisjoint(names):
                break
            count += 1
        if count == 0 and self.begin is not None:
            return int(any(name.startswith(self.begin) for name in names))
        return count

    def beginnings(self, config: ModelConfig, names: Collection[str]) -> tuple[str, ...]:
        """What the names of these begin with that are of depths."""
        if self.begin is not None:
            return (self.begin,)
        layers = range(len(self.layers(config)))
        depths = range(self.held(config, names))
        return tuple(f"{self.layer_name(config, depth, each)}." for depth in depths for each in layers)

    def _filled(self, config: ModelConfig, depth: int, theirs: str) -> str:
        last = len(self.layers(config)) - 1
        theirs = theirs.replace(FIRST, self.layer_name(config, depth, 0))
        return theirs.replace(LAST, self.layer_name(config, depth, last))

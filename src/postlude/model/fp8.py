"""FP8 products of a model's blocks: which linear layers have them, and which stay in the compute dtype.

Embedding, output head, routers, experts, norms, attention, scans and adapters stay as they are, and so do layers in
`never_fp8` of the module that holds them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence

from postlude.model.blocks.block import Block
from postlude.model.language_model import LanguageModel
from postlude.model.parallel import Linear
from postlude.ops.fp8 import MULTIPLE
from postlude.options import LayerChoice


def use_fp8(model: LanguageModel, layers: LayerChoice, tp: int) -> list[str]:
    """Makes products of tokens and weights FP8, in the blocks of these layers of the whole model that `model` has.

    Returns the names of linear layers that stay as they are because a size is no multiple of 16. Raises ValueError if
    `tp` ranks make a size so: a layout must not change what is in FP8.
    """
    unquantized = []
    for block in (block for layer in model.chosen_layers("fp8", layers) for block in layer.blocks):
        in_fp8 = {name: layer for name, layer in _layers(block) if not _unfit(layer.weight.shape[-2:])}
        for name, layer in in_fp8.items():
            _check_parts(f"{block.name}.{name}", layer, tp)
            layer.use_fp8()
        unquantized += [f"{block.name}.{name}" for name, _ in _layers(block) if name not in in_fp8]
    return unquantized


@contextlib.contextmanager
def without_fp8(blocks: Iterable[Block]) -> Iterator[None]:
    """Multiplies in the compute dtype inside: what a generator with the same weights computes."""
    scalings = {layer: layer.fp8 for block in blocks for _, layer in _layers(block)}
    for layer in scalings:
        layer.fp8 = None
    try:
        yield
    finally:
        for layer, scaling in scalings.items():
            layer.fp8 = scaling


def _layers(block: Block) -> list[tuple[str, Linear]]:
    """Returns the layers that may be in FP8, by their names in the block."""
    never = itertools.chain.from_iterable(
        [getattr(module, name) for name in getattr(module, "never_fp8", ())] for module in block.modules()
    )
    excluded = {id(layer) for layer in never}
    return [
        (name, module)
        for name, module in block.named_modules()
        if isinstance(module, Linear) and id(module) not in excluded
    ]


def _unfit(sizes: Sequence[int]) -> bool:
    return any(size % MULTIPLE for size in sizes)


def _check_parts(name: str, layer: Linear, tp: int) -> None:
    sizes = list(layer.weight.shape[-2:])
    if layer.weight_dim is None or not _unfit([sizes[layer.weight_dim] // tp]):
        return
    size = sizes[layer.weight_dim]
    raise ValueError(
        f"fp8=True needs sizes that are multiples of {MULTIPLE}, but tp={tp} gives each rank {size // tp} of the "
        f"{size} {('output', 'input')[layer.weight_dim]} features of {name}. Use a smaller tp, or fp8=False."
    )

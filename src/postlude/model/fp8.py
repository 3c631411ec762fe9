"""FP8 in training, the products of a model's blocks; and for a generator, `FP8Weights`: copies of the weights in FP8.

Embedding, output head, routers, experts, norms, attention, scans and adapters stay as they are, and so do layers in
`never_fp8` of the module that holds them. See `ops.block_fp8` for the format of the copies.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from postlude.model.block_config import BlockConfig
from postlude.model.blocks.block import Block
from postlude.model.config import ModelConfig
from postlude.model.language_model import LanguageModel
from postlude.model.parallel import Linear
from postlude.ops.block_fp8 import BLOCK, FP8Weight
from postlude.ops.fp8 import MULTIPLE
from postlude.ops.kernels.capabilities import gpu_of, why_not
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


REFUSED: Mapping[str, Callable[[BlockConfig], bool]] = {
    "has experts, whose weights have no FP8 products here": lambda block: block.has_experts,
    "caches latents, to which it applies its weights itself": lambda block: block.caches_latents,
}
"""Why a block has no FP8 weights, and whether that is so."""


class FP8Weights:
    """The FP8 copies of a model's linear layers, which products use inside `attached`.

    They are uninitialised until `write`. Layers with the same input are adjacent, so that they are one product.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._copies: dict[str, tuple[Linear, FP8Weight]] = {}
        names = {id(layer): name for name, layer in model.named_modules()}
        for layers in _groups(model):
            for layer, copy in zip(layers, _new_copies(layers), strict=True):
                self._copies[names[id(layer)]] = layer, copy

    @property
    def size_in_bytes(self) -> int:
        return sum(copy.size_in_bytes for _, copy in self._copies.values())

    @torch.no_grad()
    def write(self) -> None:
        """Rounds the current weights into the copies. Their addresses stay, so CUDA graphs stay valid."""
        for layer, copy in self._copies.values():
            copy.write(layer.weight)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Makes products use the copies inside. They have no gradients."""
        for layer, copy in self._copies.values():
            layer.fp8_weight = copy
        try:
            yield
        finally:
            for layer, _ in self._copies.values():
                layer.fp8_weight = None

    @torch.no_grad()
    def problem(self) -> str:
        """Returns what is wrong with the copies, as text that follows the sampler's name; "" if nothing is.

        Each number of a copy must be a nearest FP8 number of its weight. After an optimizer step the old copy has
        numbers that are not, wherever a weight crossed the border between two. The spacing of FP8 numbers decides, so
        that a mistake in rounding or in a scale is found too.
        """
        for name, (layer, copy) in self._copies.items():
            distance = (copy.rounded(torch.float32) - layer.weight.float()).abs()
            wrong = int((distance > copy.half_steps()).sum())
            if wrong:
                return (
                    f"has FP8 weights other than those it was given: {wrong} of {distance.numel()} numbers of "
                    f"{name}.weight differ from the weight by more than rounding explains"
                )
        return ""


def check_quantization(quantization: str | None, config: ModelConfig, device: torch.device) -> None:
    """Raises ValueError for a model or a GPU that cannot generate with weights in FP8.

    A CPU computes the same numbers as a GPU.
    """
    if quantization is None:
        return
    if quantization != "fp8":
        raise ValueError(f'quantization={quantization!r}: give "fp8", or None for the weights as they are.')
    for refusal, applies in REFUSED.items():
        name = next((name for name, block in config.named_blocks.items() if applies(block)), None)
        if name is not None:
            raise ValueError(
                f'quantization="fp8" rounds the weights of linear layers, but {name} {refusal}. Leave it out.'
            )
    if device.type == "cuda" and (reason := why_not("block_fp8", gpu_of(device))) is not None:
        raise ValueError(f'quantization="fp8" cannot run: {reason}. Leave it out.')


def _groups(model: LanguageModel) -> Iterator[Sequence[Linear]]:
    """Yields the linear layers of all blocks, those with the same input together."""
    for block in model.blocks:
        groups = block.fused_projections()
        yield from groups
        grouped = {id(layer) for layers in groups for layer in layers}
        for layer in block.modules():
            if isinstance(layer, Linear) and id(layer) not in grouped:
                yield (layer,)


def _new_copies(layers: Sequence[Linear]) -> Sequence[FP8Weight]:
    """Returns uninitialised copies of the layers' weights, adjacent in memory where whole blocks belong to a layer."""
    weights: list[Tensor] = [layer.weight for layer in layers]
    if any(len(weight) % BLOCK for weight in weights):
        return [FP8Weight.like(weight) for weight in weights]
    sizes = [len(weight) for weight in weights]
    fused = FP8Weight.like(weights[0], features=sum(sizes))
    return fused.split(sizes)

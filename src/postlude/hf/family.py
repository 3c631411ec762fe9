"""Family: how one Hugging Face model family maps onto Postlude, as plain data and pure functions.

A tensor of ours stands in theirs at one or more `TensorMapping`s: all of it in one of another name, one expert in
each, or beside others of ours in one that they keep fused, interleaved or transposed. Loading, export, weight
streaming and comparison all go by the same places.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from postlude.hf.mtp_names import LAYER, MTPNames
from postlude.model import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from postlude.hf.tensor_source import SizedSource

OUTER = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
OURS_ALONE = ("value_head.weight",)  # their models have no such tensor
EXPERT = "{expert}"
Region: TypeAlias = tuple[slice, ...]


@dataclass(frozen=True)
class TensorMapping:
    """Where a stretch of one of our tensors stands in one of theirs, which has `shape`.

    See theirs as `split` (the same elements in the same order), pick `index` of that and put its dimensions in `order`:
    what is left, row by row, is the stretch `ours`. By default each of the three leaves things as they are. An `index`
    has slices alone, one for each of the first dimensions.
    """

    theirs: str
    shape: tuple[int, ...]
    split: tuple[int, ...] = ()
    index: Region = ()
    order: tuple[int, ...] = ()
    ours: Region = ()
    """One slice, with both ends, for each dimension of ours."""
    copy: bool = False
    """Whether ours is elsewhere, and theirs repeats it: written, but not read."""

    @property
    def stretch(self) -> tuple[int, ...]:
        """The sizes of what stands here, as we hold it."""
        return tuple(each.stop - each.start for each in self.ours)

    @property
    def is_plain(self) -> bool:
        """Whether all of theirs is the stretch, row by row."""
        return not (self.split or self.index or self.order)

    def within(self, theirs: Tensor) -> Tensor:
        """HFTensor, whole -> a view of what is ours in it, in a shape of the place's own."""
        view = theirs.view(self.split) if self.split else theirs
        view = view[self.index] if self.index else view
        return view.permute(self.order) if self.order else view

    def read(self, theirs: Tensor) -> Tensor:
        """HFTensor, whole -> the stretch of ours."""
        return self.within(theirs).reshape(self.stretch)

    def write(self, theirs: Tensor, stretch: Tensor) -> None:
        """Put the stretch of ours into theirs, whole."""
        view = self.within(theirs)
        view.copy_(stretch.reshape(view.shape))


@dataclass(frozen=True)
class Inside:
    """A tensor of ours inside one of theirs, which keeps others beside it: as a `TensorMapping` says, by a name
    in the layer.

    `{expert}` in the name is allowed: then ours is stacked, and this is said of each expert's tensor.
    """

    theirs: str
    shape: tuple[int, ...] = ()
    """Of theirs; by default ours, or that of one expert."""
    split: tuple[int, ...] = ()
    index: Region = ()
    order: tuple[int, ...] = ()


def rows(theirs: str, start: int, stop: int, shape: Sequence[int]) -> Inside:
    """Rows `start` to `stop` of theirs, which has `shape`."""
    return Inside(theirs, tuple(shape), index=(slice(start, stop),))


Names: TypeAlias = Mapping[str, "str | Inside"]


@dataclass(frozen=True)
class Family:
    """One `model_type`: its config -> ModelConfig, and where its tensors stand.

    `names` maps a module inside one of our layers ("attention.q_proj") to the module inside one of theirs
    ("self_attn.q_proj"), or a whole tensor ("moe.selection_bias") to theirs, by name or `Inside` another. `{expert}` in
    their name stands for one tensor an expert, which we hold stacked. Names that hang on sizes are a function of the
    config. `outer` names what stands outside the layers, and `layer` what goes before names inside one. `depths` says
    the same of multi-token prediction, if their files have it. `modules` are parts of names that transformers' modules
    have where its files have others. `left_out` says what their files may hold besides, which is not read: by what its
    names begin with, what it is. `packed` has, by the method that a config's `quantization_config` names, how weights
    that are packed so are read, and `seen` how files are that have some tensors otherwise than these names say.
    """

    model_type: str
    to_model: Callable[[PretrainedConfig], ModelConfig]
    names: Names | Callable[[ModelConfig], Names]
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER)
    layer: str = f"model.layers.{LAYER}"
    depths: MTPNames | None = None
    modules: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    packed: Mapping[str, Callable[[SizedSource], SizedSource]] = field(default_factory=dict)
    seen: Callable[[SizedSource], SizedSource] | None = None

    def not_read(self, config: ModelConfig, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """What files that hold these have besides, and what its names begin with. Depths, if the model has none."""
        found: dict[str, tuple[str, ...]] = {}
        for start, what in self.left_out.items():
            found[what] = (*found.get(what, ()), start)
        if self.depths is not None and not config.pattern.mtp:
            found["multi-token prediction, read where mtp is on"] = self.depths.beginnings(config, names)
        return found

    def with_mtp(self, config: ModelConfig, count: int) -> ModelConfig:
        """The config of a model of the family with so many depths; as it is, where its files could not hold them."""
        return config if self.depths is None or not count else self.depths.added(config, count)

    def theirs(self, name: str, config: ModelConfig) -> Inside:
        """Where our tensor is, by a name of theirs that is whole but for `{expert}`: layers.3.… -> model.layers.3.…."""
        module, _, leaf = name.rpartition(".")
        if module in self.outer:
            return Inside(f"{self.outer[module]}.{leaf}")
        room, number, inner = (*name.split(".", 2), "", "")[:3]
        layer = self.layer.replace(LAYER, number)
        if room == "mtp" and self.depths is not None:
            own = self.depths.name(config, int(number), inner.rpartition(".")[0])
            if own is not None:
                return Inside(f"{own}.{leaf}")
            _, within, inner = inner.split(".", 2)
            layer = self.depths.layer_name(config, int(number), int(within))
        names = self.names(config) if callable(self.names) else self.names
        part = inner.rpartition(".")[0]
        found = names.get(inner)  # such as one that is no module's weight or bias
        if found is None and part in names:
            found = f"{names[part]}.{leaf}"
        if found is None or (room == "mtp" and self.depths is None):
            raise ValueError(
                f"{self.model_type} models have no tensor for {name}. Give a family of your own that names it, or a "
                "ModelConfig with family=None to go by our names."
            )
        within_layer = found if isinstance(found, Inside) else Inside(found)
        return replace(within_layer, theirs=f"{layer}.{within_layer.theirs}")

    def copies(self, name: str, config: ModelConfig) -> Iterator[str]:
        """Which of theirs repeat our tensor."""
        module, _, leaf = name.rpartition(".")
        if self.depths is not None and module in self.outer:
            for theirs in self.depths.copied(config, module):
                yield f"{theirs}.{leaf}"


def places(family: Family | None, config: ModelConfig, name: str, shape: Sequence[int]) -> Iterator[TensorMapping]:
    """Where our tensor of this name and whole shape stands in theirs.

    Without a family it stands under our own name. Nowhere, if it is `OURS_ALONE`.
    """
    if name in OURS_ALONE:
        return
    theirs = Inside(name) if family is None else family.theirs(name, config)
    whole = tuple(slice(0, size) for size in shape)
    if EXPERT not in theirs.theirs:
        yield _place(theirs, theirs.theirs, tuple(shape), whole)
        for copy in () if family is None else family.copies(name, config):
            yield TensorMapping(copy, tuple(shape), ours=whole, copy=True)
        return
    for expert in range(shape[0]):
        name_of_one = theirs.theirs.replace(EXPERT, str(expert))
        yield _place(theirs, name_of_one, tuple(shape[1:]), (slice(expert, expert + 1), *whole[1:]))


def _place(within: Inside, theirs: str, shape: tuple[int, ...], ours: Region) -> TensorMapping:
    return TensorMapping(theirs, within.shape or shape, within.split, within.index, within.order, ours)


@dataclass(frozen=True)
class HFTensor:
    """One of their tensors, and which of ours stand in it, each at its place."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, TensorMapping], ...]

    @property
    def is_copy(self) -> bool:
        """Whether it repeats another of theirs, so that files may lack it."""
        return all(place.copy for _, place in self.parts)


def map_to_hf(
    family: Family | None, config: ModelConfig, shapes: Iterable[tuple[str, Sequence[int]]]
) -> dict[str, HFTensor]:
    """All tensors of theirs that ours, of these names and whole shapes, stand in; by name, in the order of ours."""
    found: dict[str, HFTensor] = {}
    for name, shape in shapes:
        for place in places(family, config, name, shape):
            before = found.get(place.theirs)
            parts = () if before is None else before.parts
            found[place.theirs] = HFTensor(place.theirs, place.shape, (*parts, (name, place)))
    return found


def overlap(place: TensorMapping, held: Region) -> tuple[Region, Region] | None:
    """Of a stretch of ours and the region that a rank holds: what both have, counted in each. None if nothing."""
    starts = [max(one.start, other.start) for one, other in zip(place.ours, held, strict=True)]
    stops = [min(one.stop, other.stop) for one, other in zip(place.ours, held, strict=True)]
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return None

    def counted(region: Region) -> Region:
        return tuple(
            slice(start - each.start, stop - each.start)
            for start, stop, each in zip(starts, stops, region, strict=True)
        )

    return counted(place.ours), counted(held)


def copy_from_hf(theirs: Tensor, place: TensorMapping, part: Tensor, held: Region) -> None:
    """Copy what a rank holds of one of ours, `part` at `held`, out of one of theirs, whole."""
    common = overlap(place, held)
    if common is not None:
        inside, here = common
        part[here].copy_(place.read(theirs)[inside])


def copy_to_hf(theirs: Tensor, place: TensorMapping, part: Tensor, held: Region) -> None:
    """Copy what a rank holds of one of ours, `part` at `held`, into one of theirs. The rest of the place becomes 0."""
    common = overlap(place, held)
    if common is None:
        return
    inside, here = common
    if place.is_plain:
        theirs.view(place.stretch)[inside] = part[here].to(theirs.dtype)
        return
    stretch = theirs.new_zeros(place.stretch)
    stretch[inside] = part[here].to(theirs.dtype)
    place.write(theirs, stretch)

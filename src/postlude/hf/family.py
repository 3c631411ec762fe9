"""Family: how one Hugging Face model family maps onto Postlude, as plain data and pure functions.

`TensorMapping` maps a region of a Postlude tensor to a region of a Hugging Face tensor: all of a tensor of another
name, one expert of many, or a part of a fused, interleaved or transposed tensor. Loading, export, weight streaming and
comparison all use the same mappings.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from postlude.hf.mtp_names import LAYER, MTPNames
from postlude.model import ModelConfig

OUTER = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
VALUE_HEAD = "value_head.weight"
SCORE = "score.weight"
"""The name of the value head [H], as [1, H], in transformers' models that classify sequences, and in our own format."""
EXPERT = "{expert}"
Region: TypeAlias = tuple[slice, ...]
HFConfig: TypeAlias = Any
"""A transformers config, or `builtin.Fields`: families read its fields and call `to_dict`."""


@dataclass(frozen=True)
class TensorMapping:
    """Maps a region of a Postlude tensor to the Hugging Face tensor `hf_name`, which has the shape `hf_shape`.

    The Hugging Face tensor is viewed as `view` (the same elements in the same order), indexed by `index`, and its
    dimensions are permuted by `permute`. The result, row by row, is `region` of the Postlude tensor. By default each of
    the three changes nothing. `index` has only slices, one for each of the first dimensions.

    In a family's names, `hf_name` is relative to the layer and may contain `{expert}`: then the Postlude tensor stacks
    the experts, and the mapping is that of each expert's tensor. `hf_shape` is by default the Postlude tensor's shape,
    or that of one expert; `region` is set by `tensor_mappings`.
    """

    hf_name: str
    hf_shape: tuple[int, ...] = ()
    view: tuple[int, ...] = ()
    index: Region = ()
    permute: tuple[int, ...] = ()
    region: Region = ()
    """One slice, with both ends, for each dimension of the Postlude tensor."""
    is_copy: bool = False
    """Whether the Hugging Face tensor repeats another one: it is written, but not read."""

    @property
    def region_shape(self) -> tuple[int, ...]:
        """The shape of `region`."""
        return tuple(part.stop - part.start for part in self.region)

    @property
    def is_whole(self) -> bool:
        """Whether the whole Hugging Face tensor is `region`, row by row."""
        return not (self.view or self.index or self.permute)

    def select(self, hf_tensor: Tensor) -> Tensor:
        """Returns a view of the mapped elements of the whole Hugging Face tensor."""
        selected = hf_tensor.view(self.view) if self.view else hf_tensor
        selected = selected[self.index] if self.index else selected
        return selected.permute(self.permute) if self.permute else selected

    def read(self, hf_tensor: Tensor) -> Tensor:
        """Returns `region`, read from the whole Hugging Face tensor."""
        return self.select(hf_tensor).reshape(self.region_shape)

    def write(self, hf_tensor: Tensor, values: Tensor) -> None:
        """Writes the values of `region` into the whole Hugging Face tensor."""
        selected = self.select(hf_tensor)
        selected.copy_(values.reshape(selected.shape))


Names: TypeAlias = Mapping[str, "str | TensorMapping"]


def split_tensor(
    name: str, hf_name: str, sizes: Mapping[str, int], shape: Sequence[int], *, view: Sequence[int] = (), dim: int = 0
) -> Names:
    """Maps several Postlude tensors to one Hugging Face tensor of `shape`, in which they come one after another.

    `sizes` has the length of each along dimension `dim` of the `view`. `{}` in `name` stands for its key there.
    """
    ends = pairwise(accumulate(sizes.values(), initial=0))
    before = (slice(None),) * dim
    return {
        name.format(part): TensorMapping(hf_name, tuple(shape), tuple(view), (*before, slice(start, stop)))
        for part, (start, stop) in zip(sizes, ends, strict=True)
    }


class TensorSource(Protocol):
    """Tensors by their Hugging Face names, read one by one. `tensor_sources.py` has the implementations."""

    def names(self) -> Iterable[str]:
        """Returns the names of all tensors."""

    def take(self, name: str) -> Tensor:
        """Returns one tensor. It is taken once, so a source may release it."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of one tensor, without reading it."""


@dataclass(frozen=True)
class Family:
    """One `model_type`: how its config becomes a ModelConfig, and how its tensors are named."""

    model_type: str
    to_model: Callable[[HFConfig], ModelConfig]
    names: Names | Callable[[ModelConfig], Names]
    """Hugging Face modules of a layer ("self_attn.q_proj") by Postlude module ("attention.q_proj"); or by Postlude
    tensor ("moe.selection_bias"), a Hugging Face tensor or a `TensorMapping`. `{expert}` in a Hugging Face name stands
    for one tensor per expert, which Postlude stacks. Names that depend on sizes are a function of the config."""
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER)
    """The modules outside the layers."""
    layer: str = f"model.layers.{LAYER}"
    """The prefix of names in a layer."""
    mtp: MTPNames | None = None
    """The names of multi-token prediction, if the model files have it."""
    module_renames: Mapping[str, str] = field(default_factory=dict)
    """Parts of names in transformers' modules, and what its files have instead."""
    peft_stacks_experts: bool = False
    """Whether peft reads adapters of experts one by one, as in the files, and stacks them itself. It then takes every
    target named gate_proj, up_proj or down_proj for the experts'."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of tensors in the model files that are not read, and what they are."""
    dequantize: Mapping[str, Callable[[TensorSource], TensorSource]] = field(default_factory=dict)
    """By the method in `quantization_config`, how quantised weights are read."""
    adapt_source: Callable[[TensorSource], TensorSource] | None = None
    """Reads files that have other names for some tensors."""

    def ignored_prefixes(self, config: ModelConfig, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Returns the prefixes of tensors in the model files that are not read, by what they are.

        They include multi-token prediction if the model has none.
        """
        prefixes: dict[str, tuple[str, ...]] = {}
        for prefix, description in self.ignored.items():
            prefixes[description] = (*prefixes.get(description, ()), prefix)
        if self.mtp is not None and not config.pattern.mtp:
            prefixes["multi-token prediction, read where mtp is on"] = self.mtp.prefixes(config, names)
        return prefixes

    def with_mtp(self, config: ModelConfig, count: int) -> ModelConfig:
        """Returns the config with `count` MTP depths; unchanged if the family's files could not hold them."""
        return config if self.mtp is None or not count else self.mtp.add_to(config, count)

    def mapping(self, name: str, config: ModelConfig) -> TensorMapping:
        """Returns the mapping of a Postlude tensor. `hf_name` is the full name, which may contain `{expert}`."""
        module, _, leaf = name.rpartition(".")
        if module in self.outer:
            return TensorMapping(f"{self.outer[module]}.{leaf}")
        part, number, inner = (*name.split(".", 2), "", "")[:3]
        layer = self.layer.replace(LAYER, number)
        if part == "mtp" and self.mtp is not None:
            outside = self.mtp.module_name(config, int(number), inner.rpartition(".")[0])
            if outside is not None:
                return TensorMapping(f"{outside}.{leaf}")
            _, index, inner = inner.split(".", 2)
            layer = self.mtp.layer_name(config, int(number), int(index))
        names = self.names(config) if callable(self.names) else self.names
        inner_module = inner.rpartition(".")[0]
        hf_name = names.get(inner)  # a name of a whole tensor
        if hf_name is None and inner_module in names:
            hf_name = f"{names[inner_module]}.{leaf}"
        if hf_name is None or (part == "mtp" and self.mtp is None):
            raise ValueError(
                f"{self.model_type} models have no tensor for {name}. Give a family of your own that names it, or a "
                "ModelConfig with family=None to go by our names."
            )
        mapping = hf_name if isinstance(hf_name, TensorMapping) else TensorMapping(hf_name)
        return replace(mapping, hf_name=f"{layer}.{mapping.hf_name}")

    def copies(self, name: str, config: ModelConfig) -> Iterator[str]:
        """Yields the names of Hugging Face tensors that repeat the Postlude tensor."""
        module, _, leaf = name.rpartition(".")
        if self.mtp is not None and module in self.outer:
            for copy in self.mtp.copies_of(config, module):
                yield f"{copy}.{leaf}"


Families: TypeAlias = Mapping[str, Family]
"""Families by `model_type`."""


def tensor_mappings(
    family: Family | None, config: ModelConfig, name: str, shape: Sequence[int]
) -> Iterator[TensorMapping]:
    """Yields the mappings of the Postlude tensor of this name and full shape: one, or one per expert, and its copies.

    Without a family it keeps its Postlude name. The value head is `SCORE` in every family.
    """
    if name == VALUE_HEAD:
        yield TensorMapping(SCORE, (1, *shape), region=(slice(0, shape[0]),))
        return
    mapping = TensorMapping(name) if family is None else family.mapping(name, config)
    full_region = tuple(slice(0, size) for size in shape)
    if EXPERT not in mapping.hf_name:
        yield replace(mapping, hf_shape=mapping.hf_shape or tuple(shape), region=full_region)
        for copy in () if family is None else family.copies(name, config):
            yield TensorMapping(copy, tuple(shape), region=full_region, is_copy=True)
        return
    for expert in range(shape[0]):
        yield replace(
            mapping,
            hf_name=mapping.hf_name.replace(EXPERT, str(expert)),
            hf_shape=mapping.hf_shape or tuple(shape[1:]),
            region=(slice(expert, expert + 1), *full_region[1:]),
        )


@dataclass(frozen=True)
class HFTensor:
    """A Hugging Face tensor, and the mappings of the Postlude tensors in it, by Postlude name."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, TensorMapping], ...]

    @property
    def is_copy(self) -> bool:
        """Whether it repeats another Hugging Face tensor, so that files may lack it."""
        return all(mapping.is_copy for _, mapping in self.parts)


def map_to_hf(
    family: Family | None, config: ModelConfig, shapes: Iterable[tuple[str, Sequence[int]]]
) -> dict[str, HFTensor]:
    """Returns the Hugging Face tensors by name, given Postlude names and full shapes, in the same order."""
    tensors: dict[str, HFTensor] = {}
    for name, shape in shapes:
        for mapping in tensor_mappings(family, config, name, shape):
            known = tensors.get(mapping.hf_name)
            parts = () if known is None else known.parts
            tensors[mapping.hf_name] = HFTensor(mapping.hf_name, mapping.hf_shape, (*parts, (name, mapping)))
    return tensors


def overlap(mapping: TensorMapping, shard: Region) -> tuple[Region, Region] | None:
    """Returns the overlap of `mapping.region` and a rank's shard, relative to each; None if there is none."""
    starts = [max(mapped.start, local.start) for mapped, local in zip(mapping.region, shard, strict=True)]
    stops = [min(mapped.stop, local.stop) for mapped, local in zip(mapping.region, shard, strict=True)]
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return None

    def relative_to(region: Region) -> Region:
        return tuple(
            slice(start - part.start, stop - part.start)
            for start, stop, part in zip(starts, stops, region, strict=True)
        )

    return relative_to(mapping.region), relative_to(shard)


def copy_from_hf(hf_tensor: Tensor, mapping: TensorMapping, local: Tensor, shard: Region) -> None:
    """Copies from the whole Hugging Face tensor into `local`, a rank's shard of the Postlude tensor at `shard`."""
    common = overlap(mapping, shard)
    if common is not None:
        in_region, in_shard = common
        local[in_shard].copy_(mapping.read(hf_tensor)[in_region])


def copy_to_hf(hf_tensor: Tensor, mapping: TensorMapping, local: Tensor, shard: Region) -> None:
    """Copies `local`, a rank's shard at `shard`, into the Hugging Face tensor. The rest of the region becomes 0."""
    common = overlap(mapping, shard)
    if common is None:
        return
    in_region, in_shard = common
    if mapping.is_whole:
        hf_tensor.view(mapping.region_shape)[in_region] = local[in_shard].to(hf_tensor.dtype)
        return
    full = hf_tensor.new_zeros(mapping.region_shape)
    full[in_region] = local[in_shard].to(hf_tensor.dtype)
    mapping.write(hf_tensor, full)

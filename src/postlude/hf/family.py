"""Family: how one Hugging Face model family maps onto Postlude, as plain data and pure functions.

`TensorMapping` maps a region of a Postlude tensor to a region of a Hugging Face tensor: all of a tensor of another
name, one expert of many, or a part of a fused, interleaved or transposed tensor. Loading, export, weight streaming and
comparison all use the same mappings.

`MTPNames` names multi-token prediction in a family's files, which transformers' models do not have. In every family a
depth projects the embedding and the hidden state after the trunk's final norm, side by side, in this order. So only
names differ.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from postlude.model import ModelConfig

OUTER = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
VALUE_HEAD = "value_head.weight"
SCORE = "score.weight"
"""The name of the value head [H], as [1, H], in transformers' models that classify sequences, and in our own format."""
LAYER, FIRST, LAST = "{layer}", "{first}", "{last}"
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
        return self.select(hf_tensor).reshape(self.region_shape)

    def write(self, hf_tensor: Tensor, values: Tensor) -> None:
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


def _zero(config: ModelConfig) -> int:
    return 0


@dataclass(frozen=True)
class MTPNames:
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

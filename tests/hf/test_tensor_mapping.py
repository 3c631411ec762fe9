"""Our tensors as slices of Hugging Face's: fused, interleaved, transposed, one per expert; full or sharded."""

import itertools

import pytest
import torch
from torch import Tensor

from postlude.hf.family import (
    EXPERT,
    Family,
    TensorMapping,
    copy_from_hf,
    copy_to_hf,
    map_to_hf,
    split_tensor,
    tensor_mappings,
)
from postlude.model import ModelConfig, Pattern
from postlude.model.blocks import MLPConfig

CONFIG = ModelConfig(
    pattern=Pattern.parse("-"), hidden_size=5, vocab_size=7, blocks={"-": MLPConfig(intermediate_size=4)}
)
SHAPES = {
    "layers.0.x.query.weight": (6, 5),
    "layers.0.x.key.weight": (4, 5),
    "layers.0.x.conv.weight": (10, 3),
    "layers.0.x.gate.weight": (2, 4, 5),
    "layers.0.x.up.weight": (2, 4, 5),
    "layers.0.x.one.weight": (3, 2, 5),
    "layers.0.x.bias": (3,),
    "layers.0.x.apart.weight": (3, 2),
}
NAMES = {
    # by head: two of the query, then the key, twice
    "x.query.weight": TensorMapping("fused.weight", (10, 5), view=(2, 5, 5), index=(slice(None), slice(0, 3))),
    "x.key.weight": TensorMapping("fused.weight", (10, 5), view=(2, 5, 5), index=(slice(None), slice(3, 5))),
    "x.conv.weight": TensorMapping("conv1d.weight", (10, 1, 3), view=(10, 3)),
    # transposed, gate and up in turn
    "x.gate.weight": TensorMapping(
        "experts.both", (2, 5, 8), index=(slice(None), slice(None), slice(0, 8, 2)), permute=(0, 2, 1)
    ),
    "x.up.weight": TensorMapping(
        "experts.both", (2, 5, 8), index=(slice(None), slice(None), slice(1, 8, 2)), permute=(0, 2, 1)
    ),
    "x.one": f"experts.{EXPERT}.one",
    "x.bias": "bias",
    **split_tensor("x.{}.weight", "wide", {"before": 1, "apart": 3, "after": 1}, (5, 2)),
}
FAMILY = Family("without_processes", lambda hf: CONFIG, lambda config: NAMES)


def postlude_tensors() -> dict[str, Tensor]:
    counter = itertools.count(1)
    return {
        name: torch.tensor([float(next(counter)) for _ in range(torch.Size(shape).numel())]).view(shape)
        for name, shape in SHAPES.items()
    }


def to_hf_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    mapped = {}
    for hf_tensor in map_to_hf(FAMILY, CONFIG, SHAPES.items()).values():
        mapped[hf_tensor.name] = torch.full(hf_tensor.shape, -1.0)
        for name, mapping in hf_tensor.parts:
            mapping.write(mapped[hf_tensor.name], tensors[name][mapping.region])
    return mapped


def test_each_element_is_where_its_mapping_puts_it() -> None:
    tensors = postlude_tensors()
    hf_tensors = to_hf_tensors(tensors)
    prefix = "model.layers.0."
    fused, query, key = (
        hf_tensors[prefix + "fused.weight"],
        tensors["layers.0.x.query.weight"],
        tensors["layers.0.x.key.weight"],
    )
    torch.testing.assert_close(fused, torch.cat((query[:3], key[:2], query[3:], key[2:])))
    fused_experts = hf_tensors[prefix + "experts.both"]
    torch.testing.assert_close(fused_experts[:, :, 0::2], tensors["layers.0.x.gate.weight"].transpose(1, 2))
    torch.testing.assert_close(fused_experts[:, :, 1::2], tensors["layers.0.x.up.weight"].transpose(1, 2))
    torch.testing.assert_close(hf_tensors[prefix + "conv1d.weight"][:, 0], tensors["layers.0.x.conv.weight"])
    for expert in range(3):
        torch.testing.assert_close(
            hf_tensors[f"{prefix}experts.{expert}.one.weight"], tensors["layers.0.x.one.weight"][expert]
        )
    torch.testing.assert_close(hf_tensors[prefix + "wide"][1:4], tensors["layers.0.x.apart.weight"])
    assert (hf_tensors[prefix + "wide"][[0, 4]] == -1).all()  # nobody's


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dimension", [0, 1])
def test_rank_shards_are_read_from_and_add_up_to_hf_tensors(ranks: int, dimension: int) -> None:
    tensors = postlude_tensors()
    hf_tensors = to_hf_tensors(tensors)
    summed = {name: torch.zeros_like(tensor) for name, tensor in hf_tensors.items()}
    for rank, (name, tensor) in itertools.product(range(ranks), tensors.items()):
        cut = dimension if dimension < tensor.ndim else 0
        width = -(-tensor.shape[cut] // ranks)
        start, stop = min(rank * width, tensor.shape[cut]), min((rank + 1) * width, tensor.shape[cut])
        region = tuple(slice(0, size) if d != cut else slice(start, stop) for d, size in enumerate(tensor.shape))
        part = torch.zeros_like(tensor[region])
        for mapping in tensor_mappings(FAMILY, CONFIG, name, tensor.shape):
            copy_from_hf(hf_tensors[mapping.hf_name], mapping, part, region)
            rebuilt = torch.zeros_like(hf_tensors[mapping.hf_name])
            copy_to_hf(rebuilt, mapping, tensor[region], region)
            summed[mapping.hf_name] += rebuilt
        assert torch.equal(part, tensor[region])
    for name, tensor in hf_tensors.items():
        assert torch.equal(summed[name], tensor.clamp_min(0.0))


def test_error_names_a_tensor_unknown_to_the_family() -> None:
    with pytest.raises(ValueError, match=r"without_processes models have no tensor for layers\.0\.x\.other\.weight\."):
        list(tensor_mappings(FAMILY, CONFIG, "layers.0.x.other.weight", (2, 2)))

"""Sources of a model's tensors: safetensors files, checkpoints, memory. Nothing is loaded through pickle."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from postlude.hf.family import Family, TensorMapping, map_to_hf
from postlude.model import ModelConfig
from postlude.ops.adamw_storage import join_halves
from postlude.sharded_tensors import ShardReader, read_state

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MODEL = "model/"  # the prefix of a model's tensors in a checkpoint
LOW_BITS = "optimizer/low/"  # that of the lower 16 bits of split weights, whose nearest bf16 numbers are the model's


class SafetensorsSource:
    """The safetensors of a model directory, sharded or not, memory-mapped and read tensor by tensor."""

    def __init__(self, directory: Path) -> None:
        self._file_of = _files(directory)
        self._open: dict[Path, safe_open] = {}

    def names(self) -> Iterable[str]:
        """Returns the names of all tensors in the directory."""
        return self._file_of

    def take(self, name: str) -> Tensor:
        with self._reading(name) as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of one tensor from the header of its file."""
        with self._reading(name) as file:
            return tuple(file.get_slice(name).get_shape())

    @contextmanager
    def _reading(self, name: str) -> Iterator[safe_open]:
        path = self._file_of[name]
        if path not in self._open:
            self._open[path] = _open(path)
        try:
            yield self._open[path]
        except SafetensorError as error:
            raise ValueError(f"{path} does not hold {name}, as its index says ({error}); fetch both again.") from error


class CheckpointSource:
    """The model in a training checkpoint, which has our names and sharded tensors.

    Split weights come in fp32 with `all_bits`, otherwise in bf16 as a forward uses them.
    """

    def __init__(self, directory: Path, family: Family | None, config: ModelConfig, *, all_bits: bool = True) -> None:
        self._all_bits = all_bits
        self._reader = ShardReader(directory, read_state(directory))
        names = [name.removeprefix(MODEL) for name in self._reader.tensors if name.startswith(MODEL)]
        self._hf_tensors = map_to_hf(family, config, ((name, self._reader.shape(MODEL + name)) for name in names))

    def names(self) -> Iterable[str]:
        """Returns the names of all tensors of the model."""
        return self._hf_tensors

    def take(self, name: str) -> Tensor:
        tensor = self._hf_tensors[name]
        regions = [self._read(tensor_name, mapping) for tensor_name, mapping in tensor.parts]
        if len(regions) == 1 and tensor.parts[0][1].is_whole:
            return regions[0].view(tensor.shape)
        full = torch.empty(tensor.shape, dtype=regions[0].dtype)
        for (_, mapping), region in zip(tensor.parts, regions, strict=True):
            mapping.write(full, region)
        return full

    def _read(self, name: str, mapping: TensorMapping) -> Tensor:
        start, size = tuple(part.start for part in mapping.region), mapping.region_shape
        values = self._reader.read(MODEL + name, start, size)
        if not self._all_bits or LOW_BITS + name not in self._reader.tensors:
            return values
        return join_halves(values, self._reader.read(LOW_BITS + name, start, size))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._hf_tensors[name].shape


class MemorySource:
    """Tensors in memory, released one by one as they are taken."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        """Returns the names of tensors not yet taken."""
        return self._tensors

    def take(self, name: str) -> Tensor:
        """Returns one tensor and releases it."""
        return self._tensors.pop(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)


class ModuleSource(MemorySource):
    """The tensors of a transformers model in memory."""

    def __init__(self, module: nn.Module, family: Family, file_names: Container[str]) -> None:
        """Takes the tensors of `module`. `file_names` are the names of the family's tensors in its files."""
        super().__init__(as_stored(module.state_dict(), family, file_names))
        module.to("meta")  # so that taking a tensor frees its memory


def names_in_order(config: ModelConfig, family: Family, file_names: Container[str]) -> list[str]:
    """Returns `file_names` in the order of transformers' state dict."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(hf_config(config))
    return list(as_stored(module.state_dict(), family, file_names))


def hf_config(config: ModelConfig) -> PretrainedConfig:
    """Returns the transformers config that a model was read from."""
    if config.family is None or not config.hf_config:
        raise ValueError(
            f"no Hugging Face family describes this model, {config.pattern}, so it has no config.json. Write it as "
            "Postlude's own (export_model), or load it from a transformers config."
        )
    settings = {
        key: value for key, value in config.hf_config.items() if key not in ("model_type", "transformers_version")
    }
    hf: PretrainedConfig = AutoConfig.for_model(config.family, **settings)
    return hf


def as_stored(tensors: Mapping[str, Tensor], family: Family, file_names: Container[str]) -> dict[str, Tensor]:
    """Returns the tensors of a transformers module by their names in files: stacked experts become views, one each.

    Tensors whose name in the module is among `file_names` stay as they are.
    """
    stored: dict[str, Tensor] = {}
    for module_name, tensor in tensors.items():
        name = module_name
        for in_module, in_file in family.module_renames.items():
            name = name.replace(in_module, in_file)
        stem, _, leaf = name.rpartition(".")
        if name in file_names:
            stored[name] = tensor
        elif stem.endswith(".experts") and leaf == "gate_up_proj":
            for expert, matrix in enumerate(tensor):
                gate, up = matrix.chunk(2)
                stored |= {f"{stem}.{expert}.gate_proj.weight": gate, f"{stem}.{expert}.up_proj.weight": up}
        elif stem.endswith(".experts") and leaf in ("up_proj", "down_proj"):
            stored |= {f"{stem}.{expert}.{leaf}.weight": matrix for expert, matrix in enumerate(tensor)}
        else:
            stored[name] = tensor
    return stored


def _files(directory: Path) -> dict[str, Path]:
    index, single = directory / INDEX, directory / SINGLE
    if index.is_file():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
                raise TypeError("weight_map must give the name of a file for each tensor")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{index} is not a safetensors index ({error}); download or export the model again."
            ) from error
        outside = [file for file in weight_map.values() if Path(file).is_absolute() or ".." in Path(file).parts]
        if outside:
            raise ValueError(
                f"{index} names {outside[0]}, which is not in its directory; files elsewhere are not read."
            )
        missing = sorted({file for file in weight_map.values() if not (directory / file).is_file()})
        if missing:
            raise FileNotFoundError(
                f"{directory} lacks {', '.join(missing)}, which {INDEX} names; fetch the missing shards."
            )
        return {name: directory / file for name, file in weight_map.items()}
    if single.is_file():
        return dict.fromkeys(_open(single).keys(), single)
    pickled = sorted(path.name for path in directory.glob("*.bin"))
    hint = f" It has {', '.join(pickled)}, but pickled weights are never loaded: convert them first." if pickled else ""
    raise FileNotFoundError(f"{directory} holds neither {SINGLE} nor {INDEX}.{hint}")


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is not a readable safetensors file ({error}); it may be cut short. Fetch it again."
        ) from error

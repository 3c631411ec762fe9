"""Sources of a model's tensors: safetensors files, checkpoints, memory. Nothing is loaded through pickle.

Also digests of weights, none of them cryptographic: `checksum` of files, and sums over tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from postlude.hf.family import Family, TensorMapping, TensorSource, map_to_hf
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
        return self._file_of

    def take(self, name: str) -> Tensor:
        with self._reading(name) as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def shape(self, name: str) -> tuple[int, ...]:
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
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        return self._tensors

    def take(self, name: str) -> Tensor:
        return self._tensors.pop(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)


class ModuleSource(MemorySource):
    def __init__(self, module: nn.Module, family: Family, file_names: Container[str]) -> None:
        """Takes the tensors of `module`. `file_names` are the names of the family's tensors in its files."""
        super().__init__(as_stored(module.state_dict(), family, file_names))
        module.to("meta")  # so that taking a tensor frees its memory


def names_in_order(config: ModelConfig, family: Family, file_names: Container[str]) -> list[str]:
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(hf_config(config))
    return list(as_stored(module.state_dict(), family, file_names))


def hf_config(config: ModelConfig) -> PretrainedConfig:
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


LINE = 8192  # words in a row of `word_sum`
MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # of splitmix64


class ChecksummedSource:
    """The tensors of a source, each summed up as it is taken."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self._sums: dict[str, str] = {}

    def names(self) -> Iterable[str]:
        return self.source.names()

    def take(self, name: str) -> Tensor:
        tensor = self.source.take(name)
        self._sums[name] = f"{tensor.dtype} {tuple(tensor.shape)} {int(word_sum(tensor))}"
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def checksum(self) -> str:
        """Returns the checksum of all tensors. Reads those that were not taken yet."""
        for name in list(self.names()):
            if name not in self._sums:
                self.take(name)
        lines = (f"{name} {self._sums[name]}\n" for name in sorted(self._sums))
        return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()


def checksum(directory: Path) -> str:
    """Returns the checksum of a directory's safetensors: names, dtypes, shapes and values."""
    return ChecksummedSource(SafetensorsSource(directory)).checksum()


def word_sum(tensor: Tensor) -> Tensor:
    """Returns a sum of a tensor's bytes that depends on their order: [] int64, modulo 2 ** 64."""
    data = tensor.contiguous().flatten().view(torch.uint8)
    words = (F.pad(data, (0, -len(data) % 4)) if len(data) % 4 else data).view(torch.int32)
    rows, rest = divmod(len(words), LINE)
    total = position_sum(words[: len(words) - rest].view(rows, LINE), (rows + 1, LINE), (0, 0))
    return total + position_sum(words[len(words) - rest :].view(1, rest), (rows + 1, LINE), (rows, 0))


def position_sum(values: Tensor, shape: Sequence[int], start: Sequence[int]) -> Tensor:
    """Returns the sum of integers of at most 32 bits, each times a weight that its position gives: [] int64.

    `values` are the part from `start` on of a tensor of `shape`. The sums of all parts add up, modulo 2 ** 64, to that
    of the whole, however it is divided.
    """
    if not values.numel():
        return values.new_zeros((), dtype=torch.int64)
    row = torch.zeros((), dtype=torch.int64, device=values.device)  # its number, among those of the whole tensor
    for size, first, length in zip(shape[:-1], start, values.shape, strict=False):
        row = row.unsqueeze(-1) * size + torch.arange(first, first + length, device=values.device)
    columns = values.shape[-1] if values.dim() else 1
    column = torch.arange(columns, device=values.device) + (start[-1] if values.dim() else 0)
    row_weights, column_weights = _weights(row.flatten(), 1), _weights(column, 2)
    matrix = values.reshape(-1, columns)
    step = max(1, (1 << 24 if values.is_cuda else 1 << 18) // columns)  # rows that are widened to int64 at a time
    sums = [(rows.long().mul_(column_weights)).sum(1) for rows in matrix.split(step)]
    return (torch.cat(sums) * row_weights).sum()


def name_weight(name: str) -> int:
    """Returns an odd number of 64 bits by which the sum over a tensor of this name is multiplied."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True) | 1


def _weights(positions: Tensor, seed: int) -> Tensor:
    """Returns an odd number for each position, as if it were random."""
    weights = positions + (seed << 60)
    for multiplier in MULTIPLIERS:
        weights = (weights ^ (weights >> 30)) * multiplier
    return (weights ^ (weights >> 31)) | 1

"""Tensors written in shards are read in any other shards, bit-exactly, and only from the files with them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from postlude.sharded_tensors import ShardReader, StagingBuffers, TensorShard, damaged_files, merge_indexes

WHOLE = {
    "matrix": torch.arange(35, dtype=torch.float32).view(5, 7),
    "half": torch.randn(6, 3, 2).bfloat16(),
    "flags": torch.tensor([True, False, True]),
    "count": torch.tensor(12),
}


def box(name: str, *bounds: tuple[int, int]) -> TensorShard:
    slices = tuple(slice(*bound) for bound in bounds)
    return TensorShard(WHOLE[name][slices], tuple(dimension.start for dimension in slices), tuple(WHOLE[name].shape))


@pytest.fixture(params=[1 << 20, 10, 64], ids="buckets of {}".format)
def reader(tmp_path: Path, request: pytest.FixtureRequest) -> ShardReader:
    files = [
        {"matrix": box("matrix", (0, 2), (0, 7)), "half": box("half", (0, 6), (0, 3), (1, 2)), "count": box("count")},
        {"matrix": box("matrix", (2, 5), (0, 3)), "half": box("half", (0, 6), (0, 3), (0, 1))},
        {"matrix": box("matrix", (2, 5), (3, 7)), "flags": box("flags", (0, 3))},
        {},
    ]
    written = [
        StagingBuffers(request.param).take(parts).write(tmp_path / f"part-{number}.safetensors")
        for number, parts in enumerate(files)
    ]
    assert len(list(tmp_path.iterdir())) == 3  # no file for no parts
    assert damaged_files(tmp_path, merge_indexes(written)["files"]) == []
    return ShardReader(tmp_path, merge_indexes(written))


def test_any_region_is_read_as_it_was_written(reader: ShardReader) -> None:
    for name, full in WHOLE.items():
        assert torch.equal(reader.read(name), full)
    assert torch.equal(reader.read("matrix", (1, 2), (3, 4)), WHOLE["matrix"][1:4, 2:6])
    targets = {
        "matrix": TensorShard(torch.empty(2, 2), (1, 2), (5, 7)),
        "half": TensorShard(torch.empty(1, 3, 2), (4, 0, 0), (6, 3, 2)),
    }
    reader.read_into(targets)
    assert torch.equal(targets["matrix"].values, WHOLE["matrix"][1:3, 2:4])
    assert torch.equal(targets["half"].values, WHOLE["half"][4:5].float())


def test_files_are_safetensors_that_others_read(reader: ShardReader) -> None:
    actual = load_file(reader.directory / "part-1.safetensors")
    assert {name: tensor.tolist() for name, tensor in actual.items()} == {
        "matrix": WHOLE["matrix"][2:, :3].tolist(),
        "half": WHOLE["half"][:, :, :1].tolist(),
    }


def test_a_file_that_is_not_needed_is_not_opened(reader: ShardReader) -> None:
    (reader.directory / "part-1.safetensors").unlink()
    target = torch.empty(2, 7)
    reader.read_into({"matrix": TensorShard(target, (0, 0), (5, 7))})
    assert torch.equal(target, WHOLE["matrix"][:2])
    with pytest.raises(ValueError, match=r"part-1.safetensors is not a readable safetensors file"):
        reader.read("matrix")


def test_a_missing_shard_raises(reader: ShardReader) -> None:
    del reader.tensors["matrix"]["parts"][1]
    assert torch.equal(reader.read("matrix", (0, 0), (2, 7)), WHOLE["matrix"][:2])
    with pytest.raises(ValueError, match="does not hold all of matrix; load another checkpoint"):
        reader.read("matrix")


def test_single_element_with_a_stride(tmp_path: Path) -> None:
    """Such a slice has a stride, and is still contiguous."""
    values = torch.arange(12.0).view(6, 2)[2:3, 1]
    assert values.stride() == (2,)
    index = StagingBuffers().take({"column": TensorShard(values, (2,), (6,))}).write(tmp_path / "part.safetensors")
    assert ShardReader(tmp_path, index).read("column", (2,), (1,)).tolist() == [5.0]


def test_staging_keeps_earlier_values_and_is_reused(tmp_path: Path) -> None:
    staging, values = StagingBuffers(64), torch.arange(40.0)

    def save(path: Path) -> tuple[list[int], Tensor]:
        staged = staging.take({"values": TensorShard(values, (0,), (40,))})
        values.add_(100)
        staged.write(path)
        return [bucket.data_ptr() for bucket in staging.buckets], load_file(path)["values"]

    first, first_file = save(tmp_path / "one.safetensors")
    second, two = save(tmp_path / "two.safetensors")
    assert torch.equal(first_file, torch.arange(40.0))
    assert torch.equal(two, torch.arange(40.0) + 100)
    assert first == second
    assert len(first) == 3


@pytest.mark.gpu
def test_staging_uses_no_gpu_memory(tmp_path: Path) -> None:
    values = {f"{number}": torch.randn(1 << 20, device="cuda") for number in range(16)}
    staging = StagingBuffers(1 << 22)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    staged = staging.take({name: TensorShard(value, (0,), (1 << 20,)) for name, value in values.items()})
    assert torch.cuda.max_memory_allocated() == before
    assert all(bucket.is_pinned() for bucket in staging.buckets)
    staged.write(tmp_path / "part.safetensors")
    for name, tensor in load_file(tmp_path / "part.safetensors").items():
        assert torch.equal(tensor, values[name].cpu())

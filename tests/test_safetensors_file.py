"""Files written tensor by tensor are byte-identical to the library's, with little memory."""

import errno
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from postlude import safetensors_file
from postlude.safetensors_file import DTYPES, TensorInfo, write

SIZES = (1, 7, 64, 1 << 20)  # of a piece
FULL = OSError(errno.ENOSPC, "No space left on device")


def random_tensor(dtype: torch.dtype, *shape: int) -> Tensor:
    """Returns a tensor of random bytes, valid for its dtype."""
    generator = torch.Generator().manual_seed(len(str(dtype)) + sum(shape))
    high = 2 if dtype == torch.bool else 256
    data = torch.randint(high, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator, dtype=torch.uint8)
    return data.view(dtype)


def every_kind() -> dict[str, Tensor]:
    """Returns every dtype and shape other than plain matrices; odd sizes make the order matter for alignment."""
    shared = torch.arange(12.0).view(3, 4)
    return {
        **{f"of.{name}": random_tensor(dtype, 3, 5) for dtype, name in DTYPES.items()},
        "number": torch.tensor(2.5),
        "half number": torch.tensor(-1.5, dtype=torch.bfloat16),
        "nothing": torch.empty(0, 3),
        "no columns": torch.empty(4, 0, dtype=torch.int64),
        "transposed": random_tensor(torch.bfloat16, 5, 3).t(),
        "strided": torch.arange(20)[3::4],
        "expanded": torch.ones(3, 1).expand(3, 4),
        "learned": torch.ones(3, requires_grad=True),
        "conjugated": torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64).conj(),
        "negated": torch.tensor([1 + 2j], dtype=torch.complex64).conj().imag,
        "one.weight": shared,
        "the same.weight": shared,
        "a row of it": shared[1],
        'ä "quoted" name\n\x01\u2028': torch.ones(1),
    }


def entries(tensors: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def library_bytes(tensors: Mapping[str, Tensor], path: Path) -> bytes:
    save_file({name: contiguous_copy(tensor) for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    return path.read_bytes()


def contiguous_copy(tensor: Tensor) -> Tensor:
    """Returns a row-major copy, the only layout that the library takes."""
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("size", SIZES)
def test_file_is_byte_identical_to_the_library(tmp_path: Path, size: int) -> None:
    tensors = every_kind()
    backwards = reversed(tensors.items())
    write(tmp_path / "ours", entries(tensors), backwards, staging_bytes=size)
    assert (tmp_path / "ours").read_bytes() == library_bytes(tensors, tmp_path / "library")


def test_library_reads_the_file(tmp_path: Path) -> None:
    tensors = every_kind()
    write(tmp_path / "ours", entries(tensors), tensors.items())
    with safe_open(tmp_path / "ours", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    loaded = load_file(tmp_path / "ours")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        actual_bytes, expected_bytes = (
            part.view(-1).view(torch.uint8) for part in (loaded[name], contiguous_copy(tensor))
        )
        assert torch.equal(actual_bytes, expected_bytes), name


def test_empty_file(tmp_path: Path) -> None:
    write(tmp_path / "ours", {}, ())
    assert (tmp_path / "ours").read_bytes() == library_bytes({}, tmp_path / "library")


def copy_immediately(tensor: Tensor, away: Tensor) -> Callable[[], object]:
    """A GPU that copies at once."""
    tensor.copy_(away)
    return lambda: None


def copy_late(tensor: Tensor, away: Tensor) -> Callable[[], object]:
    """A GPU that copies when somebody waits for it, and leaves rubbish until then."""
    values = away.clone()
    tensor.fill_(0xEE)
    return lambda: tensor.copy_(values)


class FakeDeviceTensor:
    """Stands for a piece of a tensor on a GPU."""

    def __init__(self, piece: Tensor) -> None:
        self.piece, self.numel, self.is_cpu = piece, piece.numel, False


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("copies", [copy_immediately, copy_late])
def test_buffers_are_not_read_early_or_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, copies: Callable[..., Callable[[], object]]
) -> None:
    pieces, sizes = safetensors_file._pieces, []

    def away(*arguments: object) -> Iterator[tuple[int, object]]:
        for number, (position, piece) in enumerate(pieces(*arguments)):  # type: ignore[arg-type]
            yield position, piece if number % 5 == 3 else FakeDeviceTensor(piece)  # and some are here

    def buffer(size: int) -> Tensor:
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(safetensors_file, "_pieces", away)
    monkeypatch.setattr(safetensors_file, "_buffer", buffer)
    monkeypatch.setattr(safetensors_file, "_begin_copy", lambda here, there: copies(here, there.piece))
    tensors = every_kind()
    write(tmp_path / "ours", entries(tensors), tensors.items(), staging_bytes=size)
    assert sizes == [size, size], "two buffers, however much there is to write"
    assert (tmp_path / "ours").read_bytes() == library_bytes(tensors, tmp_path / "library")


def test_tensors_are_freed_before_the_next_one_is_made(tmp_path: Path) -> None:
    shape, buckets = (64, 3), []

    def make_tensors() -> Iterator[tuple[str, Tensor]]:
        for number in range(6):
            bucket = torch.full((2, *shape), float(number))
            alive = weakref.ref(bucket.untyped_storage())
            views = [(f"{number}.{index}", bucket[index]) for index in range(2)]
            del bucket
            while views:
                yield views.pop()
            buckets.append(alive() is not None)

    expected = {f"{number}.{index}": TensorInfo(torch.float32, shape) for number in range(6) for index in range(2)}
    write(tmp_path / "file", expected, make_tensors(), staging_bytes=100)
    assert buckets == [False] * 6


@pytest.mark.parametrize("room", [0, 50, 1000, 5000])
def test_full_disk_gives_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    pwrite = os.pwrite

    def filling(file: int, data: memoryview, position: int) -> int:
        nonlocal room
        if not room:
            raise FULL
        written = pwrite(file, data[:room], position)  # as a system does it: what there is room for
        room -= written
        return written

    monkeypatch.setattr(os, "pwrite", filling)
    tensors = {"a": torch.ones(1000), "b": torch.ones(1000)}
    with pytest.raises(OSError, match=r"file could not be written: No space left on device \(os error 28\)\.$"):
        write(tmp_path / "file", entries(tensors), tensors.items(), staging_bytes=300)


def test_an_error_at_close_is_raised(tmp_path: Path) -> None:
    """As network file systems report it."""

    class File:
        def fileno(self) -> int:
            return self.real.fileno()

        def close(self) -> None:
            if not self.real.closed:
                self.real.close()
                raise FULL

    class Full(type(tmp_path)):  # type: ignore[misc]
        def open(self, *arguments: object, **options: object) -> File:
            file = File()
            file.real = super().open(*arguments, **options)
            return file

    with pytest.raises(OSError, match=r"file could not be written: No space left on device \(os error 28\)\.$"):
        write(Full(tmp_path / "file"), {"a": TensorInfo(torch.float32, (3,))}, [("a", torch.ones(3))])


def test_error_of_the_tensor_iterator_is_raised_unchanged(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        raise OSError("a rank is gone")
        yield

    with pytest.raises(OSError, match=r"^a rank is gone$"):
        write(tmp_path / "file", {"a": TensorInfo(torch.float32, (3,))}, broken())


def test_undeclared_tensors_are_refused(tmp_path: Path) -> None:
    infos = {"a": TensorInfo(torch.float32, (3,)), "b": TensorInfo(torch.float32, (3,))}
    right = torch.ones(3)
    for wrong, sentence in (
        ([("a", right)], "1 of the file's tensors did not come: b"),
        ([("a", right), ("a", right)], "a is not one of the file's tensors, or came twice"),
        ([("c", right)], "c is not one of the file's tensors, or came twice"),
        ([("a", right.bfloat16())], "a was to be .*float32.*, but it is .*bfloat16"),
        ([("a", right[:2])], r"a was to be .*\(3,\).*, but it is .*\(2,\)"),
    ):
        with pytest.raises(ValueError, match=sentence):
            write(tmp_path / "file", infos, wrong)
    with pytest.raises(ValueError, match=r"a is torch\.complex128, which safetensors has no name for"):
        write(tmp_path / "file", {"a": TensorInfo(torch.complex128, (3,))}, ())


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1000, 1 << 20])
def test_a_file_written_from_a_gpu_has_its_values(tmp_path: Path, size: int) -> None:
    tensors = {name: tensor.detach().cuda() for name, tensor in every_kind().items()}
    tensors |= {"large": torch.randn(1 << 20, device="cuda"), "turned": torch.randn(512, 300, device="cuda").t()}
    write(tmp_path / "ours", entries(tensors), tensors.items(), staging_bytes=size)
    write(tmp_path / "cpu", entries(tensors), ((name, tensor.cpu()) for name, tensor in tensors.items()))
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "cpu").read_bytes()


@pytest.mark.gpu
def test_reused_gpu_memory_is_written_with_its_earlier_contents(tmp_path: Path) -> None:
    """Each tensor is freed immediately, and the next uses its memory while it may still be copied."""
    shape = (1 << 22,)

    def make_tensors() -> Iterator[tuple[str, Tensor]]:
        for number in range(40):
            yield str(number), torch.full(shape, float(number), device="cuda")

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    write(
        tmp_path / "file",
        {str(n): TensorInfo(torch.float32, shape) for n in range(40)},
        make_tensors(),
        staging_bytes=1 << 20,
    )
    assert torch.cuda.max_memory_allocated() - before <= 2 * 4 * shape[0]
    for name, tensor in load_file(tmp_path / "file").items():
        assert (tensor == float(name)).all(), name

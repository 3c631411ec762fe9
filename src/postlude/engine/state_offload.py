"""StateOffload: what an engine holds on its device, moved to host memory and back, for a generator on the same GPU.

Whole storages are moved: their bytes are copied, and their device memory is freed. Tensors and views of them, such as
those that FSDP and the optimizer keep, stay the same objects, and have the same bits again afterwards. A storage that
numpy or another process uses as well is not resizable, and stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, UntypedStorage

from postlude.engine.failure_state import FailureState
from postlude.engine.training_state import TrainingState
from postlude.model.parallel import local_shard

CHUNK_BYTES = 1 << 28
"""Host memory is allocated in pieces of this size: torch rounds pinned memory up to a power of two."""


class StateOffload:
    """Moves an engine's tensors of one rank. Host memory is pinned if the device is a GPU, and kept for the next time.

    It does not communicate. Everything is on the device, or the engine refuses every call until `onload` succeeds.
    """

    def __init__(self, device: torch.device, failure_state: FailureState) -> None:
        self.device, self.failure_state = device, failure_state
        self.chunks: list[Tensor] = []
        self.moved: list[tuple[UntypedStorage, int]] = []  # storages in host memory, in its order, and their sizes

    def offload(self, training_states: Iterable[TrainingState]) -> None:
        """Copies everything to host memory, then frees it on the device. Nothing is done if it is there already."""
        if self.failure_state.offloaded:
            return
        self.failure_state.check()
        storages = {
            storage.data_ptr(): (storage, storage.nbytes())
            for storage in (local_shard(tensor).untyped_storage() for tensor in _tensors(training_states))
            if storage.device == self.device and storage.nbytes() and storage.resizable()
        }
        moved = list(storages.values())
        missing = -(-sum(size for _, size in moved) // CHUNK_BYTES) - len(self.chunks)
        for _ in range(missing):
            self.chunks.append(torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=self.device.type == "cuda"))
        for on_device, on_host in self._pieces(moved):
            on_host.copy_(on_device, non_blocking=True)
        self._synchronize()
        self.moved, self.failure_state.offloaded = moved, True
        self._free()

    def onload(self) -> None:
        """Moves everything back. Raises if the device has no memory for it; it can then be called again."""
        if not self.failure_state.offloaded:
            return
        try:
            for storage, size in self.moved:
                storage.resize_(size)
        except RuntimeError as error:
            self._free()
            needed = sum(size for _, size in self.moved) / 2**30
            raise RuntimeError(
                f"onload needs {needed:.2f} GiB on {self.device}, which it does not have ({error}): free the memory of "
                "the generator there, and call onload again."
            ) from error
        for on_device, on_host in self._pieces(self.moved):
            on_device.copy_(on_host, non_blocking=True)
        self._synchronize()
        self.moved, self.failure_state.offloaded = [], False

    def _pieces(self, storages: Sequence[tuple[UntypedStorage, int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the bytes of the storages in pieces, each with its place in host memory."""
        position = 0
        for storage, size in storages:
            data = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            start = 0
            while start < size:
                chunk, offset = divmod(position, CHUNK_BYTES)
                length = min(size - start, CHUNK_BYTES - offset)
                yield data[start : start + length], self.chunks[chunk][offset : offset + length]
                start, position = start + length, position + length

    def _free(self) -> None:
        for storage, _ in self.moved:
            storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # other processes get the memory

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # kernels on any stream may use what is freed or read


def _tensors(training_states: Iterable[TrainingState]) -> Iterator[Tensor]:
    """Yields parameters, their gradients, buffers and the optimizers' state."""
    for training_state in training_states:
        for model in training_state.stages.models.values():
            for parameter in model.parameters():
                yield parameter
                if parameter.grad is not None:
                    yield parameter.grad
            yield from model.buffers()
        for state in training_state.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

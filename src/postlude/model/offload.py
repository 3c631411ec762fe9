"""Activation offload: what chosen layers keep for their backward waits in host memory.

A layer's tensors are copied when its forward ends, while later layers compute; their memory on the device is free when
the next chosen layer ends. The backward of a chosen layer starts the copy back of the one before. On a GPU the copies
run on streams of their own, through pinned pages that are used again. Elsewhere they are plain copies.

Parameters stay, and so does what others keep on the device anyway: shared tables, and in a schedule plan what crosses
the borders of segments. A storage is copied once, however many saved tensors are views of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from postlude.model.parallel import local_shard
from postlude.options import LayerChoice, chosen_layers

if TYPE_CHECKING:
    from postlude.model.context import ForwardContext

PAGE = 1 << 24
"""Bytes of a page of host memory. A layer takes whole pages."""
ALIGNED = 512  # bytes
LEAVING, RETURNING = range(2)  # the streams that copy to the host and back
LEAST = 64
"""Bytes per token of a storage that is worth a copy; statistics of norms and indices are smaller."""


def offloaded_layers(choice: LayerChoice, count: int) -> frozenset[int]:
    """Returns the numbers of the layers that are offloaded: never the last of all, whose backward comes at once."""
    return chosen_layers("offload_activations", choice, count) - {count - 1}


class ActivationOffload:
    """Moves what layers of one stage keep to host memory and back."""

    def __init__(self) -> None:
        self.pages: list[Tensor] = []  # all that exist, each PAGE uint8
        self.free: list[Tensor] = []
        self.streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None  # to the host, and back
        self.leaving: ref[_KeptByLayer] | None = None  # whose tensors are being copied, and still on the device

    @contextlib.contextmanager
    def layer(self, module: nn.Module, context: ForwardContext, held: list[Tensor]) -> Iterator[None]:
        """Offloads what `module` saves inside. `held` are tensors that stay on the device; more may be added inside.

        Selective recompute is off inside: what it keeps does not pass the hooks for saved tensors.
        """
        if not torch.is_grad_enabled():
            yield
            return
        kept = _KeptByLayer(self, context)
        recompute = context.recompute
        context.recompute = "full" if recompute == "full" else "none"
        try:
            with saved_tensors_hooks(kept.pack, _unpack):
                yield
        finally:
            context.recompute = recompute
        self._start_leaving(
            kept, {_address(tensor) for tensor in (*held, *_own_tensors(module), *context.shared_tensors)}
        )
        context.offloaded_before = ref(kept)

    @torch.no_grad()
    def _start_leaving(self, kept: _KeptByLayer, held: set[int]) -> None:
        """Starts the copies of a layer, and frees the device memory of the one before."""
        before = _alive(self.leaving)
        if before is not None:
            before.leave_device()
        self.leaving = ref(kept)
        chosen = [saved for address, saved in kept.by_address.items() if address not in held]
        if not chosen:
            return
        stream = self._stream(kept.device, LEAVING)
        with _on(stream):
            for saved in chosen:
                saved.copy_to_host()
        kept.copied = None if stream is None else stream.record_event()

    def _stream(self, device: torch.device, number: int) -> torch.cuda.Stream | None:
        """Returns one of the streams, which continues after the current one. None on a CPU."""
        if device.type != "cuda":
            return None
        self.streams = self.streams or (torch.cuda.Stream(device), torch.cuda.Stream(device))
        self.streams[number].wait_stream(torch.cuda.current_stream(device))
        return self.streams[number]

    def take_page(self, device: torch.device) -> Tensor:
        if not self.free:
            self.pages.append(torch.empty(PAGE, dtype=torch.uint8, pin_memory=device.type == "cuda"))
            self.free.append(self.pages[-1])
        return self.free.pop()


class _KeptByLayer:
    """The storages that one layer of one microbatch keeps. They belong to the graph, whose end returns the pages."""

    def __init__(self, offload: ActivationOffload, context: ForwardContext) -> None:
        self.offload = offload
        self.device = context.microbatch.tokens.device
        self.least = LEAST * len(context.microbatch.tokens)
        self.before = context.offloaded_before
        self.by_address: WeakValueDictionary[int, _SavedStorage] = WeakValueDictionary()
        self.pages: list[Tensor] = []
        self.used = PAGE  # bytes of the last page
        self.copied: torch.cuda.Event | None = None
        self.restored: torch.cuda.Event | None = None  # until a backward waited for it
        self.in_backward = False

    def __del__(self) -> None:
        if self.restored is not None:  # a graph that was dropped: its memory is written until then
            torch.cuda.current_stream(self.device).wait_event(self.restored)
        self.offload.free += self.pages

    def pack(self, tensor: Tensor) -> Any:
        """Returns what the graph keeps instead of a tensor: a view of a storage that may leave."""
        storage = tensor.untyped_storage()
        if tensor.device != self.device or storage.nbytes() < self.least or type(tensor) not in (Tensor, nn.Parameter):
            return tensor.detach()
        address = storage.data_ptr()
        leaving = _alive(self.offload.leaving)
        known = [kept.by_address.get(address) for kept in (self, leaving) if kept is not None]
        saved = next((saved for saved in known if saved is not None and saved.is_at(address)), None)
        if saved is None:
            saved = self.by_address[address] = _SavedStorage(self, storage, storage.nbytes())
        return _SavedView(saved, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def place(self, size: int) -> list[Tensor]:
        pieces = []
        while size:
            if self.used == PAGE:
                self.pages.append(self.offload.take_page(self.device))
                self.used = 0
            end = min(self.used + size, PAGE)
            pieces.append(self.pages[-1][self.used : end])
            size -= end - self.used
            self.used = min(-(-end // ALIGNED) * ALIGNED, PAGE)
        return pieces

    def leave_device(self) -> None:
        """Frees the memory of what was copied. What runs next on the device waits for the copies."""
        if self.in_backward:
            return  # the graph frees it
        if self.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self.copied)
            self.copied = None
        for saved in self.by_address.values():
            if saved.pieces:
                saved.storage = None

    @torch.no_grad()
    def restore(self) -> None:
        absent = [saved for saved in self.by_address.values() if saved.storage is None]
        if not absent:
            return
        for saved in absent:
            saved.storage = torch.empty(saved.size, dtype=torch.uint8, device=self.device).untyped_storage()
        stream = self.offload._stream(self.device, RETURNING)
        with _on(stream):
            for saved in absent:
                saved.copy_from_host()
        self.restored = None if stream is None else stream.record_event()

    def start_backward(self) -> None:
        """Makes what the layer keeps usable on the current stream, and starts the copies of the layer before."""
        if not self.in_backward:
            self.in_backward = True
            self.restore()
            before = _alive(self.before)
            if before is not None:
                before.restore()
        if self.restored is not None:
            torch.cuda.current_stream(self.device).wait_event(self.restored)
            self.restored = None


@dataclass(eq=False)
class _SavedStorage:
    """The memory of one or more saved tensors: on the device, in host memory, or both."""

    layer: _KeptByLayer
    storage: UntypedStorage | None
    """None while it is in host memory only."""
    size: int
    pieces: tuple[Tensor, ...] = ()
    """Its bytes in host memory; none if it stays on the device."""

    def is_at(self, address: int) -> bool:
        """Whether it is at this address of the device. FSDP frees the memory of weights that a graph keeps."""
        return self.storage is not None and self.storage.nbytes() == self.size and self.storage.data_ptr() == address

    def copy_to_host(self) -> None:
        """Copies it on the current stream, unless it was freed."""
        if self.storage is not None and self.storage.nbytes() == self.size:
            self.pieces = tuple(self.layer.place(self.size))
            for piece, part in zip(self.pieces, self._parts(), strict=True):
                piece.copy_(part, non_blocking=True)

    def copy_from_host(self) -> None:
        for piece, part in zip(self.pieces, self._parts(), strict=True):
            part.copy_(piece, non_blocking=True)

    def _parts(self) -> Sequence[Tensor]:
        assert self.storage is not None
        every_byte: Tensor = torch.empty(0, dtype=torch.uint8, device=self.layer.device).set_(self.storage)
        parts: Sequence[Tensor] = every_byte.split([len(piece) for piece in self.pieces])
        return parts


class _SavedView(NamedTuple):
    """A saved tensor: how it lies in its storage."""

    saved: _SavedStorage
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    saved, *view = packed
    saved.layer.start_backward()
    dtype, offset, shape, stride = view
    assert saved.storage is not None
    return torch.empty(0, dtype=dtype, device=saved.layer.device).set_(saved.storage, offset, shape, stride)


def _alive(kept: ref[_KeptByLayer] | None) -> _KeptByLayer | None:
    return None if kept is None else kept()


def _own_tensors(module: nn.Module) -> Iterable[Tensor]:
    return map(local_shard, (*module.parameters(), *module.buffers()))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)

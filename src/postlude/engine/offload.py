"""Optimizer state in host memory: copied to the device and back piece by piece during a step, while it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PIECE_BYTES = 1 << 26
"""Bytes that are copied to the device at a time, unless a single row has more."""
SLOTS = 3
"""Pieces on the device at a time: one that arrives, one that is computed on, one that leaves."""
ALIGNED = 256

OffloadedWork = tuple[Sequence[Tensor], Callable[[Sequence[Tensor]], None]]
"""Pieces of host memory, and a function that updates copies of them in place."""


def in_host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros in host memory; pinned if the device is a GPU."""
    return torch.zeros(*shape, dtype=dtype, pin_memory=device.type == "cuda")


def run_offloaded(works: Sequence[OffloadedWork], device: torch.device) -> None:
    """Runs each function on the GPU, while the next one's pieces arrive and the last one's leave.

    Host memory may be read when the device has finished its queue.
    """
    if not works:
        return
    current = torch.cuda.current_stream(device)
    inward, outward = torch.cuda.Stream(device), torch.cuda.Stream(device)
    slot_bytes = max(sum(map(_aligned_bytes, pieces)) for pieces, _ in works)
    slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
    slot_free: list[torch.cuda.Event | None] = [None] * SLOTS
    inward.wait_stream(current)  # which may have used the slots' memory until now
    for number, (pieces, work) in enumerate(works):
        slot = number % SLOTS
        copies = _views(slots[slot], pieces)
        if (free := slot_free[slot]) is not None:
            inward.wait_event(free)
        with torch.cuda.stream(inward):
            for piece, copy in zip(pieces, copies, strict=True):
                copy.copy_(piece, non_blocking=True)
        current.wait_event(inward.record_event())
        work(copies)
        outward.wait_event(current.record_event())
        with torch.cuda.stream(outward):
            for piece, copy in zip(pieces, copies, strict=True):
                piece.copy_(copy, non_blocking=True)
        slot_free[slot] = outward.record_event()
    current.wait_stream(outward)


def _aligned_bytes(piece: Tensor) -> int:
    return -(-piece.numel() * piece.element_size() // ALIGNED) * ALIGNED


def _views(slot: Tensor, pieces: Sequence[Tensor]) -> list[Tensor]:
    """Returns tensors like the pieces, one after another in a slot."""
    views, start = [], 0
    for piece in pieces:
        flat = slot[start : start + piece.numel() * piece.element_size()]
        views.append(flat.view(piece.dtype).view(piece.shape))
        start += _aligned_bytes(piece)
    return views

"""Optimizer state in host memory: brought to the device piece by piece for a step, and back, beside the computing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PIECE_BYTES = 1 << 26
"""Of what is brought to the device at a time, unless a single row has more."""
SLOTS = 3
"""Pieces on the device at one time: one that comes, one that is worked on, one that leaves."""
ALIGNED = 256

Unit = tuple[Sequence[Tensor], Callable[[Sequence[Tensor]], None]]
"""Pieces of host memory, and what is to be done with them, in place."""


def in_host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that the device can copy from and to by itself."""
    return torch.zeros(*shape, dtype=dtype, pin_memory=device.type == "cuda")


def run_offloaded(units: Sequence[Unit], device: torch.device) -> None:
    """Do each unit's work on the GPU, while the next one's pieces come there and the last one's leave.

    Host memory may be read when the device has done all that it was given.
    """
    if not units:
        return
    current = torch.cuda.current_stream(device)
    inward, outward = torch.cuda.Stream(device), torch.cuda.Stream(device)
    room = max(sum(map(_room, pieces)) for pieces, _ in units)
    slots = [torch.empty(room, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
    left: list[torch.cuda.Event | None] = [None] * SLOTS
    inward.wait_stream(current)  # which may have used the slots' memory until now
    for number, (pieces, work) in enumerate(units):
        slot = number % SLOTS
        here = _views(slots[slot], pieces)
        if (free := left[slot]) is not None:
            inward.wait_event(free)
        with torch.cuda.stream(inward):
            for piece, copy in zip(pieces, here, strict=True):
                copy.copy_(piece, non_blocking=True)
        current.wait_event(inward.record_event())
        work(here)
        outward.wait_event(current.record_event())
        with torch.cuda.stream(outward):
            for piece, copy in zip(pieces, here, strict=True):
                piece.copy_(copy, non_blocking=True)
        left[slot] = outward.record_event()
    current.wait_stream(outward)


def _room(piece: Tensor) -> int:
    return -(-piece.numel() * piece.element_size() // ALIGNED) * ALIGNED


def _views(slot: Tensor, pieces: Sequence[Tensor]) -> list[Tensor]:
    """Tensors like the pieces, one after another in a slot."""
    found, start = [], 0
    for piece in pieces:
        flat = slot[start : start + piece.numel() * piece.element_size()]
        found.append(flat.view(piece.dtype).view(piece.shape))
        start += _room(piece)
    return found

"""Channels: sends and receives of activations and gradients between neighbouring pipeline ranks."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.pipeline.schedule import Action
from postlude.world.mesh import ChannelKey, Mesh, point_to_point


class Channels:
    """FIFO point-to-point channels between neighbouring pipeline ranks: one per kind and direction.

    Gloo sends host memory only, so a device's tensors are copied through the host.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.groups = mesh.channels
        self.pp, self.rank = mesh.pp.size, mesh.pp.rank
        self.through_host = bool(self.groups) and dist.get_backend(next(iter(self.groups.values()))) == "gloo"
        self.pending: dict[ChannelKey, deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)

    def send(self, action: Action, tensor: Tensor, max_pending: int | None = None) -> None:
        """Sends the output of `action` to the stage that needs it, without waiting.

        If more than `max_pending` in the channel were not received yet, waits for the oldest.
        """
        if tensor.numel() == 0:
            return
        channel = action.kind, self.rank
        group, pending = self.groups[channel], self.pending[channel]
        tensor = (tensor.cpu() if self.through_host else tensor).contiguous()
        pending.append((point_to_point(dist.isend, tensor, group), tensor))
        while pending and (pending[0][0].is_completed() or (max_pending is not None and len(pending) > max_pending)):
            pending.popleft()[0].wait()  # on a GPU the stream waits, and may then reuse the memory

    def receive(
        self, action: Action, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Callable[[], Tensor]:
        """Launches the receive of another rank's output of `action`. Returns a function that waits for it."""
        if 0 in shape:  # then nothing is sent
            return lambda: torch.zeros(shape, dtype=dtype, device=device)
        group = self.groups[action.kind, action.stage % self.pp]
        tensor = torch.empty(shape, dtype=dtype, device="cpu" if self.through_host else device)
        work = point_to_point(dist.irecv, tensor, group)

        def wait() -> Tensor:
            work.wait()
            return tensor.to(device)

        return wait

    def finish(self) -> None:
        """Waits until everything sent has arrived."""
        for pending in self.pending.values():
            while pending:
                pending.popleft()[0].wait()

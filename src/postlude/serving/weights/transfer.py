"""WeightTransfer: weights straight from an engine's ranks into the memory of servers, with no disk between.

All ranks stream the model in buckets, and each sends them on to the servers that are its own; the first rank tells
servers what comes. No rank holds more than a bucket. Both ends go through the same tensors in the same order: the one
that `Engine.stream_weights` has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.engine import Engine
from postlude.hf.checksum import word_sum
from postlude.serving.clients.api import TensorSpecs
from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.remote_server import Weights
from postlude.serving.clients.vllm import SEND_BYTES
from postlude.serving.weights.channel import Channel, ChannelRendezvous, close, open_all, send
from postlude.serving.weights.coordinator import TransferCoordinator, TransferTarget, merged, owners
from postlude.serving.weights.gloo import GlooRendezvous
from postlude.serving.weights.nccl import NCCLRendezvous
from postlude.world.agreement import RankFailure, gather_and_decide, on_rank0

Part = TypeVar("Part")
Result = TypeVar("Result")


@dataclass(frozen=True)
class TransferResult:
    """What a transfer came to."""

    servers: int
    """That have the weights now, of those that lacked them."""
    bytes: int
    """To each of them."""
    seconds: float
    checksum: str
    """Of all that was sent, in the order it was."""


class WeightTransfer:
    """Channels to servers, which are kept from one transfer to the next. Every rank makes the same calls.

    `seconds`: how long a server may take to join a channel, or to take what one broadcast carries. `group` is of all
    ranks, and has the patience to wait for servers; None takes the ranks' own.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        seconds: float = 60.0,
        send_bytes: int = SEND_BYTES,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.engine, self.seconds, self.send_bytes, self.group = engine, seconds, send_bytes, group
        self.channels: dict[str, Channel] = {}
        self.meetings: dict[str, int] = {}
        self.owners: dict[str, int] = {}

    def send(self, http: GenerationClient | None, weights: Weights) -> TransferResult:
        """Send the engine's weights to all servers that are there and lack them. The first rank has the servers.

        A server that fails on the way is left to its fleet, and the others go on.
        """
        began = time.perf_counter()
        hand = None if http is None else http.handover(weights, self.seconds)
        takers, known = on_rank0(lambda: _own(hand).takers(), self.group)
        self._forget([url for url in self.channels if url not in known])
        ready = self._connect(hand, takers)
        sent, broken, sums = 0, dict[str, str](), list[Tensor]()
        if ready:
            for tensors, data in self._packed():
                ready = self._told(hand, tensors, broken)
                if not ready:
                    break
                mine = {url: self.channels[url] for url in ready if url in self.channels}
                broken = self._forget(send(mine, data, self.seconds))
                sent += data.numel()
                sums.append(word_sum(data))
            ready = self._agreed(lambda: broken, lambda found: _own(hand).finish(merged(found)))
        checksum = " ".join(map(str, torch.stack(sums).tolist())) if sums else ""
        return TransferResult(len(ready), sent, time.perf_counter() - began, checksum)

    def close(self) -> None:
        """Let go of the channels."""
        close(self.channels.values())
        self.channels.clear()

    def _connect(self, hand: TransferCoordinator | None, takers: Sequence[TransferTarget]) -> list[str]:
        """Open channels to servers that have come since the last time. Returns who is ready for weights."""
        self.owners |= owners([taker.url for taker in takers], self.owners, dist.get_world_size())
        mine = [taker for taker in takers if self.owners[taker.url] == dist.get_rank()]
        strange = [taker for taker in mine if self.meetings.get(taker.url) != taker.meeting]
        self._forget([taker.url for taker in strange])
        offers = {taker.url: self._offer(taker) for taker in strange}
        self._agreed(
            lambda: {url: offered.info for url, offered in offers.items()},
            lambda found: _own(hand).join(merged(found)),
        )
        opened, broken = open_all(offers, self.seconds)
        self.channels |= opened
        self.meetings |= {taker.url: taker.meeting for taker in strange if taker.url in opened}
        return self._agreed(lambda: broken, lambda found: _own(hand).begin(merged(found)))

    def _offer(self, taker: TransferTarget) -> ChannelRendezvous:
        """A channel of this rank and all workers of a server."""
        size = taker.workers + 1
        on_gpu = self.engine.device.type == "cuda"
        return NCCLRendezvous(size, self.engine.device) if on_gpu else GlooRendezvous(taker.url, size)

    def _told(self, hand: TransferCoordinator | None, tensors: TensorSpecs, broken: Mapping[str, str]) -> list[str]:
        """Have servers take what is sent next, but for those to which a channel broke. Returns who they are."""
        return self._agreed(lambda: broken, lambda found: _own(hand).take(tensors, merged(found)))

    def _agreed(self, work: Callable[[], Part], decide: Callable[[list[Part]], Result]) -> Result:
        try:
            return gather_and_decide(work, decide, self.group)
        except RankFailure as failure:
            raise failure.cause from None

    def _forget(self, urls: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
        for url in urls:
            self.meetings.pop(url, None)
            if channel := self.channels.pop(url, None):
                channel.close()
        return dict(urls) if isinstance(urls, Mapping) else {}

    def _packed(self) -> Iterator[tuple[TensorSpecs, Tensor]]:
        """What one broadcast after the other carries: what tensors, and their bytes, [n] uint8."""
        for bucket in self.engine.stream_buckets(bucket_bytes=self.send_bytes):
            for some in split_aligned(bucket):
                names = [name for name, _ in some]
                dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in some]
                data = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in some])
                yield TensorSpecs(names, dtypes, [list(tensor.shape) for _, tensor in some]), data


def split_aligned(bucket: Sequence[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """A bucket in parts, in which every tensor begins where its dtype may: who unpacks them looks at them in place."""
    part: list[tuple[str, Tensor]] = []
    filled = 0
    for name, tensor in bucket:
        if filled % tensor.element_size():
            yield part
            part, filled = [], 0
        part.append((name, tensor))
        filled += tensor.numel() * tensor.element_size()
    if part:
        yield part


def _own(hand: TransferCoordinator | None) -> TransferCoordinator:
    assert hand is not None, "the first rank alone talks to servers"
    return hand

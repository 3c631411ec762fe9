"""WeightTransfer: sends weights from an engine's ranks into the memory of servers, without a disk.

All ranks stream the model in buckets, and each rank sends them to the servers that it is assigned. Rank 0 announces
each broadcast to servers. No rank holds more than a bucket. Tensors are sent in the order of `Engine.stream_weights`.
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
from postlude.serving.clients.remote_server import WeightsVersion
from postlude.serving.clients.vllm import SEND_BYTES
from postlude.serving.weights.channel import Channel, ChannelRendezvous, GlooRendezvous, open_all, send_all
from postlude.serving.weights.coordinator import TransferCoordinator, TransferTarget, assign_ranks
from postlude.serving.weights.nccl import NCCLRendezvous
from postlude.world.agreement import gather_and_decide, on_rank0

Value = TypeVar("Value")
Result = TypeVar("Result")


@dataclass(frozen=True)
class TransferResult:
    """The result of a transfer."""

    servers: int
    """Servers that got the weights."""
    bytes: int
    """Bytes sent to each of them."""
    seconds: float
    checksum: str
    """Checksum of all bytes, in the order of sending."""


class WeightTransfer:
    """Channels to servers, which stay open from one transfer to the next. Every rank makes the same calls.

    `timeout`: seconds that a server may take to join a channel or to receive one broadcast. `group` holds all ranks and
    waits as long as servers may take; None is the default group.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        timeout: float = 60.0,
        send_bytes: int = SEND_BYTES,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.engine, self.timeout, self.send_bytes, self.group = engine, timeout, send_bytes, group
        self.channels: dict[str, Channel] = {}
        self.connect_counts: dict[str, int] = {}
        self.sender_ranks: dict[str, int] = {}

    def send(self, client: GenerationClient | None, weights: WeightsVersion) -> TransferResult:
        """Sends the engine's weights to all servers that reply and lack them. Only rank 0 has a client.

        A server that fails is reported to its pool, and the others continue.
        """
        start = time.perf_counter()
        coordinator = None if client is None else TransferCoordinator(client, weights, self.timeout)
        targets, all_urls = on_rank0(lambda: _not_none(coordinator).targets(), self.group)
        self._close([url for url in self.channels if url not in all_urls])
        ready = self._connect(coordinator, targets)
        sent_bytes, failed, checksums = 0, dict[str, str](), list[Tensor]()
        if ready:
            for specs, data in self._broadcasts():
                ready = self._announce(coordinator, specs, failed)
                if not ready:
                    break
                local_channels = {url: self.channels[url] for url in ready if url in self.channels}
                failed = send_all(local_channels, data, self.timeout)
                self._close(failed)
                sent_bytes += data.numel()
                checksums.append(word_sum(data))
            ready = self._merge_on_rank0(failed, lambda failures: _not_none(coordinator).finish(failures))
        checksum = " ".join(map(str, torch.stack(checksums).tolist())) if checksums else ""
        return TransferResult(len(ready), sent_bytes, time.perf_counter() - start, checksum)

    def close(self) -> None:
        """Closes the channels."""
        self._close(list(self.channels))

    def _connect(self, coordinator: TransferCoordinator | None, targets: Sequence[TransferTarget]) -> list[str]:
        """Opens channels to servers that were connected since the last transfer. Returns the servers that are ready."""
        urls = [target.url for target in targets]
        self.sender_ranks |= assign_ranks(urls, self.sender_ranks, dist.get_world_size())
        local_targets = [target for target in targets if self.sender_ranks[target.url] == dist.get_rank()]
        new_targets = [
            target for target in local_targets if self.connect_counts.get(target.url) != target.connect_count
        ]
        self._close([target.url for target in new_targets])
        rendezvous = {target.url: self._rendezvous(target) for target in new_targets}
        infos = {url: channel.info for url, channel in rendezvous.items()}
        self._merge_on_rank0(infos, lambda all_infos: _not_none(coordinator).join(all_infos))
        opened, failed = open_all(rendezvous, self.timeout)
        self.channels |= opened
        self.connect_counts |= {target.url: target.connect_count for target in new_targets if target.url in opened}
        return self._merge_on_rank0(failed, lambda failures: _not_none(coordinator).begin(failures))

    def _rendezvous(self, target: TransferTarget) -> ChannelRendezvous:
        """Returns a channel of this rank and all workers of a server."""
        size = target.workers + 1
        on_gpu = self.engine.device.type == "cuda"
        return NCCLRendezvous(size, self.engine.device) if on_gpu else GlooRendezvous(target.url, size)

    def _announce(
        self, coordinator: TransferCoordinator | None, specs: TensorSpecs, failed: Mapping[str, str]
    ) -> list[str]:
        """Makes servers receive the next broadcast, except those with failed channels. Returns those that do."""
        return self._merge_on_rank0(failed, lambda failures: _not_none(coordinator).receive(specs, failures))

    def _merge_on_rank0(self, local: Mapping[str, Value], work: Callable[[dict[str, Value]], Result]) -> Result:
        """Calls `work` on rank 0 with the merged mappings of all ranks. Returns its result on every rank."""

        def merge(mappings: list[Mapping[str, Value]]) -> Result:
            return work({url: value for mapping in mappings for url, value in mapping.items()})

        return gather_and_decide(lambda: local, merge, self.group, raise_cause=True)

    def _close(self, urls: Mapping[str, str] | Sequence[str]) -> None:
        for url in urls:
            self.connect_counts.pop(url, None)
            if channel := self.channels.pop(url, None):
                channel.close()

    def _broadcasts(self) -> Iterator[tuple[TensorSpecs, Tensor]]:
        """Yields the tensors of each broadcast and their bytes, [n] uint8."""
        for bucket in self.engine.stream_buckets(bucket_bytes=self.send_bytes):
            for chunk in split_aligned(bucket):
                names = [name for name, _ in chunk]
                dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in chunk]
                data = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in chunk])
                yield TensorSpecs(names, dtypes, [list(tensor.shape) for _, tensor in chunk]), data


def split_aligned(bucket: Sequence[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields chunks of a bucket in which every tensor is aligned to its dtype: the receiver views it in place."""
    chunk: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in bucket:
        if size % tensor.element_size():
            yield chunk
            chunk, size = [], 0
        chunk.append((name, tensor))
        size += tensor.numel() * tensor.element_size()
    if chunk:
        yield chunk


def _not_none(coordinator: TransferCoordinator | None) -> TransferCoordinator:
    assert coordinator is not None, "only rank 0 sends requests to servers"
    return coordinator

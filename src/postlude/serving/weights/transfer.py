"""WeightTransfer: sends weights from an engine's ranks into the memory of servers, without a disk.

`SharedMemoryTransfer` is for servers on the ranks' own devices.

All ranks stream the model in buckets, and each rank sends them to the servers that it is assigned. Rank 0 announces
each broadcast to servers. No rank holds more than a bucket. Tensors are sent in the order of `Engine.stream_weights`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.engine import Engine
from postlude.hf.tensor_sources import word_sum
from postlude.serving.clients.api import SendRequest, ServerAPI, TensorSpecs
from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.remote_server import RemoteServer
from postlude.serving.clients.server_weights import WeightsVersion
from postlude.serving.clients.vllm import SEND_BYTES
from postlude.serving.errors import InvalidResponse, RequestRefused, ServerUnavailable
from postlude.serving.vllm.shared_buffers import Buffer, allocate_buffer, device_name
from postlude.serving.weights.channel import (
    Channel,
    ChannelRendezvous,
    GlooRendezvous,
    NCCLRendezvous,
    open_all,
    send_all,
)
from postlude.world.agreement import gather_and_decide, on_rank0

ServerCall = Callable[[ServerAPI, SendRequest], Awaitable[None]]
Value = TypeVar("Value")
Result = TypeVar("Result")


@dataclass(frozen=True)
class TransferTarget:
    """A server that takes part in a transfer."""

    url: str
    connect_count: int
    """A channel that was opened at an earlier count is invalid."""
    workers: int


class TransferCoordinator:
    """One transfer. A server that fails is reported to its pool, and the others continue.

    A command goes to all servers at the same time and runs until the next command: ranks send weights meanwhile. No
    request waits longer than `timeout` seconds, since all ranks wait with it.
    """

    def __init__(self, client: GenerationClient, weights: WeightsVersion, timeout: float | None = None) -> None:
        self.client, self.weights, self.timeout = client, weights, timeout
        self._start_time = time.perf_counter()
        self._servers: dict[str, RemoteServer] = {}
        self._workers: dict[str, int] = {}
        self._running: dict[str, Future[bool]] = {}

    def targets(self) -> tuple[list[TransferTarget], set[str]]:
        """Returns the servers that reply and lack the weights, and the addresses of all servers.

        Raises `ServerError` when no server is left.
        """
        pool = self.client.pool
        self._servers = {server.url: server for server in self.client.run(pool.servers_to_update(self.weights))}

        def count_workers(url: str) -> ServerCall:
            async def count(api: ServerAPI, send: SendRequest) -> None:
                if not api.can_receive_weights:
                    raise InvalidResponse(f"is {api.name}, which takes no weights over the network; use sync: disk")
                self._workers[url] = await api.worker_count(send)

            return count

        self._start_commands({url: count_workers(url) for url in self._servers})
        targets = [TransferTarget(url, self._servers[url].connect_count, self._workers[url]) for url in self._wait()]
        return targets, {server.url for server in pool.servers}

    def join(self, infos: Mapping[str, Mapping[str, Any]]) -> None:
        def join(url: str) -> ServerCall:
            return lambda api, send: api.join_channel(send, infos[url], self._workers[url])

        self._start_commands({url: join(url) for url in infos if url in self._servers})

    def begin(self, failures: Mapping[str, str]) -> list[str]:
        """Makes servers pause and prepare. They get no requests until `finish`. Returns those that are ready."""
        ready = self._wait(failures)
        for server in self._servers.values():
            server.begin_update()
        self._start_commands(dict.fromkeys(ready, lambda api, send: api.begin_update(send)))
        return self._wait()

    def receive(self, specs: TensorSpecs, failures: Mapping[str, str]) -> list[str]:
        """Makes servers receive the next broadcast. Returns those that do."""
        self._start_commands(dict.fromkeys(self._wait(failures), lambda api, send: api.receive_tensors(send, specs)))
        return list(self._servers)

    def finish(self, failures: Mapping[str, str]) -> list[str]:
        """Makes servers use the new weights. Returns those that report the new version, or are asleep."""
        version = self.weights.version
        self._start_commands(dict.fromkeys(self._wait(failures), lambda api, send: api.finish_update(send, version)))
        for url in self._wait():
            server = self._servers[url]
            server.end_update(self.weights, time.perf_counter() - self._start_time)
            if server.is_asleep:
                continue  # it is confirmed once it is awake
            confirm = self.client.pool.confirm(server, self.weights, timeout=self.timeout)
            self._running[url] = self.client.start(self._succeeds(server, confirm))
        return self._wait()

    def _start_commands(self, commands: Mapping[str, ServerCall]) -> None:
        for url, command in commands.items():
            server = self._servers[url]
            work = server.call(command, timeout=self.timeout)
            self._running[url] = self.client.start(self._succeeds(server, work))

    def _wait(self, failures: Mapping[str, str] | None = None) -> list[str]:
        """Waits for all commands. Returns the servers that still take part, without those whose channels failed."""
        for url, reason in (failures or {}).items():
            self._report_failure(url, ServerUnavailable(reason))
        running, self._running = self._running, {}
        for url, future in running.items():
            if not future.result():
                self._servers.pop(url, None)
        return list(self._servers)

    def _report_failure(self, url: str, error: Exception) -> None:
        if future := self._running.pop(url, None):
            future.cancel()
        if server := self._servers.pop(url, None):

            async def fail() -> None:
                self.client.pool.fail(server, error)

            self.client.run(fail())

    async def _succeeds(self, server: RemoteServer, work: Coroutine[Any, Any, None]) -> bool:
        """Returns whether `work` succeeded; a failure is reported to the pool."""
        try:
            await work
        except RequestRefused as error:
            self.client.pool.fail(server, InvalidResponse(f"could not take new weights: {error}"))
        except Exception as error:  # the other servers continue
            self.client.pool.fail(server, error)
        else:
            return True
        return False


def assign_ranks(urls: Sequence[str], previous: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Returns the rank that sends to each server: the previous one, else the rank with the fewest servers."""
    assigned = {url: previous[url] for url in urls if url in previous}
    for url in urls:
        if url not in assigned:
            load = list(assigned.values())
            assigned[url] = min(range(ranks), key=load.count)
    return assigned


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
                ready = self._announce(coordinator, specs, data, failed)
                if not ready:
                    break
                failed = self._transmit(ready, data)
                sent_bytes += data.numel()
                checksums.append(word_sum(data))
            ready = self._merge_on_rank0(failed, lambda failures: _not_none(coordinator).finish(failures))
        checksum = " ".join(map(str, torch.stack(checksums).tolist())) if checksums else ""
        return TransferResult(len(ready), sent_bytes, time.perf_counter() - start, checksum)

    def close(self) -> None:
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
        self, coordinator: TransferCoordinator | None, specs: TensorSpecs, data: Tensor, failed: Mapping[str, str]
    ) -> list[str]:
        """Makes servers receive the next broadcast, except those with failed channels. Returns those that do."""
        return self._merge_on_rank0(failed, lambda failures: _not_none(coordinator).receive(specs, failures))

    def _transmit(self, ready: Sequence[str], data: Tensor) -> dict[str, str]:
        """Sends a broadcast to this rank's servers. Returns the failures by server."""
        local_channels = {url: self.channels[url] for url in ready if url in self.channels}
        failed = send_all(local_channels, data, self.timeout)
        self._close(failed)
        return failed

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


class SharedMemoryTransfer(WeightTransfer):
    """Shares buffers with servers on the ranks' own devices, instead of sending. See `serving/vllm/postlude_worker.py`.

    Every rank writes each broadcast to a buffer on its device, and a server's workers read that of their own. One
    buffer is read while another is written. They are freed after every transfer.
    """

    def __init__(self, engine: Engine, **options: Any) -> None:
        super().__init__(engine, **options)
        self._buffers: list[Buffer] = []

    def send(self, client: GenerationClient | None, weights: WeightsVersion) -> TransferResult:
        """Shares the engine's weights with all servers that reply and lack them, and frees the buffers."""
        try:
            return super().send(client, weights)
        finally:
            self.close()

    def close(self) -> None:
        """Frees the buffers."""
        buffers, self._buffers = self._buffers, []
        for buffer in buffers:
            buffer.close()

    def _connect(self, coordinator: TransferCoordinator | None, targets: Sequence[TransferTarget]) -> list[str]:
        """Prepares servers. There is nothing to connect."""
        return self._merge_on_rank0(dict[str, str](), lambda failures: _not_none(coordinator).begin(failures))

    def _announce(
        self, coordinator: TransferCoordinator | None, specs: TensorSpecs, data: Tensor, failed: Mapping[str, str]
    ) -> list[str]:
        """Writes a broadcast to the other buffer, and makes servers read it once they have read the one before."""
        device, size = self.engine.device, data.numel()
        unread = self._buffers[-1:]  # servers have replied that they read the others
        free = [buffer for buffer in self._buffers if buffer not in unread and buffer.data.numel() >= size]
        buffer = free[0] if free else allocate_buffer(device, max(self.send_bytes, size))
        self._buffers = [*(other for other in self._buffers if other is not buffer), buffer]
        buffer.data[:size].copy_(data)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        handles = {device_name(device): buffer.handle}

        def receive(all_handles: dict[str, str]) -> list[str]:
            return _not_none(coordinator).receive(replace(specs, handles=all_handles), failed)

        return self._merge_on_rank0(handles, receive)

    def _transmit(self, ready: Sequence[str], data: Tensor) -> dict[str, str]:
        """Does nothing: servers read the buffer."""
        return {}


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

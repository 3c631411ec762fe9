"""Weights in memory that servers share with the ranks, and servers that sleep while the trainer trains."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from postlude.generate.sampling_params import SamplingParams
from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.server_weights import WeightsVersion
from postlude.serving.errors import ServerError, ServerUnavailable
from postlude.serving.vllm import shared_buffers
from postlude.serving.vllm.shared_buffers import allocate_buffer, open_buffer
from postlude.serving.weights.shared_memory_sync import SharedMemorySync
from postlude.serving.weights.sync import SyncOptions
from tests.engine.test_weights import ODD
from tests.engine.training import batch, build, policy
from tests.serving.fake_receiver import Dies, RemoteReceiver
from tests.serving.fake_vllm import FakeVLLM, Refusal
from tests.serving.test_transfer import SEND_BYTES, arrived, described

CPU = torch.device("cpu")
PHASES = {
    "sync": ["/wake_up", "/start_weight_update", "/update_weights", "/finish_weight_update"],
    "wake": ["/wake_up", "/resume"],
    "sleep": ["/sleep"],
}
READ = """
import sys, torch
from shared_buffers import open_buffer
buffer = open_buffer(torch.device(sys.argv[1]), sys.argv[2])
assert buffer.data.tolist() == list(range(250)), buffer.data
buffer.data[0] = 77
if sys.argv[1] == "cuda":
    torch.cuda.synchronize()
buffer.close()
"""


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_processes_see_the_same_bytes(kind: str) -> None:
    device = torch.device(kind)
    buffer = allocate_buffer(device, 250)
    buffer.data.copy_(torch.arange(250, dtype=torch.uint8))
    command = [sys.executable, "-c", READ, kind, buffer.handle]
    subprocess.run(command, check=True, timeout=100, cwd=Path(shared_buffers.__file__).parent)
    assert buffer.data[:2].tolist() == [77, 1]
    buffer.close()


def test_a_buffer_is_in_no_directory() -> None:
    """So nothing of it stays behind a process that is killed."""
    buffer = allocate_buffer(CPU, 10)
    assert os.readlink(buffer.handle) == "/memfd:postlude (deleted)"
    with closing(open_buffer(CPU, buffer.handle)) as opened:
        assert opened.data.numel() == 10
    assert Path(buffer.handle).exists()
    buffer.close()
    assert not Path(buffer.handle).exists()


def syncs(group: Any, layout: str, urls: list[str], steps: int, sleep: bool) -> tuple[list[Any], list[Any]]:
    """Syncs after each step, as a run does. Returns the expected tensors, and completions and states after each."""
    engine = build(layout, ODD, compute_dtype=torch.bfloat16)
    first = dist.get_rank() == 0
    sampled: list[Any] = []
    settings: dict[str, Any] = {"api": "vllm", "retries": 0, "backoff": 0.01, "timeout": 30.0}
    with closing(GenerationClient(urls, **settings)) if first else nullcontext() as client:  # type: ignore[attr-defined]
        sync = SharedMemorySync(engine, client, SyncOptions(Path("unused"), "ipc", 20.0, sleep=sleep))
        sync.transfer.send_bytes = SEND_BYTES
        with closing(sync):
            for step in range(1, steps + 1):
                engine.forward_backward(batch(step), policy)
                engine.optimizer_step()
                sync.sync(f"start.{step}")
                if client is not None and sleep:
                    assert client.pool.count_up() == 0, "requests wait until it is awake"
                sync.wake()
                if client is not None:
                    ((completion,),) = client.generate([[1, 2]], SamplingParams(max_new_tokens=3))
                    sampled.append([span.version for span in completion.versions])
                sync.sleep()
        return [described(name, tensor) for name, tensor in engine.stream_weights()], sampled


@pytest.mark.parametrize(("layout", "size"), [("pp=1", 1), ("dp_shard=2", 2)])
def test_every_byte_arrives_at_every_worker(ranks: Any, layout: str, size: int) -> None:
    with RemoteReceiver(workers=2) as first, RemoteReceiver() as second:
        expected, sampled = ranks(size, syncs, layout, [first.url, second.url], 2, False)[0]
        for remote in (first, second):
            arrived(remote, expected, "start.2")
            calls = remote.received()["calls"]
            assert calls.count("/update_weights") > 2 * 2, "there were several buffers"
            assert not {"/init_weight_transfer_engine", "/sleep", "/wake_up"} & set(calls)
    assert sampled == [["start.1"], ["start.2"]]


def test_a_server_has_memory_only_between_wake_and_sleep(ranks: Any) -> None:
    with RemoteReceiver() as remote:
        ((expected, sampled),) = ranks(1, syncs, "pp=1", [remote.url], 2, True)
        arrived(remote, expected, "start.2")
        known = {path for paths in PHASES.values() for path in paths} | {"/pause", "/inference/v1/generate"}
        calls = [call for call in remote.received()["calls"] if call in known]
    assert sampled == [["start.1"], ["start.2"]]
    one_step = [*PHASES["sync"], *PHASES["wake"], "/inference/v1/generate", *PHASES["sleep"]]
    repeated = [call for call, before in zip(calls, [None, *calls], strict=False) if call != before]
    first_connection = ["/inference/v1/generate"]  # with an empty body, to see whether the route exists
    assert repeated == [*first_connection, "/sleep", *one_step, *one_step]


def sleeps_after_failures(group: Any, first: str, late: str) -> list[tuple[str, bool]]:
    """Lets servers sleep while one has just failed and before another comes. Returns whether each sleeps."""
    settings: dict[str, Any] = {"api": "vllm", "model": "tiny", "retries": 3, "backoff": 20.0}
    with closing(GenerationClient([first], **settings)) as client:
        engine: Any = None  # whose weights are not sent here
        sync = SharedMemorySync(engine, client, SyncOptions(Path("unused"), "ipc", 20.0, sleep=True))
        (server,) = client.pool.servers

        async def fail() -> None:
            await server.wake(20.0)
            server.end_connecting(None)
            client.pool.fail(server, ServerUnavailable("closed the connection"))

        client.run(fail())
        assert (server.state, server.is_asleep) == ("connecting", False)
        sync.sleep()
        client.add_server(late)
        states = [(server.state, server.is_asleep)]
        client.run(client.pool.servers_to_update(WeightsVersion(None, "start.1")))
        return [*states, *((server.state, server.is_asleep) for server in client.pool.servers[1:])]


def test_servers_that_take_no_requests_sleep_too(ranks: Any) -> None:
    """A server that has just failed holds memory all the same, and so does one that comes while the trainer trains."""
    with closing(FakeVLLM()) as first, closing(FakeVLLM()) as late:
        assert ranks(1, sleeps_after_failures, first.url, late.url) == [[("connecting", True), ("needs_weights", True)]]
        assert (first.calls.count("/sleep"), late.calls.count("/sleep")) == (2, 1)


def sleeps_twice(group: Any, url: str) -> tuple[str, str]:
    with closing(GenerationClient([url], api="vllm", model="tiny", retries=0)) as client:
        engine: Any = None
        SharedMemorySync(engine, client, SyncOptions(Path("unused"), "ipc", 20.0, sleep=True)).sleep()
        return client.pool.servers[0].state, client.pool.servers[0].problem


def test_a_server_that_does_not_free_its_memory_is_excluded_and_not_asked_again(ranks: Any) -> None:
    with closing(FakeVLLM()) as server:
        known = server.reply

        def reply(path: str, body: Any) -> Any:
            if path == "/sleep":
                raise Refusal(500, "no")
            return known(path, body)

        server.reply = reply  # type: ignore[method-assign]
        ((state, problem),) = ranks(1, sleeps_twice, server.url)
        assert (state, server.calls.count("/sleep")) == ("excluded", 1)
        assert problem == "did not free its memory: replies with status 500: no"


def dies_during_sync(group: Any, url: str) -> str:
    try:
        syncs(group, "pp=1", [url], 1, True)
    except ServerError as error:
        return str(error)
    return ""


def test_a_server_that_dies_ends_the_run_with_its_reason(ranks: Any) -> None:
    """It cannot be given weights later, for the trainer's are in host memory then."""
    with RemoteReceiver(spoil=Dies("/update_weights", 1)) as remote:
        (message,) = ranks(1, dies_during_sync, remote.url)
    assert message.startswith(f"no server took the weights: {remote.url} ")

"""WeightTransfer: every byte of every tensor arrives, in every layout, also if a server fails."""

from __future__ import annotations

import time
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from postlude.generate.sampling_params import SamplingParams
from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.server_weights import WeightsVersion
from postlude.serving.errors import ServerError
from postlude.serving.weights.sync import NetworkSync, SyncOptions
from postlude.serving.weights.transfer import WeightTransfer, split_aligned
from tests.engine.test_weights import ODD
from tests.engine.training import batch, build, config, policy
from tests.serving.fake_receiver import Dies, Hangs, Refuses, RemoteReceiver, digest

MOE = config("tiny-moe", num_hidden_layers=2, num_experts=4)
SEND_BYTES = 8_000
ORDER = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache", "/resume"]


def described(name: str, tensor: torch.Tensor) -> tuple[str, str, list[int], str]:
    return name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), digest(tensor)


def transfers(
    group: Any, layout: str, hf: PretrainedConfig, urls: list[str], steps: int = 1, seconds: float = 20.0, **http: Any
) -> tuple[list[Any], list[Any]]:
    """Sends after each step. Returns the expected tensors, and the outcome of each send and of each server."""
    engine = build(layout, hf, compute_dtype=torch.bfloat16)
    settings = {"api": "vllm", "retries": 1, "backoff": 0.01, "timeout": 30.0} | http
    first = dist.get_rank() == 0
    with closing(GenerationClient(urls, **settings)) if first else nullcontext() as servers:  # type: ignore[attr-defined]
        transfer = WeightTransfer(engine, timeout=seconds, send_bytes=SEND_BYTES)
        with closing(transfer):
            sent: list[Any] = []
            for step in range(1, steps + 1):
                engine.forward_backward(batch(step), policy)
                engine.optimizer_step()
                done = transfer.send(servers, WeightsVersion(None, f"start.{step}"))
                channels: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(channels, sorted(transfer.channels))
                states = [server.state for server in servers.pool.servers] if servers else []
                sent.append((done.servers, done.bytes, states, channels))
        return [described(name, tensor) for name, tensor in engine.stream_weights()], sent


@pytest.fixture
def one_rank(ranks: Any) -> Any:
    """Runs `transfers` on one rank."""
    return lambda *arguments, **options: ranks(1, _alone, arguments, options)[0]


def _alone(group: Any, arguments: Any, options: Any) -> Any:
    return transfers(group, "pp=1", *arguments, **options)


def arrived(remote: RemoteReceiver, expected: list[Any], version: str) -> None:
    received = remote.received()
    assert received["version"] == version
    for worker in received["taken"]:
        assert [tuple(tensor) for tensor in worker] == expected


@pytest.mark.parametrize(
    ("layout", "hf"),
    [
        pytest.param("pp=2", ODD, id="pp=2-odd", marks=pytest.mark.slow),
        pytest.param("dp_shard=2", ODD, id="dp_shard=2-odd"),
        pytest.param("pp=2", MOE, id="pp=2-moe", marks=pytest.mark.thorough),
        pytest.param("tp=2", MOE, id="tp=2-moe", marks=pytest.mark.thorough),
        pytest.param("dp_shard=2,ep=2", MOE, id="ep=2-moe", marks=pytest.mark.thorough),
    ],
)
def test_every_byte_arrives_at_every_worker_from_a_layout(ranks, layout: str, hf: PretrainedConfig) -> None:
    with RemoteReceiver(workers=2) as first_server, RemoteReceiver() as second_server:
        actual = ranks(2, transfers, layout, hf, [first_server.url, second_server.url], 2)
        expected, sent = actual[0]
        for remote in (first_server, second_server):
            arrived(remote, expected, "start.2")
            calls = [call for call in remote.received()["calls"] if call in ORDER]
            assert list(dict.fromkeys(calls)) == ORDER
            assert calls.count("/update_weights") > 2 * 2, "there were several sends"
        size = sum(torch.Size(shape).numel() * getattr(torch, dtype).itemsize for _, dtype, shape, _ in expected)
        for servers, count, states, channels in sent:
            assert (servers, count, states) == (2, size, ["up", "up"])
            assert sorted(channels) == sorted([[first_server.url], [second_server.url]]), (
                "each rank sends to one of them"
            )
        assert remote.received()["calls"].count("/init_weight_transfer_engine") == 1, "channels are kept"


def test_every_byte_arrives_from_one_rank(one_rank) -> None:
    with RemoteReceiver() as remote:
        expected, _ = one_rank(ODD, [remote.url])
        arrived(remote, expected, "start.1")


def checksums(group: Any, url: str) -> list[str]:
    """Returns the checksum of two sends, between which the last number of every tensor changed."""
    engine = build("pp=1", ODD)
    with closing(GenerationClient([url], api="vllm")) as servers, closing(WeightTransfer(engine)) as transfer:
        first = transfer.send(servers, WeightsVersion(None, "start.1")).checksum
        again = transfer.send(servers, WeightsVersion(None, "start.2")).checksum
        with torch.no_grad():
            for stage in engine.stage_models.values():
                for parameter in stage.parameters():
                    parameter.view(-1)[-1] += 1.0
        return [first, again, transfer.send(servers, WeightsVersion(None, "start.3")).checksum]


def test_the_checksum_is_of_every_byte(ranks) -> None:
    with RemoteReceiver() as remote:
        ((first, again, changed),) = ranks(1, checksums, remote.url)
    assert first == again
    assert all(before != after for before, after in zip(first.split(), changed.split(), strict=True))


@pytest.mark.slow
def test_a_receiver_that_dies_does_not_affect_the_others(one_rank) -> None:
    with RemoteReceiver(spoil=Dies("/update_weights", 3)) as doomed, RemoteReceiver() as healthy:
        expected, sent = one_rank(ODD, [doomed.url, healthy.url], steps=2)
        arrived(healthy, expected, "start.2")
        assert [servers for servers, *_ in sent] == [1, 1]
        assert sent[-1][2][1] == "up"
        assert sent[-1][2][0] in ("connecting", "unavailable")


@pytest.mark.parametrize(
    ("spoil", "reported_workers"),
    [
        pytest.param(Refuses("/start_weight_update"), None, id="refuses to begin", marks=pytest.mark.thorough),
        pytest.param(Refuses("/update_weights"), None, id="refuses to take", marks=pytest.mark.thorough),
        pytest.param(
            Refuses("/init_weight_transfer_engine", 500), None, id="was not told to", marks=pytest.mark.thorough
        ),
        pytest.param(None, 2, id="has fewer workers than it says", marks=pytest.mark.thorough),
        pytest.param(Hangs("/update_weights"), None, id="hangs", marks=pytest.mark.thorough),
    ],
)
def test_a_receiver_that_fails_delays_the_others_only_until_the_timeout(
    one_rank, spoil: Any, reported_workers: int | None
) -> None:
    with RemoteReceiver(spoil=spoil, reported_workers=reported_workers) as failing, RemoteReceiver() as healthy:
        expected, sent = one_rank(ODD, [failing.url, healthy.url], seconds=5.0, timeout=8.0)
        arrived(healthy, expected, "start.1")
        assert sent[0][0] == 1
        assert sent[0][2][1] == "up"
        assert failing.received()["version"] != "start.1"


def test_a_late_server_gets_weights_before_its_first_request(ranks) -> None:
    with RemoteReceiver() as first_server, RemoteReceiver() as second_server:
        ranks(1, _comes_late, [first_server.url, second_server.url])


def _comes_late(group: Any, urls: list[str]) -> None:
    engine = build("pp=1", ODD)
    with (
        closing(GenerationClient(urls[:1], api="vllm")) as servers,
        closing(WeightTransfer(engine, send_bytes=SEND_BYTES)) as transfer,
    ):
        assert transfer.send(servers, WeightsVersion(None, "start.1")).servers == 1
        servers.add_server(urls[1])
        late = servers.pool.servers[1]
        servers.generate([[1]] * 8, SamplingParams(max_new_tokens=1))
        while late.state == "connecting":
            time.sleep(0.01)
        assert late.state == "needs_weights"
        servers.generate([[1]] * 8, SamplingParams(max_new_tokens=1))
        assert late.state == "needs_weights", "and is not asked"
        assert transfer.send(servers, WeightsVersion(None, "start.1")).servers == 1, "the other has them"
        assert late.state == "up"


def test_without_a_receiver_left_the_error_is_one_sentence(ranks) -> None:
    with RemoteReceiver(spoil=Refuses("/get_world_size", 404)) as failing:
        (message,) = ranks(1, _fails, failing.url)
        assert "could not take new weights: status 404: no" in message


def _fails(group: Any, url: str) -> str:
    engine = build("pp=1", ODD)
    with closing(GenerationClient([url], api="vllm")) as servers, closing(WeightTransfer(engine)) as transfer:
        assert transfer.send(servers, WeightsVersion(None, "start.1")).servers == 0
        with pytest.raises(ServerError) as raised:
            transfer.send(servers, WeightsVersion(None, "start.1"))
        return str(raised.value)


@pytest.mark.slow
def test_interrupted_receiver_is_sent_everything_again(ranks) -> None:
    with RemoteReceiver(spoil=Refuses("/update_weights", 500, times=1)) as remote:
        (expected,) = ranks(1, _left_in_the_middle, remote.url)
        arrived(remote, expected, "start.1")
        calls = remote.received()["calls"]
        assert calls.count("/start_weight_update") == calls.count("/finish_weight_update") == 2
        assert calls.count("/resume") == 1, "what is half new is not used"


def _left_in_the_middle(group: Any, url: str) -> list[Any]:
    engine = build("pp=1", ODD, compute_dtype=torch.bfloat16)
    with closing(GenerationClient([url], api="vllm", backoff=0.01)) as servers:
        # The trainer waits so long for the refused broadcast: it is no receiver's reply that ends one.
        sync = NetworkSync(engine, servers, SyncOptions(Path(), "network", timeout=10.0))
        with closing(sync):
            sync.sync("start.1")
            assert servers.pool.servers[0].state == "up"
            assert sync.take_metrics()["servers/sync_bytes"] > 0
    return [described(name, tensor) for name, tensor in engine.stream_weights()]


def test_tensors_of_a_send_are_aligned_to_their_dtype() -> None:
    narrow, wide = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float32)
    bucket = [("a", narrow), ("b", narrow), ("c", wide), ("d", narrow), ("e", wide)]
    assert [[name for name, _ in part] for part in split_aligned(bucket)] == [["a", "b", "c", "d"], ["e"]]

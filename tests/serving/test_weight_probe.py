"""After every weight sync the servers' log-probs equal the trainer's, or a server is not used."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from postlude import load_model
from postlude.engine import AdamW
from postlude.generate.generator import Generator
from postlude.generate.probe import GREEDY, Probe, TrainerScores, WeightProbe
from postlude.generate.protocol import Request
from postlude.hf.tensor_sources import checksum
from postlude.serving.clients import client as client_module
from postlude.serving.clients import remote_server
from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.server_weights import WeightsVersion
from postlude.serving.engine import ServerEngine
from postlude.serving.errors import ServerError
from postlude.serving.server.generation_server import GenerationServer
from postlude.serving.weights.sync import SyncOptions
from tests.engine.training import build, config, train
from tests.serving.fake_vllm import FakeVLLM, Refusal, deterministic_completion
from tests.serving.test_generation_server import KEY, serving

MODEL = config("tiny-dense", num_hidden_layers=2, tie_word_embeddings=False)


class KeepsOldWeights(GenerationServer):
    """Reports every version and checksum correctly, but reads only the first weights."""

    reads = 1

    async def _update(self, load: Any, version: str) -> Any:
        if self.reads:
            self.reads -= 1
            return await super()._update(load, version)
        _, directory = load.args
        return await super()._update(lambda: checksum(Path(directory)), version)


class MissesOneUpdate(KeepsOldWeights):
    """Reads the first weights and, when given the second ones again, all later ones."""

    async def _update(self, load: Any, version: str) -> Any:
        if not self.reads and self.weights.version == version:
            self.reads = 100
        return await super()._update(load, version)


class ScalesOneMatrix(GenerationServer):
    """After reading weights, one matrix is 1 % too large."""

    async def _update(self, load: Any, version: str) -> Any:
        def load_and_scale() -> str | None:
            read: str | None = load()
            self.generator.model.get_parameter("layers.0.attention.q_proj.weight").data.mul_(1.01)
            return read

        return await super()._update(load_and_scale, version)


@contextmanager
def server(kind: type[GenerationServer] = GenerationServer, dtype: torch.dtype = torch.float32) -> Iterator[str]:
    with serving(Generator(load_model(MODEL, dtype=dtype), None), key=KEY, kind=kind) as (_, url):
        yield url


def probed(
    group: Any, directory: str, urls: list[str], layout: str, dtype: str, wait: bool = True
) -> tuple[list[dict[str, float]], list[str], str]:
    """Returns the metrics after 0, 1 and 2 small steps, the server states, and the error that ended the run."""
    engine = build(layout, MODEL, compute_dtype=getattr(torch, dtype), optimizer=AdamW(lr=1e-5))
    options = SyncOptions(Path(directory), probe=WeightProbe(engine), wait=wait)
    rollouts = ServerEngine(lambda: GenerationClient(urls, api_key=KEY, backoff=0.01), engine=engine, sync=options)
    with closing(rollouts):
        metrics, problem = [], ""
        for step in range(3):
            if step:
                train(engine, [step])
            try:
                rollouts.sync_weights()
            except ServerError as error:
                problem = str(error)
                break
            metrics.append(rollouts.controller.on_rank0(lambda: settled(rollouts)))
        states = rollouts.controller.on_rank0(lambda: [server.state for server in rollouts.client.pool.servers])
    return metrics, states, problem


def settled(rollouts: ServerEngine) -> dict[str, float]:
    """Returns the metrics once each server has its weights or is excluded."""
    rollouts.client.wait_for_reload()
    while any(server.state == "connecting" or server.load.pending_reloads for server in rollouts.client.pool.servers):
        time.sleep(0.01)
    return rollouts.take_metrics()


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("pp=1", "float32"), ("tp=2", "bfloat16"), pytest.param("pp=2", "float32", marks=pytest.mark.thorough)],
)
def test_servers_with_the_trainers_weights_are_used(ranks: Any, tmp_path: Path, layout: str, dtype: str) -> None:
    with server(dtype=getattr(torch, dtype)) as first_server, server(dtype=getattr(torch, dtype)) as second_server:
        results = ranks(int(layout[-1]), probed, str(tmp_path), [first_server, second_server], layout, dtype)
    for metrics, states, problem in results:
        assert (states, problem) == (["up", "up"], "")
        assert max(row["sync/logprob_diff"] for row in metrics) < {"float32": 1e-5, "bfloat16": 0.125}[dtype]
        assert [row["servers/failed"] for row in metrics] == [0, 0, 0]


@pytest.mark.parametrize(
    ("kind", "steps", "problem"),
    [
        (KeepsOldWeights, 1, "has the weights of optimizer step 0 after it was given those of step 1: its log-probs"),
        (ScalesOneMatrix, 0, "has other weights than the trainer after it was given those of optimizer step 0: its"),
    ],
)
def test_the_only_server_with_other_weights_ends_the_run(
    ranks: Any, tmp_path: Path, kind: type[GenerationServer], steps: int, problem: str
) -> None:
    with server(kind) as url:
        ((metrics, states, sentence),) = ranks(1, probed, str(tmp_path), [url], "pp=1", "float32")
    assert (len(metrics), states) == (steps, ["excluded"])
    assert sentence.startswith(f"the only server cannot be used any more: {url} {problem}")
    assert re.search(r" differ by [\d.e-]+", sentence)


@pytest.mark.parametrize("wait", [True, False])
def test_one_of_two_servers_with_old_weights_gives_no_samples(ranks: Any, tmp_path: Path, wait: bool) -> None:
    with server() as good, server(KeepsOldWeights) as stale:
        ((metrics, states, problem),) = ranks(1, probed, str(tmp_path), [good, stale], "pp=1", "float32", wait)
    assert (states, problem) == (["up", "excluded"], "")
    assert [row["servers/up"] for row in metrics] == [2, 1, 1]
    assert [row["servers/failed"] for row in metrics] == [0, 2, 0], (
        "once, and once more when it had been given them again"
    )
    assert max(row["sync/logprob_diff"] for row in metrics) < 1e-5, "of the servers that are used"


def test_a_server_with_correct_weights_after_the_second_transfer_is_used(ranks: Any, tmp_path: Path) -> None:
    with server(MissesOneUpdate) as url:
        ((metrics, states, problem),) = ranks(1, probed, str(tmp_path), [url], "pp=1", "float32")
    assert (states, problem) == (["up"], "")
    assert [row["servers/failed"] for row in metrics] == [0, 1, 0]


def test_a_trial_request_to_a_busy_server_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = iter(range(1))

    def answer(body: dict[str, Any]) -> tuple[list[int], list[float]]:
        if next(refusals, None) is not None:
            raise Refusal(429, "too many requests")
        return deterministic_completion(body)

    with closing(FakeVLLM(answer)) as fake, closing(GenerationClient([fake.url])) as client:
        (server,) = client.connect()
        assert len(client.generate_on(server, Request((5, 1), GREEDY)).tokens) == 1
        refusals = itertools.count()
        monkeypatch.setattr(client_module, "BUSY_TIMEOUT", 0.0)
        with pytest.raises(ServerError, match="too many requests"):
            client.generate_on(server, Request((5, 1), GREEDY))


def test_requests_of_the_preflight_to_a_busy_server_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each path is refused once: the list of models, features, the length, the version and the device."""

    class BusyOnce(FakeVLLM):
        def reply(self, path: str, body: Any) -> Any:
            if self.calls.count(path) == 1:
                raise Refusal(429, "too many requests")
            return super().reply(path, body)

    monkeypatch.setattr(remote_server, "BUSY_PAUSE", 0.001)
    with closing(BusyOnce()) as fake, closing(GenerationClient([fake.url], retries=0)) as client:
        (server,) = client.connect()
        client.run_on(server, server.max_length())
        client.run_on(server, server.fetch_version())
        assert client.run_on(server, server.update_problem(tied_head=True, over_network=False)) == ""
        assert min(map(fake.calls.count, fake.calls)) == 2
        monkeypatch.setattr(remote_server, "BUSY_TIMEOUT", 0.0)
        monkeypatch.setattr(fake, "calls", [])
        with pytest.raises(ServerError, match="too many requests"):
            client.run_on(server, server.fetch_version())


def test_the_probe_of_a_busy_server_is_retried() -> None:
    requests = [Request((5, length), GREEDY) for length in range(16)]
    bodies = [
        {"token_ids": list(request.prompt), "sampling_params": {"seed": request.seed, "max_tokens": 1}}
        for request in requests
    ]
    scores = TrainerScores(1, [{tokens[0]: logprobs[0]} for tokens, logprobs in map(deterministic_completion, bodies)])
    refusals = iter(range(3))

    def answer(body: dict[str, Any]) -> tuple[list[int], list[float]]:
        if next(refusals, None) is not None:
            raise Refusal(429, "too many requests")
        return deterministic_completion(body)

    with closing(FakeVLLM(answer)) as fake, closing(GenerationClient([fake.url])) as client:
        client.connect()
        client.reload(WeightsVersion("anywhere", "start.1", Probe(requests, scores, [], 1e-3)))
        (remote_server,) = client.pool.servers
        assert (remote_server.state, remote_server.failures) == ("up", 0)
        assert remote_server.weights.probe_result is not None
        assert remote_server.weights.probe_result.logprob_diff == 0.0
        assert fake.calls.count("/collective_rpc") == 1, "it is not made to read them again"

"""/metrics of `postlude serve` and the Tinker server: the counts are those of the requests."""

from __future__ import annotations

import asyncio
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from postlude import load_tokenizer
from postlude.generate.generator import Generator
from postlude.generate.protocol import Request, SamplingUsage
from postlude.generate.sampling_params import SamplingParams
from postlude.generate.session import Session
from postlude.prometheus import CONTENT_TYPE
from tests.generate.test_scheduler import EagerGenerator, GraphGenerator
from tests.generate.test_session import make_requests, sharp
from tests.serving.test_generation_server import BEARER, KEY, request_json, serving
from tests.test_prometheus import read
from tests.tinker.asgi_client import Client, pass_body, request, running_server
from tests.tinker.test_sampling import open_sampler, sample


def scrape(url: str, **headers: str) -> dict[Any, float]:
    with urllib.request.urlopen(urllib.request.Request(f"{url}/metrics", headers=headers), timeout=30) as reply:
        assert reply.headers["content-type"] == CONTENT_TYPE
        return read(reply.read())


@pytest.mark.parametrize("kind", [EagerGenerator, GraphGenerator])
def test_usage_of_a_session_counts_what_runs_and_waits(kind: type[Generator]) -> None:
    session = Session(kind(sharp(), max_sequences=2, max_batch_tokens=512))
    assert session.usage() == SamplingUsage(0, 0, 0, 512)
    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True)
    for prompt in ((1, 2, 3), (4, 5), (6,)):
        session.add(Request(prompt, sampling, n=2))
    assert session.usage() == SamplingUsage(0, 6, 0, 512)
    session.step()
    usage = session.usage()
    assert (usage.running, usage.waiting) == (2, 4)
    assert 0 < usage.used_tokens <= 512
    results = []
    while session.busy:
        results += session.step()
    assert session.usage() == SamplingUsage(0, 0, 0, 512)
    completions = [result.completion for result in results]
    assert len(completions) == 6
    waits = [completion.queue_seconds for completion in completions if completion is not None]
    assert all(wait is not None and wait >= 0 for wait in waits)
    for completion, wait in zip(completions, waits, strict=True):
        assert completion is not None
        assert completion.first_token_seconds is not None
        assert wait is not None
        assert wait <= completion.first_token_seconds
    assert max(waits) > min(waits)  # of those that had to wait for the first two


def test_counts_of_a_server_are_those_of_its_requests() -> None:
    requests = make_requests(4)
    with serving(Generator(sharp(), load_tokenizer("tiny-dense")), key=KEY) as (_, url):
        tokens = 0
        for sent in requests:
            body = {"prompt": list(sent.prompt), "sampling": {"max_new_tokens": 5, "seed": 1}}
            status, reply = request_json(f"{url}/generate", body, **BEARER)
            assert status == 200, reply
            tokens += len(reply["tokens"])
        assert request_json(f"{url}/v1/completions", {"prompt": 3.5}, **BEARER)[0] == 400
        assert request_json(f"{url}/generate", {})[0] == 401
        for path in ("a", 'b"{}', "metrics/x"):
            assert request_json(f"{url}/{urllib.request.quote(path)}", **BEARER)[0] == 404
        assert request_json(f"{url}/metrics")[0] == 401
        values = scrape(url, **BEARER)

    def requests_of(route: str, method: str, status: str) -> float:
        labels = (("route", route), ("method", method), ("status", status))
        return values.pop(("postlude_server_requests_total", labels))

    assert requests_of("/generate", "POST", "200") == len(requests)
    assert requests_of("/generate", "POST", "401") == 1
    assert requests_of("/v1/completions", "POST", "400") == 1
    assert requests_of("/metrics", "GET", "401") == 1
    assert requests_of("other", "other", "404") == 3
    assert not [name for name, _ in values if name == "postlude_server_requests_total"]
    assert values["postlude_server_prompt_tokens_total", ()] == sum(len(sent.prompt) for sent in requests)
    assert values["postlude_server_generated_tokens_total", ()] == tokens
    assert values["postlude_server_queue_seconds_count", ()] == len(requests)
    assert values["postlude_server_first_token_seconds_count", ()] == len(requests)
    assert values["postlude_server_request_seconds_count", (("route", "/generate"),)] == len(requests) + 1
    assert values["postlude_server_requests_running", ()] == 1  # the scrape itself
    assert values["postlude_server_sequences_running", ()] == 0
    assert values["postlude_server_cache_tokens", ()] == 65_536


def test_counts_of_a_tinker_server_are_those_of_its_requests(tmp_path: Path) -> None:
    async def run() -> dict[Any, float]:
        async with running_server(tmp_path, keys=["tml-one"]) as (app, backend, service):
            counted = service.metrics.requests.counting(app)
            client = await Client(counted).open()
            sampler, model = await open_sampler(client), await client.create_model()
            for number in range(3):
                await client.call("asample", sample(sampler, number, num_samples=2))
            await client.result(await client.run_pass(model, 1, 1.0, 2.0))
            backend.failure = RuntimeError("it broke")
            await client.call("forward_backward", pass_body(model, 2, 1.0))
            assert (await request(counted, "GET", "/metrics", key=None)).status == 401
            reply = await request(counted, "GET", "/metrics")
            assert reply.headers["content-type"] == CONTENT_TYPE
            return read(reply.body)

    values = asyncio.run(run())
    assert values["postlude_server_prompt_tokens_total", ()] == 3 * 2
    assert values["postlude_server_generated_tokens_total", ()] == 3 * 2 * 3
    assert values["postlude_tinker_pass_tokens_total", ()] == (2 + 1) * 2

    def results(kind: str, outcome: str) -> float:
        return values["postlude_tinker_operation_seconds_count", (("kind", kind), ("outcome", outcome))]

    assert (results("sample", "done"), results("forward_backward", "done")) == (3, 1)
    assert results("forward_backward", "server error") == 1
    assert (values["postlude_tinker_models", ()], values["postlude_tinker_sessions", ()]) == (1, 1)
    assert values["postlude_tinker_samplers", ()] == 1
    assert (values["postlude_server_sequences_running", ()], values["postlude_server_sequences_waiting", ()]) == (2, 1)
    asked = ("postlude_server_requests_total", (("route", "/api/v1/asample"), ("method", "POST"), ("status", "200")))
    assert values[asked] == 3

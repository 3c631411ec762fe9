"""Sampling requests run once each and concurrently within limits; invalid ones get clear errors."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from postlude.generate.sampling_params import SamplingParams
from postlude.tinker.bodies import SampleBody
from postlude.tinker.wire import SampleResponse

from .asgi_client import Client, running_server
from .fake_backend import BASE, CONTEXT, OTHER, VOCAB, FakeBackend


def sample(sampler: str, seq_id: int, tokens: list[int] | None = None, **fields: Any) -> dict[str, Any]:
    chunks = [{"type": "encoded_text", "tokens": [5, 6] if tokens is None else tokens}]
    params = {"max_tokens": 3, "temperature": 1, "top_k": -1, "top_p": 1}
    body = {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": {"chunks": chunks}, "num_samples": 1}
    return body | {"sampling_params": params, "type": "sample"} | fields


async def open_sampler(client: Client, number: int = 0, **fields: Any) -> str:
    body = {"session_id": client.session, "sampling_session_seq_id": number} | (fields or {"base_model": BASE})
    reply = await client.post("create_sampling_session", body)
    assert reply.status == 200, reply.body
    sampler: str = reply.json["sampling_session_id"]
    return sampler


async def test_sample_returns_requested_fields(tmp_path: Path) -> None:
    async with running_server(tmp_path) as (app, _, _service):
        client = await Client(app).open()
        sampler = await open_sampler(client)
        body = sample(sampler, 0, num_samples=2, prompt_logprobs=True, topk_prompt_logprobs=3, unknown_field=1)
        reply = await client.post("asample", body)
        assert len(reply.json["sample_sequence_ids"]) == 2
        result = SampleResponse.FromString(await client.result(reply.json["request_id"]))
        assert [np.frombuffer(sequence.tokens, "<i4").tolist() for sequence in result.sequences] == [[7, 8, 9]] * 2
        assert [sequence.stop_reason for sequence in result.sequences] == [1, 1]
        scores = np.frombuffer(result.prompt_logprobs, "<f4")
        assert np.isnan(scores[0])
        assert scores[1] == 0.0
        assert (result.topk_prompt_logprobs.length, result.topk_prompt_logprobs.k) == (2, 3)


async def test_a_retried_sample_runs_once(tmp_path: Path) -> None:
    async with running_server(tmp_path) as (app, backend, _):
        client = await Client(app).open()
        sampler = await open_sampler(client)
        assert await open_sampler(client) == sampler
        other = {"session_id": client.session, "sampling_session_seq_id": 0, "base_model": OTHER}
        assert "samples other weights" in (await client.post("create_sampling_session", other)).json["error"]
        first = (await client.post("asample", sample(sampler, 0))).json
        repeated = (await client.post("asample", sample(sampler, 0))).json
        assert repeated == first
        result = await client.result(first["request_id"])
        assert await client.result(first["request_id"]) == result
        refused = await client.post("asample", sample(sampler, 0, tokens=[3]))
        assert refused.status == 400
        assert "another client has used this number" in refused.json["error"]
        await client.call("asample", sample(sampler, 1_000_000_000))
        assert [call[0] for call in backend.calls].count("sample") == 2
        assert [call[0] for call in backend.calls].count("open_sampler") == 1


SPARSE = {"data": [1], "dtype": "int64", "shape": [1, 2], "sparse_col_indices": [0]}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tokens": []}, "the prompt is empty"),
        ({"tokens": [VOCAB]}, f"the prompt has token {VOCAB}, but the vocabulary is 0 to {VOCAB - 1}"),
        ({"tokens": [1] * CONTEXT}, f"has {CONTEXT} tokens"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"num_samples": 5000}, "the limit is 1024"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k is not supported"),
        ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "'image', but only encoded_text"),
        ({"sampling_params": {"max_tokens": CONTEXT}}, "has room for 62"),
        ({"sampling_params": {"top_p": 0}}, "top_p is 0"),
        ({"sampling_params": {"stop": [1, "a"]}}, "stop"),
        ({"sampling_params": {"seed": 10**30}}, "seed is 1000000"),
        ({"sampling_params": {"top_k": 2**31}}, "top_k is 2147483648"),
        ({"target_prompt_logprobs": {"data": [10**30], "dtype": "int64", "shape": [1, 1]}}, "data.0 is 1000000"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n is 2"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [2, 1]}}, "give [1, K]"),
        ({"target_prompt_logprobs": {**SPARSE, "sparse_crow_indices": []}}, "is not a sparse matrix"),
        (
            {"target_prompt_logprobs": {**SPARSE, "sparse_crow_indices": [1, 2]}},
            "is not a sparse matrix",
        ),
    ],
)
async def test_invalid_sampling_requests_are_refused(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    async with running_server(tmp_path) as (app, backend, _):
        client = await Client(app).open()
        sampler = await open_sampler(client)
        reply = await client.post("asample", sample(sampler, 0, **change))
        assert reply.status == 400
        assert sentence in reply.json["error"]
        assert isinstance(await client.call("asample", sample(sampler, 0)), bytes)
        assert [call[0] for call in backend.calls].count("sample") == 1


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, SamplingParams(max_new_tokens=3)),
        ([], SamplingParams(max_new_tokens=3, ignore_eos=True)),
        ("\n", SamplingParams(max_new_tokens=3, stop=("\n",), ignore_eos=True)),
        (["a", "b"], SamplingParams(max_new_tokens=3, stop=("a", "b"), ignore_eos=True)),
        ([4, 5], SamplingParams(max_new_tokens=3, stop_tokens=(4, 5), ignore_eos=True)),
    ],
)
async def test_stop_strings_or_tokens_replace_the_eos_token(tmp_path: Path, stop: Any, expected: Any) -> None:
    async with running_server(tmp_path) as (app, backend, _):
        client = await Client(app).open()
        params = {"max_tokens": 3} | ({} if stop is None else {"stop": stop})
        await client.call("asample", sample(await open_sampler(client), 0, sampling_params=params))
        assert replace(backend.calls[-1][2].sampling, seed=0) == expected


async def test_max_tokens_defaults_to_context_and_seed_to_random(tmp_path: Path) -> None:
    async with running_server(tmp_path) as (app, backend, _):
        client = await Client(app).open()
        sampler = await open_sampler(client)
        for number, params in enumerate(({}, {}, {"seed": 7, "top_k": 0})):
            await client.call("asample", sample(sampler, number, sampling_params=params))
        first, second, third = (request.sampling for name, _, request in backend.calls[-3:])
        assert first.max_new_tokens == CONTEXT - 2
        assert len({first.seed, second.seed, 7}) == 3
        assert (third.seed, third.top_k) == (7, 0)


async def wait_for_samples(backend: FakeBackend, count: int) -> None:
    async with asyncio.timeout(60):
        while [call[0] for call in backend.calls].count("sample") < count:
            await asyncio.sleep(0.01)


async def test_a_sample_that_is_cancelled_before_it_begins_ends(tmp_path: Path) -> None:
    async with running_server(tmp_path) as (app, backend, service):
        client = await Client(app).open()
        sampler = await open_sampler(client)
        owner = service.samplers.samplers[sampler].owner
        future = service.sample(owner, SampleBody.model_validate_json(json.dumps(sample(sampler, 0))))
        service.samplers.cancel(future.request_id)
        async with asyncio.timeout(60):
            assert "cancelled" in (await client.result(future.request_id))["error"]
        assert "sample" not in [call[0] for call in backend.calls]


async def test_a_cancelled_sample_ends(tmp_path: Path) -> None:
    async with running_server(tmp_path) as (app, backend, _):
        client = await Client(app).open()
        sampler = await open_sampler(client)
        backend.gate.clear()
        request_id = await client.submit("asample", sample(sampler, 0))
        await wait_for_samples(backend, 1)
        assert (await client.post("cancel_future", {"request_id": request_id})).status == 204
        assert "cancelled" in (await client.result(request_id))["error"]
        assert backend.cancelled == 1


async def test_too_many_samples_of_one_key_get_429_and_another_key_continues(tmp_path: Path) -> None:
    async with running_server(tmp_path, samples_per_key=3) as (app, backend, _):
        client, other = await Client(app).open(), await Client(app, "tml-two").open()
        sampler, second = await open_sampler(client), await open_sampler(other)
        backend.gate.clear()
        ids = [await client.submit("asample", sample(sampler, seq)) for seq in range(3)]
        await wait_for_samples(backend, 3)
        assert (await client.post("asample", sample(sampler, 3))).status == 429
        submitted = await other.submit("asample", sample(second, 0))
        backend.gate.set()
        for request_id in ids:
            assert isinstance(await client.result(request_id), bytes)
        assert isinstance(await other.result(submitted), bytes)
        assert isinstance(await client.call("asample", sample(sampler, 3)), bytes)


async def test_sampler_keeps_weights_from_its_creation(tmp_path: Path) -> None:
    async with running_server(tmp_path) as (app, _, _service):
        client = await Client(app).open()
        model = await client.create_model()
        body = {"model_id": model, "sampling_session_seq_id": 0, "seq_id": 1}
        early = (await client.call("save_weights_for_sampler", body))["sampling_session_id"]
        await client.run_pass(model, 2, 3.0)
        await client.step(model, 3)
        late = await client.call("save_weights_for_sampler", body | {"sampling_session_seq_id": 1, "seq_id": 4})
        for sampler, weight in ((early, 0.0), (late["sampling_session_id"], 3.0)):
            result = SampleResponse.FromString(await client.call("asample", sample(sampler, 0)))
            assert set(np.frombuffer(result.sequences[0].logprobs, "<f4")) == {-weight}


async def test_samplers_over_limit_are_closed_and_saved_ones_reopen(tmp_path: Path) -> None:
    async with running_server(tmp_path, samplers=2) as (app, backend, _):
        client = await Client(app).open()
        model = await client.create_model()
        path = (await client.call("save_weights_for_sampler", {"model_id": model, "path": "a", "seq_id": 1}))["path"]
        saved = await open_sampler(client, 0, model_path=path)
        body = {"model_id": model, "sampling_session_seq_id": 1, "seq_id": 2}
        snapshot = (await client.call("save_weights_for_sampler", body))["sampling_session_id"]
        bases = [await open_sampler(client, number) for number in (2, 3)]
        assert len(backend.samplers) <= 2
        assert isinstance(await client.call("asample", sample(saved, 0)), bytes)
        assert len(backend.samplers) <= 2
        closed = await client.post("asample", sample(snapshot, 0))
        assert closed.status == 410
        assert "newer samplers were used" in closed.json["error"]
        assert isinstance(await client.call("asample", sample(bases[1], 0)), bytes)


async def test_sampler_of_invalid_path_is_refused(tmp_path: Path) -> None:
    async with running_server(tmp_path) as (app, _, _service):
        client = await Client(app).open()
        model = await client.create_model()
        state = (await client.call("save_weights", {"model_id": model, "path": "a", "seq_id": 1}))["path"]
        weights = await client.call("save_weights_for_sampler", {"model_id": model, "path": "a", "seq_id": 2})
        for fields, sentence in (
            ({}, "give base_model or model_path"),
            ({"base_model": "nobody/nothing"}, f"there are {BASE}, {OTHER}"),
            ({"model_path": state}, "is not for sampling"),
            ({"model_path": weights["path"], "base_model": OTHER}, f"was trained from {BASE}"),
            ({"model_path": "tinker://a/weights"}, "is not a path"),
        ):
            body = {"session_id": client.session, "sampling_session_seq_id": 9} | fields
            reply = await client.post("create_sampling_session", body)
            assert reply.status == (404 if "nobody" in str(fields) else 400)
            assert sentence in reply.json["error"]
        body = {"model_id": model, "seq_id": 3, "path": weights["path"], "optimizer": True}
        assert "has no training state" in (await client.call("load_weights", body))["error"]
        saved = await client.call("save_weights", {"model_id": model, "path": "a", "seq_id": 4})
        assert "exists already" in saved["error"]
        over = await client.call("save_weights", {"model_id": model, "path": "a", "seq_id": 5, "overwrite": True})
        assert over["path"] == state

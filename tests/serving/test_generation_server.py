"""`postlude serve` equals the generator, loads new weights during requests, and gives clear errors."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from postlude import export_hf, load_model, load_tokenizer
from postlude.generate.generator import Generator
from postlude.generate.protocol import Request, VersionSpan
from postlude.generate.sampling_params import SamplingParams
from postlude.model import LanguageModel
from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.server_weights import WeightsVersion
from postlude.serving.errors import ServerError
from postlude.serving.server.generation_server import GenerationServer
from tests.generate.test_generator import teacher_forced
from tests.generate.test_scheduler import EagerGenerator, GraphGenerator, assert_alike
from tests.generate.test_session import generated, make_requests, sharp

KEY = "open sesame"
BEARER = {"Authorization": f"Bearer {KEY}"}


@contextmanager
def serving(
    generator: Generator,
    version: str | None = "default",
    key: str | None = None,
    kind: type[GenerationServer] = GenerationServer,
) -> Iterator[tuple[GenerationServer, str]]:
    """Serves the generator from a thread."""
    served, address, started, ended = kind(generator, "tiny", version, key=key), [], threading.Event(), []

    def ready(url: str) -> None:
        address.append(url)
        started.set()

    def run() -> None:
        try:
            asyncio.run(served.run("127.0.0.1", 0, ready))
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield served, address[0]
    finally:
        assert served._loop is not None
        if thread.is_alive():
            served._loop.call_soon_threadsafe(served.stop)
        thread.join(10)
        assert not thread.is_alive()


def request_json(url: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Returns the status and the JSON of the reply."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    named = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, named), timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_completions_over_http_equal_generate() -> None:
    model, requests, tokenizer = sharp(), make_requests(6), load_tokenizer("tiny-dense")
    local_generator = Generator(model, tokenizer)
    prompts = [request.prompt for request in requests]
    samplings = [replace(request.sampling, stop=("e",) if request.seed % 2 else ()) for request in requests]
    with serving(Generator(sharp(), tokenizer, max_sequences=4)) as (_, url), closing(GenerationClient(url)) as engine:
        assert_alike(engine.generate(prompts, samplings, n=3), local_generator.generate(prompts, samplings, n=3))
        ((completion,),) = engine.generate(prompts[:1], samplings[:1])
        ((alone,),) = local_generator.generate(prompts[:1], samplings[:1])
        assert completion == replace(alone, versions=(VersionSpan("default", 0, len(completion.tokens)),)), "to the bit"
        assert engine.pool.servers[0].api.name == "postlude"


@pytest.mark.slow
def test_weights_are_replaced_in_flight_and_invalid_directory_changes_nothing(tmp_path: Path) -> None:
    old, new, model = sharp(), sharp(seed=1), sharp()
    for name, saved_model in (("old", old), ("new", new), ("cut", old)):
        export_hf(saved_model, tmp_path / name)
    weight_bytes = (tmp_path / "cut" / "model.safetensors").read_bytes()
    (tmp_path / "cut" / "model.safetensors").write_bytes(weight_bytes[: len(weight_bytes) // 2])
    with (
        serving(Generator(model), key=KEY) as (served, url),
        closing(GenerationClient(url, api_key=KEY)) as engine,
    ):
        engine.reload(WeightsVersion(str(tmp_path / "old"), "start.1"))
        prompt, long = [1, 2, 3], SamplingParams(max_new_tokens=250, seed=3, ignore_eos=True)
        engine.submit(Request(tuple(prompt), long))
        while not any(group[0].tokens[2:] for group in list(served._session._active.values())):
            time.sleep(0.001)
        for bad in ("cut", "nowhere"):
            body = {"directory": str(tmp_path / bad), "version": "start.3"}
            status, words = request_json(f"{url}/weights", body, **BEARER)
            assert status == 400
            assert words["error"]["message"].startswith("the weights stay 'start.1', as they were: ")
        engine.reload(WeightsVersion(str(tmp_path / "new"), "start.2"))
        (done,) = engine.poll(timeout=60)
        completion = done.completion
        assert completion is not None
        before, after = completion.versions
        assert (before.version, after.version, after.end) == ("start.1", "start.2", 250)
        logprobs, cut = torch.tensor(completion.logprobs), after.start
        (by_old,), (by_new,) = (teacher_forced(model, [prompt], [[completion]]) for model in (old, new))
        torch.testing.assert_close(logprobs[:cut], by_old[:cut], rtol=0, atol=1e-4)
        torch.testing.assert_close(logprobs[cut:], by_new[cut:], rtol=0, atol=1e-4)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, new.get_parameter(name)), name


def test_weights_with_a_wrong_checksum_are_refused(tmp_path: Path, monkeypatch) -> None:
    export_hf(sharp(seed=1), tmp_path / "new")
    with (
        serving(Generator(sharp(), max_batch_tokens=96), key=KEY) as (_, url),
        closing(GenerationClient(url, api_key=KEY, retries=0)) as engine,
    ):
        (server,) = engine.connect()
        assert engine.run_on(server, server.max_length()) == 96
        monkeypatch.setattr("postlude.serving.clients.server_weights.checksum", lambda path: "other")
        with pytest.raises(ServerError, match=r"read weights of checksum .* where there are other"):
            engine.reload(WeightsVersion(str(tmp_path / "new"), "start.1"))


def test_a_server_without_weights_replies_once_it_has_some(tmp_path: Path) -> None:
    export_hf(sharp(seed=1), tmp_path / "new")
    with (
        serving(Generator(sharp()), version=None, key=KEY) as (_, url),
        closing(GenerationClient(url, api_key=KEY)) as engine,
    ):
        assert request_json(f"{url}/generate", {"prompt": [1], "sampling": {}}, **BEARER) == (
            503,
            {"error": {"message": "there are no weights yet.", "type": "server_error", "param": None, "code": None}},
        )
        engine.reload(WeightsVersion(str(tmp_path / "new"), "start.1"))
        ((completion,),) = engine.generate([[1]], SamplingParams(max_new_tokens=3))
        assert completion.versions == (VersionSpan("start.1", 0, 3),)


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({"prompt": [1], "sampling": {}, "model": "other"}, 404, "model is 'other', but 'tiny' is served here."),
        ({"prompt": [9999], "sampling": {}}, 400, "the prompt has token 9999, but the vocabulary goes from 0 to 263."),
        ({"prompt": [1] * 60, "sampling": {}}, 400, "max_batch_tokens is 64"),
        ({"prompt": [1], "sampling": {"top_p": 2}}, 400, "top_p=2"),
        ({"prompt": [1], "sampling": {"topp": 1}}, 400, "topp"),
        ({"prompt": "text", "sampling": {}}, 400, "prompt is 'text': give a list."),
        ({"prompt": [1.0], "sampling": {}}, 400, "prompt.0 is 1.0: give a whole number."),
        ({"prompt": [True], "sampling": {}}, 400, "prompt.0 is True: give a whole number."),
        ({"prompt": [10**30], "sampling": {}}, 400, "the vocabulary goes from 0 to 263."),
        ({"prompt": [1], "sampling": {"stop": ["x"] * 120_000}}, 400, "stop has 120000; the limit is 64 strings."),
        ({"prompt": [1], "sampling": {"stop": ["x" * 1025]}}, 400, "a string of stop has 1025"),
        ({"prompt": [1], "sampling": {"stop_tokens": [1] * 1025}}, 400, "stop_tokens has 1025"),
        ({"prompt": [1], "sampling": {"json_schema": "[" * 65_537}}, 400, "json_schema has 65537"),
        ({"prompt": [1], "sampling": {}, "first_index": 1.7}, 400, "first_index is 1.7: give a whole number."),
        ({"prompt": [1], "sampling": {"stop": "zzhzz"}}, 400, "sampling.stop is 'zzhzz': give a list."),
        ({"prompt": [1], "sampling": {"ignore_eos": "false"}}, 400, "ignore_eos is 'false': give true or false."),
        ({"prompt": [1], "sampling": {"temperature": "1"}}, 400, "temperature is '1': give a number."),
        ({"prompt": [1], "sampling": {"temperature": float("nan")}}, 400, "give a finite number"),
        ({"prompt": [1], "sampling": {"temperature": 10**400}}, 400, "give a finite number"),
        ({"prompt": [1], "sampling": {"seed": 1.5}}, 400, "sampling.seed is 1.5: give a whole number."),
        ({"prompt": [1], "sampling": []}, 400, "sampling is []: give an object."),
        (
            {"prompt": [1], "sampling": {}, "n": 3},
            400,
            "n is not supported; there are prompt, sampling, first_index, model.",
        ),
        ([1], 400, "the request is [1]: give an object."),
        ({"prompt": [1]}, 400, "the request has no 'sampling'"),
        (b"", 400, "the request is not JSON"),
        (b"{", 400, "the request is not JSON"),
        (b'{"prompt": "\xff"}', 400, "the request is not JSON"),
        (b"[" * 200_000, 400, "the request is not JSON: recursion limit exceeded"),
        (b'{"prompt": [' + b"9" * 5000 + b"]}", 400, "the request is not JSON: number out of range"),
        (b"1" * (1 << 21), 413, "the request has 2097152 bytes; the most is 1049600."),
        ({"prompt": ["x"] * 200_000, "sampling": {}}, 400, "prompt.0 is 'x': give a whole number."),
    ],
)
def test_invalid_request_gives_clear_error(body: Any, status: int, sentence: str) -> None:
    with serving(Generator(sharp(), load_tokenizer("tiny-dense"), max_batch_tokens=64)) as (_, url):
        code, words = request_json(f"{url}/generate", body)
        assert (code, sentence in words["error"]["message"]) == (status, True), words
        assert request_json(f"{url}/health") == (200, {"status": "ok"})
        assert request_json(f"{url}/elsewhere")[0] == 404


def test_without_the_key_only_health_replies() -> None:
    with serving(Generator(sharp()), key=KEY) as (_, url):
        assert request_json(f"{url}/health")[0] == 200
        for path, body in (
            ("/v1/models", None),
            ("/weights", None),
            ("/weights", {}),
            ("/generate", {}),
            ("/no", None),
        ):
            assert request_json(f"{url}{path}", body)[0] == 401
        wrong = GenerationClient(url, api_key="open sesam", retries=0)
        with closing(wrong), pytest.raises(ServerError, match="status 401: this server needs its key"):
            wrong.generate([[1]], SamplingParams(max_new_tokens=1))
        with closing(GenerationClient(url, api_key=KEY)) as engine:
            ((completion,),) = engine.generate([[1]], SamplingParams(max_new_tokens=1))
            assert len(completion.tokens) == 1


@pytest.mark.parametrize(
    ("headers", "status", "sentence"),
    [
        ({}, 200, ""),
        ({"Host": "127.0.0.1:1"}, 200, ""),
        ({"Host": "[::1]:1"}, 200, ""),
        ({"Host": "localhost:8000", "Origin": "http://localhost:8000"}, 200, ""),
        ({"Content-Type": "text/plain"}, 415, "Content-Type is 'text/plain'; send application/json."),
        ({"Content-Type": "application/json; charset=utf-8"}, 200, ""),
        ({"Content-Type": ""}, 415, "send application/json"),
        ({"Content-Encoding": "gzip"}, 415, "Content-Encoding is 'gzip'; send identity."),
        ({"Content-Encoding": "identity"}, 200, ""),
        ({"Host": "page.example"}, 403, "Host is 'page.example', but without a key"),
        ({"Host": "localhost.page.example"}, 403, "Connect to localhost, 127.0.0.1 or an address"),
        ({"Host": "[::1"}, 403, "POSTLUDE_API_KEY"),
        ({"Host": ""}, 403, "Host is ''"),
        ({"Origin": "http://page.example"}, 403, "comes from a page of 'http://page.example'"),
        ({"Origin": "null"}, 403, "comes from a page of 'null'"),
        ({"Host": "localhost:8000", "Origin": "http://localhost:8888"}, 403, "Leave out the header Origin"),
    ],
)
def test_without_a_key_no_page_of_another_site_is_served(
    keyless: str, headers: dict[str, str], status: int, sentence: str
) -> None:
    code, words = request_json(f"{keyless}/generate", {"prompt": [1], "sampling": {"max_new_tokens": 1}}, **headers)
    assert (code, code == 200 or sentence in words["error"]["message"]) == (status, True), words


@pytest.mark.parametrize("path", ["/weights", "/adapters"])
def test_without_a_key_no_request_changes_weights(keyless: str, path: str) -> None:
    for body in (None, {"directory": "/", "version": "1"}):
        status, words = request_json(f"{keyless}{path}", body)
        assert (status, "start it with one (POSTLUDE_API_KEY, or --api-key)" in words["error"]["message"]) == (
            403,
            True,
        )


@pytest.fixture(scope="module")
def keyless() -> Iterator[str]:
    with serving(Generator(sharp())) as (_, url):
        yield url


def test_a_client_does_not_wait_for_a_model_that_a_server_does_not_have(keyless: str) -> None:
    start = time.monotonic()
    with (
        closing(GenerationClient(keyless, "other", retries=1, backoff=60.0)) as engine,
        pytest.raises(ServerError, match="model is 'other', but 'tiny' is served here"),
    ):
        engine.generate([[1]], SamplingParams(max_new_tokens=1))
    assert time.monotonic() - start < 30


def test_requests_of_a_client_that_is_gone_are_aborted() -> None:
    with (
        serving(Generator(sharp(), context_length=65_536)) as (served, url),
        closing(GenerationClient(url, timeout=0.3, retries=0)) as engine,
    ):
        with pytest.raises(ServerError, match="gave no reply within"):
            engine.generate([[1]], SamplingParams(max_new_tokens=60_000))
        deadline = time.monotonic() + 300
        while served._session.busy and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not served._session.busy


def poisoned(model: LanguageModel, token: int) -> LanguageModel:
    """A model whose logits are NaN after it read this token."""

    def poison(_: Any, read: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill((read[0] == token)[..., None], float("nan"))

    model.embedding.register_forward_hook(poison)
    return model


@pytest.mark.parametrize("kind", [EagerGenerator, GraphGenerator])
def test_failed_request_does_not_affect_others(kind: type[Generator]) -> None:
    requests = make_requests(4)
    expected = generated(Generator(sharp()), requests)
    tokens = {token for group in expected for completion in group for token in completion.tokens}
    bad = next(token for token in range(256, 264) if token not in tokens)
    results = {}
    with (
        serving(kind(poisoned(sharp(), bad), max_batch_tokens=512, max_sequences=8)) as (served, url),
        closing(GenerationClient(url)) as engine,
    ):
        request_ids = [engine.submit(request) for request in requests]
        replies = [
            request_json(f"{url}/generate", {"prompt": [5, bad], "sampling": {"max_new_tokens": 3}}) for _ in range(2)
        ]
        while len(results) < 2 * len(request_ids):
            results |= {
                (finished.request_id, finished.index): finished.completion for finished in engine.poll(timeout=60)
            }
        assert served._failure is None
    for status, words in replies:
        assert (status, "logits after 2 tokens are NaN" in words["error"]["message"]) == (500, True)
    for request_id, group in zip(request_ids, expected, strict=True):
        for number, answer in enumerate(group):
            assert results[request_id, number].tokens == answer.tokens


def test_a_failed_step_fails_running_requests_and_later_ones_are_served(monkeypatch) -> None:
    from postlude.generate.session import Session

    with serving(Generator(sharp())) as (_, url):
        with monkeypatch.context() as patched:
            patched.setattr(Session, "step", lambda self: 1 / 0)
            status, words = request_json(f"{url}/generate", {"prompt": [1], "sampling": {"max_new_tokens": 2}})
            assert (status, words["error"]["message"]) == (500, "generating failed: division by zero")
        sampling = {"max_new_tokens": 8, "ignore_eos": True}  # longer than the failed one, which must not go on
        assert request_json(f"{url}/generate", {"prompt": [1], "sampling": sampling})[0] == 200


def test_broken_device_ends_the_server(monkeypatch) -> None:
    from postlude.generate.session import Session

    def broken(self: Session) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(Session, "step", broken)
    with serving(Generator(sharp())) as (served, url):
        status, words = request_json(f"{url}/generate", {"prompt": [1], "sampling": {}})
        assert (status, "generating has ended" in words["error"]["message"]) == (500, True)
        assert isinstance(served._failure, torch.AcceleratorError)


def test_weights_that_cannot_be_read_leave_the_old_ones(tmp_path: Path) -> None:
    export_hf(sharp(), tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").unlink()
    (tmp_path / "empty").mkdir()
    index = tmp_path / "broken" / "model.safetensors.index.json"
    question = {"prompt": [1], "sampling": {"max_new_tokens": 3}}
    with serving(Generator(sharp()), key=KEY) as (_, url):
        before = request_json(f"{url}/generate", question, **BEARER)
        for directory in ("~nosuchuser/x", "/a\0b", str(tmp_path / "empty"), str(tmp_path / "nowhere")):
            status, words = request_json(f"{url}/weights", {"directory": directory, "version": "b"}, **BEARER)
            assert (status, "the weights stay 'default', as they were: " in words["error"]["message"]) == (400, True), (
                words
            )
        for text in ("{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": null}}', '{"weight_map": {"a": 3}}'):
            index.write_text(text)
            status, words = request_json(f"{url}/weights", {"directory": str(index.parent), "version": "b"}, **BEARER)
            assert (status, "is not a safetensors index" in words["error"]["message"]) == (400, True), words
        for body in (None, [1], {"directory": 3, "version": "b"}, {"directory": "x"}):
            assert request_json(f"{url}/weights", json.dumps(body).encode(), **BEARER)[0] == 400
        assert request_json(f"{url}/generate", question, **BEARER) == before
        assert request_json(f"{url}/weights", **BEARER) == (200, {"version": "default", "checksum": None})


def test_partially_read_weights_are_not_used(tmp_path: Path, monkeypatch) -> None:
    export_hf(sharp(seed=1), tmp_path / "new")
    question = {"prompt": [1], "sampling": {"max_new_tokens": 3}}
    with serving(Generator(sharp()), key=KEY) as (_, url):
        with monkeypatch.context() as patched:
            patched.setattr("postlude.hf.load.fill", lambda *_: 1 / 0)
            status, words = request_json(
                f"{url}/weights", {"directory": str(tmp_path / "new"), "version": "b"}, **BEARER
            )
            assert (status, "there are no weights until others are read" in words["error"]["message"]) == (500, True)
        assert request_json(f"{url}/generate", question, **BEARER)[0] == 503
        assert request_json(f"{url}/weights", {"directory": str(tmp_path / "new"), "version": "b"}, **BEARER)[0] == 200
        assert request_json(f"{url}/generate", question, **BEARER)[0] == 200


def open_request(url: str, body: dict[str, Any], path: str = "/generate") -> socket.socket:
    """Sends a request, and returns its connection."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    data = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)), timeout=60)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + data)
    return connection


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("ending", ["reset", "close", "close behind another request"])
def test_a_request_of_a_disconnected_client_is_dropped(ending: str) -> None:
    with serving(Generator(sharp(), context_length=65_536)) as (served, url):
        connection = open_request(url, {"prompt": [1], "sampling": {"max_new_tokens": 60_000, "ignore_eos": True}})
        until(lambda: served._session.busy)
        if ending == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif ending == "close behind another request":
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connection.close()
        until(lambda: not served._session.busy)


def test_half_closed_client_gets_its_reply(monkeypatch) -> None:
    monkeypatch.setattr("postlude.serving.http.connection.GONE_SECONDS", 0.001)
    body = {"prompt": [1], "sampling": {"max_new_tokens": 200, "ignore_eos": True}}
    with serving(Generator(sharp())) as (_, url), open_request(url, body) as connection:
        connection.shutdown(socket.SHUT_WR)
        reply = http.client.HTTPResponse(connection)
        reply.begin()  # which passes over the interim response that told it from one that is closed
        assert (reply.status, len(json.load(reply)["tokens"])) == (200, 200)


def test_a_large_request_is_refused_before_it_is_read() -> None:
    """Its body would take the loop seconds to parse."""
    with serving(Generator(sharp())) as (_, url):
        host, _, port = url.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(head + b"Content-Length: 60000000\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
            assert request_json(f"{url}/health")[0] == 200


@pytest.mark.parametrize("part", ["nothing", "headers", "body"])
def test_a_request_that_does_not_come_whole_is_ended(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.setattr("postlude.serving.http.connection.HEAD_SECONDS", 0.05)
    monkeypatch.setattr("postlude.serving.server.generation_server.BODY_SECONDS", 0.05)
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 10"
    sent = {"nothing": b"", "headers": head, "body": head + b"\r\n\r\n{"}[part]
    with serving(Generator(sharp())) as (_, url):
        host, _, port = url.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(sent)
            assert connection.recv(4096).startswith(b"" if part == "nothing" else b"HTTP/1.1 408 ")


@pytest.mark.thorough
def test_command_prints_its_address_and_ends_on_a_signal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "postlude", "serve", "tiny-dense", "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving tiny-dense at http://127.0.0.1:")
        with closing(GenerationClient(line.split()[-1])) as engine:
            ((completion,),) = engine.generate([[1, 2, 3]], [SamplingParams(max_new_tokens=8, seed=5)])
        ((expected,),) = Generator(load_model("tiny-dense"), load_tokenizer("tiny-dense")).generate(
            [[1, 2, 3]], [SamplingParams(max_new_tokens=8, seed=5)]
        )
        assert replace(completion, versions=()) == expected
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()

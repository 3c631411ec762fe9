"""The generator behind HTTP gives what it gives here, takes weights in flight, and says what is wrong in a sentence."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from postlude import export_hf, load_model, load_tokenizer
from postlude.rollout.generator import Generator
from postlude.rollout.protocol import Request, Span
from postlude.rollout.sampling import Sampling
from postlude.rollout.servers.engine import HTTPEngine
from postlude.rollout.servers.errors import ServerError
from postlude.rollout.servers.serving import Served
from tests.rollout.test_generator import teacher_forced
from tests.rollout.test_paged_run import assert_alike
from tests.rollout.test_session import asked, sharp


@contextmanager
def serving(generator: Generator, version: str | None = "default") -> Iterator[tuple[Served, str]]:
    """The generator at an address, by a loop in a thread."""
    served, address, started, ended = Served(generator, "tiny", version), [], threading.Event(), []

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
            served._loop.call_soon_threadsafe(served.end)
        thread.join(10)
        assert not thread.is_alive()


def said(url: str, body: Any = None) -> tuple[int, Any]:
    """The status and the JSON of an answer."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=10) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_answers_over_http_are_those_of_generate() -> None:
    model, requests, tokenizer = sharp(), asked(6), load_tokenizer("tiny-dense")
    here = Generator(model, tokenizer)
    prompts = [request.prompt for request in requests]
    samplings = [replace(request.sampling, stop=("e",) if request.seed % 2 else ()) for request in requests]
    with serving(Generator(sharp(), tokenizer, max_sequences=4)) as (_, url), closing(HTTPEngine(url)) as engine:
        assert_alike(engine.generate(prompts, samplings, n=3), here.generate(prompts, samplings, n=3))
        ((one,),) = engine.generate(prompts[:1], samplings[:1])
        ((alone,),) = here.generate(prompts[:1], samplings[:1])
        assert one == replace(alone, versions=(Span("default", 0, len(one.tokens)),)), "to the bit"
        assert engine.fleet.servers[0].dialect.name == "postlude"


@pytest.mark.slow
def test_weights_come_in_flight_and_a_directory_that_is_none_changes_nothing(tmp_path: Path) -> None:
    old, new, model = sharp(), sharp(seed=1), sharp()
    for name, each in (("old", old), ("new", new), ("cut", old)):
        export_hf(each, tmp_path / name)
    whole = (tmp_path / "cut" / "model.safetensors").read_bytes()
    (tmp_path / "cut" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with serving(Generator(model)) as (served, url), closing(HTTPEngine(url)) as engine:
        engine.update(str(tmp_path / "old"), "start.1")
        prompt, long = [1, 2, 3], Sampling(max_new_tokens=250, seed=3, ignore_eos=True)
        engine.submit(Request(tuple(prompt), long))
        while not any(each.tokens[2:] for each in list(served._session._under_way.values())):
            time.sleep(0.001)
        for bad in ("cut", "nowhere"):
            status, words = said(f"{url}/weights", {"directory": str(tmp_path / bad), "version": "start.3"})
            assert status == 400
            assert words["error"].startswith("the weights stay 'start.1', as they were: ")
        engine.update(str(tmp_path / "new"), "start.2")
        (done,) = engine.poll(timeout=60)
        one = done.answer
        assert one is not None
        before, after = one.versions
        assert (before.version, after.version, after.end) == ("start.1", "start.2", 250)
        told, cut = torch.tensor(one.logprobs), after.start
        (by_old,), (by_new,) = (teacher_forced(each, [prompt], [[one]]) for each in (old, new))
        torch.testing.assert_close(told[:cut], by_old[:cut], rtol=0, atol=1e-4)
        torch.testing.assert_close(told[cut:], by_new[cut:], rtol=0, atol=1e-4)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, new.get_parameter(name)), name


def test_weights_that_were_read_otherwise_than_written_are_refused(tmp_path: Path, monkeypatch) -> None:
    export_hf(sharp(seed=1), tmp_path / "new")
    with (
        serving(Generator(sharp(), max_batch_tokens=96)) as (_, url),
        closing(HTTPEngine(url, retries=0)) as engine,
    ):
        (server,) = engine.meet()
        assert engine.longest(server) == 96
        monkeypatch.setattr("postlude.rollout.servers.server.checksum", lambda path: "other")
        with pytest.raises(ServerError, match=r"read weights of checksum .* where there are other"):
            engine.update(str(tmp_path / "new"), "start.1")


def test_one_without_weights_answers_once_it_has_some(tmp_path: Path) -> None:
    export_hf(sharp(seed=1), tmp_path / "new")
    with serving(Generator(sharp()), version=None) as (_, url), closing(HTTPEngine(url)) as engine:
        assert said(f"{url}/generate", {"prompt": [1], "sampling": {}}) == (503, {"error": "there are no weights yet."})
        engine.update(str(tmp_path / "new"), "start.1")
        ((one,),) = engine.generate([[1]], Sampling(max_new_tokens=3))
        assert one.versions == (Span("start.1", 0, 3),)


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({"prompt": [1], "sampling": {}, "model": "other"}, 400, "model is 'other', but 'tiny' is served here."),
        ({"prompt": [9999], "sampling": {}}, 400, "the prompt has token 9999, but the vocabulary goes from 0 to 263."),
        ({"prompt": [1] * 60, "sampling": {}}, 400, "max_batch_tokens is 64"),
        ({"prompt": [1], "sampling": {"top_p": 2}}, 400, "top_p=2"),
        ({"prompt": [1], "sampling": {"topp": 1}}, 400, "topp"),
        ({"prompt": "text", "sampling": {}}, 400, "give a list of token ids"),
        ({"prompt": [1]}, 400, "the request has no 'sampling'"),
        (b"{", 400, "the request is not JSON"),
    ],
)
def test_a_bad_request_is_a_sentence(body: Any, status: int, sentence: str) -> None:
    with serving(Generator(sharp(), max_batch_tokens=64)) as (_, url):
        code, words = said(f"{url}/generate", body)
        assert (code, sentence in words["error"]) == (status, True), words
        assert said(f"{url}/health") == (200, {"status": "ok"})
        assert said(f"{url}/elsewhere")[0] == 404


def test_who_goes_away_is_not_answered_any_more() -> None:
    with serving(Generator(sharp())) as (served, url), closing(HTTPEngine(url, timeout=0.3, retries=0)) as engine:
        with pytest.raises(ServerError, match="gave no answer within"):
            engine.generate([[1]], Sampling(max_new_tokens=60_000))
        deadline = time.monotonic() + 10
        while served._session.busy and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not served._session.busy


def test_when_generating_fails_whoever_waits_is_told_and_it_ends() -> None:
    model = sharp()
    with torch.no_grad():
        model.embedding.weight.fill_(float("nan"))
    with serving(Generator(model)) as (served, url):
        status, words = said(f"{url}/generate", {"prompt": [1], "sampling": {}})
        assert (status, "logits after 1 tokens are not numbers" in words["error"]) == (500, True)
        assert isinstance(served._failure, FloatingPointError)


@pytest.mark.thorough
def test_the_command_tells_its_address_and_ends_by_a_signal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "postlude", "serve", "tiny-dense", "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving tiny-dense at http://127.0.0.1:")
        with closing(HTTPEngine(line.split()[-1])) as engine:
            ((one,),) = engine.generate([[1, 2, 3]], [Sampling(max_new_tokens=8, seed=5)])
        ((here,),) = Generator(load_model("tiny-dense"), load_tokenizer("tiny-dense")).generate(
            [[1, 2, 3]], [Sampling(max_new_tokens=8, seed=5)]
        )
        assert replace(one, versions=()) == here
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()

"""GenerationClient with servers on this machine: `postlude serve` and `transformers serve`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from postlude import LanguageModel, export_hf, load_model, load_tokenizer, pack
from postlude import ranks as started
from postlude.generate.counter_rng import rng_key
from postlude.generate.distributed import ReplicatedGenerator
from postlude.generate.generator import Generator
from postlude.generate.protocol import AsyncRolloutEngine, Request
from postlude.generate.sampling_params import SamplingParams
from postlude.rollout.environments import Transcript
from postlude.serving.clients import server_pool
from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.text import TRANSFORMERS_SERVE
from postlude.serving.errors import ServerError

Reply = tuple[int, dict[str, str], Any]


class Server:
    """`server.reply` returns the reply to each request; `server.seen` are the request bodies."""

    def __init__(self) -> None:
        self.generator = Generator(load_model("tiny-dense"), load_tokenizer("tiny-dense"))
        self.reply: Callable[[dict[str, Any]], Reply] = self.complete
        self.seen: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                data = json.dumps({"data": [{"id": "tiny", "owned_by": "us"}]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:  # one at a time, so that replies can be counted
                    outer.seen.append({"path": self.path, **body})
                    outer.headers.append(dict(self.headers))
                    status, headers, answer = outer.reply(body)
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                with suppress(ConnectionError):  # a client that has given up is no mistake of the test
                    self.send_response(status)
                    for name, value in {"Content-Length": str(len(data)), **headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def forget(self) -> None:
        self.reply = self.complete
        self.seen.clear()
        self.headers.clear()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def complete(self, body: dict[str, Any], *, ids: bool = True) -> Reply:
        sampling = SamplingParams(
            max_new_tokens=body["max_tokens"],
            temperature=body["temperature"],
            top_p=body["top_p"],
            seed=body["seed"],
            stop=tuple(body.get("stop", ())),
            stop_tokens=tuple(body.get("stop_token_ids", ())),
            ignore_eos=body.get("ignore_eos", False),
        )
        choices = [
            {
                "index": index,
                "text": completion.text,
                "finish_reason": completion.finish_reason,
                "logprobs": {
                    "token_logprobs": completion.logprobs,
                    "tokens": [f"token_id:{token}" for token in completion.tokens],
                },
                **({"token_ids": completion.tokens} if ids else {}),
            }
            for index, completion in enumerate(self.generator.generate([body["prompt"]], sampling)[0])
        ]
        return 200, {}, {"object": "text_completion", "choices": choices[::-1]}


@pytest.fixture(scope="module")
def only_server() -> Iterator[Server]:
    with contextlib.closing(Server()) as server:
        yield server


@pytest.fixture
def server(only_server: Server) -> Server:
    only_server.forget()
    return only_server


def request_seed(seed: int, place: int, number: int) -> int:
    """Returns the seed sent for one completion of a call with one sampling for all prompts."""
    return Request((), SamplingParams(seed=rng_key(seed, place)), first_index=number).seed


PROMPTS = [list(b"over the wire"), list(b"x"), list(b"and back")]


@pytest.mark.parametrize("ids", [True, False], ids=["token_ids", "written tokens"])
def test_completions_equal_the_engine_behind_the_server(server: Server, ids: bool) -> None:
    server.reply = lambda body: server.complete(body, ids=ids)
    engine = GenerationClient(server.url, "tiny", api_key="secret", extra={"priority": 3})
    assert isinstance(engine, AsyncRolloutEngine)
    sampling = SamplingParams(max_new_tokens=6, temperature=0.9, seed=10, stop_tokens=(65,), ignore_eos=True)
    answered = engine.generate(PROMPTS, sampling, n=2)
    for place, (prompt, group) in enumerate(zip(PROMPTS, answered, strict=True)):
        for number, completion in enumerate(group):
            own_sampling = replace(sampling, seed=request_seed(10, place, number))
            assert [[completion]] == server.generator.generate([prompt], own_sampling)
    assert {body["path"] for body in server.seen} == {"/v1/completions"}
    assert {body["priority"] for body in server.seen} == {3}
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert server.seen[0]["top_k"] == 0  # vLLM would take the one of generation_config.json


def test_transient_failures_are_retried(server: Server) -> None:
    replies = iter([(503, {}, b"starting"), (429, {"Retry-After": "0"}, {"error": {"message": "busy"}})])
    server.reply = lambda body: next(replies, None) or server.complete(body)
    engine = GenerationClient(f"{server.url}/v1/", "tiny", backoff=0.0, retries=2)
    (group,) = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=3))
    assert len(group[0].tokens) == 3
    assert len(server.seen) == 3


def test_permanent_failures_include_the_servers_message(server: Server) -> None:
    server.reply = lambda body: (503, {}, {"error": {"message": "out of memory"}})
    with pytest.raises(
        ServerError, match=r"the only server does not reply any more: http://.* status 503: out of memory"
    ):
        GenerationClient(server.url, "tiny", backoff=0.0, retries=2).generate(PROMPTS[:1], SamplingParams())
    server.seen.clear()
    server.reply = lambda body: (400, {}, {"error": {"message": "model 'tiny' does not exist"}})
    with pytest.raises(ServerError, match="refused the request with status 400: model 'tiny' does not exist"):
        GenerationClient(server.url, "tiny").generate(PROMPTS[:1], SamplingParams())
    assert len(server.seen) == 2  # once more, since it may have been a passing one


def test_unreachable_server_and_timeout(server: Server) -> None:
    with pytest.raises(ServerError, match=r"any more: http://127\.0\.0\.1:9 cannot be reached: Connection refused"):
        GenerationClient("http://127.0.0.1:9", "tiny", backoff=0.0, retries=1).generate(PROMPTS[:1], SamplingParams())
    release = threading.Event()
    server.reply = lambda body: (200, {}, {"waited": release.wait(5)})
    with pytest.raises(ServerError, match=r"gave no reply within 0\.1 s"):
        GenerationClient(server.url, "tiny", timeout=0.1, retries=0).generate(PROMPTS[:1], SamplingParams())
    release.set()


def edit_reply(server: Server, **changes: Any) -> Callable[[dict[str, Any]], Reply]:
    def reply(body: dict[str, Any]) -> Reply:
        status, headers, answer = server.complete(body)
        answer["choices"][0] |= changes
        return status, headers, answer

    return reply


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"logprobs": None}, "gave no log-probs"),
        ({"token_ids": None, "logprobs": {"token_logprobs": [-1.0], "tokens": ["word"]}}, "no token ids"),
        ({"token_ids": [1]}, "gave 1 tokens but 3 log-probs"),
        ({"finish_reason": "abort"}, "for the reason 'abort'"),
    ],
)
def test_completions_that_cannot_be_trained_on_are_refused(
    server: Server, changes: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_pool, "BUSY_TIMEOUT", 0.2)  # an abort counts as busy
    server.reply = edit_reply(server, **changes)
    with pytest.raises(ServerError, match=sentence):
        GenerationClient(server.url, "tiny").generate(PROMPTS[:1], SamplingParams(max_new_tokens=3))


def test_malformed_replies_are_refused(server: Server) -> None:
    engine = GenerationClient(server.url, "tiny")
    server.reply = lambda body: (200, {}, b"<html>")
    with pytest.raises(ServerError, match="not JSON"):
        engine.generate(PROMPTS[:1], SamplingParams())
    server.reply = lambda body: (200, {}, {"choices": []})
    engine = GenerationClient(server.url, "tiny")  # the other one has left the server out
    with pytest.raises(ServerError, match="gave 0 choices where one was requested"):
        engine.generate(PROMPTS[:1], SamplingParams())
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        engine.generate([[1], []], SamplingParams())
    with pytest.raises(ValueError, match="is not a server's address"):
        GenerationClient("localhost:8000", "tiny")


class TextServer(Server):
    """Takes and returns only text, one completion per request, like `transformers serve`."""

    def complete(self, body: dict[str, Any], *, ids: bool = True) -> Reply:
        unknown = set(body) - {"model", "prompt", "max_tokens", "temperature", "top_p", "seed"}
        if unknown:
            return 422, {}, {"detail": f"Unexpected fields in the request: {sorted(unknown)}"}
        prompt = self.generator.tokenizer.encode(body["prompt"])
        _, _, answer = super().complete(body | {"prompt": prompt})
        for choice in answer["choices"]:
            del choice["logprobs"], choice["token_ids"]
        return 200, {}, answer | {"usage": {"prompt_tokens": len(prompt)}}


@pytest.fixture(scope="module")
def only_text_server() -> Iterator[TextServer]:
    with contextlib.closing(TextServer()) as server:
        yield server


@pytest.fixture
def text_server(only_text_server: TextServer) -> TextServer:
    only_text_server.forget()
    return only_text_server


def test_text_is_encoded_only_when_asked_for(text_server: TextServer) -> None:
    generator, sampling = text_server.generator, SamplingParams(max_new_tokens=4, temperature=0.0, seed=10)
    prompts = [list(b"a line of text"), list(b"see")]  # whose answers are letters
    with pytest.raises(ServerError, match=r"status 422: Unexpected fields .*; a text-only server needs api=.text"):
        GenerationClient(text_server.url, "tiny").generate(prompts[:1], sampling)
    text_server.seen.clear()
    engine = GenerationClient(text_server.url, "tiny", api="text", tokenizer=generator.tokenizer)
    answered, expected = engine.generate(prompts, sampling, n=2), generator.generate(prompts, sampling, n=2)
    assert answered == [
        [replace(completion, logprobs=[], sampled_logprobs=[]) for completion in group] for group in expected
    ]
    expected_seeds = {request_seed(10, place, number) for place in range(2) for number in range(2)}  # one an answer
    assert {body["seed"] for body in text_server.seen} == expected_seeds
    with pytest.raises(ValueError, match="4 tokens come with 0 log-probs"):  # they cannot be trained on by mistake
        Transcript(prompts[0]).add_completion(answered[0][0].tokens, answered[0][0].logprobs)


def test_text_ends_with_the_end_of_sequence_token(text_server: TextServer) -> None:
    tokenizer = text_server.generator.tokenizer
    text_server.reply = lambda body: (200, {}, {"choices": [{"text": "so", "finish_reason": "stop"}]})
    engine = GenerationClient(text_server.url, "tiny", api="text", tokenizer=tokenizer)
    ((completion,),) = engine.generate(PROMPTS[:1], SamplingParams())
    assert (completion.tokens, completion.text, completion.finish_reason) == (
        [*b"so", tokenizer.eos_token_id],
        "so",
        "stop",
    )


class BosTokenizer:
    """A byte tokenizer that begins every text with token 256, as Llama's does with its own BOS."""

    eos_token_id: int | None = 257

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join("<s>" if token == 256 else chr(token) for token in token_ids)

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        start = [256] if add_special_tokens else []
        return {"input_ids": start + [token for part in text.split("<s>") for token in (256, *part.encode())][1:]}


def test_prompt_text_is_tokenized_back_to_the_same_tokens(text_server: TextServer) -> None:
    reply = {"choices": [{"text": "<s>", "finish_reason": "length"}]}
    text_server.reply = lambda body: (200, {}, reply)
    engine = GenerationClient(text_server.url, "tiny", api="text", tokenizer=BosTokenizer())
    ((completion,),) = engine.generate([[256, *b"hi", 256]], SamplingParams())
    assert text_server.seen[0]["prompt"] == "hi<s>"
    assert completion.tokens == [256]
    with pytest.raises(ValueError, match="a prompt has 2 tokens that its text does not encode to"):
        engine.generate([[256], [*b"hi"]], SamplingParams())
    reply["usage"] = {"prompt_tokens": 4}
    with pytest.raises(ServerError, match="read 4 tokens in a prompt that has 3; give the client the tokenizer"):
        engine.generate([[256, *b"hi"]], SamplingParams())


def test_requests_not_expressible_as_text_are_refused(text_server: TextServer) -> None:
    tokenizer = BosTokenizer()
    engine = GenerationClient(text_server.url, "tiny", api="text", tokenizer=tokenizer)
    for ends in (SamplingParams(stop=("\n",)), SamplingParams(stop_tokens=(10,))):
        with pytest.raises(ValueError, match=r"a request has stop=.* does not report which of them ended"):
            engine.generate([[256]], ends)
    text_server.reply = lambda body: (200, {}, {"choices": [{"message": {}, "finish_reason": "stop"}]})
    with pytest.raises(ServerError, match="gave no text"):
        engine.generate([[256]], SamplingParams())
    tokenizer.eos_token_id = None
    with pytest.raises(ValueError, match="has no eos_token_id"):
        GenerationClient(text_server.url, "tiny", api="text", tokenizer=tokenizer)


LEARNED = [("Over the wire", " and back."), ("x", " marks it"), ("Un café,", " s'il vous plaît !")]


def memorising_model(tokenizer: Any) -> LanguageModel:
    """A model trained to continue with `LEARNED`, and to stop there."""
    model = load_model("tiny-dense")
    (microbatch,) = pack([tokenizer.encode(f"{begin}{end}<|end|>") for begin, end in LEARNED], budget=256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        model(microbatch, targets=True).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@contextlib.contextmanager
def transformers_serve(directory: Path, home: Path) -> Iterator[str]:
    """Yields the address of a `transformers serve` of the model in `directory`, which ends with the context."""
    command = shutil.which("transformers", path=str(Path(sys.executable).parent))
    assert command is not None, "transformers came without its command"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", home / "serve.log"
    options = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "OMP_NUM_THREADS": "1"}
    with log.open("w") as written:
        process = subprocess.Popen(
            [command, "serve", str(directory), *options], env=environment, stdout=written, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"transformers serve did not come up:\n{log.read_text()[-3000:]}", pytrace=False)
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_submitted_completions_equal_generate(server: Server) -> None:
    sampling = [SamplingParams(max_new_tokens=4, seed=seed, ignore_eos=True) for seed in (7, 30)]
    remote, generator = GenerationClient(server.url, "tiny"), server.generator
    with started(device="cpu"):
        for engine in (remote, ReplicatedGenerator(generator.model, generator.tokenizer)):
            check_submitted(engine, sampling, remote.generate if engine is remote else generator.generate)
    server.reply = lambda body: (400, {}, {"error": "no room"})
    request_id = remote.submit(Request((1,), sampling[0]))
    (done,) = remote.poll(timeout=None)
    assert (done.request_id, done.index, done.completion) == (request_id, 0, None)
    assert "refused the request with status 400: no room" in str(done.error)


def check_submitted(engine: Any, sampling: list[SamplingParams], generate: Callable[..., Any]) -> None:
    assert isinstance(engine, AsyncRolloutEngine)
    expected = generate(PROMPTS[:2], sampling, n=2)
    request_ids = [
        engine.submit(Request(tuple(prompt), params, 2)) for prompt, params in zip(PROMPTS, sampling, strict=False)
    ]
    results: dict[tuple[int, int], Any] = {}
    while len(results) < 4:
        results |= {(done.request_id, done.index): done.completion for done in engine.poll(timeout=None)}
    assert [[results[request_id, number] for number in range(2)] for request_id in request_ids] == expected
    assert engine.poll() == []
    second, third = (engine.submit(Request(tuple(PROMPTS[0]), sampling[0], 1, first)) for first in (1, 2))
    alone: dict[int, Any] = {}
    while len(alone) < 2:
        alone |= {done.request_id: done.completion for done in engine.poll(timeout=None)}
    assert alone[second].tokens == expected[0][1].tokens
    assert alone[third].tokens == generate(PROMPTS[:1], sampling[:1], first_index=2)[0][0].tokens
    assert alone[third].tokens not in [completion.tokens for completion in expected[0]]


@pytest.mark.thorough  # starts a real server; what it answers is shown here by one of our own
def test_transformers_serve_equals_the_native_generator(tmp_path: Path) -> None:
    """Greedy completions on the same weights."""
    pytest.importorskip("fastapi", reason="transformers[serving] is not installed")
    tokenizer = load_tokenizer("tiny-dense")
    model = memorising_model(tokenizer)
    directory = export_hf(model, tmp_path / "model")
    tokenizer.save_pretrained(directory)
    prompts = [tokenizer.encode(begin) for begin, _ in LEARNED]
    with transformers_serve(directory, tmp_path) as url:
        engine = GenerationClient(
            url, str(directory), api="text", tokenizer=tokenizer, extra=TRANSFORMERS_SERVE, concurrency=1
        )
        for limit in (40, 6):  # all end by themselves, none does
            greedy = SamplingParams(max_new_tokens=limit, temperature=0.0)
            answered = engine.generate(prompts, greedy, n=2)
            expected = Generator(model, tokenizer).generate(prompts, greedy, n=2)
            assert answered == [
                [replace(completion, logprobs=[], sampled_logprobs=[]) for completion in group] for group in expected
            ]
            assert {completion.finish_reason for group in answered for completion in group} == {
                "stop" if limit == 40 else "length"
            }

        drawn = SamplingParams(max_new_tokens=6, temperature=3.0, seed=5)
        (group,) = engine.generate(prompts[:1], drawn, n=4)
        assert len({completion.text for completion in group}) == 4
        assert engine.generate(prompts[:1], drawn, n=4) == [group]
        with pytest.raises(ServerError, match=r"status 422: Unexpected fields in the request: \{'top_k'\}"):
            engine.generate(prompts[:1], SamplingParams(top_k=3))
        # It has no ids of the tokens it sampled to give, and an engine that was not told to do without says so.
        with pytest.raises(ServerError, match=r"needs api=.text"):
            GenerationClient(url, str(directory), api="openai").generate(prompts[:1], drawn)

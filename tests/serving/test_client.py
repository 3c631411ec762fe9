"""GenerationClient with servers on this machine."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from postlude import load_model, load_tokenizer
from postlude import ranks as started
from postlude.generate.counter_rng import rng_key
from postlude.generate.distributed import ReplicatedGenerator
from postlude.generate.generator import Generator
from postlude.generate.protocol import AsyncRolloutEngine, Request
from postlude.generate.sampling_params import SamplingParams
from postlude.serving.clients import server_pool
from postlude.serving.clients.client import GenerationClient
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


def test_a_server_of_text_alone_is_refused(server: Server) -> None:
    server.reply = lambda body: (422, {}, {"detail": "Unexpected fields in the request: ['return_token_ids']"})
    with pytest.raises(ServerError, match=r"status 422: Unexpected fields .*; a server must take and return token ids"):
        GenerationClient(server.url, "tiny").generate(PROMPTS[:1], SamplingParams())


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


def test_a_cancelled_request_closes_its_connection_and_has_no_result(server: Server) -> None:
    held = threading.Event()
    server.reply = lambda body: (held.wait(30), (400, {}, {"error": "too late"}))[1]
    remote = GenerationClient(server.url, "tiny")
    cancelled = remote.submit(Request((1,), SamplingParams(), n=2))
    remote.cancel(cancelled)
    held.set()
    later = remote.submit(Request((1,), SamplingParams()))
    assert [done.request_id for done in remote.poll(timeout=None)] == [later]
    remote.cancel(later)
    assert remote.poll(0.1) == []


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

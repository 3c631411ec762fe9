"""The HTTP engine against a real server on this machine, which answers with the native generator."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from postlude import load_model, load_tokenizer
from postlude.rollout.generator import Generator
from postlude.rollout.http import HTTPEngine, ServerError
from postlude.rollout.protocol import RolloutEngine
from postlude.rollout.sampling import Sampling

Reply = tuple[int, dict[str, str], Any]


class Server:
    """`server.reply` decides the answer to each request; `server.seen` are their bodies."""

    def __init__(self) -> None:
        self.generator = Generator(load_model("tiny-dense"), load_tokenizer("tiny-dense"))
        self.reply: Callable[[dict[str, Any]], Reply] = self.complete
        self.seen: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:  # one at a time, so that replies can be counted
                    outer.seen.append({"path": self.path, **body})
                    outer.headers.append(dict(self.headers))
                    status, headers, answer = outer.reply(body)
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
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

    def complete(self, body: dict[str, Any], *, ids: bool = True) -> Reply:
        sampling = Sampling(
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
                "text": one.text,
                "finish_reason": one.finish_reason,
                "logprobs": {"token_logprobs": one.logprobs, "tokens": [f"token_id:{token}" for token in one.tokens]},
                **({"token_ids": one.tokens} if ids else {}),
            }
            for index, one in enumerate(self.generator.generate([body["prompt"]], sampling, n=body["n"])[0])
        ]
        return 200, {}, {"object": "text_completion", "choices": choices[::-1]}


@pytest.fixture(scope="module")
def only_server() -> Iterator[Server]:
    server = Server()
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture
def server(only_server: Server) -> Server:
    only_server.reply = only_server.complete
    only_server.seen.clear()
    only_server.headers.clear()
    return only_server


PROMPTS = [list(b"over the wire"), list(b"x"), list(b"and back")]


@pytest.mark.parametrize("ids", [True, False], ids=["token_ids", "written tokens"])
def test_answers_are_those_of_the_engine_behind_it(server: Server, ids: bool) -> None:
    server.reply = lambda body: server.complete(body, ids=ids)
    engine = HTTPEngine(server.url, "tiny", api_key="secret", extra={"priority": 3})
    assert isinstance(engine, RolloutEngine)
    sampling = Sampling(max_new_tokens=6, temperature=0.9, seed=10, stop_tokens=(65,), ignore_eos=True)
    answered = engine.generate(PROMPTS, sampling, n=2)
    for place, (prompt, group) in enumerate(zip(PROMPTS, answered, strict=True)):
        own = Sampling(**{**vars(sampling), "seed": 10 + place})
        (expected,) = server.generator.generate([prompt], own, n=2)
        assert group == expected
    assert {body["path"] for body in server.seen} == {"/v1/completions"}
    assert {body["priority"] for body in server.seen} == {3}
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert "top_k" not in server.seen[0]


def test_passing_failures_are_tried_again(server: Server) -> None:
    replies = iter([(503, {}, b"starting"), (429, {"Retry-After": "0"}, {"error": {"message": "busy"}})])
    server.reply = lambda body: next(replies, None) or server.complete(body)
    engine = HTTPEngine(f"{server.url}/v1/", "tiny", backoff=0.0, retries=2)
    (group,) = engine.generate(PROMPTS[:1], Sampling(max_new_tokens=3))
    assert len(group[0].tokens) == 3
    assert len(server.seen) == 3


def test_lasting_failures_say_what_the_server_said(server: Server) -> None:
    server.reply = lambda body: (503, {}, {"error": {"message": "out of memory"}})
    with pytest.raises(
        ServerError, match="did not answer in 3 attempts; the last failed with status 503: out of memory"
    ):
        HTTPEngine(server.url, "tiny", backoff=0.0, retries=2).generate(PROMPTS[:1], Sampling())
    server.seen.clear()
    server.reply = lambda body: (400, {}, {"error": {"message": "model 'tiny' does not exist"}})
    with pytest.raises(ServerError, match="refused the request with status 400: model 'tiny' does not exist"):
        HTTPEngine(server.url, "tiny").generate(PROMPTS[:1], Sampling())
    assert len(server.seen) == 1  # asking again would not help


def test_nobody_there_and_no_answer_in_time(server: Server) -> None:
    with pytest.raises(ServerError, match=r"did not answer in 2 attempts; the last failed with .*refused"):
        HTTPEngine("http://127.0.0.1:9", "tiny", backoff=0.0, retries=1).generate(PROMPTS[:1], Sampling())
    release = threading.Event()
    server.reply = lambda body: (200, {}, {"waited": release.wait(5)})
    with pytest.raises(ServerError, match="the last failed with timed out"):
        HTTPEngine(server.url, "tiny", timeout=0.1, retries=0).generate(PROMPTS[:1], Sampling())
    release.set()


def spoiled(server: Server, **changes: Any) -> Callable[[dict[str, Any]], Reply]:
    def reply(body: dict[str, Any]) -> Reply:
        status, headers, answer = server.complete(body)
        answer["choices"][0] |= changes
        return status, headers, answer

    return reply


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"logprobs": None}, "gave no log-probs for prompt 0"),
        ({"token_ids": None, "logprobs": {"token_logprobs": [-1.0], "tokens": ["word"]}}, "no token ids for prompt 0"),
        ({"token_ids": [1]}, "gave 1 tokens but 3 log-probs for prompt 0"),
        ({"finish_reason": "abort"}, "for the reason 'abort'"),
    ],
)
def test_answers_that_cannot_be_trained_on_are_refused(server: Server, changes: dict[str, Any], sentence: str) -> None:
    server.reply = spoiled(server, **changes)
    with pytest.raises(ServerError, match=sentence):
        HTTPEngine(server.url, "tiny").generate(PROMPTS[:1], Sampling(max_new_tokens=3))


def test_other_nonsense_is_refused(server: Server) -> None:
    engine = HTTPEngine(server.url, "tiny")
    server.reply = lambda body: (200, {}, b"<html>")
    with pytest.raises(ServerError, match="not JSON"):
        engine.generate(PROMPTS[:1], Sampling())
    server.reply = lambda body: (200, {}, {"choices": []})
    with pytest.raises(ServerError, match="gave 0 choices for prompt 0, which asked for 2"):
        engine.generate(PROMPTS[:1], Sampling(), n=2)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        engine.generate([[1], []], Sampling())
    with pytest.raises(ValueError, match="is no address of a server"):
        HTTPEngine("localhost:8000", "tiny")


@pytest.mark.slow
def test_against_transformers_serve(tmp_path) -> None:
    """transformers' own server, where its extra dependencies are installed."""
    import shutil
    import socket
    import subprocess
    import sys
    import time
    from pathlib import Path

    for needed in ("fastapi", "uvicorn"):
        pytest.importorskip(needed, reason="transformers serve needs the extra transformers[serving]")
    from postlude import export_hf

    directory = export_hf(load_model("tiny-dense"), tmp_path / "model")
    load_tokenizer("tiny-dense").save_pretrained(directory)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = shutil.which("transformers", path=str(Path(sys.executable).parent))
    process = subprocess.Popen([command, "serve", "--host", "127.0.0.1", "--port", str(port)])
    try:
        for _ in range(120):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(1)
        engine = HTTPEngine(f"http://127.0.0.1:{port}", str(directory), retries=0)
        # It has no ids of the tokens it sampled to give, and the engine says so rather than guess them.
        with pytest.raises(ServerError):
            engine.generate(PROMPTS[:1], Sampling(max_new_tokens=3, temperature=0.0))
    finally:
        process.terminate()
        process.wait(30)

"""Misbehaving servers, with a healthy one or alone: no wrong sample, and no run ends that could continue."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from postlude.generate.protocol import Completion, Request
from postlude.generate.sampling_params import SamplingParams
from postlude.serving.clients import connection, server_pool
from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.remote_server import RemoteServer
from postlude.serving.clients.server_pool import ServerPool
from postlude.serving.errors import ServerError
from tests.conftest import PATIENCE
from tests.serving.fake_vllm import FakeVLLM, deterministic_completion

VOCABULARY = 251  # what `deterministic_completion` draws from
REQUESTS = [Request((place, 2 * place + 1), SamplingParams(max_new_tokens=3, seed=place)) for place in range(12)]
GENERATE = "/inference/v1/generate"
Fault = Callable[["Misbehaving", BaseHTTPRequestHandler, Any], None]


class Misbehaving(FakeVLLM):
    """Applies `fault` to the replies of some requests, by number from 1; to all if none are given."""

    def __init__(self, fault: Fault, wrong: tuple[int, ...] = ()) -> None:
        self.fault, self.wrong, self.number = fault, wrong, 0
        self.ended = threading.Event()
        super().__init__()

    def handle(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        if handler.path == GENERATE and body:
            with self.lock:
                self.number += 1
                number = self.number
            if not self.wrong or number in self.wrong:
                with suppress(OSError):
                    self.fault(self, handler, body)
                return
        super().handle(handler, body)

    def close(self) -> None:
        self.ended.set()
        super().close()


def replies_with(status: int, body: bytes = b'{"error": "no"}', **headers: str) -> Fault:
    """Replies with another status."""

    def fault(server: Misbehaving, handler: BaseHTTPRequestHandler, _: Any) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return fault


def raw(text: bytes, *, after: Callable[[BaseHTTPRequestHandler], None] = lambda handler: None) -> Fault:
    """Sends bytes that are no complete reply, and closes the connection."""

    def fault(server: Misbehaving, handler: BaseHTTPRequestHandler, _: Any) -> None:
        handler.wfile.write(text)
        handler.wfile.flush()
        after(handler)
        handler.close_connection = True

    return fault


def edits(**changes: Any) -> Fault:
    """Sends a valid reply with some fields changed; a function changes the previous value."""

    def fault(server: Misbehaving, handler: BaseHTTPRequestHandler, body: Any) -> None:
        answer = server.choice(body)
        (choice,) = answer["choices"]
        for name, value in changes.items():
            choice[name] = value(choice[name]) if callable(value) else value
        replies_with(200, json.dumps(answer).encode())(server, handler, body)

    return fault


def logprobs(change: Callable[[list[Any]], list[Any]]) -> Fault:
    return edits(logprobs=lambda stated: {"content": change(stated["content"])})


def resets(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def drips(server: Misbehaving, handler: BaseHTTPRequestHandler, _: Any) -> None:
    """Sends one byte at a time, for ever."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
    while not server.ended.wait(0.1):
        handler.wfile.write(b"x")
        handler.wfile.flush()


def hangs(server: Misbehaving, handler: BaseHTTPRequestHandler, _: Any) -> None:
    server.ended.wait(60)


def floods(server: Misbehaving, handler: BaseHTTPRequestHandler, _: Any) -> None:
    """Sends a body of unknown length that does not end."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while not server.ended.is_set():
        handler.wfile.write(b" " * (1 << 16))


FAULTS: dict[str, Fault] = {
    "400": replies_with(400),
    "401": replies_with(401),
    "403": replies_with(403),
    "404": replies_with(404, b'{"error": "the model does not exist"}'),
    "413": replies_with(413),
    "422": replies_with(422),
    "429": replies_with(429),
    "429 for a second": replies_with(429, Retry_After="1"),
    "429 for an hour": replies_with(429, Retry_After="3600"),
    "500": replies_with(500, b"Internal Server Error"),
    "502 of a proxy": replies_with(502, b"<html>Bad Gateway</html>"),
    "503": replies_with(503),
    "503 for an hour": replies_with(503, Retry_After="3600"),
    "503 until a date": replies_with(503, Retry_After="Wed, 21 Oct 2037 07:28:00 GMT"),
    "503 with a superscript": replies_with(503, Retry_After="\u00b2"),
    "moved": replies_with(301, Location="http://localhost:1/"),
    "status 999": replies_with(999),
    "html": replies_with(200, b"<html>maintenance</html>"),
    "no body": replies_with(200, b""),
    "json cut short": replies_with(200, b'{"choices": [{"token_ids": [1'),
    "json nested deep": replies_with(200, b"[" * 100_000),
    "json of another shape": replies_with(200, b"[1, 2, 3]"),
    "not utf-8": replies_with(200, b'{"choices": "\xff\xfe"}'),
    "body cut short": raw(b'HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n{"choi'),
    "no http": raw(b"SSH-2.0-OpenSSH_9.7\r\n"),
    "closed": raw(b""),
    "reset": raw(b"HTTP/1.1 200 OK\r\n", after=resets),
    "huge": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1099511627776\r\n\r\n{"),
    "huge chunk": raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n{"),
    "negative length": raw(b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}"),
    "many headers": raw(b"HTTP/1.1 200 OK\r\n" + b"".join(b"X%d: y\r\n" % number for number in range(1000))),
    "flood": floods,
    "no choices": replies_with(200, b'{"choices": []}'),
    "two choices": lambda server, handler, body: replies_with(
        200, json.dumps({"choices": server.choice(body)["choices"] * 2}).encode()
    )(server, handler, body),
    "no tokens": edits(token_ids=[], logprobs={"content": []}, finish_reason="stop"),
    "more tokens": edits(
        token_ids=lambda tokens: tokens * 50, logprobs=lambda stated: {"content": stated["content"] * 50}
    ),
    "negative token": edits(token_ids=lambda tokens: [*tokens[:-1], -3]),
    "token of the vocabulary's size": edits(token_ids=lambda tokens: [VOCABULARY, *tokens[1:]]),
    "huge token": edits(token_ids=lambda tokens: [10**30, *tokens[1:]]),
    "half a token": edits(token_ids=lambda tokens: [tokens[0] + 0.5, *tokens[1:]]),
    "tokens as text": edits(token_ids=lambda tokens: ["a", *tokens[1:]]),
    "no token ids": edits(token_ids=None),
    "fewer log-probs": logprobs(lambda content: content[:-1]),
    "no log-probs": edits(logprobs=None),
    "log-prob NaN": logprobs(lambda content: [{"logprob": float("nan")}, *content[1:]]),
    "log-prob -inf": logprobs(lambda content: [{"logprob": -float("inf")}, *content[1:]]),
    "log-prob above 0": logprobs(lambda content: [{"logprob": 3.0}, *content[1:]]),
    "log-prob null": logprobs(lambda content: [{"logprob": None}, *content[1:]]),
    "log-prob of many digits": logprobs(lambda content: [{"logprob": -(10**400)}, *content[1:]]),
    "abort": edits(finish_reason="abort"),
    "no reason": edits(finish_reason=None),
    "other weights": edits(weight_versions=[{"version": "other"}]),
}
SLOW: dict[str, Fault] = {"hang": hangs, "slow loris": drips}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the timeouts of a run for a test."""
    monkeypatch.setattr(server_pool, "MAX_RETRY_AFTER", 0.05)
    monkeypatch.setattr(server_pool, "BUSY_TIMEOUT", 0.2)
    monkeypatch.setattr(connection, "MAX_REPLY", 1 << 22)


def check_all_completions(engine: GenerationClient) -> list[Completion | Exception]:
    """Every request gets its own completion or an error; none is lost, repeated or wrong."""
    request_ids = [engine.submit(request) for request in REQUESTS]
    results: dict[int, Completion | Exception] = {}
    while len(results) < len(request_ids):
        for done in engine.poll(PATIENCE):
            assert done.request_id not in results
            outcome = done.completion or done.error
            assert outcome is not None
            results[done.request_id] = outcome
    for request_id, request in zip(request_ids, REQUESTS, strict=True):
        if isinstance(outcome := results[request_id], Completion):
            body = {"token_ids": request.prompt, "sampling_params": {"seed": request.seed, "max_tokens": 3}}
            assert (outcome.tokens, outcome.logprobs) == deterministic_completion(body)
    return [results[request_id] for request_id in request_ids]


def connect(stack: ExitStack, *servers: FakeVLLM, slow: bool = False, **settings: Any) -> GenerationClient:
    usual = {"backoff": 0.01, "retries": 2, "concurrency": 4, "outage_timeout": PATIENCE, "vocab_size": VOCABULARY}
    limit = {"timeout": 2.0 if slow else PATIENCE}
    return stack.enter_context(
        closing(GenerationClient([server.url for server in servers], **usual | limit | settings))
    )


@pytest.mark.parametrize("moment", ["always", "sometimes"])
@pytest.mark.parametrize("fault", [*FAULTS, *SLOW])
def test_with_a_healthy_server_every_completion_is_correct(fault: str, moment: str) -> None:
    wrong = () if moment == "always" else (1, 4)
    with ExitStack() as stack:
        bad = stack.enter_context(closing(Misbehaving((FAULTS | SLOW)[fault], wrong)))
        engine = connect(stack, bad, stack.enter_context(closing(FakeVLLM())), slow=fault in SLOW)
        engine.connect()  # both, so that both are asked
        assert all(isinstance(outcome, Completion) for outcome in check_all_completions(engine))
        assert bad.number


@pytest.mark.parametrize("fault", [*FAULTS, *SLOW])
def test_the_only_server_is_retried_until_its_completion_is_valid(fault: str) -> None:
    with ExitStack() as stack:
        bad = stack.enter_context(closing(Misbehaving((FAULTS | SLOW)[fault], wrong=(1, 4))))
        engine = connect(stack, bad, slow=fault in SLOW)
        assert all(isinstance(outcome, Completion) for outcome in check_all_completions(engine))
        assert bad.number > len(REQUESTS)


@pytest.mark.parametrize("fault", [*FAULTS, "hang"])
def test_only_server_that_always_fails_is_named_with_its_reason(fault: str) -> None:
    with ExitStack() as stack:
        bad = stack.enter_context(closing(Misbehaving((FAULTS | SLOW)[fault])))
        engine = connect(stack, bad, outage_timeout=0.2, timeout=0.3 if fault in SLOW else PATIENCE)
        for outcome in check_all_completions(engine):
            assert isinstance(outcome, ServerError)
            assert bad.url in str(outcome)


def test_a_reply_that_breaks_off_is_counted_on_a_connection_that_was_used_before() -> None:
    """Only one that the server closed before it replied is replaced without notice."""
    with ExitStack() as stack:
        bad = stack.enter_context(closing(Misbehaving(FAULTS["body cut short"], wrong=(2,))))
        engine = connect(stack, bad)
        for request in REQUESTS[:2]:
            engine.generate([request.prompt], request.sampling)
        counts = engine.take_counts()
        assert (bad.number, counts.retried, counts.failed) == (3, 1, 1)


@pytest.mark.parametrize("key", ["key\n", "key\u2013"])
def test_a_key_that_no_header_can_have_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="the header Authorization for http://a:1 has a line break or a character"):
        GenerationClient("http://a:1", api_key=key)


def test_a_host_that_is_no_name_ends_the_run() -> None:
    with closing(GenerationClient("http://a..b:1", retries=0)) as engine, pytest.raises(ServerError, match=r"a\.\.b:1"):
        engine.connect()


def test_concurrency_is_reduced_to_what_a_busy_server_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It replies 429 above two concurrent requests; each such reply lowers the limit."""
    under_way, refused = 0, 0
    lock = threading.Lock()

    def limits(server: Misbehaving, handler: BaseHTTPRequestHandler, body: Any) -> None:
        nonlocal under_way, refused
        with lock:
            under_way += 1
            running_now = under_way
            refused += running_now > 2
        try:
            if running_now > 2:
                replies_with(429)(server, handler, body)
                return
            time.sleep(0.01)
            FakeVLLM.handle(server, handler, body)
        finally:
            with lock:
                under_way -= 1

    with ExitStack() as stack:
        bad = stack.enter_context(closing(Misbehaving(limits)))
        engine = connect(stack, bad, retries=0, concurrency=12)
        assert all(isinstance(outcome, Completion) for outcome in check_all_completions(engine))
        assert engine.take_counts().failed == 0
        assert engine.pool.servers[0].load.capacity < 12
    assert refused


def test_an_outage_is_waited_for_and_logged_once(caplog) -> None:
    """For longer than the allowed failures in a row; without outage_timeout the run fails."""
    with closing(FakeVLLM()) as server:
        port = server.port
    attempts: list[str] = []
    with ExitStack() as stack, caplog.at_level(logging.WARNING, "postlude"):
        with pytest.raises(ServerError, match="the only server does not reply any more"):
            connect(stack, server, outage_timeout=0.0).generate([[1]], SamplingParams(max_new_tokens=3))
        engine = connect(stack, server, outage_timeout=PATIENCE)
        caplog.clear()
        meet = engine.pool.servers[0].connect

        async def counted(weights: Any) -> None:
            attempts.append("")
            await meet(weights)

        engine.pool.servers[0].connect = counted
        request_id = engine.submit(REQUESTS[0])
        while len(attempts) < 8:  # of which 3 are allowed in a row
            time.sleep(0.01)
        with closing(FakeVLLM(port=port)):
            (done,) = engine.poll(PATIENCE)
            logged = caplog.text  # before the server is gone once more
    assert (done.request_id, done.error) == (request_id, None)
    assert logged.count("Waiting for one of them, up to 300 s more (rollout.outage_timeout)") == 1
    assert logged.count("It is unavailable now") == 1


def test_a_retry_after_of_an_hour_is_logged_and_shortened(caplog) -> None:
    with ExitStack() as stack, caplog.at_level(logging.WARNING, "postlude"):
        bad = stack.enter_context(closing(Misbehaving(FAULTS["503 for an hour"], wrong=(1,))))
        assert all(
            isinstance(outcome, Completion)
            for outcome in check_all_completions(connect(stack, bad, outage_timeout=0.0))
        )
    assert "asks to wait 3600 s. It is tried again after 0.05 s." in caplog.text


def test_a_server_that_asks_for_time_gets_no_request_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "MAX_RETRY_AFTER", 2.0)
    with ExitStack() as stack:
        server = stack.enter_context(closing(Misbehaving(replies_with(503, Retry_After="1"), wrong=(1,))))
        client = connect(stack, server, backoff=0.01)
        start = time.monotonic()
        assert isinstance(client.generate([[1, 2]], SamplingParams(max_new_tokens=3))[0][0], Completion)
        assert time.monotonic() - start >= 1.0


@pytest.mark.parametrize("servers", [1, 4])
def test_scheduling_cost_is_linear_in_the_number_of_requests(servers: int, monkeypatch) -> None:
    """The number of server lookups per request is the same for 8 times as many requests."""

    def looks(count: int) -> float:
        seen = 0
        has_capacity = ServerPool._has_capacity

        def counted(pool: ServerPool, server: RemoteServer) -> bool:
            nonlocal seen
            seen += 1
            return has_capacity(pool, server)

        async def answer(request: Request) -> Completion:
            await asyncio.sleep(0)
            return Completion([1], [0.0], [0.0], "stop")

        async def all_of_them() -> None:
            own_calls = [
                RemoteServer(f"http://h:{1 + place}", lambda _: None, "m", headers={}, timeout=5)
                for place in range(servers)
            ]
            for server in own_calls:
                server.state, server.generate = "up", answer
            pool = ServerPool(own_calls, retries=5, backoff=0.5, concurrency=4)
            await asyncio.gather(*(pool.generate(REQUESTS[0]) for _ in range(count)))

        with monkeypatch.context() as patched:
            patched.setattr(ServerPool, "_has_capacity", counted)
            asyncio.run(all_of_them())
        return seen / count

    assert looks(1600) < 1.5 * looks(200)

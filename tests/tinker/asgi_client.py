"""Calls an ASGI application in this process: a Tinker server with a fake backend."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from postlude.serving.http.access import Keys
from postlude.tinker.app import PROTOBUF, TinkerApp
from postlude.tinker.limits import Limits
from postlude.tinker.openai import OpenAIApp
from postlude.tinker.service import TinkerService
from postlude.tinker.state import StateDirectory
from postlude.tinker.wire import ForwardBackwardRequest

from .fake_backend import BASE, FakeBackend

KEY = "tml-one"


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def request(
    app: Any, method: str, path: str, body: Any = None, *, key: str | None = KEY, headers: dict[str, str] | None = None
) -> Reply:
    """Sends one request; `body` is bytes, or a value that becomes JSON."""
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    sent = {"content-type": "application/json", "host": "localhost"} | (headers or {})
    if key is not None:
        sent["x-api-key"] = key
    route, _, query = path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": route,
        "raw_path": route.encode(),
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
        "server": ("server", 80),
        "client": ("client", 1),
    }
    reply = Reply(0, {}, b"")
    pieces = [raw[start : start + 65536] for start in range(0, len(raw), 65536)] or [b""]

    async def receive() -> dict[str, Any]:
        if not pieces:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        elif message["type"] == "http.response.body":
            reply.body += message.get("body", b"")

    await app(scope, receive, send)
    return reply


def pass_body(model_id: str, seq_id: int, *weights: float, loss: str = "cross_entropy", **fields: Any) -> bytes:
    """Returns a forward_backward request with one two-token datum per weight; each token has half of the weight."""
    message = ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn=loss, **fields)
    for weight in weights:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array([1, 2], "<i4").tobytes()
        for name, values in (("target_tokens", np.array([2, 3], "<i8")), ("weights", np.full(2, weight / 2, "<f4"))):
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = values.tobytes(), 2 if name == "target_tokens" else 1
            tensor.shape.extend(values.shape)
    raw: bytes = message.SerializeToString()
    return raw


class Client:
    """Sends what the real client sends, without its retries."""

    def __init__(self, app: Any, key: str = KEY) -> None:
        self.app, self.key = app, key
        self.session = ""

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await request(self.app, "POST", f"/api/v1/{path}", body, key=self.key, headers=named)

    async def get(self, path: str) -> Reply:
        return await request(self.app, "GET", f"/api/v1/{path}", key=self.key)

    async def open(self) -> Client:
        self.session = (await self.post("create_session", {"tags": [], "sdk_version": "0.36.0"})).json["session_id"]
        return self

    async def submit(self, path: str, body: Any) -> str:
        """Submits a request and returns its id."""
        headers = {"content_type": PROTOBUF} if isinstance(body, bytes) else {}
        reply = await self.post(path, body, **headers)
        assert reply.status == 200, reply.body
        request_id: str = reply.json["request_id"]
        return request_id

    async def result(self, request_id: str) -> Any:
        """Fetches a result: JSON, or the bytes of a protobuf message."""
        while (reply := await self.post("retrieve_future", {"request_id": request_id})).status == 408:
            pass
        assert reply.status == 200, reply.body
        return reply.body if reply.headers["content-type"] == PROTOBUF else reply.json

    async def call(self, path: str, body: Any) -> Any:
        return await self.result(await self.submit(path, body))

    async def create_model(self, number: int = 0, base: str = BASE) -> str:
        body = {"session_id": self.session, "model_seq_id": number, "base_model": base, "lora_config": {"rank": 4}}
        result = await self.call("create_model", body)
        assert "model_id" in result, result
        model_id: str = result["model_id"]
        return model_id

    async def step(self, model_id: str, seq_id: int, rate: float = 1.0) -> str:
        adam = {"learning_rate": rate, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
        return await self.submit("optim_step", {"model_id": model_id, "seq_id": seq_id, "adam_params": adam})

    async def run_pass(self, model_id: str, seq_id: int, *weights: float, **fields: Any) -> str:
        return await self.submit("forward_backward", pass_body(model_id, seq_id, *weights, **fields))


@contextlib.asynccontextmanager
async def running_server(
    state: Path, backend: FakeBackend | None = None, *, keys: list[str] | None = None, **limits: Any
) -> AsyncIterator[tuple[Any, FakeBackend, TinkerService]]:
    """Runs a server on a state directory. Leaving the context is like a kill: nothing more is written."""
    directory = StateDirectory(state)
    directory.open()
    backend = backend or FakeBackend()
    service = TinkerService(backend, directory, Limits(**{"poll_seconds": 0.5} | limits))
    tinker = TinkerApp(service, Keys(keys, "localhost", "--key-file"))
    app = tinker.build(OpenAIApp(tinker).routes())
    await service.start()
    try:
        yield app, backend, service
    finally:
        await service.stop()
        directory.close()

"""OpenAI routes complete with a base model or with weights saved for sampling."""

from __future__ import annotations

import builtins
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from .asgi_client import Client, Reply, request, running_server
from .fake_backend import BASE, FakeBackend


async def saved_weights(app: Any) -> str:
    client = await Client(app).open()
    model = await client.create_model()
    await client.run_pass(model, 1, 2.0)
    await client.step(model, 2)
    path: str = (await client.call("save_weights_for_sampler", {"model_id": model, "path": "a", "seq_id": 3}))["path"]
    return path


async def post(app: Any, route: str, body: Any, key: str = "tml-one") -> Reply:
    return await request(app, "POST", route, body, key=None, headers={"authorization": f"Bearer {key}"})


def events(reply: Reply) -> list[Any]:
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in reply.body.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("prefix", ["/v1", "/oai/api/v1"])
async def test_completions_and_chat_with_saved_weights_and_base_model(tmp_path: Path, prefix: str) -> None:
    async with running_server(tmp_path, FakeBackend("tiny-dense")) as (app, backend, _service):
        path = await saved_weights(app)
        body = {"model": path, "prompt": "ab", "max_tokens": 3, "logprobs": 0, "n": 2}
        reply = await post(app, f"{prefix}/completions", body | {"min_p": 0.25, "top_k": 5})
        assert reply.status == 200, reply.body
        sampling = backend.calls[-1][2].sampling
        assert (sampling.max_new_tokens, sampling.min_p, sampling.top_k) == (3, 0.25, 5)
        choices = reply.json["choices"]
        assert [choice["logprobs"]["token_logprobs"] for choice in choices] == [[-2.0] * 3] * 2
        assert choices[0]["text"]
        assert reply.json["usage"]["completion_tokens"] == 6
        base = await post(app, f"{prefix}/completions", body | {"model": BASE})
        assert base.json["choices"][0]["logprobs"]["token_logprobs"] == [-0.0] * 3
        streamed = events(await post(app, f"{prefix}/completions", body | {"stream": True, "n": 1}))
        assert "".join(choice["text"] for event in streamed for choice in event["choices"]) == choices[0]["text"]
        assert streamed[-1]["choices"][0]["finish_reason"] == "length"
        chat = {"model": path, "messages": [{"role": "user", "content": "ab"}], "max_tokens": 3}
        reply = await post(app, f"{prefix}/chat/completions", chat)
        assert reply.status == 200, reply.body
        streamed = events(await post(app, f"{prefix}/chat/completions", chat | {"stream": True}))
        deltas = [choice["delta"].get("content", "") for event in streamed for choice in event["choices"]]
        assert "".join(deltas) == reply.json["choices"][0]["message"]["content"]
        text = reply.json["choices"][0]["message"]["content"]
        message = await post(app, f"{prefix}/messages", chat)
        assert message.json["content"] == [{"type": "text", "text": text}]
        response = await post(app, f"{prefix}/responses", {"model": path, "input": "ab", "max_output_tokens": 3})
        assert response.json["output"][0]["content"][0]["text"] == text
        refused = await post(app, f"{prefix}/messages", chat | {"max_tokens": 0})
        assert (refused.status, refused.json["type"], refused.json["error"]["type"]) == (
            400,
            "error",
            "invalid_request_error",
        )
        models = await request(app, "GET", f"{prefix}/models")
        assert {BASE, path} <= {model["id"] for model in models.json["data"]}
        for name in (BASE, path):
            assert (await request(app, "GET", f"{prefix}/models/{name}")).json["id"] == name
        for unknown in ("models/nobody", "embeddings"):
            reply = await request(app, "GET", f"{prefix}/{unknown}")
            assert (reply.status, reply.json["error"]["type"]) == (404, "invalid_request_error")


async def test_the_imports_of_the_first_request_hold_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, threading.Thread] = {}
    plain = builtins.__import__

    def importing(name: str, *arguments: Any, **options: Any) -> Any:
        threads.setdefault(name, threading.current_thread())
        return plain(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", importing)
    async with running_server(tmp_path, FakeBackend("tiny-dense")) as (app, _, _service):
        assert (await post(app, "/v1/completions", {"model": BASE, "prompt": "a", "max_tokens": 1})).status == 200
    for name in ("postlude.hf.load", "postlude.serving.server.model_routes"):
        assert threads[name] is not threading.current_thread()


async def test_weights_that_replaced_others_are_sampled(tmp_path: Path) -> None:
    """A sampling client keeps the weights that it was made with, or none once they are gone."""
    async with running_server(tmp_path, FakeBackend("tiny-dense"), samplers=2) as (app, _, _service):
        client = await Client(app).open()
        model = await client.create_model()
        for number, weight in ((0, 2.0), (3, 5.0)):
            await client.run_pass(model, number + 1, 2.0 + number / 3)
            await client.step(model, number + 2)
            save = {"model_id": model, "path": "a", "seq_id": number + 3, "overwrite": True}
            path = (await client.call("save_weights_for_sampler", save))["path"]
            body = {"model": path, "prompt": "ab", "max_tokens": 1, "logprobs": 0}
            (choice,) = (await post(app, "/v1/completions", body)).json["choices"]
            assert choice["logprobs"]["token_logprobs"] == [-weight]
            session = {"session_id": client.session, "sampling_session_seq_id": number, "model_path": path}
            assert (await client.post("create_sampling_session", session)).status == 200
        sample = {"sampling_session_id": f"{client.session}:sample:0", "seq_id": 0}
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
        result = await client.call("asample", sample | {"prompt": prompt})
        assert "was saved again since" in result["error"]


async def test_invalid_request_gets_openai_error(tmp_path: Path) -> None:
    async with running_server(tmp_path, FakeBackend("tiny-dense")) as (app, _, _service):
        path = await saved_weights(app)
        body = {"model": path, "prompt": "ab", "max_tokens": 3}
        for change, status, sentence in (
            ({"model": "nobody/nothing"}, 404, "there is no base model"),
            ({"model": 3}, 400, "give a base model"),
            ({"model": path + "b"}, 404, "there is no checkpoint"),
            ({"max_tokens": 1000}, 400, "has room for 62"),
            ({"prompt": [1, 999]}, 400, "has token 999"),
            ({"temperature": -1, "stream": True}, 400, "temperature=-1"),
        ):
            reply = await post(app, "/v1/completions", body | change)
            assert (reply.status, reply.json["error"]["type"]) == (status, "invalid_request_error")
            assert sentence in reply.json["error"]["message"]
            assert reply.json["error"]["code"] == ("model_not_found" if status == 404 else None)
        other = await post(app, "/v1/completions", body, key="tml-two")
        assert other.status == 404
        nested = await post(app, "/v1/completions", b'{"model":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
        assert (nested.status, "is nested too deeply" in nested.json["error"]["message"]) == (400, True)
        assert (await request(app, "POST", "/v1/completions", body, key=None)).status == 401

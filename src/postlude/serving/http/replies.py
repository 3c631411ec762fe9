"""What both servers reply with: JSON, server-sent events and errors."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Send

from postlude.serving.http.errors import HTTPError, error_body


def write_json(value: Any) -> bytes:
    """Returns a value as JSON. A number that JSON does not have, such as infinity, is null."""
    try:
        return json.dumps(value, allow_nan=False).encode()
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class JSONReply(JSONResponse):
    """A reply that `write_json` writes."""

    def render(self, content: Any) -> bytes:
        """Returns the body."""
        return write_json(content)


def openai_error(error: HTTPError) -> Response:
    """Returns the reply of a refused request in OpenAI's format."""
    return JSONReply(error_body(error), status_code=error.status, headers=error.headers)


async def openai_reply(result: Any) -> Response:
    """Returns the reply with a JSON value, or with the values of an asynchronous generator as server-sent events."""
    if not isinstance(result, AsyncGenerator):
        return JSONReply(result)
    first = await anext(result)  # so that an invalid request gets a status, not an event
    return EventStream(
        _events(first, result), headers={"content-type": "text/event-stream", "cache-control": "no-cache"}
    )


class EventStream(StreamingResponse):
    """A reply whose generator ends with the connection."""

    async def stream_response(self, send: Send) -> None:
        """Sends the events."""
        assert isinstance(self.body_iterator, AsyncGenerator)
        async with contextlib.aclosing(self.body_iterator):
            await super().stream_response(send)


async def _events(first: Any, rest: AsyncGenerator[Any, None]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(rest):
        try:
            yield _event(first)
            async for value in rest:
                yield _event(value)
            yield b"data: [DONE]\n\n"
        except HTTPError as error:
            yield _event(error_body(error))


def _event(value: Any) -> bytes:
    return b"data: " + write_json(value) + b"\n\n"

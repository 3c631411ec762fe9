"""What both servers reply with: JSON, server-sent events and errors."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Send

from postlude.serving.http.errors import HTTPError, anthropic_error_body, error_body

LOG = logging.getLogger("postlude")


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
        return write_json(content)


@dataclass(frozen=True)
class ReplyFormat:
    """How an API writes errors and streams. `error_body` returns the body of an error."""

    error_body: Callable[[HTTPError], dict[str, Any]]
    named_events: bool = False
    """Whether the type of an event is also sent as its name."""
    end: bytes = b""
    """What ends a stream."""

    def error(self, error: HTTPError) -> Response:
        return JSONReply(self.error_body(error), status_code=error.status, headers=error.headers)

    async def respond(self, request: Request, work: Awaitable[Response]) -> Response:
        """Returns the response of `work`, or that of its error: a refusal, a client that is gone, a fault of ours."""
        try:
            return await work
        except HTTPError as error:
            return self.error(error)
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:
            path: str = request.scope["path"]
            LOG.exception("%s %s failed", request.method, path[:80])
            return self.error(HTTPError(500, f"the request failed: {error!r}."))

    async def reply(self, result: Any) -> Response:
        """Returns the reply with a JSON value or, as server-sent events, those of an asynchronous generator."""
        if isinstance(result, Response):
            return result
        if not isinstance(result, AsyncGenerator):
            return JSONReply(result)
        first = await anext(result)  # so that an invalid request gets a status, not an event
        headers = {"content-type": "text/event-stream", "cache-control": "no-cache"}
        return EventStream(self._events(first, result), headers=headers)

    async def _events(self, first: Any, rest: AsyncGenerator[Any, None]) -> AsyncIterator[bytes]:
        async with contextlib.aclosing(rest):
            try:
                yield self._event(first)
                async for value in rest:
                    yield self._event(value)
                yield self.end
            except HTTPError as error:
                body = self.error_body(error)
                yield self._event({"type": "error"} | body if self.named_events else body)

    def _event(self, value: Any) -> bytes:
        name = f"event: {value['type']}\n".encode() if self.named_events else b""
        return name + b"data: " + write_json(value) + b"\n\n"


OPENAI = ReplyFormat(error_body, end=b"data: [DONE]\n\n")
RESPONSES = ReplyFormat(error_body, named_events=True)  # of OpenAI's newer API
ANTHROPIC = ReplyFormat(anthropic_error_body, named_events=True)


class EventStream(StreamingResponse):
    """A reply whose generator ends with the connection."""

    async def stream_response(self, send: Send) -> None:
        assert isinstance(self.body_iterator, AsyncGenerator)
        async with contextlib.aclosing(self.body_iterator):
            await super().stream_response(send)

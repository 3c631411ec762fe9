"""Requests of both servers: `read_body` reads within limits, `unless_disconnected` ends work if the client is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from postlude.serving.http.errors import HTTPError

Result = TypeVar("Result")
JSON, BYTES = "application/json", "application/octet-stream"
IDENTITY = "identity"
DISCARDED_BYTES, DISCARD_SECONDS = 1 << 24, 1.0  # of a body that is refused, which the client may still be sending


class BodyTooLarge(HTTPError):
    """A body is above the limit. `head` is its beginning."""

    def __init__(self, size: str, limit: int, head: bytes) -> None:
        super().__init__(413, f"the request has {size} bytes; the most is {limit}.")
        self.head = head


async def read_body(
    request: Request,
    limit: int,
    seconds: float,
    types: Sequence[str] = (JSON,),
    head_bytes: int = 0,
    codings: Sequence[str] = (IDENTITY,),
) -> bytes:
    """Returns the body of a request as it was sent. `seconds` is how long it may take to arrive.

    A body that says to be too large is refused after its first `head_bytes`.
    """
    length = request.headers.get("content-length", "0")
    declared, body = int(length) if length.isdecimal() else 0, bytearray()
    if declared:
        _check_headers(request, types, codings)
    chunks = request.stream()
    if declared > limit and not head_bytes:
        await _discard(chunks, declared)
        raise BodyTooLarge(str(declared), limit, b"")
    try:
        async with asyncio.timeout(seconds):
            async for chunk in chunks:
                body += chunk
                if len(body) > limit or (declared > limit and len(body) >= head_bytes):
                    raise BodyTooLarge(str(declared or f"more than {limit}"), limit, bytes(body[:head_bytes]))
    except BodyTooLarge:
        await _discard(chunks, declared)
        raise
    except TimeoutError:
        raise HTTPError(408, f"the request's body did not come within {seconds:g} s.") from None
    if body:
        _check_headers(request, types, codings)
    return bytes(body)


async def _discard(chunks: AsyncIterator[bytes], declared: int) -> None:
    """Reads the rest of a body that is refused: most clients read the reply only when they have sent all of it."""
    if declared > DISCARDED_BYTES:
        return
    discarded = 0
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(DISCARD_SECONDS):
            async for chunk in chunks:
                discarded += len(chunk)
                if discarded > DISCARDED_BYTES:
                    return


def _check_headers(request: Request, types: Sequence[str], codings: Sequence[str]) -> None:
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() not in types:
        raise HTTPError(415, f"the request's Content-Type is {kind[:60]!r}; send {' or '.join(types)}.")
    if (coding := content_coding(request)) not in codings:
        raise HTTPError(415, f"the request's Content-Encoding is {coding[:60]!r}; send {' or '.join(codings)}.")


def content_coding(request: Request) -> str:
    """Returns how the body of a request is compressed, "identity" if it is not."""
    return request.headers.get("content-encoding", IDENTITY).strip().lower()


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of `work`. Cancels it when the client is gone, and raises `ClientDisconnect`."""
    task, is_gone = asyncio.current_task(), False
    assert task is not None

    async def cancel_when_gone() -> None:
        nonlocal is_gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watcher = asyncio.create_task(cancel_when_gone())
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and not task.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()

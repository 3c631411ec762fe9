"""FutureStore: the results that clients fetch by request id."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from postlude.serving.http.errors import HTTPError
from postlude.tinker.limits import Limits

LOG = logging.getLogger("postlude")
Category = Literal["user", "server", "unknown"]
JSON = dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """Why a request failed: one sentence, and whose fault it is."""

    sentence: str
    category: Category


@dataclass(eq=False)
class Future:
    """The result of one request: JSON, protobuf bytes, or a failure."""

    request_id: str
    owner: str
    kind: str
    body_digest: bytes = b""
    """See `digest`."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    result: JSON | bytes | None = None
    failure: Failure | None = None
    created: float = field(default_factory=time.monotonic)
    finished: float = 0.0
    fetched: float | None = None
    reply: JSON = field(default_factory=dict)
    """What the client got when it submitted the request, besides the id; a retry gets the same."""
    on_end: Callable[[Future], None] = lambda _: None
    """Called once it has a result or a failure."""

    def succeed(self, result: JSON | bytes) -> None:
        if not self.done.is_set():
            self.result, self.finished = result, time.monotonic()
            self.done.set()
            self.on_end(self)

    def fail(self, sentence: str, category: Category) -> None:
        if not self.done.is_set():
            self.failure, self.finished = Failure(sentence, category), time.monotonic()
            self.done.set()
            self.on_end(self)

    @property
    def size(self) -> int:
        """Bytes that its result holds; JSON results are small."""
        return len(self.result) if isinstance(self.result, bytes) else 256


def digest(content: bytes) -> bytes:
    """Returns a digest of a request. A retry has the same one, another request with its number another one."""
    return hashlib.blake2b(content, digest_size=16).digest()


def describe_failure(error: Exception, kind: str) -> tuple[str, Category]:
    """Returns a sentence about an error of a request of this kind, and whose fault it is. Logs what was not foreseen.

    A client retries 408, 409, 429 and 5xx and raises the others to its user.
    """
    if isinstance(error, (ValueError, TypeError, OverflowError)):
        return str(error), "user"
    if isinstance(error, HTTPError):
        return str(error), "user" if error.status < 500 else "server"
    LOG.exception("%s failed", kind, exc_info=error)
    return f"the server failed in this {kind}: {error!r}. Its log has more.", "server"


class FutureStore:
    """Futures by request id, kept until some time after they were fetched."""

    def __init__(self, limits: Limits, on_end: Callable[[Future], None] = lambda _: None) -> None:
        self._limits, self._on_end = limits, on_end
        self._futures: dict[str, Future] = {}
        self._closed = False
        self._polls: set[asyncio.Timeout] = set()

    def add(self, request_id: str, owner: str, kind: str, body_digest: bytes) -> Future:
        assert request_id not in self._futures
        future = self._futures[request_id] = Future(request_id, owner, kind, body_digest, on_end=self._on_end)
        return future

    def find(self, request_id: str, kind: str, body_digest: bytes) -> Future | None:
        """Returns the future of a request that is sent again. Refuses another request with the same number."""
        future = self._futures.get(request_id)
        if future is not None and (future.kind, future.body_digest) != (kind, body_digest):
            raise HTTPError(
                400,
                f"{request_id} was a {future.kind} with other content: another client has used this number. Give each "
                "client a model or sampler of its own.",
            )
        return future

    def get(self, request_id: str) -> Future | None:
        """Returns a future that is still kept."""
        return self._futures.get(request_id)

    async def wait(self, future: Future) -> bool:
        """Waits for a result as long as a poll may take. Returns whether it is there."""
        if not future.done.is_set() and not self._closed:
            poll = asyncio.timeout(self._limits.poll_seconds)
            self._polls.add(poll)
            try:
                async with poll:
                    await future.done.wait()
            except TimeoutError:
                pass
            finally:
                self._polls.remove(poll)
        return future.done.is_set()

    def close(self) -> None:
        """Ends all polls, so that the server can stop."""
        self._closed = True
        for poll in self._polls:
            if not poll.expired():
                poll.reschedule(0.0)

    def drop_old(self) -> None:
        """Drops results that were kept for long enough, then some beyond the limit of bytes.

        First go those that were fetched, then those of the keys that hold the most, in both cases the oldest first.
        """
        now = time.monotonic()
        for future in [future for future in self._futures.values() if future.done.is_set()]:
            fetched = future.fetched is not None and now - future.fetched > self._limits.fetched_seconds
            if fetched or now - future.finished > self._limits.unfetched_seconds:
                del self._futures[future.request_id]
        done = [future for future in self._futures.values() if future.done.is_set()]
        held: Counter[str] = Counter()
        for future in done:
            held[future.owner] += future.size
        excess = held.total() - self._limits.result_bytes
        for future in sorted(done, key=lambda result: (result.fetched is None, -held[result.owner], result.finished)):
            if excess <= 0:
                break
            excess -= future.size
            del self._futures[future.request_id]

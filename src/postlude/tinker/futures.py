"""FutureStore: the results that clients fetch by request id."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from postlude.serving.http.errors import HTTPError
from postlude.tinker.limits import Limits

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
    content: bytes = b""
    """The digest of the request, see `digest`."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    result: JSON | bytes | None = None
    failure: Failure | None = None
    finished: float = 0.0
    fetched: float | None = None
    reply: JSON = field(default_factory=dict)
    """What the client got when it submitted the request, besides the id; a retry gets the same."""

    def succeed(self, result: JSON | bytes) -> None:
        """Sets the result."""
        if not self.done.is_set():
            self.result, self.finished = result, time.monotonic()
            self.done.set()

    def fail(self, sentence: str, category: Category) -> None:
        """Sets the failure."""
        if not self.done.is_set():
            self.failure, self.finished = Failure(sentence, category), time.monotonic()
            self.done.set()

    @property
    def size(self) -> int:
        """Bytes that its result holds; JSON results are small."""
        return len(self.result) if isinstance(self.result, bytes) else 256


def digest(content: bytes) -> bytes:
    """Returns a digest of a request, by which one that is sent again is told from another with its number."""
    return hashlib.blake2b(content, digest_size=16).digest()


class FutureStore:
    """Futures by request id, kept until some time after they were fetched."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._futures: dict[str, Future] = {}
        self._closed = False
        self._polls: set[asyncio.Timeout] = set()

    def add(self, request_id: str, owner: str, kind: str, content: bytes) -> Future:
        """Adds a future that is not done."""
        assert request_id not in self._futures
        future = self._futures[request_id] = Future(request_id, owner, kind, content)
        return future

    def find(self, request_id: str, kind: str, content: bytes) -> Future | None:
        """Returns the future of a request that is sent again. Refuses another request with the same number."""
        future = self._futures.get(request_id)
        if future is not None and (future.kind, future.content) != (kind, content):
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

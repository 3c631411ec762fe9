"""RemoteServer: one address, what is known of it, and the one place where its replies become answers or errors."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from postlude.generate.protocol import Completion, Request, VersionSpan
from postlude.hf.checksum import checksum
from postlude.serving.clients.api import Ask, ServerAPI
from postlude.serving.clients.connection import Reply, ServerConnection
from postlude.serving.errors import InvalidResponse, RequestRefused, ServerBusy, ServerUnavailable

BUSY, MISSING = 429, 404
PASSING = frozenset({408, 409, 425, 500, 502, 503, 504})
REFUSED = frozenset({400, MISSING, 413, 422})
POSITIVE = 1e-4  # how far above 0 rounding may bring a log-prob
CHECKED_WITHIN = 10.0  # seconds for what a server that is well answers at once
State = Literal["coming", "up", "waiting", "gone", "out"]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Weights:
    """The name that weights go by, and a directory that every server can read; None if they are sent."""

    directory: str | None
    version: str
    _sums: list[asyncio.Task[str]] = field(default_factory=list, compare=False, repr=False)

    def sum_up(self) -> asyncio.Task[str]:
        """Their checksum, by the files: counted once for all servers, while they read."""
        assert self.directory is not None
        if not self._sums:
            self._sums.append(asyncio.create_task(asyncio.to_thread(checksum, Path(self.directory))))
        return self._sums[0]


class RemoteServer:
    """One server. "coming": not known to be there; "up"; "gone": given up until there are new weights; "out" for good.

    "waiting": there, but without the newest weights, which the trainer's ranks are to send.

    The loop of the fleet it belongs to is the only one that may touch it.
    """

    def __init__(
        self,
        url: str,
        api: ServerAPI | Callable[[Any], ServerAPI],
        model: str | None,
        *,
        headers: Mapping[str, str],
        timeout: float,
        vocab_size: int | None = None,
    ) -> None:
        self.wire = ServerConnection(url, headers)
        self.url = self.wire.url
        self._dialect = api if isinstance(api, ServerAPI) else None
        self._recognise = None if isinstance(api, ServerAPI) else api
        self.model = model
        self.timeout, self.vocab_size = timeout, vocab_size
        self.state: State = "coming"
        self.problem = ""
        """Why it is not up, as a clause that follows its address."""
        self.failures = 0
        """Times in a row that it failed."""
        self.may_return = False
        """Whether it is out for an answer, and so may be tried again where no other is left."""
        self.busy = 0
        """Times in a row that it said "not now"."""
        self.busy_since: float | None = None
        """When it first did, of these times."""
        self.resting = False
        """Whether it is left alone for a moment since it did."""
        self.room = math.inf
        """How many answers it takes at once, as far as it has shown by saying "not now"."""
        self.outstanding = 0
        """Answers that it has been asked for and has not given."""
        self.version: str | None = None
        """Of the weights it has, as far as is known here."""
        self.reload_seconds = 0.0
        self.reading: str | None = None
        """The directory that it was told to read weights from, until it is seen that it has."""
        self.unsure = False
        """Whether it was told to take weights and not seen to have them: it may have some of them, and be paused."""
        self.renewing = 0
        """Weights that it is to read before it is asked again."""
        self.meetings = 0
        """Times that it came. What was agreed on with it before the last one holds no more."""

    @property
    def api(self) -> ServerAPI:
        """How it is spoken to."""
        assert self._dialect is not None, "it was not met yet"
        return self._dialect

    async def meet(self, weights: Weights | None) -> None:
        """Find out what it is, and give it the newest weights, before its first request."""
        if self._dialect is None:
            assert self._recognise is not None
            self._dialect = self._recognise(await self._ask_soon("GET", "/v1/models"))
        await self.api.meet(self._ask_soon)
        self.meetings += 1
        if self.model is None:
            self.model = await self._only_model()
        if weights is not None:
            self.version = await self.told_version()
            if not self.has(weights) and weights.directory is not None:
                await self.reload(weights)
        elif await self.api.paused(self._ask_soon):
            raise InvalidResponse(
                "is paused, as one is that was left in the middle of new weights. Start it again, or have it go on "
                "(POST /resume) if you know which it has"
            )

    def has(self, weights: Weights) -> bool:
        """Whether it has such weights, whole, as far as is known here."""
        return self.version == weights.version and not self.unsure

    async def say(self, what: Callable[[ServerAPI, Ask], Awaitable[Result]], *, seconds: float | None = None) -> Result:
        """What is said to it in its own words. Each request waits as an answer does, or `seconds`."""

        async def ask(method: str, path: str, body: Any = None) -> Any:
            return _told(await self.wire.ask(method, path, body, timeout=seconds or self.timeout))

        return await what(self.api, ask)

    async def reload(self, weights: Weights) -> None:
        """Have it read new weights, and see that it has them."""
        assert weights.directory is not None
        began = time.perf_counter()
        expected = weights.sum_up() if self.api.sums else None
        self.reading, self.unsure = weights.directory, True
        try:
            await self.api.reload(self._ask, weights.directory, weights.version)
            await self.seen_to_have(weights)
            if expected is not None and (found := await self.api.checksum(self._ask_soon)) != await expected:
                raise InvalidResponse(
                    f"read weights of checksum {found} from {weights.directory}, where there are {await expected}"
                )
        except RequestRefused as error:
            raise InvalidResponse(f"could not read new weights from {weights.directory}: {error}") from error
        except OSError as error:  # of the files, here
            raise ServerUnavailable(f"could not be compared with {weights.directory}: {error}") from error
        finally:
            self.reading = None
        self.unsure = False
        self.reload_seconds = time.perf_counter() - began

    async def seen_to_have(self, weights: Weights) -> None:
        """See that it calls its weights as they were called to it."""
        self.version = await self.told_version()
        if self.version != weights.version:
            raise InvalidResponse(f"says that its weights are {self.version!r} after it was given {weights.version!r}")

    async def answer(self, request: Request) -> Completion:
        """One answer, with the weights it was sampled with, where that is known."""
        assert self.model is not None
        before = self.version
        try:
            found = await self.api.answer(self._ask, self.model, request)
        except (AttributeError, LookupError, TypeError, OverflowError) as error:  # JSON, but of another shape
            raise InvalidResponse(f"gave an answer that cannot be read: {error!r}") from error
        except RequestRefused as error:
            if error.status == MISSING:  # of what it is there for: it may be starting, or has another model
                raise ServerUnavailable(f"answers with {error}") from error
            raise
        self._check(found, request)
        if found.versions or before is None or before != self.version:  # where new ones came in between, nobody knows
            return found
        return replace(found, versions=(VersionSpan(before, 0, len(found.tokens)),))

    def _check(self, found: Completion, request: Request) -> None:
        """Refuse an answer that cannot be one to this request."""
        most = request.sampling.max_new_tokens
        if len(found.tokens) > most:
            raise InvalidResponse(f"gave {len(found.tokens)} tokens where at most {most} were asked for")
        if not found.tokens and not self.api.leaves_out_stops:
            raise InvalidResponse("gave an answer without a token")
        least, highest = min(found.tokens, default=0), max(found.tokens, default=0)
        if least < 0 or (self.vocab_size is not None and highest >= self.vocab_size):
            wrong, size = least if least < 0 else highest, self.vocab_size
            known = "" if size is None else f": that goes from 0 to {size - 1}"
            raise InvalidResponse(f"gave token {wrong}, which is not in the vocabulary{known}")
        if (logprob := max((*found.logprobs, *found.sampled_logprobs), default=0.0)) > POSITIVE:
            raise InvalidResponse(f"gave a log-prob of {logprob:g}, but none is above 0")

    async def told_version(self) -> str | None:
        """What it calls its weights."""
        return await self.api.version(self._ask_soon)

    async def longest(self) -> int | None:
        """The most tokens, prompt and answer together, that it takes; None where it does not say."""
        assert self.model is not None
        return await self.api.longest(self._ask_soon, self.model)

    async def drawback(self, *, tied_head: bool, sent: bool) -> str:
        """Why new weights of such a model would not all be used; empty where they would."""
        if sent and not self.api.receives:
            return f"speaks {self.api.name}, which takes no weights over the network. Use rollout.sync: disk"
        return await self.api.drawback(self._ask, tied_head=tied_head, sent=sent)

    async def _only_model(self) -> str:
        names = await self.api.models(self._ask_soon)
        if len(names) != 1:
            raise InvalidResponse(f"serves {', '.join(names) or 'no model'}; say which of them in rollout.model")
        return names[0]

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        return _told(await self.wire.ask(method, path, body, timeout=self.timeout))

    async def _ask_soon(self, method: str, path: str, body: Any = None) -> Any:
        return _told(await self.wire.ask(method, path, body, timeout=min(self.timeout, CHECKED_WITHIN)))


def _told(reply: Reply) -> Any:
    """What a reply says, by its status."""
    if 200 <= reply.status < 300:
        return reply.json()
    problem = f"status {reply.status}: {_message(reply)}"
    after = reply.headers.get("retry-after", "")
    seconds = float(after) if after.isdigit() else 0.0
    if reply.status == BUSY:
        raise ServerBusy(f"answers with {problem}", seconds)
    if reply.status in PASSING:
        raise ServerUnavailable(f"answers with {problem}", seconds)
    if reply.status in REFUSED:
        raise RequestRefused(problem, reply.status)
    raise InvalidResponse(f"answers with {problem}")


def _message(reply: Reply) -> str:
    """What the server says went wrong, on one line."""
    text = reply.body[:2000].decode(errors="replace").strip()
    try:
        stated = reply.json()
        found = next((stated[name] for name in ("error", "message", "detail") if name in stated), text)
        return " ".join(str(found.get("message", found) if isinstance(found, dict) else found).split())
    except (InvalidResponse, AttributeError, TypeError):
        return " ".join(text.split()) or "nothing more was said"

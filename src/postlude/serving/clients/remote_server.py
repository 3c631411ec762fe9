"""RemoteServer: one server as its client sees it: address, state, weights; its replies as results or errors."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from postlude.generate.protocol import Completion, Request, VersionSpan
from postlude.serving.clients.api import SendRequest, ServerAPI
from postlude.serving.clients.connection import ServerConnection, json_or_raise
from postlude.serving.clients.server_weights import ServerWeights, WeightsVersion
from postlude.serving.errors import InvalidResponse, RequestRefused, ServerBusy, ServerUnavailable
from postlude.serving.weights.delta import WeightPieces

LOG = logging.getLogger("postlude")
NOT_FOUND = 404
BUSY_PAUSE = 0.5  # seconds until a request that a busy server did not take is sent again
BUSY_TIMEOUT = 60.0  # seconds of busy replies before a server becomes unavailable; `outage_timeout` if that is longer
LOGPROB_ROUNDING = 1e-4  # how far above 0 rounding may bring a log-prob
STATUS_TIMEOUT = 10.0  # seconds for requests that a working server answers immediately
State = Literal["connecting", "up", "needs_weights", "unavailable", "excluded"]
Result = TypeVar("Result")


@dataclass
class ServerLoad:
    """How many requests a server has, and how many it takes at once, estimated from its busy replies."""

    outstanding: int = 0
    """Requests that it has not answered yet."""
    capacity: float = math.inf
    busy_replies: int = 0
    """Busy replies in a row."""
    busy_since: float | None = None
    """Time of the first of them."""
    backing_off: bool = False
    """Whether it gets no requests for some seconds after a busy reply."""
    pending_reloads: int = 0
    """Reloads to finish before it gets requests."""

    def has_room(self, limit: int) -> bool:
        """Returns whether it takes another request, of at most `limit` at once."""
        is_held_back = self.backing_off or self.pending_reloads
        return not is_held_back and self.outstanding + 1 <= min(limit, self.capacity)

    def complete(self) -> None:
        """Counts a completion: the capacity grows by 1 per `capacity` completions."""
        self.busy_replies, self.busy_since = 0, None
        self.capacity += 1.0 / self.capacity

    def reply_busy(self, now: float) -> float:
        """Counts a busy reply. Returns the seconds since the first in a row."""
        self.busy_since = now if self.busy_since is None else self.busy_since
        return now - self.busy_since

    def back_off(self) -> bool:
        """Lowers the capacity below the requests that it has. Returns whether a pause begins."""
        self.capacity = max(1.0, min(self.capacity, float(self.outstanding - 1)))
        begins, self.backing_off = not self.backing_off, True
        self.busy_replies += begins
        return begins


class RemoteServer:
    """One server, whose attributes only its methods write. Not thread-safe: use it in its pool's event loop.

    Its `state` is

    - "connecting": it has not replied yet, or not since its last failure;
    - "up": it takes requests;
    - "needs_weights": it replies, but lacks the newest weights, which the trainer has to send;
    - "unavailable": it failed too often, and is tried again when there are new weights;
    - "excluded": it gave an invalid response.
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
        """Makes no request yet. `api` may be a function that chooses the API by the server's reply to /v1/models."""
        self.connection = ServerConnection(url, headers)
        self.url = self.connection.url
        self._api = api if isinstance(api, ServerAPI) else None
        self._choose_api = None if isinstance(api, ServerAPI) else api
        self.model = model
        self.timeout, self.vocab_size = timeout, vocab_size
        self._send, self._send_status = self._sender(timeout), self._patient(min(timeout, STATUS_TIMEOUT))
        self.state: State = "connecting"
        self.problem = ""
        """Why it is not up: text that follows its URL in messages, see `serving.errors`."""
        self.failures = 0
        """Failures in a row, which its pool counts with `fail`."""
        self.may_retry = False
        """Whether it was excluded because of an invalid completion. It is tried again when no other server is left."""
        self.load, self.weights = ServerLoad(), ServerWeights()
        self.connect_count = 0
        """Times that it was connected. Process groups for weights of earlier connections are invalid."""

    @property
    def api(self) -> ServerAPI:
        """The API, known after `connect`."""
        assert self._api is not None, "the server is not connected yet"
        return self._api

    @property
    def is_asleep(self) -> bool:
        """Whether it has freed its memory."""
        return self._api is not None and self._api.asleep

    # --- its state

    def begin_connecting(self, failures: int) -> None:
        """Tries it again. One that could not be used any more begins with so many failures."""
        if self.state in ("unavailable", "excluded"):
            self.failures, self.may_retry = failures, False
        self.state = "connecting"

    def end_connecting(self, weights: WeightsVersion | None) -> None:
        """Lets it take requests if it has these weights."""
        if self.state != "connecting":  # it was excluded meanwhile
            return
        self.state = "up" if not self.is_asleep and (weights is None or self.has_weights(weights)) else "needs_weights"

    def succeed(self) -> None:
        self.failures = 0
        self.load.complete()

    def fail(self, problem: str, limit: int) -> None:
        """Counts a failure: it is connected again, or unavailable after more than `limit` in a row."""
        self.problem = problem
        self.failures += 1
        if self.failures <= limit:
            self.state = "connecting"
            return
        self.give_up(problem)
        if self.weights.unconfirmed:  # it may be paused, and would never reply
            self.connection.cancel_requests()

    def give_up(self, problem: str) -> None:
        self.state, self.problem = "unavailable", problem

    def exclude(self, problem: str, *, may_retry: bool = False) -> bool:
        """Uses it no more, and sends its requests to others. Returns whether it was used until now."""
        was_used, self.state, self.problem = self.state != "excluded", "excluded", problem
        self.may_retry = may_retry if was_used else self.may_retry
        self.connection.cancel_requests()
        return was_used

    async def sleep(self, timeout: float) -> None:
        """Makes it free the memory of its weights and its KV cache."""
        await self.call(lambda api, send: api.sleep(send), timeout=timeout)
        self.weights.version = None
        if self.state == "up":
            self.state = "needs_weights"

    async def wake(self, timeout: float) -> None:
        """Makes it ready to generate with the weights that it was given while it slept."""
        await self.call(lambda api, send: api.wake(send), timeout=timeout)

    # --- its weights

    async def connect(self, weights: WeightsVersion | None) -> None:
        """Detects its API and model, and makes it read the newest weights if they are in a directory."""
        if self._api is None:
            assert self._choose_api is not None
            self._api = self._choose_api(await self._send_status("GET", "/v1/models"))
        await self.api.detect_features(self._send_status)
        self.connect_count += 1
        if self.model is None:
            self.model = await self._only_model()
        if weights is not None:
            self.weights.version = await self.fetch_version()
            if not self.has_weights(weights) and weights.directory is not None:
                self.weights.base_directory = None  # it may have been restarted
                await self.reload(weights)
        elif await self.api.is_paused(self._send_status):
            raise InvalidResponse(
                "is paused, probably by a weight update that was interrupted. Start it again, or resume it (POST "
                "/resume) if you know which weights it has"
            )

    def has_weights(self, weights: WeightsVersion) -> bool:
        """Whether it has all of these weights, by its last report."""
        return self.weights.version == weights.version and not self.weights.unconfirmed

    async def call(
        self, work: Callable[[ServerAPI, SendRequest], Awaitable[Result]], *, timeout: float | None = None
    ) -> Result:
        """Returns the result of `work(api, send)`, whose requests have this timeout. Weight sync uses it."""
        return await work(self.api, self._sender(timeout or self.timeout))

    def begin_update(self) -> None:
        """Sends it no requests until `confirm`: it may hold some new weights."""
        self.weights.unconfirmed = True
        if self.state == "up":
            self.state = "needs_weights"

    def end_update(self, weights: WeightsVersion, seconds: float) -> None:
        """Notes that it took new weights, which `confirm` checks."""
        self.weights.version, self.weights.reload_seconds = weights.version, seconds

    async def confirm(self, weights: WeightsVersion, *, timeout: float | None = None) -> None:
        """Checks that it has the weights that it was sent, and lets it take requests."""
        await self.confirm_version(weights)
        await self.compare_logprobs(weights, timeout=timeout)
        self.state, self.weights.unconfirmed = "up", False

    async def refresh_version(self) -> None:
        """Detects that it was restarted, and so has different weights."""
        version = await self.fetch_version()
        if version != self.weights.version:
            self.weights.version = version
            self.connect_count += 1

    async def reload(self, weights: WeightsVersion) -> None:
        """Makes it read new weights, then checks its version and checksum."""
        assert weights.directory is not None
        start, held = time.perf_counter(), self.weights
        expected = weights.checksum() if self.api.reports_checksum else None
        held.reading_directory, held.unconfirmed = weights.adapter_directory or weights.directory, True
        try:
            if weights.adapter_directory is None or not await self._has_base(weights):
                held.base_directory = held.default_adapter = None
                if weights.pieces is None:
                    await self.api.reload(self._send, weights.directory, weights.version)
                else:
                    await self._send_pieces(weights.pieces)
                held.base_directory = weights.directory
            if weights.adapter_directory is not None:
                assert weights.adapter_name is not None
                await self.api.load_adapter(
                    self._send, weights.adapter_name, weights.adapter_directory, weights.version
                )
                held.default_adapter = weights.adapter_name
            await self.confirm_version(weights)
            if expected is not None and (actual := await self.api.weights_checksum(self._send_status)) != (
                await expected
            ):
                raise InvalidResponse(
                    f"read weights of checksum {actual} from {weights.directory}, where there are {await expected}"
                )
            await self.compare_logprobs(weights)
        except RequestRefused as error:
            raise InvalidResponse(f"could not read new weights from {held.reading_directory}: {error}") from error
        except OSError as error:  # from reading the files here
            raise ServerUnavailable(
                f"could not be checked: the checksum of {weights.directory} cannot be computed here: {error}"
            ) from error
        finally:
            held.reading_directory = None
        held.unconfirmed, held.reload_seconds = False, time.perf_counter() - start

    async def _has_base(self, weights: WeightsVersion) -> bool:
        """Whether it has loaded the frozen model, and was not restarted since."""
        held = self.weights
        return held.base_directory == weights.directory and held.version == await self.fetch_version()

    async def _send_pieces(self, weights: WeightPieces) -> None:
        """Sends what changed if it has the weights before, else all. If it refuses the changes, sends all."""
        if not self.api.takes_pieces:
            raise InvalidResponse(f"is {self.api.name}, which takes no weights in pieces. Use rollout.sync: disk")
        self.weights.all_pieces_sent = False
        if weights.base is not None and self.weights.version == weights.base:
            try:
                await self._send_each(weights)
            except RequestRefused as error:
                LOG.warning("%s refused the weights that changed, and is sent all: %s", self.url, error)
            else:
                return
        self.weights.all_pieces_sent = True
        await self._send_each(replace(weights, base=None))

    async def _send_each(self, weights: WeightPieces) -> None:
        """Lets it read the pieces from their directory if it sees that, and the right files in it; else sends them."""
        if self.weights.sees_directory:
            try:
                await self.api.read_pieces(self._send, weights)
            except RequestRefused as error:
                if weights.base is not None and error.status != NOT_FOUND:
                    raise
                self.weights.sees_directory = False
            else:
                return
        pieces = weights.pieces()
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            await self.api.send_piece(self._send, piece)

    async def confirm_version(self, weights: WeightsVersion) -> None:
        self.weights.version = await self.fetch_version()
        if self.weights.version != weights.version:
            raise InvalidResponse(f"reports weights {self.weights.version!r} after it was given {weights.version!r}")

    async def compare_logprobs(self, weights: WeightsVersion, *, timeout: float | None = None) -> None:
        """Compares its log-probs of a few tokens with the trainer's, after it was given weights.

        If they are too far apart, raises `ServerUnavailable`, so that it is given the weights again, and the second
        time `InvalidResponse`. Completions that it was sampling are cancelled.
        """
        if weights.probe is None:
            return
        try:
            async with asyncio.timeout(timeout or self.timeout):
                completions = await asyncio.gather(*map(self.generate_when_free, weights.probe.requests))
        except TimeoutError as error:
            raise ServerUnavailable("gave no log-probs to compare with the trainer's in time") from error
        except RequestRefused as error:
            raise InvalidResponse(f"refused to give log-probs to compare with the trainer's: {error}") from error
        held = self.weights
        result = weights.probe.compare(completions, held.probe_result)
        if not result.problem:
            held.probe_result = result
        else:
            self.connection.cancel_requests()
            is_second_attempt, held.differing_version = held.differing_version == weights.version, weights.version
            raise InvalidResponse(result.problem) if is_second_attempt else ServerUnavailable(result.problem)

    async def generate_when_free(self, request: Request, patience: float = math.inf) -> Completion:
        """Returns one completion, requested again while the server is busy, for about `patience` seconds."""
        return await _when_free(lambda: self.generate(request), patience)

    async def generate(self, request: Request) -> Completion:
        """Returns one completion, with the version of the weights that sampled it if that is known."""
        assert self.model is not None
        version = self.weights.version
        if request.sampling.has_rules and not self.api.has_logit_rules:
            raise ValueError(
                f"a request has penalties, logit_bias, a grammar or top_logprobs, which {self.api.name} is not asked "
                "for here. Leave them out, or sample with the native generator or postlude serve."
            )
        if request.sampling.masked and not self.api.has_sampling_mask:
            raise ValueError(
                f"a request asks for the tokens that top_k, top_p and min_p leave, which {self.api.name} does not "
                "return. Leave these out, set sampling_mask to false, or sample with the native generator, postlude "
                "serve or vLLM."
            )
        adapter = request.adapter or self.weights.default_adapter
        try:
            completion = await self.api.generate(self._send, adapter or self.model, request)
        except (AttributeError, LookupError, TypeError, OverflowError) as error:  # unexpected JSON
            raise InvalidResponse(f"gave a reply that cannot be read: {error!r}") from error
        except RequestRefused as error:
            if error.status == NOT_FOUND and not (error.unknown_model and adapter is None):
                # It may be starting, or have been started again without the adapter.
                raise ServerUnavailable(f"replies with {error}") from error
            raise
        self._check_completion(completion, request)
        if completion.versions or version is None or version != self.weights.version:
            return completion  # with the versions it reports, or none if weights changed during the request
        return replace(completion, versions=(VersionSpan(version, 0, len(completion.tokens)),))

    def _check_completion(self, completion: Completion, request: Request) -> None:
        limit = request.sampling.max_new_tokens
        if len(completion.tokens) > limit:
            raise InvalidResponse(f"gave {len(completion.tokens)} tokens where at most {limit} were requested")
        if not completion.tokens and not self.api.omits_stop_tokens:
            raise InvalidResponse("gave a completion without a token")
        lowest, highest = min(completion.tokens, default=0), max(completion.tokens, default=0)
        if lowest < 0 or (self.vocab_size is not None and highest >= self.vocab_size):
            invalid_token, size = lowest if lowest < 0 else highest, self.vocab_size
            bounds = "" if size is None else f" (0 to {size - 1})"
            raise InvalidResponse(f"gave token {invalid_token}, which is not in the vocabulary{bounds}")
        if (logprob := max((*completion.logprobs, *completion.sampled_logprobs), default=0.0)) > LOGPROB_ROUNDING:
            raise InvalidResponse(f"gave a log-prob of {logprob:g}, but none is above 0")
        if request.sampling.masked:
            _check_masks(completion, self.vocab_size)

    async def fetch_version(self) -> str | None:
        return await self.api.weights_version(self._send_status)

    async def max_length(self) -> int | None:
        """Returns the maximum number of tokens of prompt and completion together; None if it does not report it."""
        assert self.model is not None
        return await self.api.max_length(self._send_status, self.model)

    async def update_problem(self, *, tied_head: bool, over_network: bool) -> str:
        """Returns why weight updates would not work, as text that follows its URL; "" if they work."""
        if over_network and not self.api.can_receive_weights:
            return f"is {self.api.name}, which takes no weights over the network. Use rollout.sync: disk"
        return await self.api.update_problem(
            self._patient(self.timeout), tied_head=tied_head, over_network=over_network
        )

    async def adapter_problem(self) -> str:
        """Returns why it cannot load adapters, as text that follows its URL; "" if it can."""
        return await self.api.adapter_problem(self._send_status)

    async def _only_model(self) -> str:
        names = await self.api.model_names(self._send_status)
        if len(names) != 1:
            raise InvalidResponse(f"serves {', '.join(names) or 'no model'}; name one of them in rollout.model")
        return names[0]

    def _sender(self, timeout: float) -> SendRequest:
        async def send(method: str, path: str, body: Any = None) -> Any:
            return json_or_raise(await self.connection.request(method, path, body, timeout=timeout))

        return send

    def _patient(self, timeout: float) -> SendRequest:
        """Returns a sender of requests that go to no other server: it sends them again while this one is busy."""
        send_once = self._sender(timeout)

        async def send(method: str, path: str, body: Any = None) -> Any:
            return await _when_free(lambda: send_once(method, path, body), BUSY_TIMEOUT)

        return send


def _check_masks(completion: Completion, vocab_size: int | None) -> None:
    """Raises for sampling masks that tokens of the completion cannot have been sampled from."""
    masks = completion.sampling_mask
    if masks is None or len(masks) != len(completion.tokens):
        count = "no" if masks is None else str(len(masks))
        raise InvalidResponse(f"gave {count} sampling masks for {len(completion.tokens)} tokens")
    for token, mask in zip(completion.tokens, masks, strict=True):
        if token not in mask:
            raise InvalidResponse(f"gave token {token}, which is not in its sampling mask of {len(mask)}")
        if min(mask) < 0 or (vocab_size is not None and max(mask) >= vocab_size):
            raise InvalidResponse(f"gave a sampling mask from {min(mask)} to {max(mask)}, outside of the vocabulary")


async def _when_free(attempt: Callable[[], Awaitable[Result]], patience: float) -> Result:
    """Returns the result of an attempt, made again while the server is busy, for about `patience` seconds."""
    end = time.monotonic() + patience
    while True:
        try:
            return await attempt()
        except ServerBusy as busy:
            pause = max(busy.retry_after, BUSY_PAUSE)
            if time.monotonic() + pause > end:
                raise
            await asyncio.sleep(pause)

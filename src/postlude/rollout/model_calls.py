"""ModelCall: completions that an agent asks for in its episode. `Conversations` samples them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.generate.protocol import AsyncRolloutEngine, CancellingEngine, Completion, FinishedCompletion, Request
from postlude.generate.sampling_params import SamplingParams
from postlude.rollout.episode import Episode
from postlude.serving.errors import RequestRefused, ServerError

Delivered: TypeAlias = "Sequence[Completion] | Exception"


@dataclass(frozen=True)
class ModelAccess:
    """The model as the agents of a group may use it."""

    tokenizer: ChatTokenizer
    sampling: SamplingParams
    """The run's sampling parameters, with the group's seed."""
    max_length: int
    """The limit of prompt and completion together, in tokens."""


@dataclass(eq=False)
class ModelCall:
    """A request for completions."""

    episode: Episode
    request: Request
    deliver: Callable[[Delivered], None]
    """Gets the completions, or the error that the agent gets, once."""
    cancelled: bool = False
    """Whether nobody waits for it any more."""
    _on_cancel: Callable[[], object] | None = field(default=None, init=False)

    def cancel(self) -> None:
        """Ends it, if its completions did not come yet. Any thread may call it."""
        self.cancelled = True
        if self._on_cancel is not None:
            self._on_cancel()

    def when_cancelled(self, act: Callable[[], object]) -> None:
        """Calls `act` when it is cancelled, in any thread, or now if it was. That may be twice."""
        self._on_cancel = act
        if self.cancelled:
            act()


class PendingCalls:
    """The calls that an engine works on. `record` gets each completion, and when it was requested."""

    def __init__(self, engine: AsyncRolloutEngine, record: Callable[[Completion, float], Any]) -> None:
        self.engine, self._record = engine, record
        self._calls: dict[int, _PendingCall] = {}  # by request id
        self._cancelled: deque[int] = deque()  # request ids, also of some that have finished

    @property
    def any(self) -> bool:
        return bool(self._calls)

    def submit(self, calls: Sequence[ModelCall]) -> None:
        for call in calls:
            if not call.cancelled:
                request_id = self.engine.submit(call.request)
                self._calls[request_id] = _PendingCall(call)
                call.when_cancelled(partial(self._cancelled.append, request_id))

    def end_cancelled(self) -> None:
        """Ends the requests that nobody waits for any more, if the engine can."""
        while self._cancelled:
            request_id = self._cancelled.popleft()
            if self._calls.pop(request_id, None) is not None and isinstance(self.engine, CancellingEngine):
                self.engine.cancel(request_id)

    def add(self, finished: FinishedCompletion) -> None:
        """Delivers the completions of a call, once all are there, or its error. Raises if no server is left."""
        if (pending := self._calls.get(finished.request_id)) is None:
            return  # of a call that failed or was cancelled
        if (error := finished.error) is not None:
            if isinstance(error, ServerError) and not isinstance(error.__cause__, RequestRefused):
                raise error
            del self._calls[finished.request_id]
            pending.call.deliver(error)
            return
        assert finished.completion is not None
        self._record(finished.completion, pending.since)
        pending.completions[finished.index] = finished.completion
        if len(pending.completions) == pending.call.request.n:
            del self._calls[finished.request_id]
            pending.call.deliver([pending.completions[index] for index in sorted(pending.completions)])


@dataclass(eq=False)
class _PendingCall:
    """A call, and those of its completions that finished, by index."""

    call: ModelCall
    completions: dict[int, Completion] = field(default_factory=dict)
    since: float = field(default_factory=time.perf_counter)


def combine_seeds(*numbers: int) -> int:
    """Returns one seed that depends on all numbers and their order."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (1 << 62)
    return seed

"""Session: a generator that runs step by step. Requests join while others run, and weights may change between steps.

Completions of one adapter run at a time. If those of others wait, adapters take turns: at the end of a turn its
completions stop, and their tokens are prefilled again in the next one. A turn lasts at least `TURN_SECONDS`, and at
least `TURN_STARTS` times as long as it took to begin, so that most of the time is spent on new tokens. The next turn is
that of the client that has waited longest for one.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

from postlude.generate.completion_state import CompletionState, PromptState
from postlude.generate.generator import Generator
from postlude.generate.protocol import FinishedCompletion, Request, SamplingUsage
from postlude.generate.scheduler import Scheduler

TURN_SECONDS, TURN_STARTS = 1.0, 5


@dataclass(frozen=True, eq=False)
class SessionTask:
    """Work between two steps that needs an adapter to be active, such as scoring a prompt."""

    adapter: str | None
    client: tuple[str, ...]
    run: Callable[[], None]
    fail: Callable[[Exception], None]
    """Called instead if the adapter cannot be used any more."""


class HasClient(Protocol):
    """Work that waits, of which clients take turns."""

    @property
    def client(self) -> tuple[str, ...]:
        """Who asked for it, as `Request.client`."""


Waiting = TypeVar("Waiting", bound=HasClient)


@dataclass
class _Queue:
    """What waits to run with one adapter."""

    completions: list[CompletionState] = field(default_factory=list)
    """Completions that have begun come first."""
    tasks: deque[SessionTask] = field(default_factory=deque)

    def clients(self) -> set[tuple[str, ...]]:
        """Returns the clients that wait: the first name of each `Request.client`."""
        return {completion.client[:1] for completion in self.completions} | {task.client[:1] for task in self.tasks}


@dataclass
class _Turn:
    """The time in which completions of one adapter run."""

    adapter: str | None
    began: float
    resumed: list[CompletionState]
    """Completions of an earlier turn, which have to be prefilled again."""
    seconds_to_begin: float | None = None
    """How long it took until these ran again; None until then."""


class Session:
    """Samples the completions of requests, step by step.

    A completion has the same tokens as `Generator.generate` returns for its seed and index, and the same log-probs to
    rounding, whatever else runs. Only one thread may use a session, and the whole model must be on its rank.

    Unless it `grows`, no more completions run at a time than waited at the first step, and on a GPU the cache has room
    for those only.
    """

    def __init__(
        self,
        generator: Generator,
        version: str | None = None,
        *,
        grows: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.generator, self.grows = generator, grows
        self.version = version
        """The name of the model's weights; None if they have none."""
        self._clock = clock
        self._scheduler: Scheduler | None = None
        self._turn: _Turn | None = None
        self._queues: dict[str | None, _Queue] = {}  # by adapter; completions are not in the scheduler
        self._last_turns: dict[tuple[str, ...], int] = {}  # by client
        self._turns = itertools.count(1)
        self._active: dict[int, dict[int, CompletionState]] = {}  # by request id and index
        self._request_ids = itertools.count()
        self._prompts: WeakValueDictionary[object, PromptState] = WeakValueDictionary()
        self._unordered = False  # whether the scheduler's waiting completions have to be sorted by `take_turns`

    @property
    def busy(self) -> bool:
        """Whether completions or tasks are left."""
        return bool(self._active or any(queue.tasks for queue in self._queues.values()))

    def usage(self) -> SamplingUsage:
        """Returns how busy it is now. Any thread may ask."""
        scheduler, limit = self._scheduler, self.generator.max_batch_tokens
        waiting = sum(len(queue.completions) for queue in list(self._queues.values()))
        if scheduler is None:
            return SamplingUsage(0, waiting, 0, limit)
        running = list(scheduler.running)
        cached = scheduler.allocator.used_tokens(running)
        return SamplingUsage(len(running), waiting + len(scheduler.waiting), cached, limit)

    def add(self, request: Request) -> int:
        """Adds a request. Returns its id, or raises ValueError. Requests with the same prompt share its prefill."""
        group = self.generator.new_completions(
            "the prompt",
            request.prompt,
            request.sampling,
            request.n,
            first_index=request.first_index,
            adapter=request.adapter,
        )
        key = (request.prompt, replace(request.sampling, seed=0), request.adapter)
        shared = self._prompts.setdefault(key, group[0].prompt)
        if shared is not group[0].prompt:
            shared.unstarted += len(group)
        for completion in group:
            completion.prompt, completion.client = shared, request.client
        request_id = next(self._request_ids)
        self._active[request_id] = dict(enumerate(group))
        is_its_turn = self._turn is not None and self._turn.adapter == request.adapter
        if is_its_turn and self._scheduler is not None and self._scheduler.fits_alone(group[0]):
            self._scheduler.add(group)
            self._unordered = True
        else:
            self._queue(request.adapter).completions += group
        return request_id

    def add_task(self, task: SessionTask) -> None:
        """Adds a task. In every step one is run, with clients in turns."""
        self._queue(task.adapter).tasks.append(task)

    def step(self) -> list[FinishedCompletion]:
        """Samples a token of every running completion. Returns those that finished.

        If one fails, the request has that one result with its error, and the other completions of it end.
        """
        if self._turn is not None and self._turn_is_over(self._turn):
            self._end_turn()
        while self._turn is None and self._queues:
            self._begin_turn()
        if self._turn is not None and self._activate(self._turn.adapter):
            self._step(self._turn)
        return [result for request_id in list(self._active) for result in self._take_finished(request_id)]

    def count_unfinished(self) -> tuple[int, int]:
        """Returns how many completions are unfinished, and how many tokens these have so far."""
        lengths = [len(completion.tokens) for group in self._active.values() for completion in group.values()]
        return len(lengths), sum(lengths)

    def unfinished(self, request_id: int) -> dict[int, CompletionState]:
        """Returns the unfinished completions of a request by index, with their tokens so far."""
        return dict(self._active.get(request_id, {}))

    def abort(self, request_id: int) -> None:
        """Ends the completions of a request without a result."""
        group = self._active.pop(request_id, {})
        for completion in group.values():
            queue = self._queues.get(completion.prompt.adapter)
            if queue is not None and completion in queue.completions:
                queue.completions.remove(completion)
                completion.prompt.unstarted -= not completion.tokens
            elif self._scheduler is not None:
                self._scheduler.abort(completion)

    def update_weights(self, load: Callable[[], None], version: str) -> None:
        """Calls `load`, which sets the model's new weights, and names them `version`. If it raises, nothing changes.

        Unfinished completions continue with the new weights: all their tokens are prefilled again.
        """
        load()
        self.generator.weights_changed()
        if self._scheduler is not None and self._turn is not None and self._activate(self._turn.adapter):
            with self.generator.generation_mode(self._turn.adapter):
                self._scheduler.preempt_all()
        for group in self._active.values():
            for completion in group.values():
                self._record_version(completion)
        self.version = version

    # --- turns

    def _queue(self, adapter: str | None) -> _Queue:
        return self._queues.setdefault(adapter, _Queue())

    def _begin_turn(self) -> None:
        """Begins the turn of the adapter one of whose clients has waited longest for a turn."""

        def last_turn(adapter: str | None) -> int:
            return min((self._last_turns.get(client, 0) for client in self._queues[adapter].clients()), default=0)

        adapter, began = min(self._queues, key=last_turn), self._clock()
        queue = self._queues[adapter]
        self._last_turns |= dict.fromkeys(queue.clients(), next(self._turns))
        if self._activate(adapter):
            self._turn = _Turn(adapter, began, [completion for completion in queue.completions if completion.tokens])

    def _step(self, turn: _Turn) -> None:
        queue = self._queue(turn.adapter)
        with self.generator.generation_mode(turn.adapter):
            if queue.tasks:
                queue.tasks = deque(in_turns(list(queue.tasks)))
                queue.tasks.popleft().run()
            if self._scheduler is None and queue.completions:
                completions, queue.completions = queue.completions, []
                rows = None if self.grows else len(completions)
                self._scheduler, self._unordered = self.generator.session_scheduler(completions, rows), True
            scheduler = self._scheduler
            if scheduler is not None:
                if self._unordered:
                    scheduler.waiting, self._unordered = take_turns(scheduler.waiting), False
                scheduler.step()
        if scheduler is not None and not scheduler.busy:
            scheduler = self._scheduler = None
        if scheduler is None and not queue.tasks:
            self._end_turn()
        elif turn.seconds_to_begin is None:
            waiting = {id(completion) for completion in scheduler.waiting} if scheduler is not None else set()
            still_waiting = [completion for completion in turn.resumed if id(completion) in waiting]
            if len(still_waiting) in (0, len(turn.resumed)):
                turn.seconds_to_begin = self._clock() - turn.began
            turn.resumed = still_waiting

    def _turn_is_over(self, turn: _Turn) -> bool:
        """Whether others wait, and the turn has been long enough."""
        waiting = any(
            queue.completions or (queue.tasks and adapter != turn.adapter) for adapter, queue in self._queues.items()
        )
        if not waiting or turn.seconds_to_begin is None:
            return False
        return self._clock() - turn.began >= max(TURN_SECONDS, TURN_STARTS * turn.seconds_to_begin)

    def _end_turn(self) -> None:
        """Makes the running completions wait for the next turn of their adapter, behind those of others."""
        turn, scheduler, self._turn, self._scheduler = self._turn, self._scheduler, None, None
        if turn is None:
            return
        queue = self._queues.pop(turn.adapter, _Queue())
        if scheduler is not None:
            scheduler.preempt_all()
            queue.completions = [*take_turns(scheduler.waiting), *queue.completions]
        if queue.completions or queue.tasks:
            self._queues[turn.adapter] = queue
        if not self._queues:
            self._last_turns.clear()
            self.generator.adapters.activate(None)

    def _activate(self, adapter: str | None) -> bool:
        """Makes an adapter active. If that fails, returns False, and the completions and tasks that need it fail."""
        try:
            self.generator.adapters.activate(adapter)
        except (ValueError, OSError) as error:
            for group in self._active.values():
                for completion in group.values():
                    if completion.prompt.adapter == adapter:
                        completion.error = error
            for task in self._queues.pop(adapter, _Queue()).tasks:
                task.fail(error)
            if self._turn is not None and self._turn.adapter == adapter:
                self._turn = self._scheduler = None
            return False
        return True

    # --- results

    def _take_finished(self, request_id: int) -> list[FinishedCompletion]:
        group = self._active[request_id]
        finished = {index: group.pop(index) for index, completion in list(group.items()) if completion.done}
        for index, completion in finished.items():
            if completion.error is not None:
                self.abort(request_id)
                return [FinishedCompletion(request_id, index, None, completion.error)]
            self._record_version(completion)
        if not group:
            del self._active[request_id]
        return [
            FinishedCompletion(request_id, index, self.generator.to_completion(completion))
            for index, completion in finished.items()
        ]

    def _record_version(self, completion: CompletionState) -> None:
        if self.version is not None:
            completion.record_version(self.version)


def take_turns(waiting: Iterable[CompletionState]) -> deque[CompletionState]:
    """Returns completions with clients in turns. Those that had begun and were preempted stay first."""
    completions = list(waiting)
    begun = [completion for completion in completions if completion.tokens]
    return deque([*begun, *in_turns([completion for completion in completions if not completion.tokens])])


def in_turns(waiting: Sequence[Waiting], level: int = 0) -> Sequence[Waiting]:
    """Returns the items round-robin over `client[level]`, and those of each such name over the next level."""
    by_name: dict[tuple[str, ...], list[Waiting]] = {}
    for item in waiting:
        by_name.setdefault(item.client[level : level + 1], []).append(item)
    if list(by_name) in ([], [()]):
        return waiting
    ordered = (in_turns(group, level + 1) if name else group for name, group in by_name.items())
    turns = itertools.chain.from_iterable(itertools.zip_longest(*ordered))
    return [item for item in turns if item is not None]

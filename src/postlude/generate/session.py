"""Session: a generator that runs step by step. Requests join while others run, and weights may change between steps."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from postlude.generate.completion_state import CompletionState
from postlude.generate.generator import Generator
from postlude.generate.protocol import FinishedCompletion, Request
from postlude.generate.scheduler import Scheduler


class Session:
    """Samples the completions of requests, step by step.

    A completion has the same tokens as `Generator.generate` returns for its seed and index, and the same log-probs to
    rounding, whatever else runs. Only one thread may use a session, and the whole model must be on its rank.
    Completions of one adapter run at a time; those of others wait until they are finished.
    """

    def __init__(self, generator: Generator, version: str | None = None) -> None:
        self.generator = generator
        self.version = version
        """The name of the model's weights; None if they have none."""
        self._scheduler: Scheduler | None = None
        self._adapter: str | None = None  # of all completions of the scheduler
        # Completions that wait for the next scheduler: they do not fit in this one, or have another adapter.
        self._postponed: deque[list[CompletionState]] = deque()
        self._active: dict[tuple[int, int], CompletionState] = {}  # by request id and index
        self._request_ids = itertools.count()
        self._unordered = False  # whether completions were added since the clients' turns were set

    @property
    def busy(self) -> bool:
        """Whether completions are left."""
        return bool(self._active)

    def add(self, request: Request) -> int:
        """Adds a request. Returns its id, or raises ValueError."""
        group = self.generator.new_completions(
            "the prompt",
            request.prompt,
            request.sampling,
            request.n,
            first_index=request.first_index,
            adapter=request.adapter,
        )
        for completion in group:
            completion.client = request.client
        request_id = next(self._request_ids)
        self._active |= {(request_id, index): completion for index, completion in enumerate(group)}
        if self._scheduler is None or self._postponed or not self._fits(self._scheduler, group):
            self._postponed.append(group)
        else:
            self._schedule(self._scheduler, group)
        return request_id

    def step(self) -> list[FinishedCompletion]:
        """Samples a token of every running completion. Returns those that finished or failed."""
        if self._scheduler is None:
            self._start()
        if self._scheduler is not None and self._has_adapter(self._adapter):
            if self._unordered:
                self._scheduler.waiting, self._unordered = take_turns(self._scheduler.waiting), False
            with self.generator.generation_mode(self._adapter):
                self._scheduler.step()
        if self._scheduler is not None and not self._scheduler.busy:
            self._end()
        return [self._finished(*key) for key, completion in list(self._active.items()) if completion.done]

    def unfinished(self, request_id: int) -> dict[int, CompletionState]:
        """Returns the unfinished completions of a request by index, with their tokens so far."""
        return {index: completion for (owner, index), completion in self._active.items() if owner == request_id}

    def abort(self, request_id: int) -> None:
        """Ends the completions of a request without a result."""
        group = [self._active.pop(key) for key in list(self._active) if key[0] == request_id]
        postponed = next((other for other in self._postponed if group and group[0] in other), None)
        if postponed is not None:
            self._postponed.remove(postponed)
        elif self._scheduler is not None:
            for completion in group:
                self._scheduler.abort(completion)

    def update_weights(self, load: Callable[[], None], version: str) -> None:
        """Calls `load`, which sets the model's new weights, and names them `version`. If it raises, nothing changes.

        Unfinished completions continue with the new weights: all their tokens are prefilled again.
        """
        load()
        self.generator.quantize_weights()
        if self._scheduler is not None and self._has_adapter(self._adapter):
            with self.generator.generation_mode(self._adapter):
                self._scheduler.preempt_all()
        for completion in self._active.values():
            self._record_version(completion)
        self.version = version

    def _start(self) -> None:
        """Starts a scheduler of the first postponed completions, and of all with the same adapter that fit in it."""
        while self._postponed and not self._has_adapter(self._postponed[0][0].prompt.adapter):
            pass  # they failed, and are no longer postponed
        if not self._postponed:
            return
        group = self._postponed.popleft()
        self._adapter = group[0].prompt.adapter
        with self.generator.generation_mode(self._adapter):
            self._scheduler = self.generator.session_scheduler(group)
        waiting, self._postponed = self._postponed, deque()
        for group in waiting:
            if self._fits(self._scheduler, group):
                self._schedule(self._scheduler, group)
            else:
                self._postponed.append(group)

    def _end(self) -> None:
        self._scheduler = None
        self.generator.adapters.activate(None)

    def _has_adapter(self, adapter: str | None) -> bool:
        """Whether the adapter is still loaded. If not, all completions that are sampled with it fail."""
        try:
            self.generator.adapters.check(adapter)
        except ValueError as error:
            for completion in self._active.values():
                if completion.prompt.adapter == adapter:
                    completion.error = error
            self._postponed = deque(group for group in self._postponed if group[0].prompt.adapter != adapter)
            if self._scheduler is not None and self._adapter == adapter:
                self._end()
            return False
        return True

    def _fits(self, scheduler: Scheduler, group: list[CompletionState]) -> bool:
        return group[0].prompt.adapter == self._adapter and scheduler.fits_alone(group[0])

    def _schedule(self, scheduler: Scheduler, group: list[CompletionState]) -> None:
        """Adds completions. If others with the same prompt wait, the prompt is prefilled once for all."""
        shared = next((other for other in reversed(scheduler.waiting) if _same_but_seed(other, group[0])), None)
        if shared is not None:
            shared.prompt.unstarted += len(group)
            for completion in group:
                completion.prompt = shared.prompt
        scheduler.add(group)
        self._unordered = True

    def _finished(self, request_id: int, index: int) -> FinishedCompletion:
        completion = self._active.pop((request_id, index))
        if completion.error is not None:
            return FinishedCompletion(request_id, index, None, completion.error)
        self._record_version(completion)
        return FinishedCompletion(request_id, index, self.generator.to_completion(completion))

    def _record_version(self, completion: CompletionState) -> None:
        if self.version is not None:
            completion.record_version(self.version)


def take_turns(waiting: deque[CompletionState]) -> deque[CompletionState]:
    """Returns completions with their clients in turns. Those that have begun, and were preempted, stay first."""
    begun = [completion for completion in waiting if completion.tokens]
    return deque([*begun, *_in_turns([completion for completion in waiting if not completion.tokens], 0)])


def _in_turns(waiting: list[CompletionState], level: int) -> list[CompletionState]:
    """Returns completions in turns of those with different names of the client from this level on."""
    by_name: dict[tuple[str, ...], list[CompletionState]] = {}
    for completion in waiting:
        by_name.setdefault(completion.client[level : level + 1], []).append(completion)
    if list(by_name) in ([], [()]):
        return waiting
    ordered = (_in_turns(group, level + 1) if name else group for name, group in by_name.items())
    turns = itertools.chain.from_iterable(itertools.zip_longest(*ordered))
    return [completion for completion in turns if completion is not None]


def _same_but_seed(first: CompletionState, second: CompletionState) -> bool:
    """Whether two completions have the same prompt and sampling, apart from the seed."""
    sampling = second.prompt.sampling
    return (
        first.prompt.tokens == second.prompt.tokens and replace(first.prompt.sampling, seed=sampling.seed) == sampling
    )

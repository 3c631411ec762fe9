"""Session: the generator as something that goes on. Requests join while others run, and weights are renewed between."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from postlude.generate.completion_state import CompletionState
from postlude.generate.generator import Generator
from postlude.generate.protocol import FinishedCompletion, Request


class Run(Protocol):
    """Answers under way, by whichever way the generator takes its steps."""

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        ...

    @property
    def waiting(self) -> Sequence[CompletionState]:
        """Those that have not joined."""
        ...

    def room_for(self, answer: CompletionState) -> bool:
        """Whether it would ever have room."""
        ...

    def add(self, answers: Sequence[CompletionState]) -> None:
        """More answers, which join when there is room."""
        ...

    def step(self) -> None:
        """A token for every running answer."""
        ...

    def restart(self) -> None:
        """Let all pass the model anew: what is cached of them is forgotten."""
        ...

    def withdraw(self, answer: CompletionState) -> None:
        """Nobody wants this one any more."""
        ...


class Session:
    """Answers of a generator, step by step. An answer is the one that `Generator.generate` gives for its seed and
    number, whatever runs beside it: token for token, its log-probs to rounding.

    One thread owns a session, and one rank its model.
    """

    def __init__(self, generator: Generator, version: str | None = None) -> None:
        self.generator = generator
        self.version = version
        """What the model's weights are called; None where nobody named them."""
        self._run: Run | None = None
        self._late: deque[list[CompletionState]] = deque()  # those that the run has no room for: the next one will
        self._under_way: dict[tuple[int, int], CompletionState] = {}  # by ticket and number
        self._tickets = itertools.count()

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self._under_way)

    def add(self, request: Request) -> int:
        """Ask for answers. Returns the ticket by which they will be known, or raises a sentence."""
        group = self.generator.answers("the prompt", request.prompt, request.sampling, request.n, first=request.first)
        ticket = next(self._tickets)
        self._under_way |= {(ticket, number): answer for number, answer in enumerate(group)}
        if self._run is None or self._late or not self._run.room_for(group[0]):
            self._late.append(group)
            return ticket
        self._share_prompt(group, self._run.waiting)
        self._run.add(group)
        return ticket

    def step(self) -> list[FinishedCompletion]:
        """A token for every running answer; those that it finished, and those that failed."""
        with self.generator.stepping():
            if self._run is None and self._late:
                self._begin()
            if self._run is not None:
                self._run.step()
                if not self._run.busy:
                    self._run = None
        return [self._finished(*key) for key, answer in list(self._under_way.items()) if answer.done]

    def progress(self, ticket: int) -> dict[int, CompletionState]:
        """The answers of a request that are under way, by number: their tokens so far."""
        return {number: answer for (owner, number), answer in self._under_way.items() if owner == ticket}

    def withdraw(self, ticket: int) -> None:
        """Nobody wants these answers any more."""
        group = [self._under_way.pop(key) for key in list(self._under_way) if key[0] == ticket]
        late = next((each for each in self._late if group and group[0] in each), None)
        if late is not None:
            self._late.remove(late)
        elif self._run is not None:
            for answer in group:
                self._run.withdraw(answer)

    def renew(self, load: Callable[[], None], version: str) -> None:
        """Let `load` give the model new weights, which are called `version`; if it raises, nothing has changed.

        Answers under way are kept, and go on with the new weights: all that comes before passes the model anew.
        """
        load()
        if self._run is not None:
            with self.generator.stepping():
                self._run.restart()
        for answer in self._under_way.values():
            self._name_weights(answer)
        self.version = version

    def _begin(self) -> None:
        first = self._late.popleft()
        self._run = run = self.generator.begin(first)
        while self._late and run.room_for(self._late[0][0]):
            group = self._late.popleft()
            self._share_prompt(group, run.waiting)
            run.add(group)

    def _share_prompt(self, group: list[CompletionState], waiting: Sequence[CompletionState]) -> None:
        """A prompt that others wait to answer as well passes the model once for all of them."""
        own = group[0].prompt
        for other in reversed(waiting):
            found = other.prompt
            if found.tokens == own.tokens and replace(found.sampling, seed=own.sampling.seed) == own.sampling:
                found.not_begun += len(group)
                for answer in group:
                    answer.prompt = found
                return

    def _finished(self, ticket: int, number: int) -> FinishedCompletion:
        answer = self._under_way.pop((ticket, number))
        if answer.error is not None:
            return FinishedCompletion(ticket, number, None, answer.error)
        self._name_weights(answer)
        return FinishedCompletion(ticket, number, self.generator.completion(answer))

    def _name_weights(self, answer: CompletionState) -> None:
        if self.version is not None:
            answer.sampled_with(self.version)

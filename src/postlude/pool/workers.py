"""Workers: a function called in other processes, where it may raise, hang or crash at the cost of one call."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from postlude.pool import worker
from postlude.pool.process_pool import INSIDE, ProcessPool
from postlude.pool.worker_pool import CallResult, PoolFactory, WorkerError, WorkerPool
from postlude.user_code import describe_error, load_callable


class Workers:
    """`count` processes that call `function`, or with 0 this one, where nothing can be timed out.

    `function` is one that can be pickled, or is named path/to/file.py:name. If it has a method `prepare`, that is
    called before its first call is timed. It should depend on its arguments alone, since any worker may get any call;
    hashes are the same in all of them. A call of more than `timeout` seconds is ended with its process and whatever
    that has started, and so is every worker on `close`, at exit, and when this object is dropped. `pool_factory`
    finds them; without it, they are processes of this machine.

    `submit` and `poll` let the caller go on meanwhile; `call_all` waits.
    """

    def __init__(
        self, function: str | Callable[..., Any], *, count: int, timeout: float, pool_factory: PoolFactory | None = None
    ) -> None:
        if count < 0:
            raise ValueError(f"workers is {count}, but the least is 0: call the function in this process.")
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout}, but a call needs some seconds, more than 0.")
        self.name = function if isinstance(function, str) else _name(function)
        self._here: Callable[..., Any] | None = None
        self._tickets = itertools.count()
        self._done: dict[int, CallResult] = {}  # what was called in this process
        self._crew: WorkerPool | None = None
        self._closed = False
        if count == 0:
            self._here = worker.prepare(load_callable(function) if isinstance(function, str) else function)
            return
        if INSIDE in os.environ:
            raise WorkerError(
                f"a worker process is about to start workers of its own for {self.name}. A file with a function for "
                f'workers is run in each: put what it does itself under `if __name__ == "__main__":`.'
            )
        self._crew = (pool_factory or ProcessPool)(_packed(function, self.name), self.name, count, timeout)
        self._finalizer = weakref.finalize(self, self._crew.close)

    @property
    def lost(self) -> int | None:
        """How many workers went with no fault of a call's, so that others did what they were at. None: none can."""
        return None if self._crew is None else self._crew.lost

    def submit(self, arguments: tuple[Any, ...]) -> int:
        """Ask for a call, and go on. Returns the ticket by which its outcome will be known."""
        if self._closed:
            raise WorkerError(f"the workers of {self.name} were closed. Make new ones.")
        ticket = next(self._tickets)
        if self._here is not None:
            self._done[ticket] = CallResult.of(worker.answer(self._here, arguments))
        else:
            assert self._crew is not None
            self._crew.give(ticket, _parcelled(arguments))
        return ticket

    def poll(self, timeout: float | None = 0.0, of: Collection[int] | None = None) -> dict[int, CallResult]:
        """Outcomes that have come, by their tickets: waits up to `timeout` seconds for the first, for ever if None.

        Each is told once. `of` asks for these tickets alone.
        """
        if self._crew is not None:
            return self._crew.take(timeout, of)
        found = {ticket: self._done[ticket] for ticket in (list(self._done) if of is None else of)}
        for ticket in found:
            del self._done[ticket]
        return found

    def call_all(self, calls: Sequence[tuple[Any, ...]]) -> list[CallResult]:
        """Call the function with each tuple of arguments. Outcomes come in the order of the calls."""
        tickets: list[int] = []
        outcomes: dict[int, CallResult] = {}
        try:
            for call in calls:
                tickets.append(self.submit(call))
            while len(outcomes) < len(tickets):
                outcomes |= self.poll(None, set(tickets) - outcomes.keys())
        except BaseException:
            if self._crew is not None:
                self._crew.forget(tickets)  # what they still answer is nobody's
            raise
        return [outcomes[ticket] for ticket in tickets]

    def close(self) -> None:
        """End every worker."""
        self._closed = True
        if self._crew is not None:
            self._crew.close()


def _parcelled(arguments: tuple[Any, ...]) -> bytes:
    """A call by itself, and as a plain tuple, so that a worker imports nothing of ours to read it."""
    try:
        return pickle.dumps(tuple(arguments))
    except Exception as error:
        raise WorkerError(
            f"the arguments of a call cannot be sent to a worker process ({describe_error(error)}). "
            f"Keep examples to plain data, or use workers=0."
        ) from error


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _packed(function: str | Callable[..., Any], name: str) -> bytes:
    """What a worker needs to have the function: pickled, by its file, or both."""
    where = function if isinstance(function, str) else _where(function)
    pickled: bytes | None = None
    if not isinstance(function, str) and getattr(function, "__module__", None) != "__main__":
        with contextlib.suppress(Exception):
            pickled = pickle.dumps(function)
    if pickled is None and where is None:
        raise WorkerError(
            f"{name} cannot be sent to a worker process. Put it at the top of a file and name it path/to/file.py:name, "
            f"or use workers=0."
        )
    return pickle.dumps(
        {"sys_path": [path or str(Path.cwd()) for path in sys.path], "pickled": pickled, "where": where}
    )


def _where(function: Callable[..., Any]) -> str | None:
    """The file and name of a function that stands at the top of a file."""
    file = getattr(sys.modules.get(getattr(function, "__module__", "")), "__file__", None)
    name = getattr(function, "__qualname__", "")
    return f"{file}:{name}" if file and str(file).endswith(".py") and name.isidentifier() else None

"""Runs work on rank 0 and shares its result or failure with all ranks; `ConsistencyCheck` compares what ranks have.

With a `Rank0Controller`, only rank 0 runs the program for a while, and calls functions on all ranks.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

Value = TypeVar("Value")
Result = TypeVar("Result")
Argument = TypeVar("Argument")
Failure = TypeVar("Failure", bound=BaseException)
WAIT_FOR_RANK0 = timedelta(days=7)  # how long a rank waits for rank 0's next call


class RankFailure(Exception):
    """An exception of one rank, raised on every rank."""

    def __init__(self, rank: int, cause: Exception) -> None:
        super().__init__(rank, cause)
        self.rank, self.cause = rank, cause


def gather_and_decide(
    work: Callable[[], Value],
    decide: Callable[[list[Value]], Result],
    group: dist.ProcessGroup | None = None,
    *,
    raise_cause: bool = False,
) -> Result:
    """Runs `work` on every rank and `decide` on rank 0, with the results by rank. Every rank returns its result.

    If either fails, every rank raises a `RankFailure` that names the rank, or its `cause` with `raise_cause`, so that
    none is left waiting. Each rank sends once and receives once, whatever their number.
    """
    if not dist.is_initialized():
        return decide([work()])
    local: tuple[Any, Exception | None] = _result_or_error(work)
    gathered = _gather(local, group)
    decision: list[Any] = [None]
    if gathered:
        failed = [(rank, error) for rank, (_, error) in enumerate(gathered) if error is not None]
        if failed:
            decision = [(None, failed[0])]
        else:
            result, error = _result_or_error(lambda: decide([value for value, _ in gathered]))
            decision = [(result, None if error is None else (0, error))]
    dist.broadcast_object_list(decision, group=group, group_src=0)
    result, failure = decision[0]
    if failure is not None and raise_cause:
        raise failure[1]
    if failure is not None:
        raise RankFailure(*failure)
    decided: Result = result
    return decided


def on_rank0(work: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """Runs `work` on rank 0. Returns its result, or raises its exception, on every rank."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return work()
    return gather_and_decide(lambda: None, lambda _: work(), group, raise_cause=True)


class Rank0Controller(Generic[Argument, Value]):
    """Rank 0 runs the program and calls a function on all ranks; the others wait for these calls.

    A rank waits for calls as long as rank 0 is busy, and still notices a lost rank. Every rank creates a controller, at
    the same point of the program.
    """

    def __init__(self, function: Callable[[Argument], Value]) -> None:
        self.function = function
        multiple_ranks = dist.is_initialized() and dist.get_world_size() > 1
        self.group = dist.new_group(backend="gloo", timeout=WAIT_FOR_RANK0) if multiple_ranks else None
        self.is_rank0 = self.group is None or dist.get_rank(self.group) == 0
        self._closed = False

    def close(self) -> None:
        """Destroys the controller's group. Every rank calls it, when no call is running."""
        if self.group is not None and not self._closed and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self._closed = True

    def on_rank0(self, work: Callable[[], Result]) -> Result:
        """Runs `work` on rank 0, while the others serve its calls. Returns its result, or raises, on every rank."""
        if self.group is None:
            return work()
        if not self.is_rank0:
            self._serve()
            return on_rank0(work, self.group)
        result, error = _result_or_error(work)
        dist.broadcast_object_list([None], group=self.group, group_src=0)  # there are no more calls

        def finished() -> Result:
            if error is not None:
                raise error
            return result  # type: ignore[no-any-return]

        return on_rank0(finished, self.group)

    def call_all(self, argument: Argument) -> list[Value]:
        """Calls the function on all ranks and returns the results by rank. Rank 0 calls it, inside `on_rank0`."""
        if self.group is None:
            return [self.function(argument)]
        dist.broadcast_object_list([(argument,)], group=self.group, group_src=0)
        return self._call(argument)

    def gather(self, value: Result) -> list[Result]:
        return [value] if self.group is None else _gather(value, self.group)

    def scatter(self, values: list[Result] | None) -> Result:
        """Returns this rank's value. Rank 0 passes the values of all ranks; the others pass None."""
        received: list[Any] = [None]
        if self.group is None:
            assert values is not None
            received = values
        else:
            dist.scatter_object_list(received, values, group=self.group, group_src=0)
        value: Result = received[0]
        return value

    def _serve(self) -> None:
        while True:
            call: list[Any] = [None]
            dist.broadcast_object_list(call, group=self.group, group_src=0)
            if call[0] is None:
                return
            self._call(call[0][0])

    def _call(self, argument: Argument) -> list[Value]:
        """Calls the function. Rank 0 gets all results, or raises a rank's exception, which ends its `on_rank0`."""
        gathered = self.gather(_result_or_error(lambda: self.function(argument)))
        for _, error in gathered:
            if error is not None:
                raise error
        return [value for value, _ in gathered]


def _gather(value: Result, group: dist.ProcessGroup | None) -> list[Result]:
    """Returns every rank's value, by rank, on rank 0; an empty list on the others."""
    gathered: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(value, gathered, group=group, group_dst=0)
    return gathered or []


def _result_or_error(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, if_picklable(error) or RuntimeError(f"{type(error).__name__}: {error}")


def if_picklable(error: Failure) -> Failure | None:
    """Returns a copy of an error, or None if it cannot be sent to another process."""
    try:
        copy: Failure = pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return copy


UNKNOWN = torch.iinfo(torch.int64).min // 2
"""The value that a rank without data sends."""


class ConsistencyCheck:
    """Lists of integers by name, which all ranks compare: after an `exchange`, the highest and lowest of each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.highest: dict[str, list[int]] = {}
        self.lowest: dict[str, list[int]] = {}

    @contextmanager
    def exchange(self, action: str, sizes: Mapping[str, int]) -> Iterator[dict[str, list[int]]]:
        """Compares the lists that the block stores in the dict. `sizes` has the length of each, the same on all ranks.

        A list that the block does not store is UNKNOWN on this rank. If the block raises on one rank, every rank
        raises: that rank its own error, the others that it could not do the `action`.
        """
        unknown = {name: [UNKNOWN] * size for name, size in sizes.items()}
        values = dict(unknown)
        error: Exception | None = None
        try:
            yield values
        except Exception as raised:
            error = raised
        if error is not None and dist.get_world_size() == 1:
            raise error
        failed_rank = self._reduce(values, UNKNOWN) if error is None else self._reduce(unknown, dist.get_rank())
        if error is not None:
            raise error
        if failed_rank != UNKNOWN:
            raise RuntimeError(f"rank {failed_rank} could not {action}: its own error says why.")

    def differs(self, name: str) -> bool:
        return self.lowest[name] != self.highest[name]

    def digest(self, *data: Sequence[int] | str | Tensor) -> int:
        """Returns a 62-bit digest of the data; 0 if there is only one rank."""
        if dist.get_world_size() == 1:
            return 0
        digest = hashlib.blake2b(digest_size=8)
        for item in data:
            if isinstance(item, str):
                content: Any = item.encode()
            elif isinstance(item, Tensor):
                content = item.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() if item.numel() else b""
            else:
                content = np.asarray(item, dtype=np.int64)
            digest.update(f"{len(content)} ".encode())
            digest.update(content)
        return int.from_bytes(digest.digest(), "little") >> 2

    def _reduce(self, values: Mapping[str, list[int]], failed_rank: int) -> int:
        """Fills `highest` and `lowest`, and returns a rank that failed, or UNKNOWN."""
        self.highest = self.lowest = dict(values)
        if dist.get_world_size() == 1:
            return failed_rank
        integers = [integer for name in values for integer in values[name]]
        data = torch.tensor([failed_rank, *integers, *map(_negate, integers)], dtype=torch.int64, device=self.device)
        data = cpu_if_gloo(data)
        dist.all_reduce(data, dist.ReduceOp.MAX)
        failed_rank, *maxima = data.tolist()
        highest, lowest = iter(maxima[: len(integers)]), map(_negate, maxima[len(integers) :])
        self.highest = {name: list(islice(highest, len(values[name]))) for name in values}
        self.lowest = {name: list(islice(lowest, len(values[name]))) for name in values}
        return failed_rank


def _negate(integer: int) -> int:
    """Returns -integer, so that a maximum of negated integers gives the minimum; UNKNOWN stays the lowest."""
    return UNKNOWN if integer == UNKNOWN else -integer


def cpu_if_gloo(tensor: Tensor) -> Tensor:
    """Returns the tensor on the CPU if the backend is gloo, which sends from there; else as it is."""
    return tensor.cpu() if dist.is_initialized() and dist.get_backend() == "gloo" else tensor

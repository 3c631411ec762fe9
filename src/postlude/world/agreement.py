"""What ranks decide together: the first one decides, the others are told, and a failure of one is heard by all."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

Part = TypeVar("Part")
Result = TypeVar("Result")


class RankFailure(Exception):
    """What a rank met, as every rank hears of it."""

    def __init__(self, rank: int, cause: Exception) -> None:
        super().__init__(rank, cause)
        self.rank, self.cause = rank, cause


def agreed(
    work: Callable[[], Part], decide: Callable[[list[Part]], Result], group: dist.ProcessGroup | None = None
) -> Result:
    """What the first rank decides, given what `work` found on every rank in turn; the same on all of them.

    Where either fails, every rank raises a `RankFailure` that names the rank, so none is left waiting. Each rank sends
    once and receives once, however many there are.
    """
    if not dist.is_initialized():
        return decide([work()])
    mine: tuple[Any, Exception | None] = _attempt(work)
    first = dist.get_rank(group) == 0
    everyone: list[Any] | None = [None] * dist.get_world_size(group) if first else None
    dist.gather_object(mine, everyone, group=group, group_dst=0)
    verdict: list[Any] = [None]
    if everyone is not None:
        failed = [(rank, error) for rank, (_, error) in enumerate(everyone) if error is not None]
        if failed:
            verdict = [(None, failed[0])]
        else:
            result, error = _attempt(lambda: decide([found for found, _ in everyone]))
            verdict = [(result, None if error is None else (0, error))]
    dist.broadcast_object_list(verdict, group=group, group_src=0)
    result, failure = verdict[0]
    if failure is not None:
        raise RankFailure(*failure)
    decided: Result = result
    return decided


def first_rank_says(work: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """What `work` gives on the first rank, or raises there, on every rank."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return work()
    try:
        return agreed(lambda: None, lambda _: work(), group)
    except RankFailure as failure:
        raise failure.cause from None


def _attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        try:
            told: Exception = pickle.loads(pickle.dumps(error))
        except Exception:  # it cannot be sent, but what it says can
            told = RuntimeError(f"{type(error).__name__}: {error}")
        return None, told

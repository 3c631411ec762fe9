"""What ranks decide together: the first one decides, the others are told, and a failure of one is heard by all.

In some stretches the first rank leads: it alone knows what comes next, and the others follow its orders.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch.distributed as dist

Part = TypeVar("Part")
Result = TypeVar("Result")
Order = TypeVar("Order")
PATIENCE = timedelta(days=7)  # how long a rank waits for what the first one is about to say


class RankFailure(Exception):
    """What a rank met, as every rank hears of it."""

    def __init__(self, rank: int, cause: Exception) -> None:
        super().__init__(rank, cause)
        self.rank, self.cause = rank, cause


def gather_and_decide(
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


def on_rank0(work: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """What `work` gives on the first rank, or raises there, on every rank."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return work()
    try:
        return gather_and_decide(lambda: None, lambda _: work(), group)
    except RankFailure as failure:
        raise failure.cause from None


class Rank0Controller(Generic[Order, Part]):
    """The first rank leads, the others follow: every order is obeyed by all ranks at once.

    An order that comes late is waited for, however long the first rank has to wait for others itself; a rank that is
    lost is noticed all the same. Every rank makes one, and all make it in the same place.
    """

    def __init__(self, obey: Callable[[Order], Part]) -> None:
        self.obey = obey
        several = dist.is_initialized() and dist.get_world_size() > 1
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE) if several else None
        self.is_rank0 = self.group is None or dist.get_rank(self.group) == 0
        """Whether this is the first rank."""
        self._closed = False

    def close(self) -> None:
        """Give the ranks' own group back, when no order is under way. Every rank calls it, as it is done."""
        if self.group is not None and not self._closed and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self._closed = True

    def on_rank0(self, work: Callable[[], Result]) -> Result:
        """What `work` gives on the first rank, or raises there, on every rank; the others `follow` meanwhile."""
        if self.group is None:
            return work()
        if not self.is_rank0:
            self._follow()
            return on_rank0(work, self.group)
        found, error = _attempt(work)
        dist.broadcast_object_list([None], group=self.group, group_src=0)  # there are no more orders

        def told() -> Result:
            if error is not None:
                raise error
            return found  # type: ignore[no-any-return]

        return on_rank0(told, self.group)

    def call_all(self, order: Order) -> list[Part]:
        """Have all ranks obey, inside what the first one `say`s there; returns what each found, by rank."""
        if self.group is None:
            return [self.obey(order)]
        dist.broadcast_object_list([(order,)], group=self.group, group_src=0)
        return self._obeyed(order)

    def gather(self, mine: Result) -> list[Result]:
        """What each rank brings, by rank, for the first one; nothing for the others."""
        if self.group is None:
            return [mine]
        everyone: list[Any] | None = [None] * dist.get_world_size(self.group) if self.is_rank0 else None
        dist.gather_object(mine, everyone, group=self.group, group_dst=0)
        return everyone or []

    def scatter(self, parts: list[Result] | None) -> Result:
        """Of what the first rank has for each rank, this rank's own. The others give None."""
        mine: list[Any] = [None]
        if self.group is None:
            assert parts is not None
            mine = parts
        else:
            dist.scatter_object_list(mine, parts, group=self.group, group_src=0)
        own: Result = mine[0]
        return own

    def _follow(self) -> None:
        while True:
            order: list[Any] = [None]
            dist.broadcast_object_list(order, group=self.group, group_src=0)
            if order[0] is None:
                return
            self._obeyed(order[0][0])

    def _obeyed(self, order: Order) -> list[Part]:
        """Obey. The first rank has what each found, or raises what one met, and ends by that what it was to say."""
        everyone = self.gather(_attempt(lambda: self.obey(order)))
        for _, error in everyone:
            if error is not None:
                raise error
        return [found for found, _ in everyone]


def _attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        try:
            told: Exception = pickle.loads(pickle.dumps(error))
        except Exception:  # it cannot be sent, but what it says can
            told = RuntimeError(f"{type(error).__name__}: {error}")
        return None, told

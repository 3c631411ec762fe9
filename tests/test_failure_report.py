"""If a rank stops, each rank needs only a few store operations, for any number of ranks."""

import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from postlude.world import failure_report
from postlude.world.failure_report import FailureReporter, RankStatus

SIZE = 2000
FEW = 16  # operations of one rank, from start to close


class CountingStore:
    """A store in this process that counts each rank's operations; one on many keys counts as many."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.operations: Counter[int] = Counter()

    def of(self, rank: int) -> Any:
        counting = self

        class Own:
            def __getattr__(self, name: str) -> Any:
                method = getattr(counting.store, name)

                def counted(*arguments: Any) -> Any:
                    counting.operations[rank] += len(arguments[0]) if isinstance(arguments[0], list) else 1
                    return method(*arguments)

                return counted

        return Own()


def everyone(store: CountingStore) -> list[FailureReporter]:
    """Returns all ranks. Each waits for another."""
    ranks = [FailureReporter(rank, SIZE, 600.0, store.of(rank)) for rank in range(SIZE)]
    for rank in ranks:
        rank.gpu_is_stuck = lambda seconds: True
    return ranks


def lost() -> RuntimeError:
    return RuntimeError("[../third_party/gloo/transport/tcp/pair.cc] Connection closed by peer")


@pytest.mark.slow
def test_two_thousand_ranks_name_the_first_failure_in_a_few_operations_each() -> None:
    store = CountingStore()
    ranks = everyone(store)
    thread = threading.get_ident()
    assert ranks[7].report(ValueError("no such column")) is None
    assert ranks[8].report(KeyError("later")) is None
    for rank in ranks:
        rank.answer(rank.store, thread)
    for rank in ranks:
        if rank.rank not in (7, 8):
            assert str(rank.report(lost())) == f"rank 7 of {SIZE} failed: ValueError: no such column"
    for rank in ranks:
        rank.close()
    assert store.operations.pop(7) <= SIZE + FEW  # the first to stop sets every event
    assert max(store.operations.values()) <= FEW
    assert store.store.check([f"event/{rank}" for rank in range(SIZE)])


@pytest.mark.slow
def test_one_rank_collects_the_status_of_all_ranks() -> None:
    store = CountingStore()
    ranks = everyone(store)
    lost_rank, away = ranks[1234], ranks[99]
    away.gpu_is_stuck = lambda seconds: False
    thread = threading.get_ident()
    for rank in ranks:
        if rank is not lost_rank:
            rank.answer(rank.store, -1 if rank is away else thread)
    waiting = [rank for rank in ranks if rank not in (lost_rank, away)]
    for rank in waiting[1:]:  # each has stopped before the first one is done with its investigation
        rank.set_status(RankStatus("stopped"))
    verdicts = {str(rank.report(lost())) for rank in waiting}
    assert verdicts == {
        f"rank 99 of {SIZE} did not come: it is at an unknown place; rank 1234 of {SIZE} does not answer any more: it "
        "was killed or lost."
    }
    for rank in waiting:
        rank.close()
    investigator, other_ranks = waiting[0].rank, [rank.rank for rank in waiting[1:]]
    assert max(store.operations[rank] for rank in other_ranks) <= FEW
    assert (
        store.operations[investigator] < 4 * SIZE + 400
    )  # all events twice, all statuses; and again and again until time is up


@pytest.mark.slow
def test_unresponsive_investigating_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_report, "VERDICT", 0.5)
    store = CountingStore()
    ranks = [FailureReporter(rank, 3, 600.0, store.of(rank)) for rank in range(3)]
    store.store.set("investigator", "2")  # and it was killed before it could tell
    assert str(ranks[0].report(lost())) == "rank 2 of 3 does not answer any more: it was killed or lost."


def test_a_rank_on_its_way_out_of_a_collective_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no status yet when it is asked, and is in code that cleans up."""
    for name in ("CLEANUP", "VERDICT"):
        monkeypatch.setattr(failure_report, name, 300.0)  # on a busy machine too
    store = CountingStore()
    ranks = [FailureReporter(rank, 3, 600.0, store.of(rank)) for rank in range(3)]
    ranks[1].set_status(RankStatus("finished"))
    listeners = [threading.Thread(target=rank.answer, args=(rank.store, -1)) for rank in ranks]
    reports: dict[int, str] = {}

    def report(rank: FailureReporter) -> None:
        reports[rank.rank] = str(rank.report(lost()))

    stopping = [threading.Thread(target=report, args=(ranks[index],)) for index in (0, 2)]
    stopping[0].start()
    for listener in listeners:
        listener.start()
    time.sleep(0.3)  # of rank 2's cleanup
    stopping[1].start()
    for started in (*listeners, *stopping):
        started.join()
    assert set(reports.values()) == {"rank 1 of 3 finished without coming to this collective."}

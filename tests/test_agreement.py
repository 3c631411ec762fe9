"""Rank0Controller and on_rank0: all ranks run the calls of rank 0, and get its results or its errors."""

from typing import Any

import torch.distributed as dist

from postlude.world.agreement import Rank0Controller
from tests.conftest import Ranks
from tests.process_groups import CALL_GROUPS


def run_controller(group: Any) -> list[Any]:
    def add_rank(number: int) -> int:
        if number == 7 * dist.get_rank() > 0:
            raise ValueError(f"rank {dist.get_rank()} cannot add {number}")
        return number + dist.get_rank()

    controller: Rank0Controller[int, int] = Rank0Controller(add_rank)

    def result_or_error(work: Any) -> Any:
        try:
            return controller.on_rank0(work)
        except ValueError as error:
            return str(error)

    def fails() -> int:
        controller.call_all(1)
        raise ValueError("rank 0 failed")

    return [
        result_or_error(lambda: [controller.call_all(10), controller.call_all(20)]),
        result_or_error(lambda: "no calls"),
        result_or_error(lambda: controller.call_all(7)),
        result_or_error(fails),
        controller.scatter([[rank] * 2 for rank in range(dist.get_world_size())] if controller.is_rank0 else None),
        controller.gather(dist.get_rank()),
        result_or_error(lambda: controller.call_all(0)),
    ]


def test_all_ranks_run_the_calls_of_rank_0_and_get_its_results(ranks: Ranks) -> None:
    for rank, actual in enumerate(ranks(2, run_controller)):
        assert actual == [
            [[10, 11], [20, 21]],
            "no calls",
            "rank 1 cannot add 7",
            "rank 0 failed",
            [rank, rank],
            [0, 1] if rank == 0 else [],
            [0, 1],
        ]


def test_a_single_rank_calls_itself(ranks: Ranks) -> None:
    (actual,) = ranks(1, run_controller)
    assert actual == [[[10], [20]], "no calls", [7], "rank 0 failed", [0, 0], [0], [0]]


def groups_after_close(group: Any) -> tuple[int, bool, list[int]]:
    """Returns the groups that a controller adds, whether this is rank 0, and the ranks that still communicate."""
    before = len(dist.distributed_c10d._world.pg_map)
    with CALL_GROUPS.kept():  # one of an earlier call would be counted already
        controller: Rank0Controller[int, int] = Rank0Controller(lambda number: number)
    added = len(dist.distributed_c10d._world.pg_map) - before
    controller.on_rank0(lambda: controller.call_all(1))
    for _ in range(2):
        controller.close()
    assert len(dist.distributed_c10d._world.pg_map) == before
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dist.get_rank())
    return added, controller.is_rank0, everyone


def test_close_releases_the_process_group(ranks: Ranks) -> None:
    assert ranks(2, groups_after_close) == [(1, True, [0, 1]), (1, False, [0, 1])]

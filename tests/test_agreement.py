"""Rank0Controller and on_rank0: all ranks run the calls of rank 0, and get its results or its errors."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from postlude.world.agreement import Rank0Controller
from tests.conftest import Ranks
from tests.process_groups import CALL_GROUPS


def run_on_rank0(group: Any) -> list[Any]:
    def obey(order: int) -> int:
        if order == 7 * dist.get_rank() > 0:
            raise ValueError(f"rank {dist.get_rank()} cannot do {order}")
        return order + dist.get_rank()

    controller: Rank0Controller[int, int] = Rank0Controller(obey)

    def heard(work: Any) -> Any:
        try:
            return controller.on_rank0(work)
        except ValueError as error:
            return str(error)

    def fails() -> int:
        controller.call_all(1)
        raise ValueError("the first rank has had enough")

    return [
        heard(lambda: [controller.call_all(10), controller.call_all(20)]),
        heard(lambda: "no orders"),
        heard(lambda: controller.call_all(7)),
        heard(fails),
        controller.scatter([[rank] * 2 for rank in range(dist.get_world_size())] if controller.is_rank0 else None),
        controller.gather(dist.get_rank()),
        heard(lambda: controller.call_all(0)),
    ]


def test_all_ranks_run_the_calls_of_rank_0_and_get_its_results(ranks: Ranks) -> None:
    for rank, actual in enumerate(ranks(2, run_on_rank0)):
        assert actual == [
            [[10, 11], [20, 21]],
            "no orders",
            "rank 1 cannot do 7",
            "the first rank has had enough",
            [rank, rank],
            [0, 1] if rank == 0 else [],
            [0, 1],
        ]


def test_one_rank_leads_itself(ranks: Ranks) -> None:
    (actual,) = ranks(1, run_on_rank0)
    assert actual == [[[10], [20]], "no orders", [7], "the first rank has had enough", [0, 0], [0], [0]]


def given_back(group: Any) -> tuple[int, bool, list[int]]:
    """Groups of ranks while a lead is there, whether this rank leads after it, and what all then still say."""
    before = len(dist.distributed_c10d._world.pg_map)
    with CALL_GROUPS.kept():  # one of an earlier call would be counted already
        controller: Rank0Controller[int, int] = Rank0Controller(lambda order: order)
    while_there = len(dist.distributed_c10d._world.pg_map) - before
    controller.on_rank0(lambda: controller.call_all(1))
    for _ in range(2):
        controller.close()
    assert len(dist.distributed_c10d._world.pg_map) == before
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dist.get_rank())
    return while_there, controller.is_rank0, everyone


def test_who_led_gives_the_group_back(ranks: Ranks) -> None:
    assert ranks(2, given_back) == [(1, True, [0, 1]), (1, False, [0, 1])]

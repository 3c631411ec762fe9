"""Transfers do not deadlock even if every launch blocks until the other rank's; all ranks follow one order."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from postlude.options import ZERO_BUBBLE
from postlude.pipeline.schedule import Action, ScheduleEntry, rank_schedule
from postlude.pipeline.transfers import RankTransfers, Transfer, plan_transfers, transfer_plan

SHAPES = [
    {"pp": pp, "vpp": vpp, "forward_only": forward_only, "overlap": overlap}
    for pp, vpp, forward_only, overlap in product(range(1, 6), range(1, 4), (False, True), (False, True, ZERO_BUBBLE))
    if overlap != ZERO_BUBBLE or (vpp == 1 and pp > 1)
]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.values())))
COUNTS = (0, 1, 2, 5, 11)


def schedule(shape: dict[str, Any], microbatches: int) -> list[tuple[ScheduleEntry, ...]]:
    return [rank_schedule(rank=rank, microbatches=microbatches, **shape) for rank in range(shape["pp"])]


def needed(turn: ScheduleEntry, stages: int) -> set[Action]:
    """Returns the outputs of other stages that an entry needs."""
    before = {Action(a.kind, a.stage + (-1 if a.kind == "F" else 1), a.microbatch) for a in turn if a.kind != "W"}
    return {action for action in before if 0 <= action.stage < stages}


def finishes(plan: Sequence[RankTransfers]) -> bool:
    """Returns whether all ranks finish if each launch blocks until the other rank launched the same transfer."""
    queues = [[transfer for launched in rank for transfer in launched] for rank in plan]
    positions = [0] * len(queues)
    progress = True
    while progress:
        progress = False
        for rank, queue in enumerate(queues):
            if positions[rank] == len(queue):
                continue
            head = queue[positions[rank]]
            other_rank = head.source + head.destination - rank
            if positions[other_rank] < len(queues[other_rank]) and queues[other_rank][positions[other_rank]] == head:
                positions[rank] += 1
                positions[other_rank] += 1
                progress = True
    return all(position == len(queue) for position, queue in zip(positions, queues, strict=True))


@every_shape
def test_blocking_transfers_do_not_deadlock(shape: dict[str, Any]) -> None:
    for microbatches in COUNTS:
        assert finishes(transfer_plan(microbatches=microbatches, **shape))


def test_receives_launched_one_turn_ahead_would_deadlock() -> None:
    """Each rank would wait for the receive of its next turn, while its send comes after that turn."""
    shape = {"pp": 2, "vpp": 1, "forward_only": False, "overlap": False}
    plan = []
    for rank, entries in enumerate(schedule(shape, 4)):
        launched: list[list[Transfer]] = [[] for _ in range(len(entries) + 1)]
        for index, turn in enumerate(entries):
            for payload in needed(turn, 2):
                launched[max(0, index - 1)].append(Transfer(payload, 1 - rank, rank))
            for action in turn:
                if action.stage == (action.kind == "B"):
                    launched[index + 1].insert(0, Transfer(action, rank, 1 - rank))
        plan.append(tuple(map(tuple, launched)))
    assert not finishes(plan)


@every_shape
def test_every_payload_is_sent_after_its_action_and_received_before_it_is_needed(shape: dict[str, Any]) -> None:
    pp, stages = shape["pp"], shape["pp"] * shape["vpp"]
    for microbatches in COUNTS:
        plan = transfer_plan(microbatches=microbatches, **shape)
        for rank, (entries, launched) in enumerate(zip(schedule(shape, microbatches), plan, strict=True)):
            assert len(launched) == len(entries) + 1
            received: set[Action] = set()
            sent: list[Action] = []
            for index, transfers in enumerate(launched):
                received |= {transfer.payload for transfer in transfers if transfer.destination == rank}
                sent += [transfer.payload for transfer in transfers if transfer.source == rank]
                if index < len(entries) and pp > 1:
                    assert needed(entries[index], stages) <= received
                    received -= needed(entries[index], stages)
                if index:
                    produced = {action for action in entries[index - 1] if action in sent}
                    assert produced == {transfer.payload for transfer in transfers if transfer.source == rank}
            assert not received
            assert len(sent) == len(set(sent))


@every_shape
def test_each_channel_is_fifo(shape: dict[str, Any]) -> None:
    for microbatches in COUNTS:
        ends: dict[tuple[str, int, int, bool], list[Action]] = defaultdict(list)
        for rank, launched in enumerate(transfer_plan(microbatches=microbatches, **shape)):
            for transfer in (transfer for transfers in launched for transfer in transfers):
                channel = transfer.payload.kind, transfer.source, transfer.destination
                ends[(*channel, transfer.source == rank)].append(transfer.payload)
        assert all(payloads == ends[(*channel, not sender)] for (*channel, sender), payloads in ends.items())


@every_shape
def test_few_receives_are_pending_at_a_time(shape: dict[str, Any]) -> None:
    """In plain 1F1B one for this turn and one for the next; interleaved ranks have up to two per other rank."""
    bound = 2 * shape["pp"] if shape["vpp"] > 1 else 4
    for microbatches in COUNTS:
        for rank, launched in enumerate(transfer_plan(microbatches=microbatches, **shape)):
            held_count = 0
            for turn, transfers in zip(schedule(shape, microbatches)[rank], launched, strict=False):
                held_count += sum(transfer.destination == rank for transfer in transfers)
                assert held_count <= bound
                held_count -= len(needed(turn, shape["pp"] * shape["vpp"])) if shape["pp"] > 1 else 0


def written(shape: dict[str, Any], microbatches: int, rank: int) -> str:
    launched, entries = transfer_plan(microbatches=microbatches, **shape)[rank], schedule(shape, microbatches)[rank]
    words = []
    for index, transfers in enumerate(launched):
        words += [f"{'send' if t.source == rank else 'receive'} {t.payload}," for t in transfers]
        words += ["+".join(map(str, turn)) for turn in entries[index : index + 1]]
    return " ".join(words)


def test_1f1b_of_two_ranks() -> None:
    shape = {"pp": 2, "vpp": 1, "forward_only": False, "overlap": False}
    assert written(shape, 3, 0) == (
        "F0@0 send F0@0, F1@0 send F1@0, receive B0@1, B0@0 F2@0 send F2@0, receive B1@1, receive B2@1, B1@0 B2@0"
    )
    assert written(shape, 3, 1) == (
        "receive F0@0, F0@1 receive F1@0, B0@1 send B0@1, F1@1 receive F2@0, B1@1 send B1@1, F2@1 B2@1 send B2@1,"
    )


def test_order_that_deadlocks_is_refused() -> None:
    stuck: list[tuple[ScheduleEntry, ...]] = [((Action("B", 0, 0),), (Action("F", 0, 0),)), ((Action("F", 1, 0),),)]
    with pytest.raises(ValueError, match="rank 0 for B0@1, rank 1 for F0@0 wait for actions that come later"):
        plan_transfers(stuck, vpp=1)

"""Schedules: every action once, no deadlock, and the time and memory of the documented formulas."""

from functools import cache
from itertools import chain, product
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from postlude.options import ZERO_BUBBLE, check_overlap
from postlude.pipeline.schedule import Action, ScheduleEntry, one_f_one_b, rank_schedule, zero_bubble
from postlude.plan.simulator import DeadlockError, SimulatedTimeline, dependencies, peak_held
from tests.pipeline.simulator import simulate, simulate_turns

Orders = tuple[tuple[Action, ...], ...]
every_shape = pytest.mark.parametrize(("pp", "vpp"), tuple(product(range(1, 7), range(1, 4))))


def counts(pp: int) -> list[int]:
    """Returns numbers of microbatches: all up to 20, or for a long pipeline those around its multiples."""
    return [count for count in range(21) if pp <= 4 or count < 2 or (count + 1) % pp < 3]


@cache
def orders(pp: int, vpp: int, microbatches: int, *, forward_only: bool = False) -> Orders:
    options = {"pp": pp, "vpp": vpp, "microbatches": microbatches, "forward_only": forward_only}
    return tuple(one_f_one_b(rank=rank, **options) for rank in range(pp))


@cache
def timeline(pp: int, vpp: int, microbatches: int) -> SimulatedTimeline:
    """Times a schedule with a forward of 1 and a backward of 2."""
    return simulate(orders(pp, vpp, microbatches), pp=pp, vpp=vpp)


def slots(pp: int, vpp: int, microbatches: int) -> int:
    """Returns the theoretical makespan, in forwards and backwards of one stage.

    The last rank runs vpp·microbatches of each and never idles in between, after pp - 1 forwards have come down to it
    and before pp - 1 backwards go up from it. Below pp microbatches a chunk has to wait until the first is round.
    """
    return (vpp - 1) * max(microbatches, pp) + microbatches + pp - 1 if microbatches else 0


def largest_group(pp: int, microbatches: int) -> int:
    return -(-microbatches // max(1, microbatches // pp))


def written(actions: tuple[Action, ...]) -> str:
    return " ".join(map(str, actions))


def test_1f1b_equals_the_papers_figure() -> None:
    first, last = orders(2, 1, 3)
    assert written(first) == "F0@0 F1@0 B0@0 F2@0 B1@0 B2@0"
    assert written(last) == "F0@1 B0@1 F1@1 B1@1 F2@1 B2@1"


def test_interleaved_1f1b_equals_the_papers_figure() -> None:
    first, last = orders(2, 2, 4)
    assert written(first) == "F0@0 F1@0 F0@2 F1@2 F2@0 B0@2 F3@0 B1@2 F2@2 B0@0 F3@2 B1@0 B2@2 B3@2 B2@0 B3@0"
    assert written(last) == "F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 F2@1 B0@1 F3@1 B1@1 F2@3 B2@3 F3@3 B3@3 B2@1 B3@1"


def test_a_remainder_is_spread_over_the_groups() -> None:
    forwards = orders(2, 2, 5, forward_only=True)[0]
    assert written(forwards) == "F0@0 F1@0 F2@0 F0@2 F1@2 F2@2 F3@0 F4@0 F3@2 F4@2"


@every_shape
def test_every_action_once_on_its_rank_and_every_forward_before_its_backward(pp: int, vpp: int) -> None:
    for microbatches in counts(pp):
        for rank, actions in enumerate(orders(pp, vpp, microbatches)):
            stages = range(rank, pp * vpp, pp)
            expected = {Action(kind, *place) for kind in "FB" for place in product(stages, range(microbatches))}
            assert len(actions) == len(expected)
            assert set(actions) == expected
            at = {action: index for index, action in enumerate(actions)}
            assert all(at[Action("F", a.stage, a.microbatch)] < at[a] for a in actions if a.kind == "B")


def bubble(simulated: SimulatedTimeline) -> float:
    """Returns idle time over busy time, of all ranks together."""
    return simulated.makespan * len(simulated.schedule) / sum(simulated.busy) - 1


@every_shape
def test_makespan_and_bubble_equal_theory(pp: int, vpp: int) -> None:
    for microbatches in counts(pp):
        equal = simulate(orders(pp, vpp, microbatches), pp=pp, vpp=vpp, forward_time=1, backward_time=1)
        assert equal.makespan == 2 * slots(pp, vpp, microbatches)
        unequal = timeline(pp, vpp, microbatches)
        assert unequal.makespan == 3 * slots(pp, vpp, microbatches)
        if microbatches >= pp:
            assert bubble(equal) == pytest.approx((pp - 1) / (vpp * microbatches), abs=1e-12)
            assert bubble(unequal) == pytest.approx((pp - 1) / (vpp * microbatches), abs=1e-12)


@every_shape
def test_peak_in_flight_equals_theory(pp: int, vpp: int) -> None:
    for microbatches, rank in product(counts(pp), range(pp)):
        interleaved = 2 * (pp - rank - 1) + (vpp - 1) * largest_group(pp, microbatches) + 1
        plain = timeline(pp, vpp, microbatches).peak_in_flight[rank]
        assert plain == min(pp - rank if vpp == 1 else interleaved, vpp * microbatches)


@pytest.mark.parametrize(("pp", "vpp"), tuple(product(range(1, 7), range(2, 4))))
def test_transfers_are_hidden_in_the_interleaved_steady_state(pp: int, vpp: int) -> None:
    """They cost each boundary once per direction for any number of microbatches; larger groups hide some of it."""
    boundaries = pp * vpp - 1 if pp > 1 else 0
    for microbatches in range(2 * pp, 21, max(1, pp // 2)):
        lists = orders(pp, vpp, microbatches)
        slow = simulate(lists, pp=pp, vpp=vpp, forward_time=4, backward_time=8, transfer_time=1)
        cost = slow.makespan - 12 * slots(pp, vpp, microbatches)
        assert cost <= 2 * boundaries
        if microbatches % pp == 0:
            assert cost == 2 * boundaries


@every_shape
def test_forward_only_is_the_same_order_without_backwards(pp: int, vpp: int) -> None:
    for microbatches in counts(pp):
        forwards = orders(pp, vpp, microbatches, forward_only=True)
        both_orders = orders(pp, vpp, microbatches)
        assert forwards == tuple(tuple(a for a in actions if a.kind == "F") for actions in both_orders)
        times = simulate(forwards, pp=pp, vpp=vpp)
        assert times.makespan == slots(pp, vpp, microbatches)
        assert times.peak_in_flight == (0,) * pp


def torch_orders(pp: int, vpp: int, microbatches: int) -> Orders:
    """Returns the orders of torch's own schedule class, for stages that are only numbers."""
    stages = [
        SimpleNamespace(
            group_size=pp, group_rank=0, num_stages=pp * vpp, stage_index=chunk * pp, is_first=chunk == 0,
            is_last=False, has_backward=True, submod=None,
        )
        for chunk in range(vpp)
    ]  # fmt: skip
    plan = ScheduleInterleaved1F1B(stages, microbatches).pipeline_order
    return tuple(
        tuple(
            Action(action.computation_type.value, action.stage_index, action.microbatch_index)
            for action in plan[rank]
            if action is not None
        )
        for rank in range(pp)
    )


@pytest.mark.parametrize(("pp", "vpp", "microbatches"), [(2, 2, 6), (4, 2, 3), (4, 2, 10), (3, 4, 6), (4, 3, 7)])
def test_interleaved_orders_equal_torch_where_torch_has_one(pp: int, vpp: int, microbatches: int) -> None:
    assert orders(pp, vpp, microbatches) == torch_orders(pp, vpp, microbatches)


def test_dependencies_cross_the_stages() -> None:
    assert written(dependencies(Action("F", 0, 5), stages=4)) == ""
    assert written(dependencies(Action("F", 3, 5), stages=4)) == "F5@2"
    assert written(dependencies(Action("B", 3, 5), stages=4)) == "F5@3"
    assert written(dependencies(Action("B", 2, 5), stages=4)) == "F5@2 B5@3"
    assert written(dependencies(Action("W", 2, 5), stages=4)) == "B5@2"


@given(st.data(), st.integers(2, 4), st.integers(1, 3), st.integers(1, 6))
def test_reordered_schedule_is_refused_or_keeps_its_dependencies(data, pp, vpp, microbatches) -> None:
    lists = [list(actions) for actions in orders(pp, vpp, microbatches)]
    rank = data.draw(st.integers(0, pp - 1))
    lists[rank] = data.draw(st.permutations(lists[rank]))
    try:
        times = simulate(lists, pp=pp, vpp=vpp)
    except DeadlockError:
        return
    for action in chain.from_iterable(lists):
        inputs = dependencies(action, stages=pp * vpp)
        assert all(times.finish[source] <= times.start[action] for source in inputs)


SHAPE = {"pp": 2, "vpp": 2, "microbatches": 4, "rank": 0}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"pp": 0}, "pp=0: a pipeline has at least 1 rank"),
        ({"vpp": -1}, "vpp=-1: a pipeline has at least 1 rank, and 1 stage on each"),
        ({"rank": 2}, "rank 2 does not exist; pp=2 has pipeline ranks 0 to 1"),
        ({"rank": -1}, "rank -1 does not exist"),
        ({"microbatches": -3}, "microbatches=-3 must be at least 0"),
    ],
)
def test_invalid_orders_are_refused(change: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        one_f_one_b(**SHAPE | change)


F00, B00, F01 = Action("F", 0, 0), Action("B", 0, 0), Action("F", 1, 0)


def test_a_deadlock_error_names_the_waiting_actions() -> None:
    with pytest.raises(
        DeadlockError, match="stuck: on rank 0, B0@0 waits for F0@0 and B0@1; on rank 1, F0@1 waits for"
    ):
        simulate([(B00, F00), (F01,)], pp=2, vpp=1)


def overlapped(pp: int, vpp: int, microbatches: int) -> tuple[tuple[ScheduleEntry, ...], ...]:
    return tuple(
        rank_schedule(pp=pp, vpp=vpp, microbatches=microbatches, rank=rank, overlap=True) for rank in range(pp)
    )


def test_overlapped_turns_of_one_rank_and_of_two() -> None:
    def as_text(schedule: tuple[ScheduleEntry, ...]) -> str:
        return " ".join("+".join(map(str, turn)) for turn in schedule)

    assert as_text(overlapped(1, 1, 3)[0]) == "F0@0 F1@0+B0@0 F2@0+B1@0 B2@0"
    first, last = overlapped(2, 1, 5)
    assert as_text(first) == "F0@0 F1@0 F2@0 F3@0+B0@0 F4@0+B1@0 B2@0 B3@0 B4@0"
    assert as_text(last) == "F0@1 F1@1+B0@1 F2@1+B1@1 F3@1+B2@1 F4@1+B3@1 B4@1"


@every_shape
def test_overlapped_turns_have_the_documented_time_and_memory(pp: int, vpp: int) -> None:
    for microbatches in counts(pp):
        schedules = overlapped(pp, vpp, microbatches)
        for rank in range(pp):
            assert sorted(map(str, chain.from_iterable(schedules[rank]))) == sorted(
                map(str, orders(pp, vpp, microbatches)[rank])
            )
        times = simulate_turns(schedules, pp=pp, vpp=vpp)
        assert times.makespan == 3 * slots(pp, vpp, microbatches)
        for rank, peak in enumerate(times.peak_in_flight):
            max_in_flight = 2 * (pp - rank) + (vpp - 1) * largest_group(pp, microbatches)
            assert peak == min(max_in_flight, vpp * microbatches)


@every_shape
def test_without_overlap_a_turn_is_an_action(pp: int, vpp: int) -> None:
    for forward_only in (False, True):
        options = {"pp": pp, "vpp": vpp, "microbatches": 5, "rank": 0, "forward_only": forward_only}
        assert tuple(chain.from_iterable(rank_schedule(**options))) == one_f_one_b(**options)
        assert all(len(turn) == 1 for turn in rank_schedule(**options))


def zero_bubble_schedule(pp: int, microbatches: int) -> tuple[tuple[ScheduleEntry, ...], ...]:
    options = {"pp": pp, "vpp": 1, "microbatches": microbatches, "overlap": ZERO_BUBBLE}
    return tuple(rank_schedule(rank=rank, **options) for rank in range(pp))


def test_zero_bubble_equals_the_papers_figure() -> None:
    first, second = (zero_bubble(pp=2, microbatches=3, rank=rank) for rank in range(2))
    assert written(first) == "F0@0 F1@0 B0@0 W0@0 F2@0 B1@0 W1@0 B2@0 W2@0"
    assert written(second) == "F0@1 B0@1 F1@1 B1@1 W0@1 F2@1 B2@1 W1@1 W2@1"


@pytest.mark.parametrize("pp", range(2, 7))
def test_zero_bubble_is_1f1b_with_deferred_wgrads(pp: int) -> None:
    for microbatches, rank in product(counts(pp), range(pp)):
        actions = tuple(chain.from_iterable(zero_bubble_schedule(pp, microbatches)[rank]))
        assert tuple(action for action in actions if action.kind != "W") == orders(pp, 1, microbatches)[rank]
        wgrad_actions = [action for action in actions if action.kind == "W"]
        assert wgrad_actions == [Action("W", rank, microbatch) for microbatch in range(microbatches)]


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("times", [(1, 1, 1), (1, 2, 1), (2, 3, 1), (2, 2, 3)])
def test_zero_bubble_time_and_memory_equal_theory(pp: int, times: tuple[int, int, int]) -> None:
    forward, backward, weights = times
    for microbatches in counts(pp):
        schedule = zero_bubble_schedule(pp, microbatches)
        actual = simulate_turns(schedule, pp=pp, vpp=1, times=dict(zip("FBW", times, strict=True)))
        plain = simulate(
            orders(pp, 1, microbatches), pp=pp, vpp=1, forward_time=forward, backward_time=backward + weights
        )
        assert actual.makespan <= plain.makespan
        if microbatches >= pp:
            work = microbatches * sum(times)
            assert plain.makespan - work == (pp - 1) * sum(times)
            assert actual.makespan - work == (pp - 1) * (forward + max(0, backward - weights))
        assert actual.peak_in_flight == plain.peak_in_flight
        peaks = [peak_held(rank_entries, lambda _: 1.0, lambda _: 1.0) for rank_entries in schedule]
        assert peaks == [min(pp, microbatches)] * pp


def test_forward_only_zero_bubble_is_the_plain_order() -> None:
    options = {"pp": 4, "vpp": 2, "microbatches": 5, "rank": 1, "forward_only": True}
    assert rank_schedule(overlap=ZERO_BUBBLE, **options) == rank_schedule(**options)


@pytest.mark.parametrize(
    ("overlap", "shape", "sentence"),
    [
        (ZERO_BUBBLE, {"pp": 1, "vpp": 1}, "fills the bubble of a pipeline, but pp is 1. Use pp=2 or overlap=False"),
        (ZERO_BUBBLE, {"pp": 2, "vpp": 3}, "has a schedule for one stage per rank, but vpp is 3. Use vpp=1"),
        ("zb", {"pp": 2, "vpp": 1}, "overlap='zb' is unknown; use True, False or 'zero_bubble'"),
    ],
)
def test_invalid_schedule_is_refused(overlap, shape: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_overlap(overlap, **shape)

"""Pipeline schedules as lists of actions per rank: 1F1B, interleaved if vpp > 1, overlapped, or zero-bubble.

Stage s of the pp·vpp stages is chunk s // pp of rank s % pp. The output of an F goes to the next stage, that of a B to
the one before. Activations and gradients have separate first-in-first-out channels in each direction between two
ranks: in one channel, pp = 2 with vpp > 1 would receive them in the wrong order for 5, 7, 9, … microbatches.
`transfers.py` decides when a rank sends and receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Literal

from postlude.options import ZERO_BUBBLE, Overlap, check_overlap


@dataclass(frozen=True, slots=True)
class Action:
    """The forward ("F"), the backward ("B") or the deferred weight gradients ("W") of one microbatch in one stage.

    In a zero-bubble schedule, which has Ws, a B computes only the gradient that the stage before waits for.
    """

    kind: Literal["F", "B", "W"]
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}@{self.stage}"


ScheduleEntry = tuple[Action, ...]
"""One action, or a forward and another microbatch's backward whose steps are interleaved."""


def one_f_one_b(*, pp: int, vpp: int, microbatches: int, rank: int, forward_only: bool = False) -> tuple[Action, ...]:
    """Returns the actions of one rank: warm-up forwards, then forwards and backwards alternating, then the rest.

    Microbatches pass a rank's chunks in groups of pp, so that the first of a group has passed the other ranks when the
    rank has sent the last of it. If pp does not divide their number, the groups share the remainder evenly: one smaller
    group would stall every rank, and can deadlock (pp = 4, vpp = 3, 5 microbatches). The largest group is
    g = ⌈microbatches / max(1, ⌊microbatches / pp⌋)⌉, and a rank has at most this many forwards in flight
    (that await their backward), each of one of its vpp stages:

        vpp = 1     min(microbatches, pp - rank)
        vpp > 1     min(vpp·microbatches, 2(pp - rank - 1) + (vpp - 1)g + 1)

    The factor 2 hides transfers behind compute. A multiple of pp needs least memory, with g = pp. The step takes
    (vpp - 1)·max(microbatches, pp) + microbatches + pp - 1 times one stage's forward and backward: with at least
    pp microbatches, a bubble of (pp - 1) / (vpp·microbatches).

    `forward_only` leaves out the backwards.
    """
    forwards, backwards, first_group_size = _actions(pp, vpp, microbatches, rank)
    if forward_only:
        return tuple(forwards)
    warm_up_per_later_rank = 2 if vpp > 1 else 1
    warm_up = warm_up_per_later_rank * (pp - rank - 1) + (vpp - 1) * first_group_size
    remaining = forwards[warm_up:]
    alternating = chain.from_iterable(zip(remaining, backwards, strict=False))
    return (*forwards[:warm_up], *alternating, *backwards[len(remaining) :])


def rank_schedule(
    *, pp: int, vpp: int, microbatches: int, rank: int, forward_only: bool = False, overlap: Overlap = False
) -> tuple[ScheduleEntry, ...]:
    """Returns one rank's schedule: entries of one action; with `overlap`, of a forward and a backward if possible.

    For "zero_bubble" see `zero_bubble`. With `forward_only`, nothing is overlapped.

    Both actions of an entry start and end with it, so their inputs must be there one entry earlier: a rank warms up
    with one forward more than in interleaved order. This holds for vpp = 1 too: two forwards per later rank and one
    more, where 1F1B has one per later rank. A rank has at most min(vpp·microbatches, 2(pp - rank) + (vpp - 1)g)
    forwards in flight, one more than in interleaved order, and the step takes the same time.
    """
    if overlap == ZERO_BUBBLE and not forward_only:
        check_overlap(overlap, pp=pp, vpp=vpp)
        return tuple((action,) for action in zero_bubble(pp=pp, microbatches=microbatches, rank=rank))
    if not overlap or forward_only:
        actions = one_f_one_b(pp=pp, vpp=vpp, microbatches=microbatches, rank=rank, forward_only=forward_only)
        return tuple((action,) for action in actions)
    forwards, backwards, first_group_size = _actions(pp, vpp, microbatches, rank)
    warm_up = 2 * (pp - rank - 1) + (vpp - 1) * first_group_size + 1
    paired = tuple(zip(forwards[warm_up:], backwards, strict=False))
    unpaired = backwards[len(paired) :]
    return (*((action,) for action in forwards[:warm_up]), *paired, *((action,) for action in unpaired))


def zero_bubble(*, pp: int, microbatches: int, rank: int) -> tuple[Action, ...]:
    """Returns one rank's actions of ZB-H1 (Qi et al., 2023).

    Forwards and backwards are as in 1F1B, but each rank defers the weight gradients of as many microbatches as there
    are ranks before it. So earlier ranks get their gradients sooner, and a rank computes deferred weight gradients
    when it would wait for a backward. A rank has as many forwards in flight as in 1F1B, and deferred weight gradients
    of at most `rank` microbatches when a forward begins: together at most pp, as many forwards as rank 0 has. With at
    least pp microbatches the bubble is (pp - 1)(F + max(0, B - W)), and that of 1F1B is (pp - 1)(F + B + W): a third of
    it if all three take equally long.
    """
    forwards, backwards, _ = _actions(pp, 1, microbatches, rank)
    deferred = [Action("W", backward.stage, backward.microbatch) for backward in backwards]
    warm_up = pp - rank - 1
    actions = forwards[:warm_up]
    for index, backward in enumerate(backwards):
        actions += [*forwards[warm_up + index : warm_up + index + 1], backward]
        actions += deferred[index - rank : index - rank + 1] if index >= rank else []
    return (*actions, *deferred[max(0, microbatches - rank) :])


def _actions(pp: int, vpp: int, microbatches: int, rank: int) -> tuple[list[Action], list[Action], int]:
    """Returns all forwards and all backwards of one rank, each in order, and the size of the first group."""
    _check_degrees(pp, vpp)
    if not 0 <= rank < pp:
        raise ValueError(f"rank {rank} does not exist; pp={pp} has pipeline ranks 0 to {pp - 1}.")
    if microbatches < 0:
        raise ValueError(f"microbatches={microbatches} must be at least 0.")
    groups = _groups(microbatches, pp)
    stages = range(rank, pp * vpp, pp)
    forwards = [Action("F", stage, microbatch) for group in groups for stage in stages for microbatch in group]
    backwards = [Action("B", stage, microbatch) for group in groups for stage in stages[::-1] for microbatch in group]
    return forwards, backwards, len(groups[0])


def _groups(microbatches: int, pp: int) -> list[range]:
    """Returns as many groups of at least pp microbatches as possible, or one; of nearly equal size."""
    count = max(1, microbatches // pp)
    sizes = [microbatches // count + (index < microbatches % count) for index in range(count)]
    return [range(first, last) for first, last in pairwise(accumulate(sizes, initial=0))]


def _check_degrees(pp: int, vpp: int) -> None:
    for name, degree in (("pp", pp), ("vpp", vpp)):
        if degree < 1:
            raise ValueError(f"{name}={degree}: a pipeline has at least 1 rank, and 1 stage on each. Use {name}=1.")

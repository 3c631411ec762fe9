"""Which action a pipeline rank runs when, as plain data: 1F1B, interleaved when vpp > 1, overlapped, or zero-bubble.

Stage s of the pp·vpp stages lives on rank s % pp, as its chunk s // pp. What an F makes goes to the next stage, what a
B makes to the one before. Activations and gradients have a channel each, first in first out, in either direction
between two ranks: in one channel, pp = 2 with vpp > 1 would mix them up for 5, 7, 9, … microbatches. When a rank sends
and receives is in `transfers.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Literal

from postlude.options import ZERO_BUBBLE, Overlap, check_overlap


@dataclass(frozen=True, slots=True)
class Action:
    """The forward ("F") or the backward ("B") of one microbatch through one stage; or what it puts off ("W").

    Where there are Ws, a B makes the gradient that the stage before waits for, and a W those of weights.
    """

    kind: Literal["F", "B", "W"]
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}@{self.stage}"


ScheduleEntry = tuple[Action, ...]
"""One action, or a forward and a backward of another microbatch whose steps are run in turn."""


def one_f_one_b(*, pp: int, vpp: int, microbatches: int, rank: int, forward_only: bool = False) -> tuple[Action, ...]:
    """The compute order of one rank: forwards to warm up, then one forward and one backward in turn, then the rest.

    Microbatches pass a rank's chunks in groups of pp, so that the first of a group is back from the other ranks when
    the last has left. Where pp does not divide their number, the groups take the remainder evenly: one smaller group
    would stall every rank, and can deadlock (pp = 4, vpp = 3, 5 microbatches). The largest group is
    g = ⌈microbatches / max(1, ⌊microbatches / pp⌋)⌉, and a rank holds at most this many forwards that await their
    backward, each 1/vpp of the rank:

        vpp = 1     min(microbatches, pp - rank)
        vpp > 1     min(vpp·microbatches, 2(pp - rank - 1) + (vpp - 1)g + 1)

    The 2 hides transfers behind compute. A multiple of pp is thriftiest, with g = pp. The step takes
    (vpp - 1)·max(microbatches, pp) + microbatches + pp - 1 times one stage's forward and backward: from pp microbatches
    on, a bubble of (pp - 1) / (vpp·microbatches).

    `forward_only` is the same order without its backwards.
    """
    forwards, backwards, first_group = _actions(pp, vpp, microbatches, rank)
    if forward_only:
        return tuple(forwards)
    per_hop = 2 if vpp > 1 else 1
    warm_up = per_hop * (pp - rank - 1) + (vpp - 1) * first_group
    steady = forwards[warm_up:]
    alternating = chain.from_iterable(zip(steady, backwards, strict=False))
    return (*forwards[:warm_up], *alternating, *backwards[len(steady) :])


def rank_schedule(
    *, pp: int, vpp: int, microbatches: int, rank: int, forward_only: bool = False, overlap: Overlap = False
) -> tuple[ScheduleEntry, ...]:
    """The order as turns of one action each; with `overlap` a forward and a backward share a turn wherever they can.

    For "zero_bubble" see `zero_bubble`. It is the same for `forward_only`, where nothing is overlapped.

    Both begin with the turn and end with it, so what they start from has to be there a turn earlier: a rank warms up
    with one forward more than in interleaved order, and in plain 1F1B with one more a hop. It holds at most
    min(vpp·microbatches, 2(pp - rank) + (vpp - 1)g) forwards that await their backward, one more than interleaved
    order does, and the step is as long.
    """
    if overlap == ZERO_BUBBLE and not forward_only:
        check_overlap(overlap, pp=pp, vpp=vpp)
        return tuple((action,) for action in zero_bubble(pp=pp, microbatches=microbatches, rank=rank))
    if not overlap or forward_only:
        actions = one_f_one_b(pp=pp, vpp=vpp, microbatches=microbatches, rank=rank, forward_only=forward_only)
        return tuple((action,) for action in actions)
    forwards, backwards, first_group = _actions(pp, vpp, microbatches, rank)
    warm_up = 2 * (pp - rank - 1) + (vpp - 1) * first_group + 1
    shared = tuple(zip(forwards[warm_up:], backwards, strict=False))
    rest = backwards[len(shared) :]
    return (*((action,) for action in forwards[:warm_up]), *shared, *((action,) for action in rest))


def zero_bubble(*, pp: int, microbatches: int, rank: int) -> tuple[Action, ...]:
    """ZB-H1 (Qi et al., 2023): forwards and backwards as in 1F1B, but each rank puts off the weights' gradients of as
    many microbatches as there are ranks before it.

    So backwards come sooner to the ranks before, and what was put off is made when no backward is left to wait for. A
    rank holds as many forwards that await their backward as in 1F1B, and of what is put off at most `rank` microbatches
    when a forward begins: of both never more than pp, what the first rank holds. From pp microbatches on the bubble is
    (pp - 1)(F + max(0, B - W)) where 1F1B's is (pp - 1)(F + B + W): a third of it, if all three take as long.
    """
    forwards, backwards, _ = _actions(pp, 1, microbatches, rank)
    weights = [Action("W", each.stage, each.microbatch) for each in backwards]
    warm_up = pp - rank - 1
    found = forwards[:warm_up]
    for index, backward in enumerate(backwards):
        found += [*forwards[warm_up + index : warm_up + index + 1], backward]
        found += weights[index - rank : index - rank + 1] if index >= rank else []
    return (*found, *weights[max(0, microbatches - rank) :])


def _actions(pp: int, vpp: int, microbatches: int, rank: int) -> tuple[list[Action], list[Action], int]:
    """All forwards and all backwards of one rank, each in order, and how many microbatches the first group has."""
    _check_shape(pp, vpp)
    if not 0 <= rank < pp:
        raise ValueError(f"rank {rank} does not exist; pp={pp} has pipeline ranks 0 to {pp - 1}.")
    if microbatches < 0:
        raise ValueError(f"microbatches={microbatches}: a step has none or more. Use at least 0.")
    groups = _groups(microbatches, pp)
    stages = range(rank, pp * vpp, pp)
    forwards = [Action("F", stage, microbatch) for group in groups for stage in stages for microbatch in group]
    backwards = [Action("B", stage, microbatch) for group in groups for stage in stages[::-1] for microbatch in group]
    return forwards, backwards, len(groups[0])


def _groups(microbatches: int, pp: int) -> list[range]:
    """As many groups of at least pp microbatches as there can be, as even as can be, the larger first; or one."""
    count = max(1, microbatches // pp)
    sizes = [microbatches // count + (index < microbatches % count) for index in range(count)]
    return [range(first, last) for first, last in pairwise(accumulate(sizes, initial=0))]


def _check_shape(pp: int, vpp: int) -> None:
    for name, degree in (("pp", pp), ("vpp", vpp)):
        if degree < 1:
            raise ValueError(f"{name}={degree}: a pipeline has at least 1 rank, and 1 stage on each. Use {name}=1.")

"""Which action a pipeline rank runs when, as plain data: 1F1B, and interleaved 1F1B when vpp > 1.

Stage s of the pp·vpp stages lives on rank s % pp, as its chunk s // pp. `order` gives each rank its list of actions;
`transfers` what it sends and receives on the way; `simulate` runs all lists on a clock, without a process.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import ClassVar, Literal


@dataclass(frozen=True, slots=True)
class Action:
    """The forward ("F") or the backward ("B") of one microbatch through one stage."""

    kind: Literal["F", "B"]
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}@{self.stage}"


@dataclass(frozen=True, slots=True)
class Overlap:
    """A forward and a backward of different microbatches, run as one: each computes while the other exchanges."""

    forward: Action
    backward: Action
    kind: ClassVar[Literal["FB"]] = "FB"

    def __str__(self) -> str:
        return f"{self.forward}+{self.backward}"


Entry = Action | Overlap
"""What one place of an order holds."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One end of moving what `payload` made: the activations of an F to the next stage, the gradient of a B back.

    Every channel needs a communicator or a tag of its own, and sends that do not wait for their receive. Then receives
    posted in compute order always meet their sends in order. Less is not enough: with blocking sends, or with both
    directions of a pair of ranks in one queue (as in one NCCL communicator), two microbatches already deadlock; and if
    activations share a channel with gradients, pp = 2 with vpp > 1 mixes them up for 5, 7, 9, … microbatches.
    """

    end: Literal["send", "receive"]
    payload: Action
    source: int
    destination: int

    @property
    def channel(self) -> tuple[Literal["F", "B"], int, int]:
        """What the payload travels in: (kind, source rank, destination rank), first in first out."""
        return self.payload.kind, self.source, self.destination


class DeadlockError(RuntimeError):
    """Orders in which every unfinished rank waits for an action that never comes."""


def order(
    *, pp: int, vpp: int, microbatches: int, rank: int, forward_only: bool = False, overlap: bool = False
) -> tuple[Action, ...]:
    """The compute order of one rank: forwards to warm up, then one forward and one backward in turn, then the rest.

    Microbatches pass a rank's chunks in groups of pp, so that the first of a group is back from the other ranks when
    the last has left. Where pp does not divide their number, the groups take the remainder evenly: one smaller group
    would stall every rank, and can deadlock (pp = 4, vpp = 3, 5 microbatches). The largest group is
    g = ⌈microbatches / max(1, ⌊microbatches / pp⌋)⌉, and a rank holds at most this many forwards that await their
    backward, each 1/vpp of the rank:

        vpp = 1     min(microbatches, pp - rank)
        vpp > 1     min(vpp·microbatches, 2(pp - rank - 1) + (vpp - 1)g + 1)
        `overlap`   min(vpp·microbatches, 2(pp - rank - 1) + (vpp - 1)g + 2)

    The 2 hides transfers behind compute. A multiple of pp is thriftiest, with g = pp. The step takes
    (vpp - 1)·max(microbatches, pp) + microbatches + pp - 1 times one stage's forward and backward: from pp microbatches
    on, a bubble of (pp - 1) / (vpp·microbatches).

    `forward_only` is the same order without its backwards. `overlap` makes it fit for `merge_overlap`: the forwards run
    so far ahead that none stands right before its own backward.
    """
    _check_shape(pp, vpp)
    if not 0 <= rank < pp:
        raise ValueError(f"rank {rank} does not exist; pp={pp} has pipeline ranks 0 to {pp - 1}.")
    if microbatches < 0:
        raise ValueError(f"microbatches={microbatches}: a step has none or more. Use at least 0.")
    groups = _groups(microbatches, pp)
    stages = range(rank, pp * vpp, pp)
    forwards = [Action("F", stage, microbatch) for group in groups for stage in stages for microbatch in group]
    if forward_only:
        return tuple(forwards)
    backwards = [Action("B", stage, microbatch) for group in groups for stage in stages[::-1] for microbatch in group]
    per_hop = 2 if vpp > 1 or overlap else 1
    warm_up = per_hop * (pp - rank - 1) + (vpp - 1) * len(groups[0]) + overlap
    steady = forwards[warm_up:]
    alternating = chain.from_iterable(zip(steady, backwards, strict=False))
    return (*forwards[:warm_up], *alternating, *backwards[len(steady) :])


def merge_overlap(actions: Iterable[Action]) -> tuple[Entry, ...]:
    """Make an `Overlap` of every forward and the backward right after it, if they are of different microbatches.

    Both now wait for what either needs, so a backward gains one rank per pair: `order(..., overlap=True)` runs far
    enough ahead for that, and costs no time; a plain 1F1B order stays safe, but takes about twice as long. A rank whose
    forwards all come first has no steady state and is left alone, since its neighbours may wait for the last of them.
    """
    actions = tuple(actions)
    if "BF" not in "".join(action.kind for action in actions):
        return actions
    merged: list[Entry] = []
    for action in actions:
        last = merged[-1] if merged else action
        if isinstance(last, Action) and last.kind + action.kind == "FB" and last.microbatch != action.microbatch:
            merged[-1] = Overlap(last, action)
        else:
            merged.append(action)
    return tuple(merged)


def parts(entry: Entry) -> tuple[Action, ...]:
    """The actions in one place of an order: one, or the forward and the backward of an overlap."""
    return (entry.forward, entry.backward) if isinstance(entry, Overlap) else (entry,)


def dependencies(entry: Entry, *, pp: int, vpp: int) -> tuple[Action, ...]:
    """What must have finished before: for an F the stage before it, for a B its own F and the B of the stage after."""
    if isinstance(entry, Overlap):
        return tuple(chain.from_iterable(dependencies(action, pp=pp, vpp=vpp) for action in parts(entry)))
    _check_shape(pp, vpp)
    stage, microbatch = entry.stage, entry.microbatch
    if not 0 <= stage < pp * vpp:
        raise ValueError(f"{entry} has no stage: pp={pp}, vpp={vpp} has stages 0 to {pp * vpp - 1}.")
    if entry.kind == "F":
        return (Action("F", stage - 1, microbatch),) if stage > 0 else ()
    forward = Action("F", stage, microbatch)
    return (forward, Action("B", stage + 1, microbatch)) if stage < pp * vpp - 1 else (forward,)


def transfers(entries: Iterable[Entry], *, pp: int, vpp: int) -> tuple[Transfer, ...]:
    """What a rank receives before and sends after each entry of its order, in that order."""
    moves: list[Transfer] = []
    for entry in entries:
        rank = parts(entry)[0].stage % pp
        for needed in dependencies(entry, pp=pp, vpp=vpp):
            if (source := needed.stage % pp) != rank:
                moves.append(Transfer("receive", needed, source, rank))
        for action in parts(entry):
            next_stage = action.stage + (1 if action.kind == "F" else -1)
            if 0 <= next_stage < pp * vpp and (destination := next_stage % pp) != rank:
                moves.append(Transfer("send", action, rank, destination))
    return tuple(moves)


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each action started and finished, and the most forwards each rank held that still awaited a backward."""

    orders: tuple[tuple[Entry, ...], ...]
    start: Mapping[Action, float]
    finish: Mapping[Action, float]
    peak_in_flight: tuple[int, ...]

    @property
    def makespan(self) -> float:
        """When the last action finished."""
        return max(self.finish.values(), default=0.0)

    @property
    def bubble(self) -> float:
        """Idle time over busy time, of all ranks together: 0.25 makes a step a quarter longer than its work."""
        firsts = [parts(entry)[0] for entry in chain.from_iterable(self.orders)]
        busy = sum(self.finish[action] - self.start[action] for action in firsts)
        return self.makespan * len(self.orders) / busy - 1 if busy else 0.0


def simulate(
    orders: Sequence[Sequence[Entry]],
    *,
    pp: int,
    vpp: int,
    forward_time: float = 1.0,
    backward_time: float = 2.0,
    overlap_time: float | None = None,
    transfer_time: float = 0.0,
) -> Timeline:
    """Run every rank's order on a clock, each entry as soon as its rank is free and its dependencies have arrived.

    Times are those of one stage; an overlap takes `overlap_time`, both times by default, and what another rank made
    arrives `transfer_time` after it was finished. Raises DeadlockError if an entry can never start.
    """
    both = forward_time + backward_time if overlap_time is None else overlap_time
    times = {"F": forward_time, "B": backward_time, "FB": both}
    if min(times.values()) <= 0 or transfer_time < 0:
        given = f"{times}, transfer_time={transfer_time}"
        raise ValueError(f"an action takes time: {given}. Use times above 0, and at least 0 for a transfer.")
    _check_orders(orders, pp)
    start: dict[Action, float] = {}
    finish: dict[Action, float] = {}
    clocks, queues = [0.0] * pp, [deque(entries) for entries in orders]
    progress = True
    while progress:
        progress = False
        for rank, queue in enumerate(queues):
            while queue and finish.keys() >= set(needed := dependencies(queue[0], pp=pp, vpp=vpp)):
                entry = queue.popleft()
                arrivals = [finish[other] + (transfer_time if other.stage % pp != rank else 0) for other in needed]
                begin = max([clocks[rank], *arrivals])
                clocks[rank] = begin + times[entry.kind]
                start |= dict.fromkeys(parts(entry), begin)
                finish |= dict.fromkeys(parts(entry), clocks[rank])
                progress = True
    if stuck := {rank: queue[0] for rank, queue in enumerate(queues) if queue}:
        blocked = []
        for rank, entry in stuck.items():
            awaited = " and ".join(str(other) for other in dependencies(entry, pp=pp, vpp=vpp) if other not in finish)
            blocked.append(f"on rank {rank}, {entry} waits for {awaited}")
        raise DeadlockError(f"The pipeline is stuck: {'; '.join(blocked)}. Put what is awaited earlier in its order.")
    return Timeline(tuple(map(tuple, orders)), start, finish, tuple(map(_peak_in_flight, orders)))


def picture(timeline: Timeline) -> str:
    """The timeline as text: a row for each rank, its entries from left to right, dots where it idles."""
    entries = chain.from_iterable(timeline.orders)
    spans = {entry: (timeline.start[parts(entry)[0]], timeline.finish[parts(entry)[0]]) for entry in entries}
    scale = max(((len(str(entry)) + 1) / (stop - start) for entry, (start, stop) in spans.items()), default=0.0)
    rows = []
    for rank, entries_of_rank in enumerate(timeline.orders):
        row = ""
        for entry in entries_of_rank:
            start, stop = (round(time * scale) for time in spans[entry])
            row = row.ljust(start, ".") + str(entry).ljust(stop - start - 1, "-") + " "
        rows.append(f"rank {rank} |{row.ljust(round(timeline.makespan * scale), '.')}|")
    return "\n".join(rows)


def _groups(microbatches: int, pp: int) -> list[range]:
    """As many groups of at least pp microbatches as there can be, as even as can be, the larger first; or one."""
    count = max(1, microbatches // pp)
    sizes = [microbatches // count + (index < microbatches % count) for index in range(count)]
    return [range(first, last) for first, last in pairwise(accumulate(sizes, initial=0))]


def _peak_in_flight(entries: Sequence[Entry]) -> int:
    actions = list(chain.from_iterable(map(parts, entries)))
    awaited = {(action.stage, action.microbatch) for action in actions if action.kind == "B"}
    changes = [1 if action.kind == "F" else -1 for action in actions if (action.stage, action.microbatch) in awaited]
    return max(accumulate(changes, initial=0))


def _check_shape(pp: int, vpp: int) -> None:
    for name, degree in (("pp", pp), ("vpp", vpp)):
        if degree < 1:
            raise ValueError(f"{name}={degree}: a pipeline has at least 1 rank, and 1 stage on each. Use {name}=1.")


def _check_orders(orders: Sequence[Sequence[Entry]], pp: int) -> None:
    if len(orders) != pp:
        raise ValueError(f"pp={pp} needs {pp} orders, one for each rank, but there are {len(orders)}.")
    for rank, entries in enumerate(orders):
        actions = list(chain.from_iterable(map(parts, entries)))
        for action in actions:
            if action.stage % pp != rank:
                raise ValueError(f"rank {rank} cannot run {action}: its stage lives on rank {action.stage % pp}.")
        if len(set(actions)) < len(actions):
            raise ValueError(f"rank {rank} runs {Counter(actions).most_common(1)[0][0]} twice. Leave one out.")

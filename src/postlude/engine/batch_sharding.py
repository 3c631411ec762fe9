"""Dealing: from a batch to this rank's own microbatches, and from their results back to who asked.

Which sequences share a microbatch, and which rank runs it, follows from lengths alone, so a rank reads and packs only
what it runs. What every rank has to know alike, and what only some can know (the sum of a column over the batch, the
dtype of a column of which this rank has no row), they tell each other in three small sums before a pass begins. There
they also notice if they were given different batches, or if one of them cannot read its own.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from postlude.data import Batch, Microbatch, scatter, shard_context
from postlude.data.bins import BinPlan, plan_bins, plan_sharded_bins
from postlude.data.microbatch import ROUTING
from postlude.data.packing import Content, build, is_plain, lengths_of, read
from postlude.engine.scale import count_name
from postlude.model.config import ModelConfig
from postlude.model.routing import Routers, check_experts
from postlude.world.mesh import Mesh

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
PLAIN = 100
"""Added to the number of a dtype that the caller did not choose: Python's numbers are bool, int64 or float32."""
NOTHING = torch.iinfo(torch.int64).min // 2
"""Said by a rank that knows nothing about something."""
MOST_TRAILING = 3


@dataclass(frozen=True)
class LocalBatch:
    """This rank's part of a batch, and what it must know of the rest."""

    plan: BinPlan
    own: list[Microbatch]
    """This rank's microbatches, cut over context parallelism, on its device."""
    counts: Mapping[str, float]
    """The sum over the whole batch of each column, and the number of "tokens" with a target and of "sequences".

    Of what is further ahead, under `count_name`."""
    held: bool
    """Whether results go to who holds a sequence, and not to everyone."""
    mesh: Mesh

    def gather_results(
        self, found: Sequence[Mapping[str, Tensor]], *, shifted: bool, device: torch.device
    ) -> dict[str, list[Tensor]]:
        """Values of own microbatches [T, ...] by name -> one tensor [length, ...] a sequence, on the CPU.

        The ranks of the last stage give each other what they have, and then the stages before them. Nothing is sent
        but the values of tokens. Every rank has those of the whole batch then, or of what it holds.
        """
        mesh, ranks = self.mesh, self.mesh.dp.size
        members = [self.plan.members(range(rank, len(self.plan.bins), ranks)) for rank in range(ranks)]
        sizes = [sum(self.plan.lengths[member] for member in each) for each in members]
        shown = [mesh.dp.rank] if self.held else list(range(ranks))
        results = {}
        for name, dtype, trailing in self._described(found, device):
            own = torch.zeros((sizes[mesh.dp.rank], *trailing), dtype=dtype, device=device)
            if found:
                self._lay_out([each[name].detach() for each in found], own, members[mesh.dp.rank], shifted)
            # As bytes, which every backend sends. Of ranks that share a sequence, one has a token's, the others zeros.
            width = math.prod(trailing) * dtype.itemsize  # of a token, though this rank may have none
            together = _on_the_wire(own).view(-1).view(torch.uint8).view(len(own), width)
            if found and mesh.cp.group is not None:
                dist.all_reduce(together, group=mesh.cp.group)
            if len(shown) > 1:
                alike = together.new_zeros((max(sizes), width))
                alike[: len(together)] = together
                together = alike.new_zeros((ranks * max(sizes), width))
                if found:
                    dist.all_gather_into_tensor(together, alike, group=mesh.dp.group)
            if mesh.pp.group is not None:
                dist.broadcast(together, group=mesh.pp.group, group_src=mesh.pp.size - 1)
            by_sequence: dict[int, Tensor] = {}
            for number, rank in enumerate(shown):
                start = number * max(sizes)
                sent = together[start : start + sizes[rank]].cpu()
                values = sent.view(-1).view(dtype).view(sizes[rank], *trailing)
                lengths = [self.plan.lengths[member] for member in members[rank]]
                by_sequence |= zip(members[rank], values.split_with_sizes(lengths), strict=True)
            results[name] = [by_sequence[member] for member in sorted(by_sequence)]
        return results

    def _lay_out(self, values: Sequence[Tensor], into: Tensor, members: Sequence[int], shifted: bool) -> None:
        """Put each microbatch's values where its sequences lie when this rank's are laid end to end."""
        starts, end = {}, 0
        for member in members:
            starts[member], end = end, end + self.plan.lengths[member]
        for microbatch, each in zip(self.own, values, strict=True):
            moves = [starts[member] - self.plan.starts[member] for member in microbatch.sequences]
            device = microbatch.batch_indices.device
            moved = (
                microbatch.batch_indices
                + torch.tensor(moves, dtype=torch.int64, device=device)[microbatch.packing.sequence_index()]
            )
            here = replace(microbatch, batch_indices=moved.where(microbatch.batch_indices >= 0, -1), batch_tokens=end)
            scatter(here, each, into, shifted=shifted)

    def _described(
        self, found: Sequence[Mapping[str, Tensor]], device: torch.device
    ) -> list[tuple[str, torch.dtype, list[int]]]:
        """Name, dtype and trailing shape of what the last stage found, for the stages that have none of it."""
        text = json.dumps(
            [[name, str(value.dtype).split(".")[1], list(value.shape[1:])] for name, value in found[0].items()]
            if found
            else []
        )
        if self.mesh.pp.group is not None:
            group, last = self.mesh.pp.group, self.mesh.pp.size - 1
            header = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
            size = _on_the_wire(torch.tensor([len(header)], device=device))
            dist.broadcast(size, group=group, group_src=last)
            header = _on_the_wire((header if found else torch.zeros(int(size), dtype=torch.uint8)).to(device))
            dist.broadcast(header, group=group, group_src=last)
            text = bytes(header.cpu().numpy()).decode()
        return [(name, getattr(torch, dtype), trailing) for name, dtype, trailing in json.loads(text)]


def shard_batch(
    batch: Batch,
    mesh: Mesh,
    *,
    budget: int,
    vocab_size: int,
    device: torch.device,
    depths: int = 0,
    routers: Routers | None = None,
    counts: Mapping[str, float] | None = None,
) -> LocalBatch:
    """This rank's microbatches of a batch. Every rank raises where one does, or where their batches differ.

    `counts` are those of the step, if they are given: they must be alike on every rank, too.
    """
    rank, ranks = mesh.dp.rank, mesh.dp.size
    talk = ConsistencyCheck(device)
    with talk.about("plan its microbatches") as said:
        plan = _plan(batch, ranks, budget)
        said.append(
            talk.digest(
                plan.lengths,
                [*map(len, plan.bins)],
                plan.members(range(len(plan.bins))),
                *batch.columns,
                repr(sorted((counts or {}).items())),
            )
        )
    if talk.differ([0]):
        raise ValueError(
            "the ranks were given batches of different lengths, groups, owners or columns, or different counts. Give "
            "every rank the same batch, or each its own sequences with Batch.sharded, and the same counts."
        )

    numbers = range(rank, len(plan.bins), ranks)
    with talk.about("read its part of the batch", entries=_columns_entries(batch) + ranks) as said:
        content = _read(batch, plan, rank, numbers)
        _check_vocabulary(content.tokens, vocab_size)
        if ROUTING in content.columns and len(content.tokens):
            check_experts(content.columns[ROUTING], routers or {})
        for name, column in content.columns.items():
            said.extend(_described(name, column, is_plain(batch.columns[name])) if len(content.tokens) else _UNKNOWN)
        digests = [NOTHING] * ranks
        digests[rank] = talk.digest(content.tokens, *content.columns.values())
        if batch.sharding is None and ranks > 1:  # nobody reads it all, but each reads what the next one runs
            beside = (rank + 1) % ranks
            other = _read(batch, plan, beside, range(beside, len(plan.bins), ranks))
            digests[beside] = talk.digest(other.tokens, *other.columns.values())
        said.extend(digests)
    content = Content(content.tokens, dict(_agreed_columns(content, talk)))
    for slot in range(ranks):
        if talk.differ([_columns_entries(batch) + slot]):
            raise ValueError(
                f"the ranks were given different batches: not all have the same tokens and columns for what "
                f"data-parallel rank {slot} runs. Give every rank the same batch, or each its own with Batch.sharded."
            )

    microbatches = build(plan, numbers, content, depths)
    counts = {"sequences": float(len(plan.lengths))}
    for depth in range(depths + 1):
        counts[count_name("tokens", depth)] = float(sum(max(0, length - 1 - depth) for length in plan.lengths))
    own = [shard_context(each, mesh.cp, multiple_of=mesh.tp.size).to(device) for each in microbatches]
    return LocalBatch(plan, own, counts | _sums(microbatches, mesh, device), batch.sharding is not None, mesh)


def with_step_counts(microbatch: Microbatch, counts: Mapping[str, float], config: ModelConfig) -> Microbatch:
    """A microbatch of a step that its batch is only part of, whose routers' side losses are means over the step."""
    if "all_tokens" in counts:
        tokens = int(counts["all_tokens"])
        ahead = tuple(replace(each, batch_tokens=tokens) for each in microbatch.mtp_microbatches)
        return replace(microbatch, batch_tokens=tokens, mtp_microbatches=ahead)
    if any(block.has_aux_losses for block in config.blocks.values()):
        raise LookupError(
            'counts has no "all_tokens", every token of the step, which side losses of routers are a mean over. Give '
            "what Engine.count makes of all batches of the step."
        )
    return microbatch


def _plan(batch: Batch, ranks: int, budget: int) -> BinPlan:
    if not len(batch):
        raise ValueError("there are no sequences to pack, but the least is 1. Skip the step when a batch is empty.")
    if batch.sharding is None:
        lengths = lengths_of(batch.sequences)
        return BinPlan(lengths, plan_bins(lengths, budget, multiple_of=ranks, groups=batch.groups))
    lengths = [int(length) for length in batch.sharding.lengths]
    return BinPlan(lengths, plan_sharded_bins(lengths, batch.sharding.owners, ranks, budget, groups=batch.groups))


def _read(batch: Batch, plan: BinPlan, rank: int, numbers: Sequence[int]) -> Content:
    """What the sequences of these microbatches hold."""
    members = plan.members(numbers)
    if batch.sharding is None:
        return read(batch.sequences, batch.columns, members, members, plan.lengths)
    held = [index for index, owner in enumerate(batch.sharding.owners) if owner == rank]
    own, said = lengths_of(batch.sequences), [plan.lengths[index] for index in held]
    if own != said:
        raise ValueError(
            f"this rank was given sequences of {_few(own)} tokens, but data-parallel rank {rank} is said to hold ones "
            f"of {_few(said)}. Give it those, in the order of `lengths`."
        )
    at = {index: place for place, index in enumerate(held)}
    return read(batch.sequences, batch.columns, members, [at[member] for member in members], plan.lengths)


def _check_vocabulary(tokens: Tensor, size: int) -> None:
    if len(tokens) and (highest := int((tokens if tokens.is_cuda else tokens.numpy()).max())) >= size:
        raise ValueError(
            f"a sequence holds token {highest}, but the vocabulary ends at {size - 1}. "
            "Are tokenizer and model of one kind?"
        )


_UNKNOWN = [NOTHING] * (2 + MOST_TRAILING)


def _columns_entries(batch: Batch) -> int:
    return len(batch.columns) * len(_UNKNOWN)


def _described(name: str, column: Tensor, plain: bool) -> list[int]:
    """A column's dtype and trailing shape, as numbers."""
    trailing = column.shape[1:]
    if column.dtype not in DTYPES or len(trailing) > MOST_TRAILING:
        raise ValueError(
            f'column "{name}" holds {column.dtype} of shape {tuple(trailing)} per token. Give numbers of at most '
            f"{MOST_TRAILING} dimensions per token."
        )
    kind = DTYPES.index(column.dtype) + PLAIN * plain
    return [kind, len(trailing), *trailing, *[0] * (MOST_TRAILING - len(trailing))]


def _agreed_columns(content: Content, talk: ConsistencyCheck) -> Iterator[tuple[str, Tensor]]:
    """The columns in the dtype and shape that all ranks found together: one alone may have no row, or whole numbers."""
    either = {PLAIN + DTYPES.index(dtype) for dtype in (torch.int64, torch.float32)}
    for number, (name, column) in enumerate(content.columns.items()):
        entries = range(number * len(_UNKNOWN), (number + 1) * len(_UNKNOWN))
        kind, dimensions, *trailing = (talk.highest[entry] for entry in entries)
        mixed = {talk.lowest[entries[0]], kind} == either
        if talk.differ(entries[1:]) or (talk.differ(entries[:1]) and not mixed):
            raise ValueError(
                f'column "{name}" holds values of different dtypes or shapes on different ranks. '
                "Give all the same dtype and shape."
            )
        dtype = DTYPES[kind % PLAIN]
        yield name, (column if len(content.tokens) else torch.zeros(0, *trailing[:dimensions])).to(dtype)


def _sums(microbatches: Sequence[Microbatch], mesh: Mesh, device: torch.device) -> dict[str, float]:
    """The sum of every column over the whole batch."""
    columns = [
        {
            count_name(name, depth): column
            for depth, ahead in enumerate((each, *each.mtp_microbatches))
            for name, column in ahead.columns.items()
        }
        for each in microbatches
    ]
    names = list(columns[0])
    sums = [sum(float(each[name].sum(dtype=torch.float64)) for each in columns) for name in names]
    if names and mesh.dp.group is not None:
        totals = _on_the_wire(torch.tensor(sums, dtype=torch.float64, device=device))
        dist.all_reduce(totals, group=mesh.dp.group)
        sums = totals.tolist()
    return dict(zip(names, sums, strict=True))


class ConsistencyCheck:
    """Whole numbers that all ranks tell each other at once: of each, the highest and the lowest anyone said."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.highest: list[int] = []
        self.lowest: list[int] = []

    @contextmanager
    def about(self, what: str, entries: int = 1) -> Iterator[list[int]]:
        """Say what is put into the list within; if one rank fails there, all do, each with its own sentence."""
        said: list[int] = []
        failed: Exception | None = None
        try:
            yield said
        except Exception as error:
            failed = error
        if failed is not None and dist.get_world_size() == 1:
            raise failed
        whose = NOTHING if failed is None else dist.get_rank()
        self._exchange([NOTHING] * entries if failed is not None else said, whose)
        if failed is not None:
            raise failed
        if self.failed != NOTHING:
            raise RuntimeError(f"rank {self.failed} could not {what}: its own error says why.")

    def differ(self, entries: Sequence[int]) -> bool:
        """Whether two ranks said different things."""
        return any(self.lowest[entry] != self.highest[entry] for entry in entries)

    def digest(self, *things: Sequence[int] | str | Tensor) -> int:
        """A number of 62 bits that tells different things apart; 0 where there is nobody to compare with."""
        if dist.get_world_size() == 1:
            return 0
        digest = hashlib.blake2b(digest_size=8)
        for thing in things:
            if isinstance(thing, str):
                content: Any = thing.encode()
            elif isinstance(thing, Tensor):
                content = thing.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() if thing.numel() else b""
            else:
                content = np.asarray(thing, dtype=np.int64)
            digest.update(f"{len(content)} ".encode())
            digest.update(content)
        return int.from_bytes(digest.digest(), "little") >> 2

    def _exchange(self, said: Sequence[int], failed: int) -> None:
        self.highest = self.lowest = list(said)
        self.failed = failed
        if dist.get_world_size() > 1:
            negated = [NOTHING if number == NOTHING else -number for number in said]
            numbers = _on_the_wire(torch.tensor([failed, *said, *negated], dtype=torch.int64, device=self.device))
            dist.all_reduce(numbers, dist.ReduceOp.MAX)
            self.failed, *both = numbers.tolist()
            self.highest = both[: len(said)]
            self.lowest = [NOTHING if number == NOTHING else -number for number in both[len(said) :]]


def _on_the_wire(tensor: Tensor) -> Tensor:
    """The same tensor where the ranks' backend can send it from: gloo knows the host's memory best."""
    return tensor.cpu() if dist.is_initialized() and dist.get_backend() == "gloo" else tensor


def _few(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers[:8])) or "no"
    return f"{listed}, …" if len(numbers) > 8 else listed

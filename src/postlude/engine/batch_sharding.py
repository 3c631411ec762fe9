"""Shards the caller's batch into this rank's microbatches, and returns their results in the caller's order.

The plan (the sequences and rank of each microbatch) depends on lengths, groups and owners only. So every rank computes
the same plan, and packs only what it runs. Before a pass begins, three small all-reduces compute the sum of each
column, give ranks without rows its dtype, and detect ranks that have another batch or cannot pack it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.data import Batch, Microbatch, scatter_add, shard_context
from postlude.data.batch import BatchSharding
from postlude.data.bins import BinPlan, find_shared_prefixes, plan_bins, plan_sharded_bins
from postlude.data.microbatch import ROUTING
from postlude.data.packing import BatchContent, build_microbatches, has_no_dtype, read_content, sequence_lengths
from postlude.data.prefix_tree import PrefixOrder
from postlude.engine.normalizer import count_name
from postlude.engine.options import EngineOptions
from postlude.model.blocks import Block
from postlude.model.config import ModelConfig
from postlude.model.context import check_experts
from postlude.options import SharePrefixes
from postlude.world.agreement import ConsistencyCheck, Rank0Controller, cpu_if_gloo
from postlude.world.mesh import Axis, Mesh

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
INFERRED_DTYPE = 100
"""Added to a dtype's index if the values are Python numbers: the caller did not choose the dtype."""
MAX_TRAILING_DIMS = 3
INTEGERS_PER_COLUMN = 2 + MAX_TRAILING_DIMS  # dtype, number of trailing dimensions, their sizes


@dataclass(frozen=True)
class LocalBatch:
    """This rank's microbatches of a batch, and the counts of the whole batch."""

    plan: BinPlan
    microbatches: list[Microbatch]
    """This rank's, sharded over context parallelism, on its device."""
    counts: Mapping[str, float]
    """The sum of each column over the whole batch, the number of "tokens" with a target and of "sequences".

    Those of a multi-token-prediction depth are under `count_name(name, depth)`."""
    sharded: bool
    """Whether a result goes only to the rank that holds the sequence."""
    mesh: Mesh

    def gather_results(
        self, values: Sequence[Mapping[str, Tensor]], *, shifted: bool, device: torch.device
    ) -> dict[str, list[Tensor]]:
        """Returns one tensor [length, ...] per sequence by name, on the CPU, from [T, ...] of this rank's microbatches.

        Every rank gets the sequences of the whole batch, or those that it holds. The last stage's ranks exchange
        per-token values and broadcast them to the stages before.
        """
        mesh, ranks = self.mesh, self.mesh.dp.size
        members = [self.plan.members(range(rank, len(self.plan.bins), ranks)) for rank in range(ranks)]
        sizes = [sum(self.plan.lengths[member] for member in sequences) for sequences in members]
        source_ranks = [mesh.dp.rank] if self.sharded else list(range(ranks))
        results = {}
        for name, dtype, trailing in self._result_types(values):
            local = torch.zeros((sizes[mesh.dp.rank], *trailing), dtype=dtype, device=device)
            if values:
                self._write_values([value[name].detach() for value in values], local, members[mesh.dp.rank], shifted)
            by_sequence: dict[int, Tensor] = {}
            tokens_by_rank = self._exchange(local, sizes, source_ranks, on_last_stage=bool(values))
            for rank, tokens in zip(source_ranks, tokens_by_rank, strict=True):
                lengths = [self.plan.lengths[member] for member in members[rank]]
                by_sequence |= zip(members[rank], tokens.split_with_sizes(lengths), strict=True)
            results[name] = [by_sequence[member] for member in sorted(by_sequence)]
        return results

    def _exchange(
        self, local: Tensor, sizes: Sequence[int], source_ranks: Sequence[int], *, on_last_stage: bool
    ) -> list[Tensor]:
        """Returns the values of each of `source_ranks`, [sizes[rank], ...] on the CPU. `local` are those of this rank.

        They are sent as bytes, which every backend supports. Of the context-parallel ranks that share a sequence, one
        has a token's value and the others have zeros, so the sum is the value.
        """
        mesh, trailing, padded_size = self.mesh, local.shape[1:], max(sizes)
        width = math.prod(trailing) * local.dtype.itemsize  # bytes per token; this rank may have no tokens
        data = cpu_if_gloo(local).view(-1).view(torch.uint8).view(len(local), width)
        if on_last_stage and mesh.cp.group is not None:
            dist.all_reduce(data, group=mesh.cp.group)
        if len(source_ranks) > 1:
            padded = data.new_zeros((padded_size, width))
            padded[: len(data)] = data
            data = padded.new_zeros((len(sizes) * padded_size, width))
            if on_last_stage:
                dist.all_gather_into_tensor(data, padded, group=mesh.dp.group)
        if mesh.pp.group is not None:
            dist.broadcast(data, group=mesh.pp.group, group_src=mesh.pp.size - 1)
        received = [data[index * padded_size :][: sizes[rank]].cpu() for index, rank in enumerate(source_ranks)]
        return [tokens.view(-1).view(local.dtype).view(len(tokens), *trailing) for tokens in received]

    def _write_values(self, values: Sequence[Tensor], output: Tensor, members: Sequence[int], shifted: bool) -> None:
        """Writes each microbatch's values into `output`, in which this rank's sequences lie end to end."""
        starts, end = {}, 0
        for member in members:
            starts[member], end = end, end + self.plan.lengths[member]
        for microbatch, value in zip(self.microbatches, values, strict=True):
            offsets = torch.tensor(
                [starts[member] - self.plan.starts[member] for member in microbatch.sequences],
                dtype=torch.int64,
                device=microbatch.batch_indices.device,
            )
            indices = microbatch.batch_indices + offsets[microbatch.packing.sequence_index()]
            indices = indices.where(microbatch.batch_indices >= 0, -1)
            scatter_add(replace(microbatch, batch_indices=indices, batch_tokens=end), value, output, shifted=shifted)

    def _result_types(self, values: Sequence[Mapping[str, Tensor]]) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Returns name, dtype and trailing shape of the last stage's results, on the other stages too."""
        first = values[0] if values else {}
        types = [[(name, value.dtype, tuple(value.shape[1:])) for name, value in first.items()]]
        if self.mesh.pp.group is not None:
            dist.broadcast_object_list(types, group=self.mesh.pp.group, group_src=self.mesh.pp.size - 1)
        return types[0]


def supported_sharing(options: EngineOptions, config: ModelConfig) -> SharePrefixes:
    """Returns how the engine shares prefixes: with "auto" not at all where the model cannot.

    Raises ValueError if it cannot with "always".
    """
    blocks = (block for symbol, block in options.blocks.items() if symbol in config.pattern.kinds)
    unable = next((block for block in blocks if not _shares_prefixes(block)), None)
    if unable is None and not options.batch_invariant:
        return options.share_prefixes
    if options.share_prefixes == "always":
        reason = (
            "batch_invariant keeps the bits of every sequence computed alone. Use one of the two."
            if unable is None
            else f"{unable.__name__} does not take them. Set shares_prefixes=True on a block that reads other tokens "
            'through microbatch.sequence_rows or microbatch.head_exchange alone, or use share_prefixes="auto".'
        )
        raise ValueError(f'share_prefixes="always" computes common tokens once, but {reason}')
    return "off"


def _shares_prefixes(block: type[Block]) -> bool:
    """Whether a block declares that it takes shared tokens. A class with methods of its own declares it itself."""
    for kind in block.__mro__:
        if "shares_prefixes" in vars(kind):
            return block.shares_prefixes
        if any(isinstance(value, FunctionType) for value in vars(kind).values()):
            return False
    return False


def scatter_batch(
    batch: Batch | None,
    mesh: Mesh,
    controller: Rank0Controller[Any, Any],
    budget: int,
    share_prefixes: SharePrefixes = "off",
) -> Batch:
    """Returns a sharded batch with this rank's sequences. Rank 0 passes the whole batch, the others None.

    Rank 0 plans the bins once, and the plan is sent with the batch: an engine with the same `budget` runs it as if
    every rank had been given the whole batch.
    """
    dp_ranks = controller.gather(mesh.dp.rank)
    if batch is None:
        return controller.scatter(None)
    if mesh.dp.size == 1:
        return controller.scatter([batch for _ in dp_ranks])
    prefixes = _local_prefixes(batch, share_prefixes, mesh.dp.rank)
    bins = plan_bins(batch.lengths, budget, multiple_of=mesh.dp.size, groups=batch.groups, prefixes=prefixes)
    owners = [0] * len(batch)
    for bin_index, members in enumerate(bins):
        for member in members:
            owners[member] = bin_index % mesh.dp.size
    sharding = BatchSharding(batch.lengths, owners, bins, budget, prefixes)
    return controller.scatter([_select_rows(batch, sharding, rank) for rank in dp_ranks])


def _select_rows(batch: Batch, sharding: BatchSharding, rank: int) -> Batch:
    rows = [row for row, owner in enumerate(sharding.owners) if owner == rank]
    columns = {name: [values[row] for row in rows] for name, values in batch.columns.items()}
    return replace(batch, sequences=[batch.sequences[row] for row in rows], columns=columns, sharding=sharding)


def shard_batch(
    batch: Batch,
    mesh: Mesh,
    config: ModelConfig,
    *,
    budget: int,
    device: torch.device,
    step_counts: Mapping[str, float] | None = None,
    adapter: str | None = None,
    share_prefixes: SharePrefixes = "off",
) -> LocalBatch:
    """Returns this rank's microbatches of a batch. Every rank raises if one does, or if their batches differ.

    `step_counts` are the denominators of the step, if the caller gave them, and `adapter` is the active one: they must
    be equal on every rank.
    """
    check, depths = ConsistencyCheck(device), len(config.pattern.mtp)
    plan = _agreed_plan(
        batch,
        mesh.dp,
        budget,
        check,
        share_prefixes,
        repr((sorted((step_counts or {}).items()), adapter, batch.temperature)),
    )
    bin_indices = range(mesh.dp.rank, len(plan.bins), mesh.dp.size)
    content = _agreed_content(batch, plan, bin_indices, mesh.dp, config, check)
    microbatches = build_microbatches(plan, bin_indices, content, depths, batch.temperature)
    if step_counts and "all_tokens" in step_counts:  # before shared segments are made of them
        microbatches = [_with_step_tokens(microbatch, int(step_counts["all_tokens"])) for microbatch in microbatches]
    counts = {"sequences": float(len(plan.lengths))}
    for depth in range(depths + 1):
        counts[count_name("tokens", depth)] = float(sum(max(0, length - 1 - depth) for length in plan.lengths))
    local = [shard_context(microbatch, mesh.cp, mesh.tp).to(device) for microbatch in microbatches]
    return LocalBatch(plan, local, counts | _column_sums(microbatches, mesh, device), batch.sharding is not None, mesh)


def _agreed_plan(
    batch: Batch, dp: Axis, budget: int, check: ConsistencyCheck, share_prefixes: SharePrefixes, settings: str
) -> BinPlan:
    """Returns the plan of microbatches. Raises if ranks have different plans, columns or `settings`."""
    prefixes = None
    is_planned = _is_planned(batch, budget, share_prefixes)
    if share_prefixes != "off" and not is_planned:
        with check.exchange("find the tokens that its sequences share", {}):
            prefixes = _local_prefixes(batch, share_prefixes, dp.rank)
        if batch.sharding is not None and dp.group is not None:
            prefixes = _gather_prefixes(prefixes, batch.sharding, dp)
    # The verb phrase completes an error message: "rank 3 could not plan its microbatches".
    with check.exchange("plan its microbatches", {"plan": 1}) as values:
        plan = _plan(batch, dp.size, budget, prefixes, is_planned=is_planned)
        members = plan.members(range(len(plan.bins)))
        shared = () if prefixes is None else (*prefixes.order, *prefixes.common)
        values["plan"] = [check.digest(plan.lengths, [*map(len, plan.bins)], members, shared, *batch.columns, settings)]
    if check.differs("plan"):
        raise ValueError(
            "the ranks were given batches of different lengths, groups, owners, columns or temperatures, or different "
            "counts, or use different adapters. Give every rank the same batch, or each its own sequences with "
            "Batch.sharded, and the same counts and adapter."
        )
    return plan


def _agreed_content(
    batch: Batch, plan: BinPlan, bin_indices: range, dp: Axis, config: ModelConfig, check: ConsistencyCheck
) -> BatchContent:
    """Returns the content of this rank's bins. Raises if the model lacks a token or expert, or if batches differ."""
    sizes = {_column_key(name): INTEGERS_PER_COLUMN for name in batch.columns}
    sizes |= {_content_key(rank): 1 for rank in range(dp.size)}
    with check.exchange("read its part of the batch", sizes) as values:
        content = _read_bins(batch, plan, dp.rank, bin_indices)
        _check_vocabulary(content.tokens, config.vocab_size)
        if ROUTING in content.columns and len(content.tokens):
            check_experts(content.columns[ROUTING], config.routers)
        for name, column in content.columns.items() if len(content.tokens) else ():
            values[_column_key(name)] = _column_type(name, column, has_no_dtype(batch.columns[name]))
        values[_content_key(dp.rank)] = [check.digest(content.tokens, *content.columns.values())]
        # To detect different batches, each rank also hashes its neighbour's part.
        if batch.sharding is None and dp.size > 1:
            neighbour = (dp.rank + 1) % dp.size
            neighbour_content = _read_bins(batch, plan, neighbour, range(neighbour, len(plan.bins), dp.size))
            values[_content_key(neighbour)] = [
                check.digest(neighbour_content.tokens, *neighbour_content.columns.values())
            ]
    content = BatchContent(content.tokens, dict(_columns_of_common_dtype(content, check)))
    for rank in range(dp.size):
        if check.differs(_content_key(rank)):
            raise ValueError(
                f"the ranks were given different batches: not all have the same tokens and columns for the "
                f"sequences of data-parallel rank {rank}. Give every rank the same batch, or each its own with "
                "Batch.sharded."
            )
    return content


def _column_key(column: str) -> str:
    return f"dtype and shape of column {column}"


def _content_key(rank: int) -> str:
    return f"content of data-parallel rank {rank}"


def _with_step_tokens(microbatch: Microbatch, tokens: int) -> Microbatch:
    """Returns the microbatch with the token count of the whole step, for the means of routers' auxiliary losses."""
    depths = tuple(replace(depth, batch_tokens=tokens) for depth in microbatch.mtp_microbatches)
    return replace(microbatch, batch_tokens=tokens, mtp_microbatches=depths)


def check_step_tokens(counts: Mapping[str, float], config: ModelConfig) -> None:
    """Raises LookupError if the counts of a step lack the token count that its auxiliary losses need."""
    if "all_tokens" not in counts and any(block.has_aux_losses for block in config.blocks.values()):
        raise LookupError(
            'counts has no "all_tokens", the number of tokens of the step, which routers\' auxiliary losses need. '
            "Pass counts=engine.count(*batches) with all batches of the step."
        )


def _local_prefixes(batch: Batch, share: SharePrefixes, rank: int) -> PrefixOrder | None:
    """Returns the tokens that the sequences on this rank share: of the whole batch, or of a sharded one its part.

    Their indices are those of the whole batch.
    """
    if share == "off" or not len(batch.sequences):
        return None
    lengths, sharding = sequence_lengths(batch.sequences), batch.sharding
    prefixes = find_shared_prefixes(batch.sequences, lengths, share, batch.columns.get(ROUTING))
    if prefixes is None or sharding is None:
        return prefixes
    owned = [index for index, owner in enumerate(sharding.owners) if owner == rank]
    return PrefixOrder(tuple(owned[row] for row in prefixes.order), prefixes.common)


def _is_planned(batch: Batch, budget: int, share: SharePrefixes) -> bool:
    """Whether `scatter_batch` planned microbatches that fit this engine: its budget, and its sharing of tokens."""
    sharding = batch.sharding
    fits = sharding is not None and sharding.bins is not None and sharding.budget == budget
    return fits and sharding is not None and (share != "off" or sharding.prefixes is None)


def _gather_prefixes(local: PrefixOrder | None, sharding: BatchSharding, dp: Axis) -> PrefixOrder | None:
    """Returns the tokens that sequences of the whole batch share, from what each data-parallel rank found."""
    by_rank: list[PrefixOrder | None] = [None] * dp.size
    dist.all_gather_object(by_rank, local, group=dp.group)
    if all(order is None for order in by_rank):
        return None
    orders = [
        order or PrefixOrder.unshared([index for index, owner in enumerate(sharding.owners) if owner == rank])
        for rank, order in enumerate(by_rank)
    ]
    return PrefixOrder(sum((order.order for order in orders), ()), sum((order.common for order in orders), ()))


def _plan(batch: Batch, ranks: int, budget: int, prefixes: PrefixOrder | None, *, is_planned: bool) -> BinPlan:
    if not len(batch):
        raise ValueError("there are no sequences to pack. Skip the step when a batch is empty.")
    if batch.sharding is None:
        lengths = sequence_lengths(batch.sequences)
        bins = plan_bins(lengths, budget, multiple_of=ranks, groups=batch.groups, prefixes=prefixes)
        return BinPlan(lengths, bins, prefixes)
    lengths = [int(length) for length in batch.sharding.lengths]
    if is_planned:
        return BinPlan(lengths, batch.sharding.bins or (), batch.sharding.prefixes)
    owners = batch.sharding.owners
    bins = plan_sharded_bins(lengths, owners, ranks, budget, groups=batch.groups, prefixes=prefixes)
    return BinPlan(lengths, bins, prefixes)


def _read_bins(batch: Batch, plan: BinPlan, rank: int, bin_indices: Sequence[int]) -> BatchContent:
    """Returns the tokens and columns of the sequences in these bins, which belong to data-parallel rank `rank`."""
    members = plan.members(bin_indices)
    if batch.sharding is None:
        return read_content(batch.sequences, batch.columns, members, members, plan.lengths)
    owned = [index for index, owner in enumerate(batch.sharding.owners) if owner == rank]
    lengths, expected = sequence_lengths(batch.sequences), [plan.lengths[index] for index in owned]
    if lengths != expected:
        raise ValueError(
            f"this rank was given sequences of {_lengths_text(lengths)} tokens, but by `lengths` and `owners` "
            f"data-parallel rank {rank} holds sequences of {_lengths_text(expected)}. Give it those, in the order of "
            "`lengths`."
        )
    row_of = {index: row for row, index in enumerate(owned)}
    return read_content(batch.sequences, batch.columns, members, [row_of[member] for member in members], plan.lengths)


def _check_vocabulary(tokens: Tensor, size: int) -> None:
    if len(tokens) and (highest := int((tokens if tokens.is_cuda else tokens.numpy()).max())) >= size:
        raise ValueError(
            f"a sequence holds token {highest}, but the vocabulary ends at {size - 1}. "
            "Check that the tokenizer belongs to the model."
        )


def _column_type(name: str, column: Tensor, inferred: bool) -> list[int]:
    trailing = column.shape[1:]
    if column.dtype not in DTYPES or len(trailing) > MAX_TRAILING_DIMS:
        raise ValueError(
            f'column "{name}" holds {column.dtype} of shape {tuple(trailing)} per token. Give numbers of at most '
            f"{MAX_TRAILING_DIMS} dimensions per token."
        )
    dtype = DTYPES.index(column.dtype) + INFERRED_DTYPE * inferred
    return [dtype, len(trailing), *trailing, *[0] * (MAX_TRAILING_DIMS - len(trailing))]


def _columns_of_common_dtype(content: BatchContent, check: ConsistencyCheck) -> Iterator[tuple[str, Tensor]]:
    """Yields the columns, cast to the common dtype: a rank may have no row, or integers where others have floats."""
    int_or_float = {INFERRED_DTYPE + DTYPES.index(dtype) for dtype in (torch.int64, torch.float32)}
    for name, column in content.columns.items():
        dtype, *shape = check.highest[_column_key(name)]
        lowest_dtype, *lowest_shape = check.lowest[_column_key(name)]
        if shape != lowest_shape or (dtype != lowest_dtype and {lowest_dtype, dtype} != int_or_float):
            raise ValueError(
                f'column "{name}" holds values of different dtypes or shapes on different ranks. '
                "Give all the same dtype and shape."
            )
        dimensions, *trailing = shape
        values = column if len(content.tokens) else torch.zeros(0, *trailing[:dimensions])
        yield name, values.to(DTYPES[dtype % INFERRED_DTYPE])


def _column_sums(microbatches: Sequence[Microbatch], mesh: Mesh, device: torch.device) -> dict[str, float]:
    columns = [
        {
            count_name(name, depth): column
            for depth, depth_microbatch in enumerate((microbatch, *microbatch.mtp_microbatches))
            for name, column in depth_microbatch.columns.items()
        }
        for microbatch in microbatches
    ]
    names = list(columns[0])
    sums = [sum(float(by_name[name].sum(dtype=torch.float64)) for by_name in columns) for name in names]
    if names and mesh.dp.group is not None:
        totals = cpu_if_gloo(torch.tensor(sums, dtype=torch.float64, device=device))
        dist.all_reduce(totals, group=mesh.dp.group)
        sums = totals.tolist()
    return dict(zip(names, sums, strict=True))


def _lengths_text(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers[:8])) or "no"
    return f"{listed}, …" if len(numbers) > 8 else listed

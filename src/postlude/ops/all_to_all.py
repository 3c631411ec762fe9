"""Exchanges of rows between ranks (all-to-all) that are started and awaited separately.

`AllToAllPlan` says which rows go where, and their order before and after. Gradients take the reverse plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from postlude.trace.recorder import NO_RECORDER, Recorder
from postlude.trace.spans import SpanKind


@dataclass(frozen=True)
class Permutation:
    """Puts row order[i] at row i. `inverse` undoes it."""

    order: Tensor
    inverse: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns the rows in the new order. Without gradient: the plan has one."""
        return rows[self.order]

    @property
    def reverse(self) -> Permutation:
        return Permutation(self.inverse, self.order)


@dataclass(frozen=True)
class AllToAllPlan:
    """Sends the next sent[r] rows to each rank r of `group` and lays what arrives end to end, by rank.

    Rows are permuted by `before` first, and what arrived by `after`.
    """

    sent: list[int]
    received: list[int]
    group: dist.ProcessGroup
    before: Permutation | None = None
    after: Permutation | None = None

    @property
    def reverse(self) -> AllToAllPlan:
        """The plan that sends the same rows back."""
        return AllToAllPlan(
            self.received,
            self.sent,
            self.group,
            self.after.reverse if self.after is not None else None,
            self.before.reverse if self.before is not None else None,
        )

    def __call__(self, rows: Tensor, name: str = "", recorder: Recorder = NO_RECORDER) -> Tensor:
        """[sum(sent), ...] -> [sum(received), ...], with gradient. `recorder` records both directions as `name`."""
        moved: Tensor = _AllToAll.apply(rows, self, name, recorder)
        return moved

    def start(
        self, rows: Tensor, kind: SpanKind = "exchange", name: str = "", recorder: Recorder = NO_RECORDER
    ) -> Callable[[], Tensor]:
        """Starts the exchange, without gradient. Call the result to wait; on a GPU the stream waits, not the host."""
        ordered = rows if self.before is None else self.before(rows)
        output = rows.new_empty(sum(self.received), *rows.shape[1:])
        sending = ordered.contiguous()
        under_way = recorder.start(kind, name)
        work = dist.all_to_all_single(output, sending, self.received, self.sent, group=self.group, async_op=True)
        wait_for = under_way.end_with(work, self.group)

        def wait() -> Tensor:
            nonlocal sending
            wait_for()
            del sending  # the backend reads it until now
            return output if self.after is None else self.after(output)

        return wait


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: AllToAllPlan, name: str, recorder: Recorder) -> Tensor:
        ctx.plan, ctx.recording = plan, (name, recorder)
        return plan.start(rows, "exchange", name, recorder)()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.plan.reverse.start(gradients[0], "exchange back", *ctx.recording)(), None, None, None


def exchange_sizes(sizes: Tensor, group: dist.ProcessGroup) -> Callable[[], tuple[Tensor, list[int], list[int]]]:
    """Starts sending sizes[r] to each rank r of `group`. Call the result to wait.

    `sizes` [ranks, n] -> what each rank sent here [ranks, n], and the sums per rank of what was sent and received, on
    the host. The host waits for these numbers only, not for work that the GPU was given after them.
    """
    outgoing, incoming = sizes.contiguous(), torch.empty_like(sizes)
    work = dist.all_to_all_single(incoming, outgoing, group=group, async_op=True)
    if not sizes.is_cuda:

        def wait() -> tuple[Tensor, list[int], list[int]]:
            work.wait()
            sent, received = torch.stack((outgoing.sum(1), incoming.sum(1))).tolist()
            return incoming, sent, received

        return wait

    side_stream = torch.cuda.Stream(sizes.device)
    side_stream.wait_stream(torch.cuda.current_stream(sizes.device))
    with torch.cuda.stream(side_stream):
        work.wait()
        sums = torch.stack((outgoing.sum(1), incoming.sum(1)))
        on_host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        on_host.copy_(sums, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()

    def wait_on_gpu() -> tuple[Tensor, list[int], list[int]]:
        ready.synchronize()
        torch.cuda.current_stream(sizes.device).wait_stream(side_stream)
        for tensor in (outgoing, incoming):
            tensor.record_stream(side_stream)
        sent, received = on_host.tolist()
        return incoming, sent, received

    return wait_on_gpu

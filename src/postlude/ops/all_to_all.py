"""Rows on their way between ranks: an exchange that can be begun, and waited for when other work is done.

`AllToAllPlan` says which rows go where and in which order they lie before and after. The gradient takes the same
way back.
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
    """Row order[i] at row i. `inverse` undoes it."""

    order: Tensor
    inverse: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        """No gradient of its own: a `AllToAllPlan` has one."""
        return rows[self.order]

    @property
    def undone(self) -> Permutation:
        """The way back."""
        return Permutation(self.inverse, self.order)


@dataclass(frozen=True)
class AllToAllPlan:
    """The next sent[r] of a rank's rows go to each rank r of `group`; what comes from each is laid end to end.

    They are put in the order `before` first, and what came into the order `after`.
    """

    sent: list[int]
    received: list[int]
    group: dist.ProcessGroup
    before: Permutation | None = None
    after: Permutation | None = None

    @property
    def back(self) -> AllToAllPlan:
        """The same rows to where they came from."""
        return AllToAllPlan(
            self.received,
            self.sent,
            self.group,
            self.after.undone if self.after is not None else None,
            self.before.undone if self.before is not None else None,
        )

    def __call__(self, rows: Tensor, name: str = "", recorder: Recorder = NO_RECORDER) -> Tensor:
        """[sum(sent), ...] -> [sum(received), ...], with a gradient. `recorder` is told of both ways by `name`."""
        moved: Tensor = _Moved.apply(rows, self, name, recorder)
        return moved

    def start(
        self, rows: Tensor, kind: SpanKind = "exchange", name: str = "", recorder: Recorder = NO_RECORDER
    ) -> Callable[[], Tensor]:
        """Send them off, without a gradient. Call what this returns to wait: on a GPU it is the stream that waits."""
        ordered = rows if self.before is None else self.before(rows)
        arrived = rows.new_empty(sum(self.received), *rows.shape[1:])
        sending = ordered.contiguous()
        under_way = recorder.start(kind, name)
        work = dist.all_to_all_single(arrived, sending, self.received, self.sent, group=self.group, async_op=True)
        wait_for = under_way.until(work, self.group)

        def wait() -> Tensor:
            nonlocal sending
            wait_for()
            del sending  # the backend reads it until now
            return arrived if self.after is None else self.after(arrived)

        return wait


class _Moved(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: AllToAllPlan, name: str, recorder: Recorder) -> Tensor:
        ctx.way, ctx.told = way, (name, recorder)
        return way.start(rows, "exchange", name, recorder)()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.way.back.start(gradients[0], "exchange back", *ctx.told)(), None, None, None


def exchange_sizes(sizes: Tensor, group: dist.ProcessGroup) -> Callable[[], tuple[Tensor, list[int], list[int]]]:
    """Tell each rank r of `group` the numbers sizes[r], and hear its own: begin it now, call what this returns to wait.

    `sizes` [ranks, n] -> what was heard [ranks, n], and the sums a rank of what was told and of what was heard, on the
    host, which waits for these numbers and for nothing that was asked of the GPU after them.
    """
    told, heard = sizes.contiguous(), torch.empty_like(sizes)
    work = dist.all_to_all_single(heard, told, group=group, async_op=True)
    if not sizes.is_cuda:

        def wait() -> tuple[Tensor, list[int], list[int]]:
            work.wait()
            sent, received = torch.stack((told.sum(1), heard.sum(1))).tolist()
            return heard, sent, received

        return wait

    aside = torch.cuda.Stream(sizes.device)
    aside.wait_stream(torch.cuda.current_stream(sizes.device))
    with torch.cuda.stream(aside):
        work.wait()
        sums = torch.stack((told.sum(1), heard.sum(1)))
        on_host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        on_host.copy_(sums, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()

    def wait_on_gpu() -> tuple[Tensor, list[int], list[int]]:
        ready.synchronize()
        torch.cuda.current_stream(sizes.device).wait_stream(aside)
        for tensor in (told, heard):
            tensor.record_stream(aside)
        sent, received = on_host.tolist()
        return heard, sent, received

    return wait_on_gpu

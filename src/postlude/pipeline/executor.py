"""Executor: runs an order of forwards and backwards over the stages of one pipeline. One rank is the shortest pipeline.

Nothing is kept between calls and no shape is fixed: every receive takes its shape from the microbatch, which all ranks
have. So lengths may change at will, and evaluation is the same loop without its backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.data import Microbatch
from postlude.model import LanguageModel, OutputProcessor
from postlude.pipeline.order import Action, order

TAGS = {"F": 0, "B": 1}


class Executor:
    """The stages of this rank, and the channels to its neighbours.

    `stages` maps global stage numbers to this rank's models, vpp of them; `group` holds the pp ranks of this pipeline
    in order, None for a pipeline of one.
    """

    def __init__(self, stages: Mapping[int, LanguageModel], group: dist.ProcessGroup | None = None) -> None:
        self.pp = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self.vpp = len(stages)
        self.stages = dict(stages)
        expected = list(range(self.rank, self.pp * self.vpp, self.pp))
        if sorted(stages) != expected:
            raise ValueError(
                f"pipeline rank {self.rank} of {self.pp} with {self.vpp} stage(s) runs stages {expected}, "
                f"but was given {sorted(stages)}."
            )
        for index, stage in stages.items():
            if (stage.stage.index, stage.stage.count) != (index, self.pp * self.vpp):
                raise ValueError(f"stage {index} of {self.pp * self.vpp} was given a model built as {stage.stage}.")
        self.channels = Channels(group, self.pp)

    def run(
        self,
        microbatches: Sequence[Microbatch],
        *,
        output_processor: OutputProcessor | None = None,
        output_processor_context: Any = None,
        loss: Callable[[Any], Tensor] | None = None,
    ) -> list[Any]:
        """Every microbatch through every stage. Returns what the processor returned for each, [] on the other ranks.

        `loss` takes a result to the scalar that is differentiated; gradients are added to the parameters'. Without it
        the pipeline runs forward only, and nothing is kept for a backward. All ranks pass the same microbatches.
        """
        actions = order(
            pp=self.pp, vpp=self.vpp, microbatches=len(microbatches), rank=self.rank, forward_only=loss is None
        )
        results: dict[int, Any] = {}
        entered: dict[tuple[int, int], Tensor | None] = {}
        left: dict[tuple[int, int], Tensor] = {}
        with torch.set_grad_enabled(loss is not None):
            for action in actions:
                place, microbatch = (action.stage, action.microbatch), microbatches[action.microbatch]
                stage = self.stages[action.stage]
                if action.kind == "B":
                    gradient = None if stage.stage.last else self._receive(action, microbatch)
                    left.pop(place).backward(gradient)
                    self._send(action, _gradient(entered.pop(place)))
                    continue
                hidden = None if stage.stage.first else self._receive(action, microbatch)
                if hidden is not None and loss is not None:
                    hidden.requires_grad_()
                if stage.stage.last:
                    result = stage(
                        microbatch,
                        hidden,
                        output_processor=output_processor,
                        output_processor_context=output_processor_context,
                    )
                    results[action.microbatch] = result
                    if loss is not None:
                        entered[place], left[place] = hidden, loss(result)
                else:
                    output = stage(microbatch, hidden)
                    self._send(action, output.detach())
                    if loss is not None:
                        entered[place], left[place] = hidden, output
        self.channels.finish()
        return [results[index] for index in sorted(results)]

    def _receive(self, action: Action, microbatch: Microbatch) -> Tensor:
        """The activations an F starts from, or the gradient a B starts from: [T, H] of its microbatch."""
        before = action.stage - 1 if action.kind == "F" else action.stage + 1
        stage = self.stages[action.stage]
        like = next(stage.parameters())
        shape = (len(microbatch), stage.config.hidden_size)
        return self.channels.receive(Action(action.kind, before, action.microbatch), shape, like)

    def _send(self, action: Action, tensor: Tensor | None) -> None:
        if tensor is not None:
            self.channels.send(action, tensor)


class Channels:
    """First in, first out, from one rank to the next, one channel a kind and direction (see `order.Transfer`).

    Gloo tells them apart by tags on one group. It moves host memory alone, so a device's tensors pass through the host.
    """

    def __init__(self, group: dist.ProcessGroup | None, pp: int) -> None:
        self.group = group
        self.pp = pp
        self.pending: list[tuple[dist.Work, Tensor]] = []
        if group is None:
            return
        self.ranks = dist.get_process_group_ranks(group)
        if pp > 1 and (backend := dist.get_backend(group)) != "gloo":
            raise ValueError(
                f"a pipeline over {backend} needs a communicator for every channel, which is not built yet; "
                "give the executor a gloo group."
            )

    def send(self, payload: Action, tensor: Tensor) -> None:
        """Hand over what `payload` made to the stage that waits for it, without waiting."""
        if tensor.numel() == 0:
            return
        destination = (payload.stage + (1 if payload.kind == "F" else -1)) % self.pp
        tensor = tensor.cpu().contiguous()
        self.pending = [(work, kept) for work, kept in self.pending if not work.is_completed()]
        work = dist.isend(tensor, self.ranks[destination], group=self.group, tag=TAGS[payload.kind])
        assert work is not None  # this rank is in its own group
        self.pending.append((work, tensor))

    def receive(self, payload: Action, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """What `payload` made on another rank: `shape`, of the dtype and on the device of `like`."""
        if 0 in shape:
            return torch.zeros(shape, dtype=like.dtype, device=like.device)
        tensor = torch.empty(shape, dtype=like.dtype)
        dist.recv(tensor, self.ranks[payload.stage % self.pp], group=self.group, tag=TAGS[payload.kind])
        return tensor.to(like.device)

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        for work, _ in self.pending:
            work.wait()
        self.pending.clear()


def _gradient(entered: Tensor | None) -> Tensor | None:
    """What goes back to the stage before: None on the first stage, zero where nothing depended on its output."""
    if entered is None:
        return None
    return torch.zeros_like(entered) if entered.grad is None else entered.grad

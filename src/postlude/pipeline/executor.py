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
from postlude.mesh import Mesh
from postlude.model import LanguageModel, OutputProcessor
from postlude.ops.products import plain_products
from postlude.pipeline.order import Action, order


class Executor:
    """The stages of this rank, and the channels to its neighbours.

    `stages` maps global stage numbers to this rank's models, vpp of them. `dtype` is that of the hidden states between
    them; by default the parameters'.
    """

    def __init__(
        self, stages: Mapping[int, LanguageModel], mesh: Mesh | None = None, *, dtype: torch.dtype | None = None
    ) -> None:
        self.mesh = mesh or Mesh.alone()
        self.pp, self.rank = self.mesh.pp.size, self.mesh.pp.rank
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
        self.dtype = dtype or next(self.stages[self.rank].parameters()).dtype
        self.channels = Channels(self.mesh)

    def run(
        self,
        microbatches: Sequence[Microbatch],
        *,
        output_processor: OutputProcessor | None = None,
        output_processor_context: Any = None,
        loss: Callable[[Any], Tensor] | None = None,
        before_last_backward: Callable[[LanguageModel], None] | None = None,
    ) -> list[Any]:
        """Every microbatch through every stage. Returns what the processor returned for each, [] on the other ranks.

        `loss` takes a result to the scalar that is differentiated; gradients are added to the parameters'. Without it
        the pipeline runs forward only, and nothing is kept for a backward. All ranks of the pipeline pass the same
        microbatches. `before_last_backward` is told of each stage when all but one of its backwards are done.
        """
        actions = order(
            pp=self.pp, vpp=self.vpp, microbatches=len(microbatches), rank=self.rank, forward_only=loss is None
        )
        last = {action.stage: index for index, action in enumerate(actions) if action.kind == "B"}
        results: dict[int, Any] = {}
        entered: dict[tuple[int, int], Tensor | None] = {}
        left: dict[tuple[int, int], Tensor] = {}
        with torch.set_grad_enabled(loss is not None), plain_products(self.dtype):
            for index, action in enumerate(actions):
                place, microbatch = (action.stage, action.microbatch), microbatches[action.microbatch]
                stage = self.stages[action.stage]
                if action.kind == "B":
                    if before_last_backward is not None and last[action.stage] == index:
                        before_last_backward(stage)
                    gradient = None if stage.stage.last else self._receive(action, microbatch)
                    left.pop(place).backward(gradient)
                    if isinstance(result := results.get(action.microbatch), Tensor):
                        results[action.microbatch] = result.detach()  # its graph has done its work
                    entry = entered.pop(place)
                    if entry is not None:
                        self.channels.send(action, _gradient(entry))
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
                    self.channels.send(action, output.detach())
                    if loss is not None:
                        entered[place], left[place] = hidden, output
        self.channels.finish()
        return [results[index] for index in sorted(results)]

    def _receive(self, action: Action, microbatch: Microbatch) -> Tensor:
        """The activations an F starts from, or the gradient a B starts from: [T / tp, H]."""
        before = action.stage - 1 if action.kind == "F" else action.stage + 1
        stage = self.stages[action.stage]
        shape = (len(microbatch) // self.mesh.tp.size, stage.config.hidden_size)
        payload = Action(action.kind, before, action.microbatch)
        return self.channels.receive(payload, shape, self.dtype, next(stage.parameters()).device)


class Channels:
    """First in, first out, from one rank of the pipeline to the next: one channel a kind and direction.

    Gloo moves host memory alone, so over it a device's tensors pass through the host.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.groups = mesh.channels
        self.pp, self.rank = mesh.pp.size, mesh.pp.rank
        self.through_host = bool(self.groups) and dist.get_backend(next(iter(self.groups.values()))) == "gloo"
        self.pending: list[tuple[dist.Work, Tensor]] = []

    def send(self, payload: Action, tensor: Tensor) -> None:
        """Hand over what `payload` made to the stage that waits for it, without waiting."""
        if tensor.numel() == 0:
            return
        group = self.groups[payload.kind, self.rank]
        tensor = (tensor.cpu() if self.through_host else tensor).contiguous()
        self.pending = [(work, kept) for work, kept in self.pending if not work.is_completed()]
        work = dist.isend(tensor, group=group, group_dst=1 - dist.get_rank(group))
        assert work is not None  # this rank is in its own group
        self.pending.append((work, tensor))

    def receive(self, payload: Action, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """What `payload` made on another rank."""
        if 0 in shape:
            return torch.zeros(shape, dtype=dtype, device=device)
        group = self.groups[payload.kind, payload.stage % self.pp]
        tensor = torch.empty(shape, dtype=dtype, device="cpu" if self.through_host else device)
        dist.recv(tensor, group=group, group_src=1 - dist.get_rank(group))
        return tensor.to(device)

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        for work, _ in self.pending:
            work.wait()
        self.pending.clear()


def _gradient(entered: Tensor) -> Tensor:
    """What goes back to the stage before: zero where nothing depended on its output."""
    return torch.zeros_like(entered) if entered.grad is None else entered.grad

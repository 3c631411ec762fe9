"""Executor: runs an order of forwards and backwards over the stages of one pipeline. One rank is the shortest pipeline.

Nothing is kept between calls and no shape is fixed: every receive takes its shape from the microbatch, which all ranks
have. So lengths may change at will, and evaluation is the same loop without its backwards.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.data import Microbatch
from postlude.model import LanguageModel, OutputProcessor
from postlude.ops.products import plain_products
from postlude.pipeline.order import Action, order
from postlude.world.mesh import Channel, Mesh

MOST_UNSENT = 2
"""Activations a rank may have sent that were not taken yet before it waits, when it runs forward only."""


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

        What an action starts from is asked for before the action ahead of it is run. Backwards keep a rank from running
        ahead of the next one; forwards alone wait for what they have sent.
        """
        actions = order(
            pp=self.pp, vpp=self.vpp, microbatches=len(microbatches), rank=self.rank, forward_only=loss is None
        )
        last = {action.stage: index for index, action in enumerate(actions) if action.kind == "B"}
        results: dict[int, Any] = {}
        entered: dict[tuple[int, int], Tensor | None] = {}
        left: dict[tuple[int, int], Tensor] = {}
        unsent = MOST_UNSENT if loss is None else None
        expected = deque(self._expect(action, microbatches) for action in actions[:1])
        with torch.set_grad_enabled(loss is not None), plain_products(self.dtype):
            for index, action in enumerate(actions):
                place, microbatch = (action.stage, action.microbatch), microbatches[action.microbatch]
                stage = self.stages[action.stage]
                expected.extend(self._expect(each, microbatches) for each in actions[index + 1 : index + 2])
                arrived = expected.popleft()()
                if action.kind == "B":
                    if before_last_backward is not None and last[action.stage] == index:
                        before_last_backward(stage)
                    left.pop(place).backward(arrived)
                    if isinstance(result := results.get(action.microbatch), Tensor):
                        results[action.microbatch] = result.detach()  # its graph has done its work
                    entry = entered.pop(place)
                    if entry is not None:
                        self.channels.send(action, _gradient(entry))
                    continue
                hidden = arrived
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
                    self.channels.send(action, output.detach(), unsent)
                    if loss is not None:
                        entered[place], left[place] = hidden, output
        self.channels.finish()
        return [results[index] for index in sorted(results)]

    def _expect(self, action: Action, microbatches: Sequence[Microbatch]) -> Callable[[], Tensor | None]:
        """Ask for the activations an F starts from, or the gradient a B starts from: [T / tp, H], or None at an end."""
        stage = self.stages[action.stage]
        if stage.stage.first if action.kind == "F" else stage.stage.last:
            return lambda: None
        before = action.stage - 1 if action.kind == "F" else action.stage + 1
        shape = (len(microbatches[action.microbatch]) // self.mesh.tp.size, stage.config.hidden_size)
        payload = Action(action.kind, before, action.microbatch)
        return self.channels.expect(payload, shape, self.dtype, next(stage.parameters()).device)


class Channels:
    """First in, first out, from one rank of the pipeline to the next: one channel a kind and direction.

    Gloo moves host memory alone, so over it a device's tensors pass through the host.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.groups = mesh.channels
        self.pp, self.rank = mesh.pp.size, mesh.pp.rank
        self.through_host = bool(self.groups) and dist.get_backend(next(iter(self.groups.values()))) == "gloo"
        self.pending: dict[Channel, deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)

    def send(self, payload: Action, tensor: Tensor, unsent: int | None = None) -> None:
        """Hand over what `payload` made to the stage that waits for it, without waiting.

        With more than `unsent` in the channel that were not taken yet, wait for the oldest.
        """
        if tensor.numel() == 0:
            return
        channel = payload.kind, self.rank
        group, pending = self.groups[channel], self.pending[channel]
        tensor = (tensor.cpu() if self.through_host else tensor).contiguous()
        work = dist.isend(tensor, group=group, group_dst=1 - dist.get_rank(group))
        assert work is not None  # this rank is in its own group
        pending.append((work, tensor))
        while pending and (pending[0][0].is_completed() or (unsent is not None and len(pending) > unsent)):
            pending.popleft()[0].wait()  # on a GPU it is the stream that waits, and then may use the memory again

    def expect(
        self, payload: Action, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Callable[[], Tensor]:
        """Make ready for what `payload` makes on another rank. Call what this returns to wait for it."""
        if 0 in shape:  # then nothing is sent
            return lambda: torch.zeros(shape, dtype=dtype, device=device)
        group = self.groups[payload.kind, payload.stage % self.pp]
        tensor = torch.empty(shape, dtype=dtype, device="cpu" if self.through_host else device)
        work = dist.irecv(tensor, group=group, group_src=1 - dist.get_rank(group))
        assert work is not None

        def arrived() -> Tensor:
            work.wait()
            return tensor.to(device)

        return arrived

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        for pending in self.pending.values():
            while pending:
                pending.popleft()[0].wait()


def _gradient(entered: Tensor) -> Tensor:
    """What goes back to the stage before: zero where nothing depended on its output."""
    return torch.zeros_like(entered) if entered.grad is None else entered.grad

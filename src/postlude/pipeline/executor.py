"""Executor: runs an order of forwards and backwards over the stages of one pipeline. One rank is the shortest pipeline.

Nothing is kept between calls and no shape is fixed: every receive takes its shape from the microbatch, which all ranks
have. So lengths may change at will, and evaluation is the same loop without its backwards.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.data import Microbatch
from postlude.model import LanguageModel, OutputProcessor
from postlude.model.parallel import FSDPUnit
from postlude.model.schedule_plan import OnGradsReady, SchedulePlan, StepGenerator, interleave
from postlude.ops.cpu_matmul import blas_fp32_matmul
from postlude.options import Overlap
from postlude.pipeline.schedule import Action, rank_schedule
from postlude.pipeline.transfers import Transfer, transfer_plan
from postlude.trace.recorder import NO_RECORDER, Recorder
from postlude.world.mesh import Channel, Mesh, point_to_point

MOST_UNSENT = 2
"""Activations a rank may have sent that were not taken yet before it waits, when it runs forward only."""


class Executor:
    """The stages of this rank, and the channels to its neighbours.

    `stages` maps global stage numbers to this rank's models, vpp of them. `dtype` is that of the hidden states between
    them; by default the parameters'. With `overlap` the forward of one microbatch and the backward of another take
    turns, step by step, so that exchanges with experts are under way while the other computes; with "zero_bubble" a
    backward sends its gradient on, and weights get theirs when the rank would wait for another stage.
    """

    def __init__(
        self,
        stages: Mapping[int, LanguageModel],
        mesh: Mesh | None = None,
        *,
        dtype: torch.dtype | None = None,
        overlap: Overlap = False,
    ) -> None:
        self.mesh = mesh or Mesh.single_rank()
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
        self.overlap = overlap
        self.channels = Channels(self.mesh)

    def run(
        self,
        microbatches: Sequence[Microbatch],
        *,
        output_processor: OutputProcessor | None = None,
        output_processor_context: Any = None,
        loss: Callable[[Any], Tensor] | None = None,
        before_last_backward: Callable[[LanguageModel], None] | None = None,
        on_grads_ready: Callable[[LanguageModel, FSDPUnit], None] = lambda stage, module: None,
        recorder: Recorder = NO_RECORDER,
    ) -> list[Any]:
        """Every microbatch through every stage. Returns what the processor returned for each, [] on the other ranks.

        `loss` takes a result to the scalar that is differentiated; gradients are added to the parameters'. Without it
        the pipeline runs forward only, and nothing is kept for a backward. All ranks of the pipeline pass the same
        microbatches. `before_last_backward` is called with each stage when all but one of its backwards are done, and
        their deferred weight gradients. With overlap, `on_grads_ready` is called with a stage and its layer, or itself,
        when a backward is done with it; with "zero_bubble" once more after its deferred weight gradients. `recorder`
        records everything.

        Sends and receives are launched in the order of `transfer_plan`, which cannot deadlock. Backwards keep a rank
        from running ahead of the next one; forwards alone wait for what they have sent.
        """
        shape: dict[str, Any] = {"pp": self.pp, "vpp": self.vpp, "microbatches": len(microbatches)}
        shape |= {"forward_only": loss is None, "overlap": self.overlap}
        all_turns = rank_schedule(rank=self.rank, **shape)
        transfers = transfer_plan(**shape)[self.rank]
        actions = [action for turn in all_turns for action in turn]
        last = {action.stage: action for action in actions if action.kind != "F"}
        ends = {(action.stage, action.microbatch): action for action in actions}
        results: dict[int, Any] = {}
        passes: dict[tuple[int, int], _Pass] = {}
        transit = _Transit(self, microbatches, MOST_UNSENT if loss is None else None)
        with torch.set_grad_enabled(loss is not None), blas_fp32_matmul(self.dtype):
            for index, turn in enumerate(all_turns):
                transit.launch(transfers[index])
                arrived = [transit.input_of(action, recorder.for_microbatch(action.microbatch)) for action in turn]
                moves = []
                for action, given in zip(turn, arrived, strict=True):
                    place, stage = (action.stage, action.microbatch), self.stages[action.stage]
                    if action.kind != "F":
                        if before_last_backward is not None and last[action.stage] == action:
                            before_last_backward(stage)
                        told_of, ending = functools.partial(on_grads_ready, stage), ends[place] == action
                        moves.append(passes[place].backward(action, given, told_of, ends=ending))
                        continue
                    if given is not None and loss is not None:
                        given.requires_grad_()
                    processor = (output_processor, output_processor_context) if stage.stage.last else (None, None)
                    told = recorder.for_microbatch(action.microbatch)
                    passes[place] = _Pass(stage, microbatches[action.microbatch], given, told, *processor)
                    moves.append(passes[place].forward(planned=bool(self.overlap) and loss is not None))
                for action, output in zip(turn, interleave(*moves), strict=True):
                    place, stage = (action.stage, action.microbatch), self.stages[action.stage]
                    passed = passes.pop(place) if ends[place] == action else passes[place]
                    if action.kind == "B":
                        if isinstance(result := results.get(action.microbatch), Tensor):
                            results[action.microbatch] = result.detach()  # its graph has done its work
                        entry, passed.entered, passed.left = passed.entered, None, None  # a W needs the plan alone
                        if entry is not None:
                            transit.outgoing[action] = _gradient(entry)
                    elif action.kind == "F" and stage.stage.last:
                        results[action.microbatch] = output
                        passed.left = loss(output) if loss is not None else None
                    elif action.kind == "F":
                        transit.outgoing[action] = output.detach()
                        passed.left = output
                    del passed  # and what it holds, if it has ended
        transit.launch(transfers[-1])
        with recorder.span("wait", "for what was sent"):
            self.channels.finish()
        return [results[index] for index in sorted(results)]


@dataclass
class _Transit:
    """What is on its way between this rank and others in one run: outputs not sent yet, and receives not used yet."""

    executor: Executor
    microbatches: Sequence[Microbatch]
    unsent: int | None
    outgoing: dict[Action, Tensor] = field(default_factory=dict)
    incoming: dict[Action, Callable[[], Tensor]] = field(default_factory=dict)

    def launch(self, transfers: Iterable[Transfer]) -> None:
        """Launch sends and receives, in this order. A receive is of activations or a gradient, [T / tp, H]."""
        executor = self.executor
        stage = executor.stages[executor.rank]
        for payload, source in ((transfer.payload, transfer.source) for transfer in transfers):
            if source == executor.rank:
                executor.channels.send(payload, self.outgoing.pop(payload), self.unsent)
                continue
            rows = len(self.microbatches[payload.microbatch]) // executor.mesh.tp.size
            shape, device = (rows, stage.config.hidden_size), next(stage.parameters()).device
            self.incoming[payload] = executor.channels.receive(payload, shape, executor.dtype, device)

    def input_of(self, action: Action, recorder: Recorder) -> Tensor | None:
        """Wait for the activations an F starts from, or the gradient a B starts from. None at the ends and for a W."""
        source = Action(action.kind, action.stage + (-1 if action.kind == "F" else 1), action.microbatch)
        if source not in self.incoming:
            return None
        with recorder.span("wait", f"for {source}"):
            return self.incoming.pop(source)()


@dataclass
class _Pass:
    """One microbatch on its way through one stage: there, and back."""

    stage: LanguageModel
    microbatch: Microbatch
    entered: Tensor | None
    recorder: Recorder
    processor: OutputProcessor | None
    context: Any
    left: Tensor | None = None
    plan: SchedulePlan | None = None

    def forward(self, *, planned: bool) -> StepGenerator:
        """At once, or as a plan that pauses where others can go on. Returns the stage's output."""
        options: dict[str, Any] = {"recorder": self.recorder}
        if self.processor:
            options |= {"output_processor": self.processor, "output_processor_context": self.context}
        if planned:
            self.plan = self.stage.build_schedule_plan(self.microbatch, self.entered, **options)
            return (yield from self.plan.forward_steps())
        with self.recorder.span("forward", f"stage {self.stage.stage.index}"):
            return self.stage(self.microbatch, self.entered, **options)

    def backward(self, action: Action, gradient: Tensor | None, complete: OnGradsReady, *, ends: bool) -> StepGenerator:
        """The same for the backward of what `left` became, or for the gradients of weights that it put off.

        It puts them off where a W is to come, so that it is not what `ends` the pass.
        """
        if action.kind == "W":
            assert self.plan is not None
            return self.plan.flush_wgrads(complete)
        assert self.left is not None
        if self.plan is not None:
            yield from self.plan.backward_steps(self.left, gradient, complete, weights=ends)
        else:
            with self.recorder.span("backward", f"stage {self.stage.stage.index}"):
                self.left.backward(gradient)


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
        pending.append((point_to_point(dist.isend, tensor, group), tensor))
        while pending and (pending[0][0].is_completed() or (unsent is not None and len(pending) > unsent)):
            pending.popleft()[0].wait()  # on a GPU it is the stream that waits, and then may use the memory again

    def receive(
        self, payload: Action, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Callable[[], Tensor]:
        """Launch the receive of what `payload` makes on another rank. Call what this returns to wait for it."""
        if 0 in shape:  # then nothing is sent
            return lambda: torch.zeros(shape, dtype=dtype, device=device)
        group = self.groups[payload.kind, payload.stage % self.pp]
        tensor = torch.empty(shape, dtype=dtype, device="cpu" if self.through_host else device)
        work = point_to_point(dist.irecv, tensor, group)

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

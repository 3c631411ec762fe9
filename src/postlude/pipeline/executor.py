"""Executor: runs a schedule of forwards and backwards over a pipeline's stages. Also used with pp = 1.

It keeps no state between calls, and no shape is fixed: every receive takes its shape from the microbatch, which all
ranks have. So lengths may change between calls, and evaluation is the same loop without its backwards.
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

MAX_PENDING_SENDS = 2
"""The number of sent activations that may be not received yet before a forward-only rank waits."""


class Executor:
    """This rank's stages, and the channels to its neighbours.

    `stages` maps global stage numbers to this rank's models, vpp of them. `dtype` is that of the hidden states between
    them; by default the parameters'. `overlap` selects the schedule (`postlude.options.Overlap`).
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
        for index, model in stages.items():
            if (model.stage.index, model.stage.count) != (index, self.pp * self.vpp):
                raise ValueError(f"stage {index} of {self.pp * self.vpp} was given a model built as {model.stage}.")
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
        """Runs every microbatch through every stage. Returns the processor's results; [] on all but the last stage.

        `loss` turns a result into the scalar that is differentiated; gradients are accumulated in `.grad`. Without
        it the pipeline runs forward only, and nothing is kept for a backward. All ranks of the pipeline pass the same
        microbatches. `before_last_backward` is called with each stage before its last backward, or before the last
        deferred weight gradients if there are any, to enable their reduction. With overlap, `on_grads_ready` is called
        with a stage and an FSDP unit of it (a layer, or the stage itself) when a backward has computed the unit's
        gradients; with "zero_bubble" once more after its deferred weight gradients.

        Sends and receives are launched in the order of `transfer_plan`, which cannot deadlock. In a forward-only run,
        where no backward keeps a rank from running ahead of the next one, MAX_PENDING_SENDS limits its sends.
        """
        options: dict[str, Any] = {"pp": self.pp, "vpp": self.vpp, "microbatches": len(microbatches)}
        options |= {"forward_only": loss is None, "overlap": self.overlap}
        schedule = rank_schedule(rank=self.rank, **options)
        transfers = transfer_plan(**options)[self.rank]
        actions = [action for entry in schedule for action in entry]
        last_of_stage = {action.stage: action for action in actions if action.kind != "F"}
        last_of_pass = {(action.stage, action.microbatch): action for action in actions}
        results: dict[int, Any] = {}
        passes: dict[tuple[int, int], _StagePass] = {}
        pending = _PendingTransfers(self, microbatches, MAX_PENDING_SENDS if loss is None else None)

        def start_forward(action: Action, hidden: Tensor | None) -> StepGenerator:
            model = self.stages[action.stage]
            if hidden is not None and loss is not None:
                hidden.requires_grad_()
            processor = (output_processor, output_processor_context) if model.stage.last else (None, None)
            microbatch, pass_recorder = microbatches[action.microbatch], recorder.for_microbatch(action.microbatch)
            stage_pass = _StagePass(model, microbatch, hidden, pass_recorder, *processor)
            passes[action.stage, action.microbatch] = stage_pass
            return stage_pass.forward(interleaved=bool(self.overlap) and loss is not None)

        def start_backward(action: Action, gradient: Tensor | None) -> StepGenerator:
            key, model = (action.stage, action.microbatch), self.stages[action.stage]
            if before_last_backward is not None and last_of_stage[action.stage] == action:
                before_last_backward(model)
            is_last = last_of_pass[key] == action
            return passes[key].backward(action, gradient, functools.partial(on_grads_ready, model), is_last=is_last)

        def finish(action: Action, output: Any) -> None:
            key = action.stage, action.microbatch
            stage_pass = passes.pop(key) if last_of_pass[key] == action else passes[key]
            if action.kind == "B":
                if isinstance(result := results.get(action.microbatch), Tensor):
                    results[action.microbatch] = result.detach()  # frees its graph
                hidden = stage_pass.input
                stage_pass.input = stage_pass.output = None  # its W needs neither
                if hidden is not None:
                    pending.outgoing[action] = _input_gradient(hidden)
            elif action.kind == "F" and self.stages[action.stage].stage.last:
                results[action.microbatch] = output
                stage_pass.output = loss(output) if loss is not None else None
            elif action.kind == "F":
                pending.outgoing[action] = output.detach()
                stage_pass.output = output

        with torch.set_grad_enabled(loss is not None), blas_fp32_matmul(self.dtype):
            for index, entry in enumerate(schedule):
                pending.launch(transfers[index])
                inputs = [pending.input_of(action, recorder.for_microbatch(action.microbatch)) for action in entry]
                running = [
                    (start_forward if action.kind == "F" else start_backward)(action, received)
                    for action, received in zip(entry, inputs, strict=True)
                ]
                for action, output in zip(entry, interleave(*running), strict=True):
                    finish(action, output)
        pending.launch(transfers[-1])
        with recorder.span("wait", "for pending sends"):
            self.channels.finish()
        return [results[index] for index in sorted(results)]


@dataclass
class _PendingTransfers:
    """Tensors between this rank and others in one run: outputs not sent yet, and receives not used yet."""

    executor: Executor
    microbatches: Sequence[Microbatch]
    max_pending: int | None
    outgoing: dict[Action, Tensor] = field(default_factory=dict)
    incoming: dict[Action, Callable[[], Tensor]] = field(default_factory=dict)

    def launch(self, transfers: Iterable[Transfer]) -> None:
        """Launches sends and receives, in this order. A receive is of activations or a gradient, [T / tp, H]."""
        executor = self.executor
        model = executor.stages[executor.rank]
        for action, source in ((transfer.payload, transfer.source) for transfer in transfers):
            if source == executor.rank:
                executor.channels.send(action, self.outgoing.pop(action), self.max_pending)
                continue
            rows = len(self.microbatches[action.microbatch]) // executor.mesh.tp.size
            shape, device = (rows, model.config.hidden_size), next(model.parameters()).device
            self.incoming[action] = executor.channels.receive(action, shape, executor.dtype, device)

    def input_of(self, action: Action, recorder: Recorder) -> Tensor | None:
        """Waits for the input of an F (activations) or a B (a gradient). None at the pipeline's ends and for a W."""
        source = Action(action.kind, action.stage + (-1 if action.kind == "F" else 1), action.microbatch)
        if source not in self.incoming:
            return None
        with recorder.span("wait", f"for {source}"):
            return self.incoming.pop(source)()


@dataclass
class _StagePass:
    """One microbatch's forward and backward through one stage."""

    model: LanguageModel
    microbatch: Microbatch
    input: Tensor | None
    recorder: Recorder
    processor: OutputProcessor | None
    context: Any
    output: Tensor | None = None
    """The stage's output, or the loss."""
    plan: SchedulePlan | None = None

    def forward(self, *, interleaved: bool) -> StepGenerator:
        """Runs the forward at once, or as a plan that pauses where other work can run. Returns the stage's output."""
        options: dict[str, Any] = {"recorder": self.recorder}
        if self.processor:
            options |= {"output_processor": self.processor, "output_processor_context": self.context}
        if interleaved:
            self.plan = self.model.build_schedule_plan(self.microbatch, self.input, **options)
            return (yield from self.plan.forward_steps())
        with self.recorder.span("forward", f"stage {self.model.stage.index}"):
            return self.model(self.microbatch, self.input, **options)

    def backward(
        self, action: Action, gradient: Tensor | None, on_grads_ready: OnGradsReady, *, is_last: bool
    ) -> StepGenerator:
        """Runs the backward of `output` (B), or the deferred weight gradients (W).

        A B that is not the last action of the pass defers weight gradients to the W that follows.
        """
        if action.kind == "W":
            assert self.plan is not None
            return self.plan.flush_wgrads(on_grads_ready)
        assert self.output is not None
        if self.plan is not None:
            yield from self.plan.backward_steps(self.output, gradient, on_grads_ready, compute_wgrads=is_last)
        else:
            with self.recorder.span("backward", f"stage {self.model.stage.index}"):
                self.output.backward(gradient)


class Channels:
    """FIFO point-to-point channels between neighbouring pipeline ranks: one per kind and direction.

    Gloo sends host memory only, so a device's tensors are copied through the host.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.groups = mesh.channels
        self.pp, self.rank = mesh.pp.size, mesh.pp.rank
        self.through_host = bool(self.groups) and dist.get_backend(next(iter(self.groups.values()))) == "gloo"
        self.pending: dict[Channel, deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)

    def send(self, action: Action, tensor: Tensor, max_pending: int | None = None) -> None:
        """Sends the output of `action` to the stage that needs it, without waiting.

        If more than `max_pending` in the channel were not received yet, waits for the oldest.
        """
        if tensor.numel() == 0:
            return
        channel = action.kind, self.rank
        group, pending = self.groups[channel], self.pending[channel]
        tensor = (tensor.cpu() if self.through_host else tensor).contiguous()
        pending.append((point_to_point(dist.isend, tensor, group), tensor))
        while pending and (pending[0][0].is_completed() or (max_pending is not None and len(pending) > max_pending)):
            pending.popleft()[0].wait()  # on a GPU the stream waits, and may then reuse the memory

    def receive(
        self, action: Action, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Callable[[], Tensor]:
        """Launches the receive of another rank's output of `action`. Returns a function that waits for it."""
        if 0 in shape:  # then nothing is sent
            return lambda: torch.zeros(shape, dtype=dtype, device=device)
        group = self.groups[action.kind, action.stage % self.pp]
        tensor = torch.empty(shape, dtype=dtype, device="cpu" if self.through_host else device)
        work = point_to_point(dist.irecv, tensor, group)

        def wait() -> Tensor:
            work.wait()
            return tensor.to(device)

        return wait

    def finish(self) -> None:
        """Waits until everything sent has arrived."""
        for pending in self.pending.values():
            while pending:
                pending.popleft()[0].wait()


def _input_gradient(hidden: Tensor) -> Tensor:
    """Returns the gradient for the stage before: zeros if nothing depended on its output."""
    return torch.zeros_like(hidden) if hidden.grad is None else hidden.grad

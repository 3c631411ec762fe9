"""Executor: runs a schedule of forwards and backwards over a pipeline's stages. Also used with pp = 1.

It keeps no state between calls, and no shape is fixed: every receive takes its shape from the microbatch, which all
ranks have. So lengths may change between calls, and evaluation is the same loop without its backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from postlude.data import Microbatch
from postlude.model import LanguageModel, OutputProcessor
from postlude.model.parallel import FSDPUnit
from postlude.model.schedule_plan import OnGradsReady, SchedulePlan, StepGenerator, interleave
from postlude.ops.linear import blas_fp32_matmul
from postlude.options import Overlap
from postlude.pipeline.schedule import Action, ScheduleEntry, rank_schedule
from postlude.pipeline.transfers import Channels, Transfer, transfer_plan
from postlude.trace.recorder import NO_RECORDER, Recorder
from postlude.world.mesh import Mesh

MAX_PENDING_SENDS = 2
"""A forward-only rank waits if more of the activations that it sent are not received yet."""


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
        on_grads_ready: Callable[[LanguageModel, FSDPUnit], None] = lambda stage, unit: None,
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
        processor = output_processor, output_processor_context
        run = _Run(self, microbatches, processor, loss, before_last_backward, on_grads_ready, recorder)
        with torch.set_grad_enabled(loss is not None), blas_fp32_matmul(self.dtype):
            for entry, transfers in zip(run.schedule, run.transfers, strict=False):
                run.pending.launch(transfers)
                run.run_entry(entry)
        run.pending.launch(run.transfers[-1])
        with recorder.span("wait", "for pending sends"):
            self.channels.finish()
        return [run.results[index] for index in sorted(run.results)]


@dataclass
class _Run:
    """One call of `Executor.run`: its schedule, the passes in flight and the results so far."""

    executor: Executor
    microbatches: Sequence[Microbatch]
    processor: tuple[OutputProcessor | None, Any]
    """The output processor and its context, for the last stage."""
    loss: Callable[[Any], Tensor] | None
    before_last_backward: Callable[[LanguageModel], None] | None
    on_grads_ready: Callable[[LanguageModel, FSDPUnit], None]
    recorder: Recorder
    passes: dict[tuple[int, int], _StagePass] = field(default_factory=dict)
    """By stage and microbatch, from the forward to the last action."""
    results: dict[int, Any] = field(default_factory=dict)
    """The output processor's results by microbatch."""

    def __post_init__(self) -> None:
        executor, forward_only = self.executor, self.loss is None
        options: dict[str, Any] = {"pp": executor.pp, "vpp": executor.vpp, "microbatches": len(self.microbatches)}
        options |= {"forward_only": forward_only, "overlap": executor.overlap}
        self.schedule = rank_schedule(rank=executor.rank, **options)
        self.transfers = transfer_plan(**options)[executor.rank]  # before each entry, and after the last
        actions = [action for entry in self.schedule for action in entry]
        self.last_backward_of_stage = {action.stage: action for action in actions if action.kind != "F"}
        self.last_action_of_pass = {(action.stage, action.microbatch): action for action in actions}
        self.pending = _PendingTransfers(executor, self.microbatches, MAX_PENDING_SENDS if forward_only else None)

    def run_entry(self, entry: ScheduleEntry) -> None:
        """Runs one action, or a forward and a backward interleaved."""
        inputs = [self.pending.input_of(action, self._recorder(action)) for action in entry]
        steps = [
            self._forward(action, received) if action.kind == "F" else self._backward(action, received)
            for action, received in zip(entry, inputs, strict=True)
        ]
        for action, output in zip(entry, interleave(*steps), strict=True):
            if action.kind == "F":
                self._finish_forward(action, output)
            if action.kind == "B":
                self._finish_backward(action)
            if self._is_last_of_pass(action):
                del self.passes[action.stage, action.microbatch]

    def _recorder(self, action: Action) -> Recorder:
        return self.recorder.for_microbatch(action.microbatch)

    def _is_last_of_pass(self, action: Action) -> bool:
        return self.last_action_of_pass[action.stage, action.microbatch] == action

    def _forward(self, action: Action, hidden: Tensor | None) -> StepGenerator:
        model = self.executor.stages[action.stage]
        if hidden is not None and self.loss is not None:
            hidden.requires_grad_()
        processor = self.processor if model.stage.last else (None, None)
        microbatch = self.microbatches[action.microbatch]
        stage_pass = _StagePass(model, microbatch, hidden, self._recorder(action), *processor)
        self.passes[action.stage, action.microbatch] = stage_pass
        return stage_pass.forward(interleaved=bool(self.executor.overlap) and self.loss is not None)

    def _backward(self, action: Action, gradient: Tensor | None) -> StepGenerator:
        model = self.executor.stages[action.stage]
        if self.before_last_backward is not None and self.last_backward_of_stage[action.stage] == action:
            self.before_last_backward(model)
        return self.passes[action.stage, action.microbatch].backward(
            action, gradient, partial(self.on_grads_ready, model), is_last=self._is_last_of_pass(action)
        )

    def _finish_forward(self, action: Action, output: Any) -> None:
        """Stores the last stage's result, and the loss for the backward. Other stages send their output to the next."""
        stage_pass = self.passes[action.stage, action.microbatch]
        if stage_pass.model.stage.last:
            self.results[action.microbatch] = output
            stage_pass.output = None if self.loss is None else self.loss(output)
        else:
            self.pending.outgoing[action] = output.detach()
            stage_pass.output = output

    def _finish_backward(self, action: Action) -> None:
        """Frees the graph of a B, and sends the gradient of the stage's input to the stage before."""
        if isinstance(result := self.results.get(action.microbatch), Tensor):
            self.results[action.microbatch] = result.detach()
        stage_pass = self.passes[action.stage, action.microbatch]
        hidden = stage_pass.input
        stage_pass.input = stage_pass.output = None  # a W needs neither
        if hidden is not None:
            self.pending.outgoing[action] = _input_gradient(hidden)


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
            rows = len(self.microbatches[action.microbatch].layer_microbatch) // executor.mesh.tp.size
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


def _input_gradient(hidden: Tensor) -> Tensor:
    """Returns the gradient for the stage before: zeros if nothing depended on its output."""
    return torch.zeros_like(hidden) if hidden.grad is None else hidden.grad

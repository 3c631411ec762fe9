"""Engine: one model in one layout, driven by the same lines on every rank."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from postlude.data import Batch, Microbatch
from postlude.engine import checkpoint, export, optimizers, streaming
from postlude.engine.batch_sharding import LocalBatch, shard_batch, with_step_counts
from postlude.engine.failure_state import FailureState
from postlude.engine.fsdp import all_reduce_shared
from postlude.engine.gradients import all_reduce_counters, replica_count, total_norm, zero_gradient
from postlude.engine.reference import Reference, TokenScores
from postlude.engine.result import Result, StepResult
from postlude.engine.scale import MetricAccumulator, MetricIndex, ObjectiveProcessor, Scale, check_counts
from postlude.engine.stage_builder import StageBuilder
from postlude.head import HeadConfig
from postlude.hf.export import hf_export_config
from postlude.hf.families import FAMILIES
from postlude.hf.family import Family, copy_from_hf
from postlude.hf.load import init_or_load_weights
from postlude.hf.model_card import ModelCard
from postlude.hf.model_source import Recast, Source
from postlude.hf.read_model import read_generation, read_model, read_model_with_mtp, read_recast_plan, with_mtp
from postlude.layout import Layout
from postlude.model import LanguageModel, OutputInputs
from postlude.model.blocks import BLOCKS, Block
from postlude.model.output import NO_VALUE_HEAD
from postlude.model.parallel import region
from postlude.model.recast import plan_recast
from postlude.model.recompute import Recompute
from postlude.objectives import Objective
from postlude.ops.kernels.capabilities import ScanBackend
from postlude.optimizer import AdamW, OptimizerConfig, WeightStorage
from postlude.pipeline.schedule import Overlap, check_overlap
from postlude.sharded_tensors import StagingBuffers
from postlude.trace.recorder import NO_RECORDER, Recorder
from postlude.world.agreement import on_rank0
from postlude.world.devices import group_device
from postlude.world.mesh import Mesh


class Engine:
    """A model spread over the ranks of a layout, with its optimizer. SPMD: every rank makes the same calls.

    The caller hands the same global batch to every rank, or each its part (`Batch.sharded`); the engine packs it into
    microbatches of at most `budget` tokens, each rank its own, and puts results back in the caller's order. `device` is
    by default the rank's, as `ranks` chose it. With `critic` the model has a value head, from zero: it is trained,
    clipped, saved and loaded like every other parameter, and is no part of weights that are streamed or exported.
    With `mtp` it has the multi-token-prediction depths of the source's files, too, and depths are trained, by an
    objective that asks for them (`MTP`); without, they stay as they are. `recompute`, `scans` and `head` are
    `LanguageModel`'s.
    With `overlap` one microbatch's forward and another's backward take turns, so that exchanges with experts hide
    behind compute, with the same result to the bit. WeightStorage then stay whole for a step. With "zero_bubble"
    a pipeline's backwards put off the gradients of weights, which are made in its bubble. With `gather_once`, and in a
    pipeline, so do gradients, which are summed once a step instead of once a microbatch: where ranks shard a model,
    each needs room for all of its stage's, in fp32. One that shards nothing has them whole anyway. `weights` says how
    they are stored between steps (`postlude.optimizer.WeightStorage`): narrower than fp32 where no rank shares them.
    `selection_bias_rate` is how far a step moves the selection biases of routers towards even load, whatever the
    learning rate is; None leaves what the model's config says, which is 0 for every model of a Hugging Face family.

    `source` is what `load_model` takes. A `ModelConfig` starts from fresh weights; if it names no Hugging Face family,
    its tensors are streamed under our own names. Of a `Recast`, `fresh` names the tensors that the source had not.
    `blocks` and `families` are the tables of each, with yours added.
    """

    def __init__(
        self,
        source: Source,
        *,
        layout: Layout | None = None,
        optimizer: OptimizerConfig | None = None,
        budget: int = 8192,
        compute_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        recompute: Recompute = "none",
        scans: ScanBackend = "auto",
        head: HeadConfig | None = None,
        critic: bool = False,
        mtp: bool = False,
        overlap: Overlap = False,
        gather_once: bool = False,
        weights: WeightStorage = "fp32",
        selection_bias_rate: float | None = None,
        seed: int = 0,
        mesh: Mesh | None = None,
        blocks: Mapping[str, type[Block]] = BLOCKS,
        families: Mapping[str, Family] = FAMILIES,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "an engine runs on ranks, and none are started: make it inside `with postlude.ranks():`, by itself, "
                "under torchrun, or in a function given to `postlude.launch`."
            )
        self.device = group_device() if device is None else torch.device(device)
        self.mesh = mesh or Mesh(layout or Layout(), self.device.type)
        check_overlap(overlap, pp=self.mesh.layout.pp, vpp=self.mesh.layout.vpp)
        self.budget, self.overlap, self.weights = budget, overlap, weights
        self.critic, self.mtp = critic, mtp
        self.block_types, self.families = blocks, families
        source = with_mtp(source, families, blocks) if mtp else source
        self.family, self.config = read_model(source, families, blocks)
        if selection_bias_rate is not None:
            self.config = self.config.with_selection_bias_rate(selection_bias_rate)
        self.fresh = read_recast_plan(source, families, blocks).fresh if isinstance(source, Recast) else ()
        self.generation = read_generation(source, blocks)
        self.compute_dtype = compute_dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        self.builder = StageBuilder(
            config=self.config,
            mesh=self.mesh,
            device=self.device,
            compute_dtype=self.compute_dtype,
            recompute=recompute,
            scans=scans,
            head=head or HeadConfig(),
            critic=critic,
            mtp=mtp,
            overlap=overlap,
            gather_once=gather_once,
            weights=weights,
            blocks=blocks,
        )
        self.stages, self.gathering, self.executor = self.builder.build(
            lambda stage: init_or_load_weights(stage, source, self.family, seed, families)
        )
        self.failure_state = FailureState()
        self.metric_index = MetricIndex()
        self.step = self.skipped = 0
        self.optimizer_start, self.idle, self.began_later = 0, 0, dict[str, int]()
        self.optimizer_config = optimizer or AdamW()
        self.optimizer = self._build_optimizer(self.optimizer_config)
        self._saving: checkpoint.PendingSave | None = None
        self._saving_group: dist.ProcessGroup | None = None
        self._staging = StagingBuffers()

    def _rebuild(self) -> None:
        """After a pass that failed."""
        self.stages, self.gathering, self.executor = self.builder.rebuild(self.stages, self.gathering)

    @property
    def layout(self) -> Layout:
        """How the work is divided."""
        return self.mesh.layout

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters that are trained, by their global names."""
        return {
            name: parameter
            for stage in self.stages.values()
            for name, parameter in stage.named_parameters()
            if parameter.requires_grad
        }

    @property
    def shared(self) -> frozenset[str]:
        """The names of what both ends of a pipeline hold."""
        return self.config.shared

    @property
    def tensors(self) -> dict[str, Tensor]:
        """This rank's parameters and persistent buffers by their global names."""
        return {name: tensor for stage in self.stages.values() for name, tensor in stage.state_dict().items()}

    @property
    def low_bits(self) -> dict[str, Tensor]:
        """What the bf16 `tensors` of split weights lack of fp32, of what this rank stores, by their global names."""
        return self.optimizer.low_bits() if isinstance(self.optimizer, optimizers.ShardedAdamW) else {}

    @property
    def has_output(self) -> bool:
        """Whether this rank runs the last stage."""
        return self.layout.stages - 1 in self.stages

    def forward_backward(
        self,
        batch: Batch,
        objective: Objective,
        *,
        counts: Mapping[str, float] | None = None,
        recorder: Recorder = NO_RECORDER,
    ) -> Result:
        """Run the batch forward and backward, and add its gradients to those already there.

        `counts` are the denominators of a step that this batch is only part of, as `count` gives them: all that its
        losses are over, by name, and "all_tokens", every token of the step, where routers have side losses. A
        `recorder` is told what this rank does when.

        What is a mean over something unknown, or over weights that sum to zero, is refused, and the engine stays as it
        is: before the pass, where the objective says in `denominators` what it is over, else after it, and then the
        gradients of the step are lost. They also are if it fails on one rank: `zero_grad`, and run its batches again.
        If it fails on one of several, so does every later call: the others may be anywhere.
        """
        counts = counts or None
        dealt = self._deal(batch, counts)
        own = dealt.own
        if counts is not None:
            own = [with_step_counts(each, counts, self.config) for each in own]
        tally = self._tally(objective, dealt, counts)
        with self.failure_state.passing("forward_backward", self._rebuild, gradients=True):
            for name in self.shared & self.parameters.keys():
                if self._is_second_copy(name):
                    self.parameters[name].grad = None  # the first stage holds what was summed before
            for index, stage in self.stages.items():
                stage.train()
                with recorder.span("shards", "weights"):
                    self.gathering[index].begin(train=True)
            self.executor.run(
                own,
                output_processor=ObjectiveProcessor(objective, tally),
                loss=lambda value: value,
                before_last_backward=lambda stage: self.gathering[stage.stage.index].before_last_backward(),
                complete=lambda stage, module: self.gathering[stage.stage.index].complete(module),
                recorder=recorder,
            )
            self._finish_gradients()
            for block in self._blocks:
                for name, share in block.metrics().items():
                    tally.add_share(name, *share)
            metrics = tally.reduce(self._speaks)
        self.failure_state.refuse(tally.refused, "forward_backward", gradients=True)
        reductions = dict(self.metric_index.lines.keys())
        return Result(metrics.pop("loss"), metrics, len(dealt.plan.bins), dealt.plan.tokens, reductions)

    def count(self, *batches: Batch) -> dict[str, float]:
        """The denominators of a step made of these batches: `counts` for the `forward_backward` of each of them."""
        total: dict[str, float] = {}
        for dealt in map(self._deal, batches):
            for name, count in {**dealt.counts, "all_tokens": dealt.plan.tokens}.items():
                total[name] = total.get(name, 0.0) + count
        return total

    def _tally(
        self, objective: Objective, dealt: LocalBatch, counts: Mapping[str, float] | None = None
    ) -> MetricAccumulator:
        """For a pass whose denominators all ranks know alike, or none begins it."""
        known = dealt.counts if counts is None else counts
        check_counts(objective, known, len(self.config.pattern.mtp))
        return MetricAccumulator(Scale(dealt.own, known, sharers=self.mesh.cp.size), self.metric_index)

    def evaluate_loss(self, batch: Batch, objective: Objective) -> Result:
        """What `forward_backward` would find, without a backward: no gradient is made or changed."""
        dealt = self._deal(batch)
        tally = self._tally(objective, dealt)
        with self.failure_state.passing("measure", self._rebuild):
            self._forward(dealt.own, lambda inputs: tally.evaluate(objective, inputs))
            metrics = tally.reduce(self._speaks)
        self.failure_state.refuse(tally.refused, "measure")
        reductions = dict(self.metric_index.lines.keys())
        return Result(metrics.pop("loss"), metrics, len(dealt.plan.bins), dealt.plan.tokens, reductions)

    def optimizer_step(self) -> StepResult:
        """Clip the gradients by their global norm, step, and start over from zero gradients."""
        config, found = self.optimizer_config, self._norm_of_gradients()
        lr = config.lr * config.schedule.factor(self.step - self.optimizer_start)
        idle = bool(self.parameters) and all(each.grad is None for each in self.parameters.values())
        with self.failure_state.writing("optimizer_step"):
            self.optimizer.move(lr, found)
            norm = float(found)  # the host waits for it when the device has all of the step
            finite = math.isfinite(norm)
            if finite:
                self._after_step()
        self.step, self.skipped, self.idle = self.step + finite, self.skipped + (not finite), self.idle + idle
        self.zero_grad()
        return StepResult(self.step, norm, lr, skipped=not finite)

    def set_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Move weights by this from now on: with fresh moments, and its schedule from the beginning.

        The weights stay what they are, to the last bit. If it is refused, so does the optimizer.
        """
        new = self._build_optimizer(optimizer)
        if isinstance(new, optimizers.ShardedAdamW) and isinstance(self.optimizer, optimizers.ShardedAdamW):
            new.take_low_bits(self.optimizer)
        self.optimizer, self.optimizer_config = new, optimizer
        self.optimizer_start, self.idle, self.began_later = self.step, 0, {}

    def _build_optimizer(self, config: OptimizerConfig) -> optimizers.ShardedAdamW | optimizers.ShardedSGD:
        matrices = frozenset[str]().union(*(stage.matrices for stage in self.stages.values()))
        return optimizers.build(config, self.parameters, matrices, self.weights)

    def zero_grad(self) -> None:
        """Forget the gradients, and what blocks have counted for the same step."""
        self.failure_state.check()
        self.failure_state.mended()
        self.optimizer.zero_grad(set_to_none=True)
        for block in self._blocks:
            for counted in block.count_buffers():
                counted.zero_()

    def grad_norm(self) -> float:
        """The norm of the whole gradient, over every rank."""
        return float(self._norm_of_gradients())

    def weight_norm(self) -> float:
        """The norm of all weights, over every rank. It is not finite where one of them is not."""
        return float(total_norm(((each, replica_count(each)) for each in self._own_parameters), self.device))

    def _norm_of_gradients(self) -> Tensor:
        self.failure_state.check(gradients=True)
        own = self._own_parameters
        return total_norm(((each.grad, replica_count(each)) for each in own if each.grad is not None), self.device)

    @property
    def _own_parameters(self) -> list[nn.Parameter]:
        """Those of `parameters` that this stage speaks for."""
        if self.layout.pp == 1:
            return list(self.parameters.values())
        return [each for name, each in self.parameters.items() if not self._is_second_copy(name)]

    def evaluate_tokens(
        self, batch: Batch, processor: Callable[[OutputInputs], Mapping[str, Tensor]], *, shifted: bool = True
    ) -> dict[str, list[Tensor]]:
        """Run any processor that returns per-token values [T, ...] by name, without gradients.

        Every rank gets one tensor [length, ...] per sequence, in the caller's order, on the CPU; of a batch that ranks
        hold in parts, each gets those of its own. With `shifted` a value belongs to the token it predicts; without, to
        the token whose position it stands at.
        """
        dealt = self._deal(batch)
        with self.failure_state.passing("evaluation", self._rebuild):
            found = self._forward(dealt.own, lambda inputs: dict(processor(inputs)))
            return dealt.gather_results(found, shifted=shifted, device=self.device)

    def logprobs(self, batch: Batch, *, entropy: bool = False, temperature: float = 1.0) -> TokenScores:
        """Log-prob of every token given those before it and, on request, the entropy of the distribution it is from."""

        def processor(inputs: OutputInputs) -> dict[str, Tensor]:
            stats = inputs.head.logprobs(
                inputs.hidden, inputs.microbatch.targets, entropy=entropy, temperature=temperature
            )
            found = {"logprob": stats.logprob}
            if stats.entropy is not None:
                found["entropy"] = stats.entropy
            return found

        found = self.evaluate_tokens(batch, processor)
        return TokenScores(found["logprob"], found.get("entropy"))

    def values(self, batch: Batch) -> list[Tensor]:
        """What the critic expects, [length] fp32 per sequence: entry i before token i is chosen; entry 0 is 0."""
        if not self.critic:
            raise ValueError(NO_VALUE_HEAD)
        return self.evaluate_tokens(batch, lambda inputs: {"value": inputs.head.values(inputs.hidden)})["value"]

    def topk(self, batch: Batch, k: int, *, temperature: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
        """The k likeliest tokens in place of every token: log-probs and ids, each [length, k] per sequence."""

        def processor(inputs: OutputInputs) -> dict[str, Tensor]:
            logprobs, ids = inputs.head.topk(inputs.hidden, k, temperature=temperature)
            return {"logprobs": logprobs, "ids": ids}

        found = self.evaluate_tokens(batch, processor)
        return found["logprobs"], found["ids"]

    def reference(self, *, offload: bool = False) -> Reference:
        """A frozen copy of the weights as they are now, with `logprobs` and `topk` of its own."""
        self.failure_state.check()
        return Reference(self, offload=offload)

    def stream_weights(
        self, *, bucket_bytes: int = 1 << 30, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """The whole model's tensors by their Hugging Face names, in transformers' order, on every rank.

        A model without a family goes by our own names.

        They come in buckets of at most `bucket_bytes` (or one tensor), in `dtype`, by default as the model computes
        with them; what a block keeps in fp32 comes in fp32 at least. Split weights come whole where `dtype` asks for
        more than bf16. Every rank has to take them all.
        """
        return chain.from_iterable(self.stream_buckets(bucket_bytes=bucket_bytes, dtype=dtype))

    def stream_buckets(
        self, *, bucket_bytes: int = 1 << 30, dtype: torch.dtype | None = None
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """As `stream_weights`, bucket by bucket. Ranks may stop after any, if all of them do."""
        self.failure_state.check()
        low = None if dtype is None else self.low_bits  # the model computes with the upper halves alone
        dtype = dtype or self.compute_dtype
        buckets = streaming.plan_buckets(self._pieces, bucket_bytes, dtype)
        return (
            list(streaming.stream([bucket], self.tensors, self.mesh, dtype, shared=self.shared, low=low))
            for bucket in buckets
        )

    @torch.no_grad()
    def copy_weights(self, model: LanguageModel) -> None:
        """Copy the weights into a whole model on every rank, such as one that generates."""
        own = model.state_dict()
        for piece, (_, tensor) in zip(self._pieces, self.stream_weights(), strict=True):
            for ours, place in piece.parts:
                copy_from_hf(tensor, place, own[ours], region(own[ours]))

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The whole gradient, tensor by tensor, as `stream_weights` names and orders them; fp32. Not the critic's."""
        self.failure_state.check(gradients=True)
        own = {name: parameter.grad for name, parameter in self.parameters.items() if parameter.grad is not None}
        buckets = streaming.plan_buckets(self._pieces, 1 << 30, torch.float32)
        return streaming.stream(buckets, own, self.mesh, torch.float32, shared=self.shared)

    @cached_property
    def _pieces(self) -> list[streaming.StreamedTensor]:
        return streaming.plan_tensors(self.config, self.family, self.block_types)

    def export_hf(
        self,
        directory: str | os.PathLike[str],
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: torch.dtype | None = None,
        card: ModelCard | None = None,
        overwrite: bool = False,
        untied: bool = False,
    ) -> Path:
        """Write a directory that transformers loads, in `dtype` or the compute dtype. The first rank writes.

        It gets a model `card`, and the source's generation_config.json. A directory that holds a model is only written
        to if `overwrite` says so. Where the first rank cannot write, every rank hears of it before the next bucket.
        `untied` writes a head that is tied to the embedding once more, as one of its own.
        """
        self.failure_state.check()
        written = dtype or self.compute_dtype
        model = export.Untied(self) if untied else self
        hf_export_config(model.config, written, self.families)  # or a sentence
        return export.export(model, directory, tokenizer, written, card=card or ModelCard(), overwrite=overwrite)

    def export_model(
        self,
        directory: str | os.PathLike[str],
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: torch.dtype | None = None,
        card: ModelCard | None = None,
        overwrite: bool = False,
    ) -> Path:
        """As `export_hf` where a Hugging Face family describes the model; any other is written as Postlude's own.

        What that is, `postlude.export_model` says.
        """
        self.failure_state.check()
        return export.export(
            self, directory, tokenizer, dtype or self.compute_dtype, card=card or ModelCard(), overwrite=overwrite
        )

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        extra: Mapping[str, Any] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        wait: bool = True,
    ) -> None:
        """Write the training state to a new directory: weights, optimizer, schedule, random states and `extra` (JSON).

        With the model's config, and the `tokenizer` if given, beside it, it can be loaded as a model, too. It is copied
        to host memory at once; without `wait` it is written in the background, and `finish_saving` tells how that went.
        """
        self.failure_state.check()
        self.finish_saving()
        if self._saving_group is None:
            self._saving_group = dist.new_group(backend="gloo")
        description = export.description(self, self.compute_dtype, tokenizer)
        self._saving = checkpoint.save(self, directory, extra, self._saving_group, self._staging, description.write)
        if wait:
            self.finish_saving()

    def finish_saving(self) -> None:
        """Wait for a checkpoint on its way to disk, if there is one."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def load(self, directory: str | os.PathLike[str], *, recast: bool = False) -> dict[str, Any]:
        """Restore the training state that an engine in any layout saved. Returns its `extra`.

        Each rank gets back the state of its own random generators, that of its GPU included. A rank that the other
        layout had not gets the first rank's.

        With `recast` it may have been saved under another pattern, which blocks are matched with as `Recast` says. What
        stays is restored with its optimizer state; so are the schedule, the step and the random state. What is new
        keeps the weights that this engine has, and starts from no moments, as at a first step; `fresh` then names it.
        """
        self.failure_state.check(load=True)
        if not recast:
            return checkpoint.load(self, directory)
        before = on_rank0(lambda: read_model_with_mtp(Path(directory), self.families, self.block_types)[1])
        moved = plan_recast(before, self.config, self.block_types)
        extra = checkpoint.load(self, directory, moved)
        self.fresh = moved.fresh
        return extra

    def _forward(self, own: list[Microbatch], processor: Callable[[OutputInputs], Any]) -> list[Any]:
        """Run this rank's microbatches without gradients."""
        for index, stage in self.stages.items():
            stage.eval()
            self.gathering[index].begin(train=False)
        found = self.executor.run(own, output_processor=lambda inputs, _: processor(inputs))
        for gathering in self.gathering.values():
            gathering.end()
        return found

    def _deal(self, batch: Batch, counts: Mapping[str, float] | None = None) -> LocalBatch:
        """This rank's microbatches of a batch. Where one rank refuses its part, all do, and the engine stays whole."""
        self.failure_state.check()
        return shard_batch(
            batch,
            self.mesh,
            budget=self.budget,
            vocab_size=self.config.vocab_size,
            device=self.device,
            depths=len(self.config.pattern.mtp),
            routers=self.config.routers,
            counts=counts,
        )

    @property
    def _speaks(self) -> bool:
        """Whether this rank's results count: tensor-parallel ranks all have the same."""
        return self.has_output and self.mesh.tp.rank == 0

    def _is_second_copy(self, name: str) -> bool:
        """Whether this is a parameter of both ends of a pipeline as the last stage holds it."""
        return self.layout.pp > 1 and 0 not in self.stages and name in self.shared

    def _finish_gradients(self) -> None:
        """Give every parameter a gradient, and sum those of shared ones over both ends of the pipeline.

        Zero where nothing depended on it: one without would get no optimizer state, which a checkpoint then lacks.
        """
        for gathering in self.gathering.values():
            gathering.settle()
            gathering.end()
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = zero_gradient(parameter)
        for name in sorted(self.shared & self.parameters.keys()):
            gradient = self.parameters[name].grad
            assert gradient is not None
            all_reduce_shared(gradient, self.mesh)

    @property
    def _blocks(self) -> list[Block]:
        return [block for stage in self.stages.values() for block in stage.blocks]

    def _after_step(self) -> None:
        all_reduce_counters([counted for block in self._blocks for counted in block.count_buffers()], self.mesh)
        for block in self._blocks:
            block.after_optimizer_step()

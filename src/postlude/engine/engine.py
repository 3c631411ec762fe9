"""Engine: one model in one layout. Every rank makes the same calls (SPMD)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from postlude.data import Batch
from postlude.engine import checkpoint, export, gradients, streaming
from postlude.engine.adapters import Adapters, add_adapter_configs, weight_deltas
from postlude.engine.batch_sharding import LocalBatch, check_step_tokens, shard_batch, supported_sharing
from postlude.engine.failure_state import FailureState
from postlude.engine.normalizer import LossNormalizer, check_counts
from postlude.engine.objective_processor import ObjectiveProcessor
from postlude.engine.options import EngineOptions, takes_options
from postlude.engine.pass_metrics import LayerMetrics, LossRecord, MetricIndex, ReducedPass, reduce_pass
from postlude.engine.reference import Reference
from postlude.engine.result import (
    Outputs,
    PassResult,
    StepResult,
    TokenProcessor,
    TokenScores,
    logprob_processor,
    topk_processor,
)
from postlude.engine.stages import StageBuilder
from postlude.engine.training_state import StateOffload, TrainingState, TrainingStateProperties, loading_in_fp32
from postlude.hf.export import ModelCard, hf_export_config
from postlude.hf.load import init_or_load_weights
from postlude.hf.read_model import Recast, Source, read_generation_config, read_model, read_recast_plan, with_mtp
from postlude.layout import Layout
from postlude.lora import NO_ADAPTERS
from postlude.model import LanguageModel
from postlude.model.output import NO_VALUE_HEAD
from postlude.objectives import Objective
from postlude.optimizer import OptimizerConfig
from postlude.trace.recorder import NO_RECORDER, Recorder
from postlude.world.devices import check_initialized
from postlude.world.mesh import Mesh


class Engine(TrainingStateProperties):
    """A model distributed over the ranks of a layout, with its optimizer.

    Every rank passes the same global batch, or its own part (`Batch.sharded`). The engine packs it into microbatches
    of at most `budget` tokens and returns results in the caller's order.

    source: what `load_model` takes. A `ModelConfig` starts from random weights; if it names no Hugging Face family, its
        tensors are streamed under Postlude's names. For a `Recast`, `new_tensors` names those that the source lacked.
    The keyword arguments are the fields of `EngineOptions`. `engine.options` has them, with the mesh.
    """

    @takes_options(EngineOptions)
    def __init__(self, source: Source, options: EngineOptions) -> None:
        check_initialized()
        self.device, self.compute_dtype = options.rank_device, options.dtype
        self.mesh = options.mesh or Mesh(options.layout, self.device.type)
        self.options = replace(options, mesh=self.mesh, device=self.device, compute_dtype=self.compute_dtype)
        self.block_types, self.families = options.blocks, options.families
        source = with_mtp(source, self.families, self.block_types) if options.mtp else source
        self.family, self.config = read_model(source, self.families, self.block_types)
        if options.selection_bias_rate is not None:
            self.config = self.config.with_selection_bias_rate(options.selection_bias_rate)
        self.config = self.config.with_router_losses(options.router_losses)
        recast = read_recast_plan(source, self.families, self.block_types) if isinstance(source, Recast) else None
        self.new_tensors = () if recast is None else recast.new_tensors
        self.generation_config = read_generation_config(source, self.block_types)
        self.share_prefixes = supported_sharing(options, self.config)
        self.adapters = Adapters(options, self.config, self.family, self.block_types)
        self.builder = StageBuilder(
            config=self.config,
            mesh=self.mesh,
            device=self.device,
            compute_dtype=self.compute_dtype,
            options=self.options,
            frozen=self.adapters.enabled,
            adapters=NO_ADAPTERS,
        )
        self.failure_state = FailureState()
        low_bits: dict[str, Tensor] = {}

        def load(stage: LanguageModel) -> None:
            with loading_in_fp32(stage, low_bits) if options.weights == "split" else nullcontext():
                init_or_load_weights(stage, source, self.family, options.seed, self.families)

        self.training_state = TrainingState(self.builder, self.builder.build(load), options.optimizer)
        self.training_state.set_low_bits(low_bits)
        self.training_states: dict[str | None, TrainingState] = {None: self.training_state}
        for name, configs in self.adapters.by_name.items():
            add_adapter_configs(self, name, configs, seed=options.seed)
        self.set_adapter(self.adapters.active)
        self._state_offload = StateOffload(self.device, self.failure_state)
        self.metric_index, self.layer_metrics = MetricIndex(), LayerMetrics(self.config)
        self._checkpoint_writer = checkpoint.CheckpointWriter()

    @property
    def layout(self) -> Layout:
        """The degrees of parallelism."""
        return self.mesh.layout

    def set_adapter(self, adapter: str | None) -> None:
        """Makes an adapter the active one, which all other calls use; None is the model alone, which is not trained.

        Each adapter has its own gradients, optimizer and steps, which stay as they are while another one is active.
        """
        self.adapters.check_name(adapter)
        self.training_state = self.training_states[adapter]
        self.adapters.active = self.failure_state.adapter = adapter

    @property
    def stage_models(self) -> dict[int, LanguageModel]:
        """This rank's models of stages, by the stages' global numbers."""
        return self.stages.models

    @property
    def shared_parameters(self) -> frozenset[str]:
        """The names of parameters that the first and the last stage both hold."""
        return self.config.shared_parameters

    @property
    def tensors(self) -> dict[str, Tensor]:
        """This rank's parameters and persistent buffers by their global names."""
        self.failure_state.check_on_device()
        return self.stages.tensors

    @property
    def low_bits(self) -> dict[str, Tensor]:
        """The lower 16 bits of split weights by global name, this rank's shards; the upper 16 are the parameters."""
        self.failure_state.check_on_device()
        return self.training_state.low_bits

    def forward_backward(
        self,
        batch: Batch,
        objective: Objective,
        *,
        counts: Mapping[str, float] | None = None,
        recorder: Recorder = NO_RECORDER,
    ) -> PassResult:
        """Runs the batch forward and backward, and accumulates its gradients.

        `counts`: if the step has several batches, pass `engine.count(*batches)` for each. They are the sums of every
        column that a loss is a mean over, and "all_tokens", which routers' auxiliary losses need. `recorder` records a
        timeline of this rank.

        `FailureState` explains which errors it raises, and what is lost then.
        """
        self.adapters.check_trainable()
        local = self._shard(batch, counts)
        if counts:
            check_step_tokens(counts, self.config)
        record = self._loss_record(objective, local, counts)
        with self.failure_state.guard_pass("forward_backward", self.training_state.rebuild, gradients=True):
            self.training_state.free_shared_gradients()
            processor = ObjectiveProcessor(objective, record, self.stages.trains_depths)
            self.stages.forward_backward(local.microbatches, processor, recorder)
            gradients.fill_and_reduce_shared(self.parameters, self.shared_parameters, self.mesh)
            layer_sums = self.layer_metrics.take_sums(self.stages.blocks, self.device)
            reduced = self._reduce_pass(record, layer_sums)
            outputs = self._gather_outputs(objective, local, record, reduced)
            self.training_state.has_gradients = True
        self.failure_state.raise_loss_error(reduced.error, "forward_backward", gradients=True)
        return self._result(reduced, local, outputs)

    def count(self, *batches: Batch) -> dict[str, float]:
        """Returns the denominators of a step of these batches: `counts` for the `forward_backward` of each."""
        total: dict[str, float] = {}
        for local in map(self._shard, batches):
            for name, count in {**local.counts, "all_tokens": local.plan.tokens}.items():
                total[name] = total.get(name, 0.0) + count
        return total

    def evaluate_loss(
        self, batch: Batch, objective: Objective, counts: Mapping[str, float] | None = None
    ) -> PassResult:
        """Returns the result of `forward_backward`, without a backward and without the layers' metrics."""
        local = self._shard(batch, counts)
        record = self._loss_record(objective, local, counts)
        with self.failure_state.guard_pass("evaluate_loss", self.training_state.rebuild):
            processor = ObjectiveProcessor(objective, record, self.stages.trains_depths)
            self.stages.forward(local.microbatches, processor)
            reduced = self._reduce_pass(record)
            outputs = self._gather_outputs(objective, local, record, reduced)
        self.failure_state.raise_loss_error(reduced.error, "evaluate_loss")
        return self._result(reduced, local, outputs)

    def _loss_record(
        self, objective: Objective, local: LocalBatch, counts: Mapping[str, float] | None = None
    ) -> LossRecord:
        """Returns the empty record of a pass. All ranks raise before it begins if a denominator is unknown."""
        counts = counts or local.counts  # an empty mapping means none
        check_counts(objective, counts, len(self.config.pattern.mtp))
        return LossRecord(LossNormalizer(local.microbatches, counts, cp_size=self.mesh.cp.size))

    def _reduce_pass(self, record: LossRecord, layer_sums: Tensor | None = None) -> ReducedPass:
        return reduce_pass(record, self.metric_index, reports_results=self._reports_results, layer_sums=layer_sums)

    def _gather_outputs(
        self, objective: Objective, local: LocalBatch, record: LossRecord, reduced: ReducedPass
    ) -> Outputs:
        if not getattr(objective, "has_outputs", False) or reduced.error is not None:
            return {}
        return local.gather_results(record.outputs, shifted=True, device=self.device)

    def _result(self, reduced: ReducedPass, local: LocalBatch, outputs: Outputs) -> PassResult:
        layers, plan, metrics = self.layer_metrics.compute(reduced.layer_totals), local.plan, dict(reduced.metrics)
        loss, reductions = metrics.pop("loss"), dict(self.metric_index.slots.keys()) | layers.reductions
        return PassResult(
            loss,
            metrics | layers.numbers,
            len(plan.bins),
            plan.tokens,
            plan.shared_tokens,
            reductions,
            layers.vectors,
            outputs,
        )

    def optimizer_step(self, config: OptimizerConfig | None = None) -> StepResult:
        """Clips the gradients by their global norm, updates the weights, and frees the gradients.

        `config` replaces the optimizer's learning rate, schedule, betas, eps, weight decay and clipping for this step.
        """
        self.adapters.check_trainable()
        self.failure_state.check(gradients=True)
        training_state, config = self.training_state, self.training_state.step_config(config)
        norm_on_device = training_state.gradient_norm()
        with self.failure_state.guard_write("optimizer_step"):
            lr = training_state.clipped_step(config, norm_on_device)
            norm = float(norm_on_device)  # synchronises here, after all kernels of the step are launched
            finite = math.isfinite(norm)
            if finite:
                gradients.all_reduce_counters(self.stages.token_counters, self.mesh)
                for block in self.stages.blocks:
                    block.after_optimizer_step()
        training_state.count_step(finite)
        self.zero_grad()
        return StepResult(training_state.step, norm, lr, skipped=not finite)

    def set_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Replaces the optimizer and resets the moments and the schedule. Split weights keep their low bits.

        If the new optimizer cannot be built, this raises and the old one stays.
        """
        self.failure_state.check()
        self.training_state.set_optimizer(optimizer)

    def zero_grad(self) -> None:
        """Frees the gradients, and zeroes the blocks' counters."""
        self.failure_state.check()
        self.failure_state.mark_recovered()
        self.training_state.zero_grad()

    def grad_norm(self) -> float:
        """Returns the global gradient norm, over every rank."""
        self.failure_state.check(gradients=True)
        return float(self.training_state.gradient_norm())

    def weight_norm(self) -> float:
        """Returns the norm of all weights, over every rank. It is not finite if a weight is not."""
        self.failure_state.check()
        return float(self.training_state.weight_norm())

    def evaluate_tokens(
        self, batch: Batch, processor: TokenProcessor, *, shifted: bool = True
    ) -> dict[str, list[Tensor]]:
        """Runs a processor that returns per-token values [T, ...] by name, without gradients.

        Returns one tensor [length, ...] per sequence, in the caller's order, on the CPU, on every rank; for a sharded
        batch, of the sequences that this rank holds. With `shifted` a value belongs to the token it predicts; without,
        to the token at its position.
        """
        local = self._shard(batch)
        with self.failure_state.guard_pass("evaluate_tokens", self.training_state.rebuild):
            values = self.stages.forward(local.microbatches, lambda inputs: dict(processor(inputs)))
            return local.gather_results(values, shifted=shifted, device=self.device)

    def logprobs(self, batch: Batch, *, entropy: bool = False) -> TokenScores:
        """Returns the log-prob of every token given those before it and, on request, the distribution's entropy."""
        scores = self.evaluate_tokens(batch, logprob_processor(entropy))
        return TokenScores(scores["logprob"], scores.get("entropy"))

    def values(self, batch: Batch) -> list[Tensor]:
        """Returns the values, [length] fp32 per sequence: entry i is the state's before token i. Entry 0 is 0."""
        if not self.options.critic:
            raise ValueError(NO_VALUE_HEAD)
        return self.evaluate_tokens(batch, lambda inputs: {"value": inputs.head.values(inputs.hidden)})["value"]

    def topk(self, batch: Batch, k: int) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the k likeliest tokens in place of each token, given those before: log-probs and ids, [length, k]."""
        values = self.evaluate_tokens(batch, topk_processor(k, self.config.vocab_size))
        return values["logprobs"], values["ids"]

    def reference(self, *, offload: bool = False) -> Reference:
        """Returns a frozen copy of the current weights, with its own `logprobs` and `topk`.

        The reference of new adapters is the model without them: nothing is copied. Every rank calls it.
        """
        self.failure_state.check()
        return Reference(self, offload=offload)

    def stream_weights(
        self, *, bucket_bytes: int = streaming.BUCKET_BYTES, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields all tensors of the model by Hugging Face name, in transformers' order, on every rank.

        A model without a family uses Postlude's names. Tensors come in buckets of at most `bucket_bytes` (or one
        tensor), in `dtype`, by default the compute dtype; what a block keeps in fp32 comes in fp32 at least. Split
        weights come with all bits if `dtype` has more than bf16. Every rank must exhaust the iterator.
        """
        return chain.from_iterable(self.stream_buckets(bucket_bytes=bucket_bytes, dtype=dtype))

    def stream_buckets(
        self, *, bucket_bytes: int = streaming.BUCKET_BYTES, dtype: torch.dtype | None = None
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Yields the tensors of `stream_weights` bucket by bucket. All ranks may stop together after any of them."""
        self.failure_state.check()
        buckets = streaming.plan_buckets(self._streamed_tensors, dtype or self.compute_dtype, bucket_bytes)
        return streaming.stream_buckets(buckets, self, dtype or self.compute_dtype, all_bits=dtype is not None)

    def weight_deltas(self) -> Mapping[str, streaming.WeightDelta]:
        """Returns what adapters add to this rank's weights, by the weights' names. Every rank calls it."""
        return weight_deltas(self.stages)

    def copy_weights(self, model: LanguageModel) -> None:
        """Copies the weights into an unsharded model on every rank, such as a generator's."""
        streaming.copy_into(model, self._streamed_tensors, self.stream_weights())

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yields full gradients, fp32, with names and order of `stream_weights`, without the value head's."""
        self.failure_state.check(gradients=True)
        local = {name: parameter.grad for name, parameter in self.parameters.items() if parameter.grad is not None}
        buckets = streaming.plan_buckets(self._streamed_tensors, torch.float32)
        return streaming.stream(buckets, local, self.mesh, torch.float32, shared=self.shared_parameters)

    @cached_property
    def _streamed_tensors(self) -> list[streaming.StreamedTensor]:
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
        """Writes a directory that transformers loads, in `dtype` or the compute dtype. Rank 0 writes.

        It contains a model `card` and the source's generation_config.json. A directory that holds a model is replaced
        only with `overwrite`. If rank 0 cannot write, every rank raises before the next bucket. `untied` writes a head
        that is tied to the embedding as a tensor of its own. Without a `tokenizer` it warns, unless the directory
        has one.
        """
        self.failure_state.check()
        dtype = dtype or self.compute_dtype
        model = export.Untied(self) if untied else self
        hf_export_config(model.config, dtype, self.families)  # raises if no family describes the model
        path = export.export(model, directory, tokenizer, dtype, card=card, overwrite=overwrite)
        export.warn_without_tokenizer(path)
        return path

    def export_model(
        self,
        directory: str | os.PathLike[str],
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: torch.dtype | None = None,
        card: ModelCard | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Writes the model as `export_hf` does if a family describes it, else in Postlude's own format."""
        self.failure_state.check()
        dtype = dtype or self.compute_dtype
        path = export.export(self, directory, tokenizer, dtype, card=card, overwrite=overwrite)
        export.warn_without_tokenizer(path)
        return path

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        extra: Mapping[str, Any] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        wait: bool = True,
    ) -> None:
        """Writes the training state to a new directory: weights, optimizer, schedule, random states, `extra` (JSON).

        With the model's config and the `tokenizer`, if given, it can also be loaded as a model. The state is copied to
        host memory first. Without `wait` it is written in the background, and `finish_saving` raises its error.
        """
        self.failure_state.check()
        model_files = export.model_files(self, self.compute_dtype, tokenizer)
        self._checkpoint_writer.save(self, directory, extra, model_files.write)
        if wait:
            self.finish_saving()

    def finish_saving(self) -> None:
        """Waits for a checkpoint that is being written, if there is one."""
        self._checkpoint_writer.finish()

    def base_fingerprint(self) -> str | None:
        """Returns a digest of the frozen model, the same in every layout; None without LoRA. Every rank calls it."""
        base = self.training_states[None].stages
        return self.adapters.base_fingerprint(base.tensors, self.mesh, self.shared_parameters)

    def load(self, directory: str | os.PathLike[str], *, recast: bool = False) -> dict[str, Any]:
        """Restores the training state that an engine in any layout saved. Returns its `extra`.

        Each rank gets the state of its own random generators, or rank 0's if the saved layout had fewer ranks.
        With `recast` it may have been saved under another pattern; `Recast` describes how blocks are matched. New
        tensors keep this engine's weights and start without moments, as at a first step; `new_tensors` names them.
        """
        self.failure_state.check(load=True)
        plan = export.recast_plan(self, directory) if recast else None
        extra = checkpoint.load(self, directory, plan)
        self.new_tensors = self.new_tensors if plan is None else plan.new_tensors
        return extra

    def offload(self) -> None:
        """Moves this rank's weights, gradients and optimizer state to host memory. Other calls raise until `onload`."""
        self._state_offload.offload(self.training_states.values())

    def onload(self) -> None:
        """Moves everything back to the device, bit for bit. Without enough memory it raises and can be called again."""
        self._state_offload.onload()

    def _shard(self, batch: Batch, step_counts: Mapping[str, float] | None = None) -> LocalBatch:
        """Returns this rank's microbatches. If one rank raises, all do, and the engine stays usable."""
        self.failure_state.check()
        options: dict[str, Any] = {"step_counts": step_counts, "adapter": self.adapters.active}
        options["share_prefixes"] = self.share_prefixes
        return shard_batch(batch, self.mesh, self.config, budget=self.options.budget, device=self.device, **options)

    @property
    def _reports_results(self) -> bool:
        """Whether this rank reports metrics: it runs the last stage, and its TP rank is 0 (all have the same)."""
        return self.layout.stages - 1 in self.stage_models and self.mesh.tp.rank == 0

"""Stages of a model on one rank: built with the weights of a source, or rebuilt around existing parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from postlude.data import Microbatch
from postlude.engine.fsdp import shard_stage
from postlude.engine.gradients import all_reduce_counters
from postlude.engine.options import EngineOptions
from postlude.engine.unsharded import ParameterSharding
from postlude.layout import Stage
from postlude.lora import AdapterConfigs
from postlude.model import LanguageModel, ModelConfig, OutputInputs, OutputProcessor
from postlude.model.adapters import freeze_base
from postlude.model.batch_invariant import check_batch_invariant
from postlude.model.blocks import Block
from postlude.model.fp8 import use_fp8
from postlude.model.parallel import local_shard
from postlude.ops.fp8 import check_fp8
from postlude.pipeline import Executor
from postlude.trace.recorder import Recorder
from postlude.world.mesh import Mesh

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stages:
    """This rank's stages by their global numbers, the sharding of their parameters, and the pipeline that runs them."""

    models: dict[int, LanguageModel]
    sharding: dict[int, ParameterSharding]
    executor: Executor

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        named = (item for stage in self.models.values() for item in stage.named_parameters())
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers by their global names."""
        return {name: tensor for stage in self.models.values() for name, tensor in stage.state_dict().items()}

    @property
    def trains_depths(self) -> bool:
        """Whether multi-token-prediction depths are here, and trained."""
        depths = (stage.mtp for stage in self.models.values() if stage.has_mtp)
        return any(parameter.requires_grad for mtp in depths for parameter in mtp.parameters())

    @property
    def blocks(self) -> list[Block]:
        return [block for stage in self.models.values() for block in stage.blocks]

    @property
    def token_counters(self) -> list[Tensor]:
        """The blocks' counters of this rank's tokens since the last optimizer step."""
        return [counter for block in self.blocks for counter in block.token_counters()]

    @property
    def matrices(self) -> frozenset[str]:
        return frozenset[str]().union(*(stage.matrices for stage in self.models.values()))

    def forward(self, microbatches: Sequence[Microbatch], processor: Callable[[OutputInputs], Any]) -> list[Any]:
        """Runs the microbatches without gradients. Returns the processor's result for each."""
        for index, stage in self.models.items():
            stage.eval()
            self.sharding[index].begin_pass(train=False)
        results = self.executor.run(microbatches, output_processor=lambda inputs, _: processor(inputs))
        for sharding in self.sharding.values():
            sharding.end_pass()
        return results

    def forward_backward(
        self, microbatches: Sequence[Microbatch], processor: OutputProcessor, recorder: Recorder
    ) -> None:
        """Runs the microbatches forward and backward. `processor` returns the loss."""
        self._count_batch(microbatches)
        for index, stage in self.models.items():
            stage.train()
            with recorder.span("fsdp", "weights"):
                self.sharding[index].begin_pass(train=True)
        self.executor.run(
            microbatches,
            output_processor=processor,
            loss=lambda value: value,
            before_last_backward=lambda stage: self.sharding[stage.stage.index].before_last_backward(),
            on_grads_ready=lambda stage, unit: self.sharding[stage.stage.index].grads_ready(unit),
            recorder=recorder,
        )
        for sharding in self.sharding.values():
            sharding.finish_grads()
            sharding.end_pass()

    def _count_batch(self, microbatches: Sequence[Microbatch]) -> None:
        """Counts what balance losses need of the whole batch before its first backward, in an extra forward."""
        model = next(iter(self.models.values()))
        if not any(block.counts_batch for block in model.config.blocks.values()):  # the same on every rank
            return
        counters = [counter for block in self.blocks for counter in block.batch_counters()]
        for counter in counters:
            counter.zero_()
        self.forward(microbatches, _run_depths)
        all_reduce_counters(counters, model.mesh)


@dataclass(frozen=True, kw_only=True)
class StageBuilder:
    config: ModelConfig
    mesh: Mesh
    device: torch.device
    compute_dtype: torch.dtype
    options: EngineOptions
    frozen: bool
    """With LoRA: the model is stored in the compute dtype and not trained."""
    adapters: AdapterConfigs

    def __post_init__(self) -> None:
        options = self.options
        if options.fp8:
            log.info("fp8: products are %s", check_fp8(self.device, self.compute_dtype))
        if options.batch_invariant:
            check_batch_invariant(self.config, self.mesh.layout, options.batch_dependent, options.blocks)

    def build(self, fill: Callable[[LanguageModel], None]) -> Stages:
        """Returns this rank's stages. Each is sharded on the meta device, then allocated and filled by `fill`."""

        def allocate(index: int, model: LanguageModel) -> None:
            fill(model.to_empty(device=self.device))

        layout = self.mesh.layout
        return self._build(range(self.mesh.pp.rank, layout.stages, layout.pp), allocate)

    def rebuild(self, old: Stages) -> Stages:
        """Returns new stages around the same parameters, after an exception in the middle of a pass."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # running kernels on other streams still use the old ones
        for old_sharding in old.sharding.values():
            old_sharding.end_pass()
        return self._build(old.models, lambda index, model: _move_tensors(old.models[index], model))

    def build_on(self, base: Stages, seed: int) -> Stages:
        """Returns stages that share the frozen tensors of `base`. The trained ones are their own.

        Adapters are initialised by `seed`; a value head starts from the one of `base`.
        """

        def share(index: int, model: LanguageModel) -> None:
            new = {
                name: nn.Parameter(torch.empty_like(parameter, device=self.device))
                for name, parameter in model.named_parameters()
                if parameter.requires_grad
            }
            in_base = {name: tensor for name, tensor in base.models[index].state_dict().items() if name in new}
            _move_tensors(base.models[index], model, new)
            model.reset(seed, only=new.keys() - in_base.keys())
            with torch.no_grad():
                for name, tensor in in_base.items():
                    local_shard(new[name]).copy_(local_shard(tensor))

        return self._build(base.models, share)

    def _build(self, indices: Iterable[int], fill: Callable[[int, LanguageModel], None]) -> Stages:
        models, sharding = dict[int, LanguageModel](), dict[int, ParameterSharding]()
        for index in indices:
            models[index], sharding[index] = self._build_on_meta(index)
            fill(index, models[index])
        executor = Executor(models, self.mesh, dtype=self.compute_dtype, overlap=self.options.overlap)
        return Stages(models, sharding, executor)

    def _build_on_meta(self, index: int) -> tuple[LanguageModel, ParameterSharding]:
        options = self.options
        with torch.device("meta"):
            stage = LanguageModel(
                self.config,
                mesh=self.mesh,
                stage=Stage(index, self.mesh.layout.stages),
                recompute=options.recompute,
                offload_activations=options.offload_activations,
                scan_backend=options.scan_backend,
                head=options.head,
                value_head=options.critic,
                dtype=self.compute_dtype if self.frozen else None if options.weights == "fp32" else torch.bfloat16,
                blocks=options.blocks,
                adapters=self.adapters,
                batch_invariant=options.batch_invariant,
            )
        if options.fp8 and (unquantized := use_fp8(stage, options.fp8, self.mesh.layout.tp)):
            names = ", ".join(unquantized)
            log.warning("fp8: %s stay in %s: a size is no multiple of 16", names, self.compute_dtype)
        if self.frozen:
            freeze_base(stage, value_head=bool(self.adapters))
        elif stage.has_mtp:
            stage.mtp.requires_grad_(options.mtp)
        return stage, shard_stage(stage, self.mesh, self.compute_dtype, options)


def _run_depths(inputs: OutputInputs) -> Tensor:
    """Runs the multi-token-prediction depths, and projects nothing."""
    if inputs.mtp is not None:
        for _ in inputs.mtp(inputs, stop_trunk=True, stop_head=True):
            pass
    return inputs.hidden.new_zeros(())


def _move_tensors(old: LanguageModel, new: LanguageModel, added: Mapping[str, Tensor] = MappingProxyType({})) -> None:
    """Moves parameters, their gradients and buffers of a stage into a new one that has never run; some are `added`.

    It reads only the old stage's state dict, which FSDP returns sharded in whatever state it is.
    """
    new.load_state_dict({**old.state_dict(keep_vars=True), **added}, assign=True)
    for name, buffer in old.named_buffers():  # those that are not persistent too
        module, _, leaf = name.rpartition(".")
        setattr(new.get_submodule(module), leaf, buffer)

"""LanguageModel: embedding, stack, final norm and head of one pipeline stage, and its forward."""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast, get_args

import torch
from torch import Tensor, nn

from postlude.checks import check_choice
from postlude.data import Microbatch
from postlude.data.microbatch import SAMPLING_MASK, SharedSegments
from postlude.head import HeadConfig
from postlude.layout import Layout, Stage
from postlude.lora import NO_ADAPTERS, AdapterConfigs, LoRAGroup
from postlude.model.adapters import add_adapters, is_adapter, reset_adapter
from postlude.model.blocks import BLOCKS, Block, BlockTable, SeparateUnit
from postlude.model.blocks.block import reset_parameter
from postlude.model.config import ModelConfig
from postlude.model.context import DecodeState, ForwardContext, check_routing
from postlude.model.mtp import LazyDepths, MTPModule, PlannedDepths, final_norm_step, output_names, view_for_processor
from postlude.model.offload import ActivationOffload, offloaded_layers
from postlude.model.output import (
    MTPDepths,
    MTPOptions,
    OutputHead,
    OutputInputs,
    OutputProcessor,
    logits_processor,
    token_loss_processor,
)
from postlude.model.parallel import (
    ColumnLinear,
    FSDPUnit,
    RMSNorm,
    ValueHead,
    VocabularyEmbedding,
    default_dtype,
    is_dtensor,
    local,
    local_shard,
    region,
    role_of,
)
from postlude.model.recompute import Recompute
from postlude.model.schedule_plan import OUTPUT, PlannedStep, SchedulePlan
from postlude.model.stack import HybridStack, LogicalLayer
from postlude.model.steps import LayerStep, compute
from postlude.ops.batch_invariant import with_batch_invariance_of_model
from postlude.ops.collectives import gather_from_sequence
from postlude.ops.kernels.capabilities import ScanBackend
from postlude.ops.linear_logprobs import LogitConfig
from postlude.options import LayerChoice, chosen_layers
from postlude.trace.recorder import NO_RECORDER, Recorder
from postlude.world.mesh import Mesh

DEFAULT_HEAD = HeadConfig()


class LanguageModel(FSDPUnit):
    """A decoder on packed sequences. It builds the layers of its `stage` only, under their global names.

    `mesh` says which part of every layer this rank holds; by default there is a single rank. `recompute` is the
    activation recompute of each logical layer (one bracket group of the pattern): "none", all but expensive results
    ("selective"), or everything ("full"). `offload_activations` chooses layers that keep it in host memory: see
    `model/offload.py`. `scan_backend` selects kernels of recurrent blocks (`postlude.ops.ssd.ssd`),
    `head` the backend and memory limit of the output head. With `value_head` the last stage also has a value head, one
    scalar per token, initially zero.
    `dtype` is that of all parameters but those that a block keeps in fp32; by default torch's own. `adapters` are those
    of its modules, by their global names ("layers.0.attention.q_proj"). `batch_invariant`: `ops/batch_invariant.py`.

    Parameters start from `reset(seed=0)`. Built under `torch.device("meta")` they have no storage until loaded.
    """

    lora_groups: ClassVar[Mapping[str, LoRAGroup]] = {"embedding": "embedding", "head": "head"}

    def __init__(
        self,
        config: ModelConfig,
        *,
        mesh: Mesh | None = None,
        stage: Stage | None = None,
        recompute: Recompute = "none",
        offload_activations: LayerChoice = False,
        scan_backend: ScanBackend = "auto",
        head: HeadConfig = DEFAULT_HEAD,
        value_head: bool = False,
        dtype: torch.dtype | None = None,
        blocks: BlockTable = BLOCKS,
        adapters: AdapterConfigs = NO_ADAPTERS,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.routers = config, config.routers
        self.mesh, self.stage = mesh or Mesh.single_rank(), stage or Stage()
        self.recompute, self.scan_backend, self.head_config = recompute, scan_backend, head
        self.block_types, self.batch_invariant = blocks, batch_invariant
        check_choice("recompute", recompute, get_args(Recompute))
        with default_dtype(dtype):
            self._build_modules(blocks, value_head)
        offload, offloaded = ActivationOffload(), offloaded_layers(offload_activations, len(config.pattern))
        for index, layer in self.layers.items():
            if int(index) in offloaded:
                cast(LogicalLayer, layer).offload = offload
        add_adapters(self, adapters)
        check_storage(self.named_parameters(), self.sharded_separately(), self.mesh)
        self.matrices = frozenset(name for name, _ in self.named_parameters() if role_of(self, name) == "matrix")
        if not any(parameter.is_meta for parameter in self.parameters()):
            self.reset()

    def _build_modules(self, blocks: BlockTable, value_head: bool) -> None:
        config, tp = self.config, self.mesh.tp
        # A tied head and MTP need the embedding on the last stage; then both stages hold it.
        if self.stage.first or (self.stage.last and config.shared_parameters):
            self.embedding = VocabularyEmbedding(config.vocab_size, config.hidden_size, tp=tp)
        self.layers = HybridStack(config, self.stage, self.mesh, blocks)
        if self.stage.last:
            self.norm = RMSNorm(config.hidden_size, config.norm_eps, tp=tp, offset=config.norm_offset)
            if not config.tied_head:
                self.head = ColumnLinear(config.hidden_size, config.vocab_size, tp=tp)
            if config.pattern.mtp:
                self.mtp = MTPModule(config, self.mesh, blocks)
        self.has_value_head = value_head  # on the last stage
        self.value_head = ValueHead(config.hidden_size, tp=tp) if value_head and self.stage.last else None

    @property
    def layout(self) -> Layout:
        """The parallel layout."""
        return self.mesh.layout

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of this stage, in order."""
        return tuple(block for layer in self.logical_layers for block in layer.blocks)

    @property
    def logical_layers(self) -> tuple[LogicalLayer, ...]:
        """The layers of this stage in order, MTP layers included."""
        mtp_layers = self.mtp.layers if self.has_mtp else ()
        return (*(cast(LogicalLayer, layer) for layer in self.layers.values()), *mtp_layers)

    def chosen_layers(self, option: str, choice: LayerChoice) -> tuple[LogicalLayer, ...]:
        """Returns the layers of this stage that an option chooses by their numbers in the whole model.

        Layers of multi-token-prediction depths have no numbers: they are chosen together with the trunk's last layer.
        """
        count = len(self.config.pattern)
        chosen = chosen_layers(option, choice, count)
        mtp_layers = self.mtp.layers if self.has_mtp and count - 1 in chosen else ()
        trunk = (cast(LogicalLayer, layer) for index, layer in self.layers.items() if int(index) in chosen)
        return (*trunk, *mtp_layers)

    @property
    def has_mtp(self) -> bool:
        """Whether this stage has MTP depths."""
        return self.stage.last and bool(self.config.pattern.mtp)

    @with_batch_invariance_of_model
    def forward(
        self,
        microbatch: Microbatch,
        hidden: Tensor | None = None,
        *,
        targets: Tensor | bool | None = None,
        output_processor: OutputProcessor | None = None,
        output_processor_context: Any = None,
        decode_state: DecodeState | None = None,
        recorder: Recorder = NO_RECORDER,
    ) -> Any:
        """Runs this stage. The last one returns the output processor's result unchanged.

        `hidden` [T / tp, H] comes from the stage before and is given on every stage but the first; other stages than
        the last return hidden states of that shape. Without a processor the last stage returns logits [T, vocab], or
        per-token losses [T] if `targets` are given: True for the microbatch's own next tokens, or a tensor [T] with
        -100 where there is none. `decode_state` is the cache of earlier tokens in generation. `recorder` records
        communication and waits, in forward and backward.
        """
        processor, processor_context = self._resolve_processor(targets, output_processor, output_processor_context)
        context = self._context(microbatch.layer_microbatch, decode_state, recorder, microbatch.segments)
        embedding = self._embedding_weight()
        hidden = self.layers(self._stage_input(hidden, embedding, context), context)
        if not self.stage.last:
            return hidden
        hidden, context = self._final(hidden, context), self._output_context(microbatch, context)
        return self._run_processor(hidden, embedding, processor, processor_context, context)

    def build_schedule_plan(
        self,
        microbatch: Microbatch,
        hidden: Tensor | None = None,
        *,
        targets: Tensor | bool | None = None,
        output_processor: OutputProcessor | None = None,
        output_processor_context: Any = None,
        recorder: Recorder = NO_RECORDER,
    ) -> SchedulePlan:
        """Returns the same forward as a plan, in segments that can be interleaved with another microbatch's.

        Weights must already be all-gathered: its steps do not call layers, so FSDP's hooks do not run. The plan
        has the steps of the multi-token-prediction depths if the processor has `mtp_options`.
        """
        processor, processor_context = self._resolve_processor(targets, output_processor, output_processor_context)
        context = self._context(microbatch.layer_microbatch, recorder=recorder, segments=microbatch.segments)

        def embed(context: ForwardContext) -> Mapping[str, Any]:
            embedding = self._embedding_weight()
            return {"embedding": embedding, "hidden": self._stage_input(hidden, embedding, context)}

        def output(hidden: Tensor, context: ForwardContext) -> Mapping[str, Any]:
            return {OUTPUT: hidden}

        # The tied embedding is a value that the first step writes and the last one reads, so that its gradients are
        # summed as in a plain forward.
        steps = [step for layer in self.layers.values() for step in cast(LogicalLayer, layer).planned_steps(context)]
        output_steps = (
            self._planned_output(processor, processor_context, context, self._output_context(microbatch, context))
            if self.stage.last
            else [PlannedStep(compute("output", output, never_recompute=True), context, name="output")]
        )
        return SchedulePlan(
            [
                PlannedStep(compute("embed", embed, never_recompute=True), context, name="embed", completes=(self,)),
                *steps,
                *output_steps,
            ],
            context,
            # Gradients of weights that are used twice are summed, and so not deferred.
            deferred_wgrad=not (self.has_mtp and self.mtp.repeated),
        )

    def _planned_output(
        self,
        processor: OutputProcessor,
        processor_context: Any,
        trunk_context: ForwardContext,
        context: ForwardContext,
    ) -> list[PlannedStep]:
        """Returns a plan's steps from the last layer to the processor's result, with the MTP depths it declares."""
        mtp_options: MTPOptions | None = getattr(processor, "mtp_options", None)
        depths: list[PlannedStep] = []
        reads: tuple[str, ...] = output_names(0)
        mtp_layers = self.mtp.layers if self.has_mtp else ()
        if mtp_options is not None and mtp_layers:
            depths, mtp_layers = list(self.mtp.planned_steps(context, self._embed, mtp_options)), ()
            reads += tuple(name for depth in range(self.mtp.depths) for name in output_names(depth + 1))

        def output(*values: Any) -> Mapping[str, Any]:  # three per depth (`output_names`), and the context
            (hidden, embedding, context), *mtp_outputs = (values[i : i + 3] for i in range(0, len(reads), 3))
            planned = PlannedDepths(mtp_options, mtp_outputs) if mtp_options is not None and mtp_outputs else None
            return {OUTPUT: self._run_processor(hidden, embedding, processor, processor_context, context, planned)}

        return [
            final_norm_step(0, partial(self._final, context=trunk_context), context),
            *depths,
            PlannedStep(
                LayerStep("output", "compute", reads, output, never_recompute=True),
                context,
                name="output",
                completes=mtp_layers,
            ),
        ]

    def _context(
        self,
        microbatch: Microbatch,
        decode_state: DecodeState | None = None,
        recorder: Recorder = NO_RECORDER,
        segments: SharedSegments | None = None,
    ) -> ForwardContext:
        if microbatch.routing is not None:
            check_routing(microbatch.routing, self.routers)
        return ForwardContext(
            microbatch,
            self.mesh,
            segments=segments,
            decode_state=decode_state,
            recompute=self.recompute,
            scan_backend=self.scan_backend,
            routers=tuple(self.routers),
            recorder=recorder,
        )

    def _output_context(self, microbatch: Microbatch, context: ForwardContext) -> ForwardContext:
        """Returns the context of the output processor and the MTP depths, whose sequences are whole."""
        return context if microbatch.segments is None else self._context(microbatch, recorder=context.recorder)

    def _final(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Returns the final states of whole sequences, from the last layer's output: both [T / tp, H]."""
        hidden = self.norm(hidden)
        if context.segments is None:
            return hidden
        for axis in (self.mesh.tp, self.mesh.cp):
            hidden = gather_from_sequence(hidden, axis.group)
        return context.segments.rows(hidden)

    def _run_processor(
        self,
        hidden: Tensor,
        embedding: Tensor | None,
        processor: OutputProcessor,
        processor_context: Any,
        context: ForwardContext,
        planned: MTPDepths | None = None,
    ) -> Any:
        """Calls the processor with the final states. `planned` are MTP depths that a plan has computed."""
        inputs = self._output_inputs(hidden, context, embedding)
        if self.has_mtp:
            depths = planned or LazyDepths(self.mtp, hidden, context, embedding, self._embed)
            inputs = replace(inputs, hidden=view_for_processor(hidden), mtp=depths)
        return processor(inputs, processor_context)

    def draft(self, hidden: Tensor, microbatch: Microbatch, decode_state: DecodeState) -> OutputInputs:
        """Returns the head's inputs at the first MTP depth, from final states [T / tp, H], for speculative decoding.

        The microbatch has the token after each state. A generator calls this once that token is sampled; training uses
        `OutputInputs.depths`.
        """
        context = self._context(microbatch, decode_state)
        return self._output_inputs(self.mtp[0](hidden, self._embed(microbatch.tokens), context), context)

    def output_head(self, embedding: Tensor | None = None) -> OutputHead:
        """Returns the head, with the embedding's weight if they are tied: `embedding`, if the caller has read it."""
        if not self.stage.last:
            raise ValueError(
                f"stage {self.stage.index} of {self.stage.count} has no output head; the last stage has it."
            )
        return OutputHead(
            weight=self._head_weight(embedding),
            logit_config=LogitConfig(
                vocab_start=self.mesh.tp.block(self.config.vocab_size)[0],
                vocab_size=self.config.vocab_size,
                logit_scale=self.config.logit_scale,
                softcap=self.config.logit_softcap,
                group=self.mesh.tp.group,
                backend=self.head_config.backend,
                memory_budget=self.head_config.memory_budget,
            ),
            tp=self.mesh.tp,
            value_head=self.value_head,
            adapter=None if self.config.tied_head else self.head.adapter,
        )

    def _head_weight(self, embedding: Tensor | None) -> Tensor:
        if not self.config.tied_head:
            weight = local(self.head.weight)
            return weight if self.head.adapter is None else self.head.adapter.extend_weight(weight)
        return local(self.embedding.weight) if embedding is None else embedding

    def _embedding_weight(self) -> Tensor | None:
        """Returns this rank's shard of the embedding weight; None if this stage has none."""
        if not hasattr(self, "embedding"):
            return None
        weight = local(self.embedding.weight)
        # Head and depths both use a tied one. A view has no main_grad, so autograd sums in one order in every schedule.
        return weight.view_as(weight) if self.config.tied_head and self.has_mtp else weight

    def sharded_separately(self) -> tuple[SeparateUnit, ...]:
        """Returns all modules that FSDP shards separately: those of the blocks, and the value head in fp32."""
        units = [unit for block in self.blocks for unit in block.sharded_separately()]
        return (*units, *([] if self.value_head is None else [SeparateUnit(self.value_head, fp32=True)]))

    @torch.no_grad()
    def reset(self, seed: int = 0, *, only: Container[str] | None = None) -> None:
        """Initialises every parameter from the seed and its name: the same in every layout and dtype.

        CPU and GPU give different random numbers. With `only`, other tensors are unchanged.
        """
        std = self.config.initializer_range
        blocks_by_prefix = {f"{block.name}.": block for block in self.blocks}
        for name, parameter in self.named_parameters():
            if only is not None and name not in only:
                continue
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            prefix = next((prefix for prefix in blocks_by_prefix if name.startswith(prefix)), None)
            full_tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            if is_adapter(name):
                reset_adapter(name, full_tensor, generator)
            elif prefix is None:
                reset_parameter(role_of(self, name), full_tensor, std, generator, norm=1.0 - self.config.norm_offset)
            else:
                blocks_by_prefix[prefix].reset(name.removeprefix(prefix), full_tensor, std, generator)
            local_shard(parameter).copy_(full_tensor[region(parameter)])
        for buffer in self.buffers() if only is None else ():
            buffer.zero_()

    def _stage_input(self, hidden: Tensor | None, embedding: Tensor | None, context: ForwardContext) -> Tensor:
        """Returns the embedded tokens on the first stage, else `hidden` of the stage before, [T / tp, H]."""
        microbatch = context.microbatch
        if self.stage.first:
            if hidden is not None:
                raise ValueError("the first stage embeds the microbatch's tokens itself; leave `hidden` out.")
            tokens, size = microbatch.tokens, self.config.vocab_size
            # On a GPU the check would make the host wait; there the embedding kernel fails.
            if not tokens.is_cuda and tokens.numel() and int(tokens.max()) >= size:
                raise ValueError(f"token {int(tokens.max())} is out of range: the vocabulary ends at {size - 1}.")
            embedded = self._embed(tokens, embedding)
            return embedded.requires_grad_() if self.training and torch.is_grad_enabled() else embedded
        expected = (len(microbatch) // self.mesh.tp.size, self.config.hidden_size)
        if hidden is None or tuple(hidden.shape) != expected:
            shape = "nothing" if hidden is None else tuple(hidden.shape)
            raise ValueError(
                f"stage {self.stage.index} of {self.stage.count} continues from hidden states {expected}, "
                f"but got {shape}."
            )
        return hidden

    def _output_inputs(self, hidden: Tensor, context: ForwardContext, embedding: Tensor | None = None) -> OutputInputs:
        microbatch = context.microbatch
        known_target_count = microbatch.targets, microbatch.target_count
        head = replace(
            self.output_head(embedding),
            known_target_count=known_target_count,
            temperature=microbatch.temperature,
            sampling_masks=microbatch.columns.get(SAMPLING_MASK),
        )
        return OutputInputs(
            hidden=hidden,
            head=head,
            microbatch=microbatch,
            layout=self.layout,
            config=self.config,
        )

    def _embed(self, tokens: Tensor, weight: Tensor | None = None) -> Tensor:
        """Embeds tokens, [T] -> [T / tp, H]."""
        embedded: Tensor = self.embedding(tokens, weight)
        scale = self.config.embedding_scale
        if self.config.embedding_scale_rounded:
            scale = torch.tensor(scale, dtype=embedded.dtype).item()  # on the host
        return embedded if scale == 1.0 else embedded * scale

    def _resolve_processor(
        self, targets: Tensor | bool | None, processor: OutputProcessor | None, context: Any
    ) -> tuple[OutputProcessor, Any]:
        if not isinstance(targets, Tensor | bool | None):
            raise TypeError(f"targets is True, a tensor [T] or None, but is a {type(targets).__name__}.")
        wants_loss = targets is not None and targets is not False
        if not self.stage.last and (processor is not None or wants_loss):
            raise ValueError(
                f"stage {self.stage.index} of {self.stage.count} has no output head, so an output processor or targets "
                "would be ignored here; give them to the last stage."
            )
        if processor is None:
            if context is not None:
                raise ValueError("output_processor_context was given without an output_processor to receive it.")
            if not wants_loss:
                return logits_processor, None
            return token_loss_processor, None if targets is True else targets
        if not callable(processor):
            raise TypeError(
                f"output_processor must be callable as (inputs, context), but is a {type(processor).__name__}."
            )
        if wants_loss:
            raise ValueError(
                "give either targets or an output_processor; a processor can read inputs.microbatch.targets."
            )
        return processor, context


def check_storage(parameters: Iterable[tuple[str, nn.Parameter]], separate: Sequence[SeparateUnit], mesh: Mesh) -> None:
    """Raises for plain parameters, which tensor-parallel ranks would train independently."""
    if mesh.tp.size == 1:
        return
    of_experts = {id(parameter) for unit in separate if unit.experts for parameter in unit.module.parameters()}
    for name, parameter in parameters:
        if not is_dtensor(parameter) and id(parameter) not in of_experts:
            raise TypeError(
                f"{name} is a plain parameter, which tp={mesh.tp.size} ranks would update independently; "
                "make it with postlude.model.parallel.sharded_parameter."
            )

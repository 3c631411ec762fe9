"""`LogprobsProcessor`: the fused head as an `output_processor` for Megatron-Core's GPTModel. Needs no Megatron.

    model(..., labels=labels, output_processor=LogprobsProcessor(vocab_size=len(tokenizer), entropy=True))

Megatron runs it on the last pipeline stage, after the final norm and after its own MTP loss. HybridModel, MambaModel
and Megatron before 0.18 have no `output_processor`: there `logprobs_output_layer` replaces the output layer for a call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from postlude.ops.collectives import copy_to_group, gather_from_sequence
from postlude.ops.linear_logprobs import TokenStats, linear_logprobs
from postlude.ops.linear_logprobs.backends import HeadBackend

BY_HAND = "Call postlude's linear_logprobs in a processor of your own."


@dataclass(frozen=True)
class MegatronContext:
    """Values that change from call to call, passed as `output_processor_context`."""

    targets: Tensor | None = None  # [b, s] instead of labels, with Megatron's shift: entry i is the token after i
    temperature: float | Tensor | None = None  # a number or [b, s], instead of the processor's


@dataclass(frozen=True)
class LogprobsProcessor:
    """An `output_processor` that returns the log-probs of the labels, and more on request, without making logits.

    Results are [b, s] in Megatron's order: entry i belongs to `labels[:, i]`, the token **after** position i, as in the
    losses GPTModel returns. They are the same on every tensor-parallel rank, with one small collective per call besides
    the gather of a sequence-parallel shard. Gradients reach hidden states and weight as through the output layer. Under
    context parallelism every rank scores its own tokens.

    Args:
        vocab_size: the tokenizer's size. Megatron pads the vocabulary; without this the padding takes part in the
            softmax, as it does in Megatron's own cross entropy.
        temperature: divides the logits. Per call or per token: `MegatronContext`.
        entropy, topk, lse, top1: results besides the log-prob, see `linear_logprobs`.
        ignore_index: the label of positions that are not projected: every result is 0 there.
        use_loss_mask: do not project positions where `loss_mask` is 0 either.
        returns: "stats" for `TokenStats`. Megatron's combined 1F1B schedule (`overlap_moe_expert_parallel_comm`) hangs
            attributes on the output, so there it must be one tensor: "tensor" gives [n, b, s], the log-prob and then
            what was asked of entropy and lse. `logprob, entropy = output.unbind()` takes it apart.
        backend, memory_budget: see `linear_logprobs`.
    """

    vocab_size: int | None = None
    temperature: float = 1.0
    entropy: bool = False
    topk: int = 0
    lse: bool = False
    top1: bool = False
    ignore_index: int = -100
    use_loss_mask: bool = True
    returns: Literal["stats", "tensor"] = "stats"
    backend: HeadBackend = "auto"
    memory_budget: int | None = None

    def __post_init__(self) -> None:
        if self.returns not in ("stats", "tensor"):
            raise ValueError(f'returns must be "stats" or "tensor", but is {self.returns!r}.')
        if self.returns == "tensor" and (self.topk or self.top1):
            raise ValueError(
                'returns="tensor" holds logprob, entropy and lse alone. Drop topk and top1, or take "stats".'
            )

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        labels: Tensor | None,
        loss_mask: Tensor | None,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        decoder_input: Any,
        inference_context: Any,
        packed_seq_params: Any,
        runtime_gather_output: bool | None,
        context: MegatronContext | None,
        compute_language_model_loss: Callable[..., Tensor],
        scale_logits: Callable[[Tensor], Tensor],
        config: Any,
        **later: Any,
    ) -> TokenStats | Tensor:
        """Takes the hook's sixteen arguments. Returns `TokenStats` of [b, s], or one tensor [n, b, s].

        `hidden_states` is [s, b, h], or this rank's [s / tp, b, h] under sequence parallelism. An argument of a later
        Megatron is refused by name unless it is None: it might change the logits, and a wrong log-prob trains quietly
        where an error does not.
        """
        unknown = sorted(name for name, value in later.items() if value is not None)
        if unknown:
            raise TypeError(
                f"Megatron's hook passed {', '.join(unknown)}, which this version of postlude does not know. Upgrade "
                "postlude, or drop it in a processor of your own that calls this one if it does not change the logits."
            )
        if inference_context is not None:
            raise ValueError("LogprobsProcessor is for training and scoring: call the model without inference_context.")
        if context is not None and not isinstance(context, MegatronContext):
            raise TypeError(f"output_processor_context must be a MegatronContext, but is a {type(context).__name__}.")
        context = context or MegatronContext()
        stats = self._score(
            hidden_states,
            output_layer,
            output_layer.weight if output_weight is None else output_weight,
            self._targets(labels, loss_mask, context),
            context.temperature,
            _scale_of(scale_logits),
            config,
        )
        results = {field.name: getattr(stats, field.name) for field in fields(stats)}
        batch_first = {name: rows.transpose(0, 1).contiguous() for name, rows in results.items() if rows is not None}
        return torch.stack([*batch_first.values()]) if self.returns == "tensor" else TokenStats(**batch_first)

    def _score(
        self,
        hidden: Tensor,
        layer: Any,
        weight: Tensor,
        targets: Tensor,
        temperature: float | Tensor | None,
        logit_scale: float,
        config: Any,
    ) -> TokenStats:
        """Scores [s, b, h] or [s / tp, b, h] with this rank's weight and targets [b, s]. Returns results of [s, b]."""
        _check_layer(layer, weight, config)
        temperature = self.temperature if temperature is None else temperature
        if isinstance(temperature, Tensor) and temperature.dim() == 2:
            temperature = temperature.t()
        group, rows = layer.tp_group, weight.shape[0]
        size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        vocab_size = rows * size if self.vocab_size is None else self.vocab_size
        if vocab_size > rows * size:
            raise ValueError(f"vocab_size is {vocab_size}, but the output layer has {rows} rows x {size} ranks.")
        if size > 1:
            gather = gather_from_sequence if layer.sequence_parallel else copy_to_group
            hidden = gather(hidden, group)  # [s, b, h]
        return linear_logprobs(
            hidden,
            weight,
            targets.t(),
            bias=None if layer.skip_bias_add else layer.bias,  # Megatron's models drop a skipped bias
            temperature=temperature,
            logit_scale=logit_scale,
            ignore_index=self.ignore_index,
            vocab_start=rank * rows,
            vocab_size=vocab_size,
            group=group,
            entropy=self.entropy,
            topk=self.topk,
            lse=self.lse,
            top1=self.top1,
            backend=self.backend,
            memory_budget=self.memory_budget,
        )

    def _targets(self, labels: Tensor | None, loss_mask: Tensor | None, context: MegatronContext) -> Tensor:
        """Returns targets [b, s], `ignore_index` at positions that are not projected."""
        targets = labels if context.targets is None else context.targets
        if targets is None:
            raise ValueError("LogprobsProcessor needs tokens to score: give the model labels, or the context targets.")
        if self.use_loss_mask and loss_mask is not None:
            targets = targets.masked_fill(loss_mask == 0, self.ignore_index)
        return targets


@contextmanager
def logprobs_output_layer(
    model: Any, processor: LogprobsProcessor, targets: Tensor, *, temperature: float | Tensor | None = None
) -> Iterator[None]:
    """Makes the model return [b, s, n] instead of logits inside the block, if it is called without labels.

    The first of the n is the log-prob of each target; entropy and lse follow if `processor` requests them.

        with logprobs_output_layer(model, LogprobsProcessor(entropy=True), targets=labels):
            output = model(tokens, position_ids, attention_mask)
        logprob, entropy = output.unbind(-1)

    For Megatron models without `output_processor`. Another module, with the same parameters under the same names,
    replaces `model.output_layer` until the end of the block, also after an error; no method is replaced. The backward
    pass may run outside. On a pipeline stage without an output layer nothing changes.

    Args:
        model: a GPTModel, HybridModel or MambaModel: what DDP and Float16Module wrap, not the wrapper.
        processor: with `returns="tensor"` or without topk and top1. Its `use_loss_mask` has no mask to use.
        targets: [b, s] with Megatron's shift: entry i is the token after position i, or `ignore_index`.
        temperature: a number or [b, s], instead of the processor's.
    """
    layer = getattr(model, "output_layer", None)
    if layer is None or not model.post_process:
        yield
        return
    if processor.topk or processor.top1:
        raise ValueError("logprobs_output_layer returns logprob, entropy and lse alone. Drop topk and top1.")
    if getattr(model.config, "mtp_num_layers", None):
        raise ValueError("logprobs_output_layer needs a model without MTP, whose loss also calls the output layer.")
    if getattr(model.config, "use_mup", False) and model.config.mup_output_mult != 1.0:
        raise ValueError(
            f"logprobs_output_layer cannot undo mup_output_mult = {model.config.mup_output_mult}, by which the model "
            f"multiplies what its output layer returns. {BY_HAND}"
        )
    check = model.register_forward_pre_hook(_refuse_labels, with_kwargs=True)
    model.output_layer = _LogprobsLayer(layer, processor, targets, temperature, model.config)
    try:
        yield
    finally:
        model.output_layer = layer
        check.remove()


def _refuse_labels(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    arguments = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    for name in ("labels", "inference_context", "runtime_gather_output"):
        if arguments.get(name) is not None:
            raise ValueError(f"Inside logprobs_output_layer call the model without {name}: it returns no logits.")


class _LogprobsLayer(nn.Module):
    """Has an output layer's place and parameters, and returns [s, b, n] results where that returned logits."""

    def __init__(
        self,
        layer: Any,
        processor: LogprobsProcessor,
        targets: Tensor,
        temperature: float | Tensor | None,
        config: Any,
    ) -> None:
        super().__init__()
        for name, parameter in layer.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self._arguments = (layer, processor, targets, temperature, config)

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """As a ColumnParallelLinear's: [s, b, h] -> [s, b, n] and no bias."""
        layer, processor, targets, temperature, config = self._arguments
        stats = processor._score(
            hidden, layer, layer.weight if weight is None else weight, targets, temperature, 1.0, config
        )
        rows = [stats.logprob, *(row for row in (stats.entropy, stats.lse) if row is not None)]
        return torch.stack(rows, dim=-1), None


def _scale_of(scale_logits: Callable[[Tensor], Tensor]) -> float:
    """Returns the factor by which `scale_logits` multiplies logits (MuP's), found by calling it."""
    probe = torch.tensor([1.0, 0.0, -2.0, 4096.0], dtype=torch.float64)  # powers of two: no rounding hides a factor
    scaled = scale_logits(probe.clone())
    scale = float(scaled[0])
    if not torch.equal(scaled, probe * scale):
        raise ValueError(
            f"LogprobsProcessor can honour a factor on the logits alone, but scale_logits turns {probe.tolist()} into "
            f"{scaled.tolist()}. {BY_HAND}"
        )
    return scale


def _check_layer(layer: Any, weight: Tensor, config: Any) -> None:
    """Raises for an output layer whose logits or gradients differ from those of hidden · weightᵀ."""
    kind: Any = type(layer)
    plain = next((base for base in kind.__mro__ if base.__name__ == "ColumnParallelLinear"), None)
    if plain is None or kind.forward is not plain.forward or "forward" in vars(layer):
        raise TypeError(
            f"LogprobsProcessor needs a plain ColumnParallelLinear, but the output layer is a {kind.__name__} with a "
            f"forward of its own, whose logits may be others. {BY_HAND}"
        )
    if isinstance(weight, DTensor) or weight.shape[0] != layer.output_size_per_partition:
        raise ValueError(
            f"LogprobsProcessor needs the {layer.output_size_per_partition} rows of this rank's output layer, but its "
            f"weight is a {type(weight).__name__} {list(weight.shape)}: FSDP has not gathered it."
        )
    if getattr(layer, "disable_grad_reduce", False):
        raise ValueError(
            "LogprobsProcessor completes hidden's gradient: build the output layer without disable_grad_reduce."
        )
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return
    if getattr(config, "defer_embedding_wgrad_compute", False):
        raise ValueError("LogprobsProcessor defers no gradient: set defer_embedding_wgrad_compute=False.")
    # MTP's own pass through the layer adds to main_grad and marks it as done; Megatron's DDP then drops our gradient,
    # unless the weight says that its .grad counts too.
    fused_mtp = getattr(config, "gradient_accumulation_fusion", False) and getattr(config, "mtp_num_layers", None)
    if fused_mtp and not getattr(weight, "zero_out_wgrad", False):
        raise ValueError(
            "With gradient_accumulation_fusion and MTP, Megatron would drop LogprobsProcessor's gradient of the head. "
            "Set zero_out_wgrad = True on the output layer's weight once, or gradient_accumulation_fusion=False."
        )

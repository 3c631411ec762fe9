"""`LogprobsProcessor`: the fused head as an `output_processor` for Megatron-Core's GPTModel. Needs no Megatron.

    model(..., labels=labels, output_processor=LogprobsProcessor(vocab_size=len(tokenizer), entropy=True))

Megatron runs it on the last pipeline stage, after the final norm and after its own MTP loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from postlude.ops.collectives import copy_to_group, gather_from_sequence
from postlude.ops.linear_logprobs import TokenStats, linear_logprobs
from postlude.ops.linear_logprobs.backends import Backend

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
        entropy, topk, lse, hit: results besides the log-prob, see `linear_logprobs`.
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
    hit: bool = False
    ignore_index: int = -100
    use_loss_mask: bool = True
    returns: Literal["stats", "tensor"] = "stats"
    backend: Backend = "auto"
    memory_budget: int | None = None

    def __post_init__(self) -> None:
        if self.returns not in ("stats", "tensor"):
            raise ValueError(f'returns must be "stats" or "tensor", but is {self.returns!r}.')
        if self.returns == "tensor" and (self.topk or self.hit):
            raise ValueError(
                'returns="tensor" holds logprob, entropy and lse alone. Drop topk and hit, or take "stats".'
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
        """The hook's sixteen arguments -> `TokenStats` of [b, s], or one tensor [n, b, s].

        `hidden_states` is [s, b, h], or this rank's [s / tp, b, h] under sequence parallelism. An argument of a later
        Megatron is refused by name unless it is None: it might change the logits, and a wrong log-prob trains quietly
        where an error does not.
        """
        unknown = sorted(name for name, given in later.items() if given is not None)
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
        temperature = self.temperature if context.temperature is None else context.temperature
        if isinstance(temperature, Tensor) and temperature.dim() == 2:
            temperature = temperature.t()

        weight = output_layer.weight if output_weight is None else output_weight  # [padded vocabulary / tp, h]
        _check_layer(output_layer, weight, config)
        group, rows = output_layer.tp_group, weight.shape[0]
        size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        vocab_size = rows * size if self.vocab_size is None else self.vocab_size
        if vocab_size > rows * size:
            raise ValueError(f"vocab_size is {vocab_size}, but the output layer has {rows} rows x {size} ranks.")
        targets, logit_scale = self._targets(labels, loss_mask, context), _scale_of(scale_logits)
        if size > 1:
            gather = gather_from_sequence if output_layer.sequence_parallel else copy_to_group
            hidden_states = gather(hidden_states, group)  # [s, b, h]

        stats = linear_logprobs(
            hidden_states,
            weight,
            targets.t(),
            bias=None if output_layer.skip_bias_add else output_layer.bias,  # GPTModel drops a skipped bias
            temperature=temperature,
            logit_scale=logit_scale,
            ignore_index=self.ignore_index,
            vocab_start=rank * rows,
            vocab_size=vocab_size,
            group=group,
            entropy=self.entropy,
            topk=self.topk,
            lse=self.lse,
            hit=self.hit,
            backend=self.backend,
            memory_budget=self.memory_budget,
        )
        results = {field.name: getattr(stats, field.name) for field in fields(stats)}
        batch_first = {name: rows.transpose(0, 1).contiguous() for name, rows in results.items() if rows is not None}
        return torch.stack([*batch_first.values()]) if self.returns == "tensor" else TokenStats(**batch_first)

    def _targets(self, labels: Tensor | None, loss_mask: Tensor | None, context: MegatronContext) -> Tensor:
        """[b, s], `ignore_index` where nothing is to be projected."""
        targets = labels if context.targets is None else context.targets
        if targets is None:
            raise ValueError("LogprobsProcessor needs tokens to score: give the model labels, or the context targets.")
        if self.use_loss_mask and loss_mask is not None:
            targets = targets.masked_fill(loss_mask == 0, self.ignore_index)
        return targets


def logprobs_output_processor(**hook: Any) -> TokenStats | Tensor:
    """`LogprobsProcessor()` as a function: the log-probs of the labels [b, s], over the padded vocabulary."""
    return LogprobsProcessor()(**hook)


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

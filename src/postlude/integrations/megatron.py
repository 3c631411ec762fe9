"""`LogprobsProcessor`: the fused head as an `output_processor` for Megatron-Core's GPTModel. Needs no Megatron.

    model(..., labels=labels, output_processor=LogprobsProcessor(vocab_size=len(tokenizer), entropy=True))

Megatron runs it on the last pipeline stage, after the final norm and after its own MTP loss. HybridModel, MambaModel
and Megatron before 0.18 have no `output_processor`: `OutputHook` adds it. It also gives processors the MTP depths.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from postlude.ops.collectives import copy_to_group, gather_from_sequence
from postlude.ops.linear_logprobs import TokenStats, linear_logprobs
from postlude.ops.linear_logprobs.resolved_call import HeadBackend

BY_HAND = "Call postlude's linear_logprobs in a processor of your own."
CALL_ARGUMENTS = (
    "labels",
    "loss_mask",
    "input_ids",
    "position_ids",
    "attention_mask",
    "decoder_input",
    "inference_context",
    "packed_seq_params",
    "runtime_gather_output",
)
"""The arguments of a model's call that the hook passes on."""


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
        with torch.no_grad():  # no rows: runs the layer's hooks, in which Megatron's DDP waits for the gathered weight
            layer(hidden[:0], weight=weight, runtime_gather_output=False)
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


@dataclass(frozen=True)
class MegatronDepth:
    """One multi-token-prediction depth of a call, to be scored by a processor."""

    labels: Tensor  # [b, s]: the token that the depth predicts at each position
    loss_mask: Tensor  # [b, s]: 0 where there is no such token
    hook: Mapping[str, Any]  # the hook's arguments, with the depth's hidden states

    def __call__(self, processor: Callable[..., Any], context: Any = None, *, stop_head: bool | None = None) -> Any:
        """Returns what `processor` returns for the depth.

        With `stop_head` no gradient reaches the head's weight. Default: as in Megatron's loss, `mtp_detach_heads`.
        """
        hook = dict(self.hook)
        if getattr(hook["config"], "mtp_detach_heads", False) if stop_head is None else stop_head:
            weight = hook["output_weight"]
            hook["output_weight"] = (hook["output_layer"].weight if weight is None else weight).detach()
        return processor(labels=self.labels, loss_mask=self.loss_mask, context=context, **hook)


class OutputHook:
    """Adds the arguments `output_processor` and `output_processor_context` to a Megatron model's call.

        OutputHook(model)  # a HybridModel, MambaModel or GPTModel: what DDP and Float16Module wrap, not the wrapper
        stats = model(tokens, position_ids, mask, labels=labels, output_processor=LogprobsProcessor(entropy=True))

    The processor gets what GPTModel passes to its hook, `decoder_input` only if the caller passed it, and its result is
    the model's output. Megatron's own MTP loss runs before it, as in GPTModel. If the processor has a parameter `mtp`,
    that loss does not run: `mtp` is a tuple with an `MegatronDepth` for each depth, and the processor returns what is
    trained of them. With `mtp_detach_heads` in Megatron's config their gradient stops at the trunk and the embedding.

    The two are torch's forward hooks; `remove()` takes them off. During a call with a processor the model's
    `post_process` is False, so that its forward ends before the output layer. Calls without one are unchanged.
    """

    def __init__(self, model: Any) -> None:
        self._call: tuple[Callable[..., Any], Any, Mapping[str, Any]] | None = None
        self._handles = (
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, prepend=True, with_kwargs=True, always_call=True),
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        processor = kwargs.pop("output_processor", None)
        context = kwargs.pop("output_processor_context", None)
        if processor is not None and model.post_process:
            call = inspect.signature(model.forward).bind(*args, **kwargs).arguments
            if any(call.get(name) is not None for name in ("inference_context", "inference_params")):
                raise ValueError("OutputHook is for training and scoring: call the model without inference_context.")
            model.post_process, self._call = False, (processor, context, call)
        return args, kwargs

    def _after(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor | None) -> Any:
        if self._call is None:
            return None  # torch then keeps the model's output
        (processor, context, call), self._call, model.post_process = self._call, None, True
        if hidden is None:  # the forward raised an error
            return None
        hook = _hook_arguments(model, call)
        takes_mtp = "mtp" in inspect.signature(processor).parameters
        mtp: tuple[MegatronDepth, ...] = ()
        if count := getattr(model.config, "mtp_num_layers", None):
            if takes_mtp:
                hidden, *depth_states = hidden.chunk(1 + count)
                mtp = tuple(_mtp_depths(model, hook, depth_states))
            else:
                hidden = _with_mtp_loss(model, hook, hidden)
        if takes_mtp:
            hook["mtp"] = mtp
        return processor(hidden_states=hidden, context=context, **hook)


def _hook_arguments(model: Any, call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the hook's arguments but for hidden_states and context, from the arguments of a model's call."""
    config = model.config
    scale = config.mup_output_mult if getattr(config, "use_mup", False) else 1.0
    return {
        "output_layer": model.output_layer,
        "output_weight": (
            model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        ),
        **{name: call.get(name) for name in CALL_ARGUMENTS},
        "compute_language_model_loss": model.compute_language_model_loss,
        "scale_logits": lambda logits: logits * scale,
        "config": config,
    }


def _mtp_depths(model: Any, hook: Mapping[str, Any], depth_states: Sequence[Tensor]) -> Iterator[MegatronDepth]:
    """Yields each depth with labels and mask shifted by Megatron, as for its own MTP loss."""
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    def shift(tensor: Tensor) -> Tensor:
        rolled, _ = roll_tensor(tensor, cp_group=model.pg_collection.cp, packed_seq_params=hook["packed_seq_params"])
        return cast("Tensor", rolled)

    labels, mask = hook["labels"], hook["loss_mask"]
    if mask is None:
        mask = torch.ones_like(hook["input_ids"] if labels is None else labels)
    if labels is None:
        labels, mask = shift(hook["input_ids"]), shift(mask)
    for hidden in depth_states:
        labels, mask = shift(labels), shift(mask)
        others = {name: value for name, value in hook.items() if name not in ("labels", "loss_mask")}
        yield MegatronDepth(labels, mask, {**others, "hidden_states": hidden})


def _with_mtp_loss(model: Any, hook: Mapping[str, Any], hidden: Tensor) -> Tensor:
    """Returns the trunk's hidden states, in whose backward pass Megatron adds the gradient of its own MTP loss."""
    from megatron.core.transformer.multi_token_prediction import process_mtp_loss

    groups = model.pg_collection
    known = {"is_training": model.training, "cp_group": groups.cp, "tp_group": groups.tp, "hidden_states": hidden}
    values = {**hook, **known, "scale_logits_fn": hook["scale_logits"]}
    names = inspect.signature(process_mtp_loss).parameters  # tp_group and input_ids are newer than the others
    return cast("Tensor", process_mtp_loss(**{name: values[name] for name in names}))


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

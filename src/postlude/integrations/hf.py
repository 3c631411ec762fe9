"""`logprobs`: token log-probs of any transformers causal LM, from one call of its base model and without logits."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from postlude.ops.linear_logprobs import TokenStats, linear_logprobs
from postlude.ops.linear_logprobs.resolved_call import HeadBackend

IGNORE = -100
BY_HAND = "Call postlude's linear_logprobs on its hidden states with the weight, bias, scale and softcap it means."

# What a family does to its logits after the head, by the config's `model_type`. The same key is a factor in one family
# and a divisor in another, so a family is listed after its model was compared with its own logits.
TIMES = {
    "cohere": "logit_scale",
    "cohere2": "logit_scale",
    "cohere2_moe": "logit_scale",
    "cohere_compass_text": "logit_scale",
    "falcon_h1": "lm_head_multiplier",
    "hyperclovax": "logits_scaling",
}
OVER = dict.fromkeys(
    ("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "minicpm3"),
    "logits_scaling",
)
SOFTCAP = {
    "beam": "final_logit_softcapping",
    "gemma2": "final_logit_softcapping",
    "gemma3_text": "final_logit_softcapping",
    "gemma3n_text": "final_logit_softcapping",
    "gemma4_text": "final_logit_softcapping",
    "gemma4_unified_text": "final_logit_softcapping",
    "nanochat": "final_logit_softcapping",
    "recurrent_gemma": "logits_soft_cap",
    "vaultgemma": "final_logit_softcapping",
}
# Families whose config does not show that their logits are not just the head's output.
STRANGE = {
    "chameleon": "masks the logits of image tokens",
    "cpmant": "lets tokens see those after them",
    "prophetnet": "predicts with a second stream",
    "xlnet": "lets tokens see those after them",
}
# Parts of config keys that concern the head's output, and parts that concern something else.
ABOUT_LOGITS = ("logit", "lm_head_multiplier", "output_multiplier", "unpadded_vocab")
ABOUT_OTHERS = ("attn", "attention", "router", "keep", "init")


def logprobs(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    labels: Tensor | None = None,
    position_ids: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    topk: int = 0,
    lse: bool = False,
    top1: bool = False,
    backend: HeadBackend = "auto",
    memory_budget: int | None = None,
    **model_inputs: Any,
) -> TokenStats:
    """Returns the log-prob of every token given those before it, [B, S], and on request the rest of `TokenStats`.

    Entry [b, i] belongs to token i: its log-prob, the entropy of the distribution it was sampled from, and so on. A
    token without a predecessor has 0: the first of each row, or the first after left padding; so has padding. Values
    and parameter gradients are those of `model(...).logits`, softcap and logit scale included.

    Args:
        model: a transformers model with a language-modelling head. Its base model is called once; its own forward and
            its head's are not called, nor is anything patched.
        input_ids: [B, S].
        attention_mask: [B, S], 0 for padding, on either side. Left padding is as right as the model makes it: one that
            takes no position_ids and has absolute positions, such as Bart's decoder, counts padding too.
        labels: [B, S], the tokens to score, by default `input_ids`. Where it is -100 nothing is projected and every
            result is 0.
        position_ids: [B, S]. By default the real tokens of a row are counted, as `generate` does. A position of 0
            starts a sequence: rows may hold several, one after another, if `attention_mask` is None.
        temperature: a number, or [B, S] with an entry for each token.
        entropy, topk, lse, top1: results to return besides the log-prob, see `linear_logprobs`.
        backend, memory_budget: see `linear_logprobs`.
        model_inputs: passed to the base model, such as `pixel_values`.
    """
    base, head = _base_and_head(model)
    logit_scale, softcap = _logit_transform(model)
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask {list(attention_mask.shape)} must be {list(input_ids.shape)} like input_ids. "
            "For sequences packed in a row, give position_ids that start again at 0 instead."
        )
    if position_ids is None and attention_mask is not None and _counts_positions(model, base):
        position_ids = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)

    optional = {"attention_mask": attention_mask, "position_ids": position_ids}
    model_inputs |= {name: value for name, value in optional.items() if value is not None}
    if _accepts(base, "use_cache"):
        model_inputs["use_cache"] = False
    hidden = base(input_ids=input_ids, return_dict=True, **model_inputs).last_hidden_state  # [B, S, H]

    if isinstance(temperature, Tensor) and temperature.numel() > 1:
        temperature = _to_predictor(temperature, fill=1)
    stats = linear_logprobs(
        hidden,
        head.weight,
        _to_predictor(_tokens_to_score(input_ids, attention_mask, labels, position_ids), fill=IGNORE),
        bias=head.bias,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        ignore_index=IGNORE,
        entropy=entropy,
        topk=topk,
        lse=lse,
        top1=top1,
        backend=backend,
        memory_budget=memory_budget,
    )
    by_predictor = {field.name: getattr(stats, field.name) for field in fields(stats)}
    return TokenStats(**{name: _to_token(rows) for name, rows in by_predictor.items() if rows is not None})


def _tokens_to_score(
    input_ids: Tensor, attention_mask: Tensor | None, labels: Tensor | None, position_ids: Tensor | None
) -> Tensor:
    """Returns [B, S] ids, -100 for padding and for tokens without a predecessor."""
    tokens = input_ids if labels is None else labels
    if attention_mask is not None:
        real = attention_mask.bool()
        tokens = tokens.masked_fill(~(real & real.roll(1, dims=1)), IGNORE)
    if position_ids is not None and position_ids.dim() == 2:  # three rows a token for images: those start nothing
        tokens = tokens.masked_fill(position_ids == 0, IGNORE)
    return tokens


def _to_predictor(rows: Tensor, *, fill: int) -> Tensor:
    """Moves [B, S] values from tokens to the positions that predict them; the last position predicts nothing."""
    return torch.cat([rows[:, 1:], torch.full_like(rows[:, :1], fill)], dim=1)


def _to_token(rows: Tensor) -> Tensor:
    """Moves [B, S, ...] values from predicting positions to their tokens; the first token of a row gets 0."""
    return torch.cat([torch.zeros_like(rows[:, :1]), rows[:, :-1]], dim=1)


def _base_and_head(model: PreTrainedModel) -> tuple[nn.Module, nn.Linear]:
    """Returns the base model and head; raises TypeError if there is more. (`model.base_model` differs in Llama 4.)"""
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"logprobs needs a transformers PreTrainedModel, but got a {kind}, whose forward would be passed by. With "
            "LoRA give model.get_base_model(); under DDP, wrap a module whose forward calls logprobs."
        )
    if model.config.model_type in STRANGE:
        raise TypeError(f"logprobs does not know {kind}: it {STRANGE[model.config.model_type]}.")
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise TypeError(
            f"logprobs needs a head that is a plain nn.Linear, but that of {kind} is a {type(head).__name__}. {BY_HAND}"
        )
    if (model.tp_size or 1) > 1 or isinstance(head.weight, DTensor):
        raise TypeError(
            f"logprobs needs the head's whole weight, but that of this {kind} is sharded over ranks. Shard the base "
            "model alone, or use postlude's own models, which run in every layout."
        )
    others = {name: child for name, child in model.named_children() if child is not head}
    if len(others) != 1 or model.config.is_encoder_decoder:
        raise TypeError(
            f"logprobs needs a decoder and a head, but {kind} has {', '.join(others)} besides its head, so its logits "
            f"may be more than the head's output. {BY_HAND}"
        )
    return *others.values(), head


def _logit_transform(model: PreTrainedModel) -> tuple[float, float | None]:
    """Returns logit_scale and softcap from the config; raises if a key might change the logits in another way."""
    family, config = model.config.model_type, model.config.get_text_config()
    known = {table[family] for table in (TIMES, OVER, SOFTCAP) if family in table}
    for key, value in vars(config).items():
        about_logits = any(part in key for part in ABOUT_LOGITS) and not any(part in key for part in ABOUT_OTHERS)
        neutral = value is None or value is False or (value == 1 and "cap" not in key)
        if about_logits and not neutral and key not in known:
            raise ValueError(
                f"logprobs does not know what config key {key!r} = {value!r} of a {family!r} model does to its logits. "
                f"{BY_HAND}"
            )
    scale = 1.0
    if family in TIMES:
        scale = getattr(config, TIMES[family])
    elif family in OVER:
        scale = 1 / getattr(config, OVER[family])
    return scale, getattr(config, SOFTCAP[family]) if family in SOFTCAP else None


def _counts_positions(model: PreTrainedModel, base: nn.Module) -> bool:
    """Whether positions are counts over the mask: for text they are, for images not."""
    return model.config.get_text_config() is model.config and _accepts(base, "position_ids")


def _accepts(module: nn.Module, name: str) -> bool:
    return name in inspect.signature(module.forward).parameters

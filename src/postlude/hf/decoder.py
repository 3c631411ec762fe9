"""Config fields and tensor names that the Llama-like families share."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from postlude.checks import Bounds
from postlude.hf.family import EXPERT, HFConfig
from postlude.model import ModelConfig, Pattern
from postlude.model.block_config import NormPosition
from postlude.model.blocks import AttentionConfig, BlockConfig, MLPConfig, SlidingAttentionConfig
from postlude.ops.activation import Activation
from postlude.ops.rotary import RotaryConfig

ATTENTION_NAMES = {
    "attention.norm": "input_layernorm",
    **{f"attention.{name}": f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
}
QK_NORM_NAMES = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
MLP_NAMES = {"mlp.norm": "post_attention_layernorm", **{f"mlp.{name}": f"mlp.{name}" for name in PROJECTIONS}}
MOE_NAMES = {
    "moe.norm": "post_attention_layernorm",
    "moe.router": "mlp.gate",
    **{f"moe.experts.{name}": f"mlp.experts.{EXPERT}.{name}" for name in PROJECTIONS},
}
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}


def decoder_config(
    hf: HFConfig,
    *,
    mlp_bias: bool = False,
    norm: NormPosition = "pre",
    sliding: Sequence[bool] | None = None,
    layers: Sequence[str] | None = None,
    blocks: Mapping[str, BlockConfig] | None = None,
    **attention: Any,
) -> ModelConfig:
    """Returns a ModelConfig from the fields that these families share.

    `sliding` selects the layers with a sliding window (default: by `layer_types`, else none). `layers` are the second
    blocks of the layers (default "-"), and `blocks` the configs of those other than a gated MLP. `attention` are other
    fields of the attention's config, such as biases.
    """
    count = hf.num_hidden_layers
    sliding = sliding if sliding is not None else sliding_layers(hf)
    second = layers if layers is not None else ["-"] * count
    partial = "rotary_dim" in attention
    key_value_heads = getattr(hf, "num_key_value_heads", None)
    attention |= {
        "heads": hf.num_attention_heads,
        "kv_heads": hf.num_attention_heads if key_value_heads is None else key_value_heads,
        "head_dim": head_dim(hf),
        "norm": norm,
    }
    configs: dict[str, BlockConfig] = dict(blocks or {})
    if not all(sliding):
        configs["*"] = AttentionConfig(rotary=rotary(hf, "full_attention", partial=partial), **attention)
    if any(sliding):
        configs["S"] = SlidingAttentionConfig(
            rotary=rotary(hf, "sliding_attention", partial=partial), sliding_window=hf.sliding_window, **attention
        )
    if "-" in second and "-" not in configs:
        configs["-"] = MLPConfig(
            intermediate_size=hf.intermediate_size, activation=activation(hf), bias=mlp_bias, norm=norm
        )
    firsts = ("S" if slides else "*" for slides in sliding)
    return model_config(hf, [first + block for first, block in zip(firsts, second, strict=True)], configs)


def model_config(
    hf: HFConfig, layers: Sequence[str], blocks: Mapping[str, BlockConfig], *, norm_eps: float | None = None
) -> ModelConfig:
    """Returns a ModelConfig of these layers ("*-", "+E", …), with the fields that nearly all families share."""
    if getattr(hf, "attention_dropout", 0.0):
        warnings.warn(
            f"attention_dropout={hf.attention_dropout} in the config is not applied in training.", stacklevel=2
        )
    if not layers:
        raise ValueError(f"num_hidden_layers is {hf.num_hidden_layers}, but a model has at least one layer.")
    return ModelConfig(
        pattern=Pattern(segments=(tuple(layers),), mtp=()),
        hidden_size=hf.hidden_size,
        vocab_size=hf.vocab_size,
        blocks=blocks,
        tied_head=bool(hf.tie_word_embeddings),
        norm_eps=hf.rms_norm_eps if norm_eps is None else norm_eps,
        initializer_range=hf.initializer_range,
        family=hf.model_type,
        hf_config=hf.to_dict(),
    )


def head_dim(hf: HFConfig) -> int:
    """Returns the head dimension, which a config may omit."""
    width: int | None = getattr(hf, "head_dim", None)
    if width is not None:
        return width
    Bounds(least=1).check("num_attention_heads", hf.num_attention_heads)
    return int(hf.hidden_size // hf.num_attention_heads)


def sliding_layers(hf: HFConfig) -> list[bool]:
    """Returns which layers have a sliding window, by the config's `layer_types`."""
    kinds = getattr(hf, "layer_types", None) or ["full_attention"] * hf.num_hidden_layers
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"layer_types holds {', '.join(unknown)}, which {hf.model_type} has no block for.")
    if "sliding_attention" in kinds and not hf.sliding_window:
        raise ValueError("layer_types has sliding_attention, but sliding_window is not set.")
    return [kind == "sliding_attention" for kind in kinds]


def activation(hf: HFConfig, field: str = "hidden_act") -> Activation:
    hf_name = getattr(hf, field)
    if hf_name not in ACTIVATIONS:
        raise ValueError(f"{field} {hf_name!r} is not supported; there are {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[hf_name]


def rotary_dim(hf: HFConfig) -> int:
    """Returns the number of rotated features of a head, for families that may rotate a part."""
    parameters = hf.rope_parameters.get("full_attention", hf.rope_parameters)
    share = parameters.get("partial_rotary_factor", 1.0)
    Bounds(above=0, most=1).check("partial_rotary_factor", share)
    return int(head_dim(hf) * share)


def rotary(hf: HFConfig, layer_type: str, *, partial: bool = False) -> RotaryConfig:
    """Returns the rotary config of one type of layer: the parameters are given by layer type, or once for all.

    With `partial` the caller rotates `rotary_dim` features of a head; otherwise all must be rotated.
    """
    parameters = hf.rope_parameters
    parameters = parameters.get(layer_type, parameters)
    if not partial and parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor={parameters['partial_rotary_factor']} is not supported, only 1.0.")
    kind, theta = parameters.get("rope_type", "default"), parameters["rope_theta"]
    match kind:
        case "default":
            return RotaryConfig(theta=theta)
        case "linear":
            return RotaryConfig(theta=theta, scaling="linear", factor=parameters["factor"])
        case "llama3":
            return RotaryConfig(
                theta=theta,
                scaling="llama3",
                factor=parameters["factor"],
                original_length=parameters["original_max_position_embeddings"],
                low_frequency_factor=parameters["low_freq_factor"],
                high_frequency_factor=parameters["high_freq_factor"],
            )
        case "yarn":
            return _yarn(hf, parameters, theta)
    raise ValueError(f"rope_type {kind!r} is not supported; there are default, linear, llama3 and yarn.")


def _yarn(hf: HFConfig, parameters: Mapping[str, Any], theta: float) -> RotaryConfig:
    original = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor")
    if factor is None:
        factor = hf.max_position_embeddings / original
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        over, under = parameters.get("mscale"), parameters.get("mscale_all_dim")
        attention_factor = (
            yarn_magnitude(factor, over) / yarn_magnitude(factor, under)
            if over and under
            else yarn_magnitude(factor, 1.0)
        )
    return RotaryConfig(
        theta=theta,
        scaling="yarn",
        factor=factor,
        original_length=original,
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        attention_factor=attention_factor,
        truncate=parameters.get("truncate", True),
    )


def yarn_magnitude(factor: float, weight: float) -> float:
    """Returns the factor by which YaRN scales rotated vectors, given its context extension `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

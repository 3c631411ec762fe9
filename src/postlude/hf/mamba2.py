"""Mamba-2, and the tensor names of all families with Mamba-2 blocks."""

from __future__ import annotations

import math
from typing import Any

from postlude.hf.decoder import model_config
from postlude.hf.family import Family, HFConfig, Names, split_tensor
from postlude.model import ModelConfig
from postlude.model.blocks import MambaConfig

BACKBONE = {"embedding": "backbone.embeddings", "norm": "backbone.norm_f", "head": "lm_head"}


def to_model(hf: HFConfig) -> ModelConfig:
    """Returns the model's config: one block per layer. The residual stream has the model's dtype in any case."""
    check_activation(hf.hidden_act)
    block = mamba_config(hf, heads=hf.num_heads, head_dim=hf.head_dim, state_size=hf.state_size)
    return model_config(hf, ["M"] * hf.num_hidden_layers, {"M": block}, norm_eps=hf.layer_norm_epsilon)


def mamba_config(hf: HFConfig, **sizes: Any) -> MambaConfig:
    """Returns a block of these sizes, with the fields that Mamba-2 and Nemotron-H name equally.

    Each group is normed separately, as in the authors' code. transformers before 5.23 norms all groups of Mamba-2 and
    of Granite's hybrid models together, so it differs from this where there are several.
    """
    return MambaConfig(
        groups=hf.n_groups,
        norm_groups=hf.n_groups,
        conv_kernel=hf.conv_kernel,
        conv_bias=hf.use_conv_bias,
        bias=hf.use_bias,
        time_step_limit=time_step_limit(hf),
        time_step_start=(hf.time_step_min, hf.time_step_max),
        chunk=hf.chunk_size,
        **sizes,
    )


def check_activation(name: str) -> None:
    if name not in ("silu", "swish"):
        raise ValueError(f"a Mamba-2 block with activation {name!r} is not supported, only with silu.")


def time_step_limit(hf: HFConfig) -> tuple[float, float]:
    """Returns the bounds of the time step. JSON has no infinity, so it may be missing or text."""
    low, high = hf.time_step_limit or (0.0, math.inf)
    return float(low), float(high)


def mamba_names(mixer: str, config: ModelConfig) -> Names:
    """Returns the names of a block "mamba" whose module in their layer is `mixer`.

    They fuse the projections of z, x, B, C and dt, and the convolutions of x, B and C.
    """
    block = config.blocks["M"]
    assert isinstance(block, MambaConfig)
    inner, shared, taps = block.inner, block.shared, block.conv_kernel
    projections = {"z": inner, "x": inner, "b": shared, "c": shared, "dt": block.heads}
    convolved = {"x": inner, "b": shared, "c": shared}
    rows, channels = sum(projections.values()), sum(convolved.values())
    weight, kernel = f"{mixer}.in_proj.weight", f"{mixer}.conv1d.weight"
    return {
        "mamba.gated_norm": f"{mixer}.norm",
        "mamba.out_proj": f"{mixer}.out_proj",
        **{f"mamba.vectors.{vector}": f"{mixer}.{vector}" for vector in ("A_log", "dt_bias", "D")},
        **split_tensor("mamba.{}_proj.weight", weight, projections, (rows, config.hidden_size)),
        **split_tensor("mamba.{}_proj.bias", f"{mixer}.in_proj.bias", projections, (rows,)),
        **split_tensor("mamba.{}_conv.weight", kernel, convolved, (channels, 1, taps), view=(channels, taps)),
        **split_tensor("mamba.{}_conv.bias", f"{mixer}.conv1d.bias", convolved, (channels,)),
    }


MAMBA2 = Family(
    "mamba2",
    to_model,
    lambda config: {"mamba.norm": "norm", **mamba_names("mixer", config)},
    outer=BACKBONE,
    layer="backbone.layers.{layer}",
)

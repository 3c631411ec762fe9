"""Mamba-2, and the tensor names of all families with Mamba-2 blocks."""

from __future__ import annotations

import math
from typing import Any

from postlude.hf.decoder import model_config
from postlude.hf.family import Family, HFConfig, Names, TensorMapping, row_range
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
    """Refuses a convolution with another activation than silu."""
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
    names: dict[str, str | TensorMapping] = {
        "mamba.gated_norm": f"{mixer}.norm",
        "mamba.out_proj": f"{mixer}.out_proj",
        **{f"mamba.vectors.{vector}": f"{mixer}.{vector}" for vector in ("A_log", "dt_bias", "D")},
    }
    inner, shared = block.inner, block.shared
    projections = {"z_proj": inner, "x_proj": inner, "b_proj": shared, "c_proj": shared, "dt_proj": block.heads}
    start, total = 0, sum(projections.values())
    for name, size in projections.items():
        stop = start + size
        names[f"mamba.{name}.weight"] = row_range(f"{mixer}.in_proj.weight", start, stop, (total, config.hidden_size))
        names[f"mamba.{name}.bias"] = row_range(f"{mixer}.in_proj.bias", start, stop, (total,))
        start = stop
    start, total = 0, inner + 2 * shared
    for name, size in {"x_conv": inner, "b_conv": shared, "c_conv": shared}.items():
        stop, taps = start + size, block.conv_kernel
        names[f"mamba.{name}.weight"] = TensorMapping(
            f"{mixer}.conv1d.weight", (total, 1, taps), view=(total, taps), index=(slice(start, stop),)
        )
        names[f"mamba.{name}.bias"] = row_range(f"{mixer}.conv1d.bias", start, stop, (total,))
        start = stop
    return names


MAMBA2 = Family(
    "mamba2",
    to_model,
    lambda config: {"mamba.norm": "norm", **mamba_names("mixer", config)},
    outer=BACKBONE,
    layer="backbone.layers.{layer}",
)

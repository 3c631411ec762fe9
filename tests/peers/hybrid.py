"""A HybridModel made of Megatron's modules, without Transformer Engine."""

import functools
from typing import Any
from unittest import mock

import torch

from tests.peers.frameworks import LENGTH, VOCABULARY, import_alone, seeded, transformer_config

MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 64, "mamba_state_dim": 16, "mamba_num_groups": 2}


def hybrid_model(device: str, pattern: str, *, tied: bool, dtype: torch.dtype, **config: Any) -> Any:
    """Returns this rank's part of a model of `M` Mamba-2, `*` attention and `-` MLP layers.

    `|` in the pattern is a pipeline cut, and `/` stands before the layers of each MTP depth.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    parts = get_gpt_layer_local_submodules()
    attention = TransformerLayerSubmodules(
        input_layernorm=parts.input_layernorm, self_attention=parts.self_attention, self_attn_bda=parts.self_attn_bda
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=parts.pre_mlp_layernorm, mlp=parts.mlp, mlp_bda=parts.mlp_bda)
    layers = {
        "attention_layer": ModuleSpec(module=TransformerLayer, submodules=attention),
        "mlp_layer": ModuleSpec(module=TransformerLayer, submodules=mlp),
    }
    trunk, *depths = pattern.split("/")
    if depths:
        layers["mtp_block_spec"] = mtp_block()
        config = {"mtp_num_layers": len(depths), **config}
    if "M" in pattern:
        layers["mamba_layer"] = mamba_layer()
        config = {**MAMBA, "use_mamba_mem_eff_path": False, **config}
    # Its final norm is Transformer Engine's, which needs CUDA.
    with mock.patch("megatron.core.models.hybrid.hybrid_block.TENorm", WrappedTorchNorm):
        model = HybridModel(
            transformer_config(dtype, num_layers=len(trunk.replace("|", "")), **config),
            ModuleSpec(module=HybridStack, submodules=HybridStackSubmodules(**layers)),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            hybrid_layer_pattern=pattern,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=tied,
        )
    return seeded(model, device, dtype)


def mtp_block() -> Any:
    """Megatron's MTP block for a HybridModel, with modules that need no Transformer Engine."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        get_mtp_layer_spec_for_backend,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec

    depth = get_mtp_layer_spec_for_backend(None, LocalSpecProvider())  # its layers are those of the pattern
    return ModuleSpec(
        module=MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[depth])
    )


def mamba_layer() -> Any:
    """Megatron's Mamba layer on mamba_ssm's Triton kernels, with torch's convolution: causal_conv1d is compiled."""
    import_mamba_kernels()
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    projections = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mixer = ModuleSpec(module=MambaMixer, submodules=projections)
    parts = MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=mixer, mamba_bda=get_bias_dropout_add)
    return ModuleSpec(module=MambaLayer, submodules=parts)


@functools.cache
def import_mamba_kernels() -> None:
    """Imports them before Megatron's mixer does: mamba_ssm's __init__ needs its compiled extension."""
    with mock.patch.dict("os.environ", {"MAMBA_DETERMINISTIC": "1"}):  # one configuration a kernel: no autotuning
        for name in ("layernorm_gated", "ssd_combined"):
            import_alone(f"mamba_ssm.ops.triton.{name}")

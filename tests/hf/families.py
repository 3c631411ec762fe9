"""Small models with odd sizes of every family, in pairs: transformers' and ours."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from packaging.version import Version
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    NemotronHConfig,
    Olmo3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from tests.hf import attention_families
from tests.hf.sizes import SMALL


def norm_groups(count: int) -> int:
    """Returns the groups of a Mamba-2 block to test with: one before transformers 5.23, which norms them together."""
    return count if Version(version("transformers")) >= Version("5.23") else 1


MOE = {**SMALL, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MAMBA = {
    **SMALL,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "state_size": 5,
    "time_step_min": 0.1,
    "time_step_max": 0.9,
}
for unknown in ("intermediate_size", "max_position_embeddings"):
    MAMBA.pop(unknown)
NEMOTRON = {
    **SMALL,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "ssm_state_size": 5,
    "time_step_min": 1e-9,  # which transformers takes for the least time step of all
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28,
}
for unknown in ("num_hidden_layers", "max_position_embeddings"):
    NEMOTRON.pop(unknown)
GRANITE = {
    **SMALL,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 6,
    "mamba_d_state": 5,
    "mamba_chunk_size": 8,
    "shared_intermediate_size": 28,
    "embedding_multiplier": 3.0,
    "logits_scaling": 1.5,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
}

# A head whose query meets hardly a key gives almost nothing, which its norm enlarges, rounding and all: hence eps.
HYBRID = {
    "rms_norm_eps": 1e-3,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}
SHARED = {**MOE, "shared_expert_intermediate_size": 20}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    **attention_families.CONFIGS,
    "llama-mha": lambda: LlamaConfig(**SMALL, num_attention_heads=4),
    "llama-smollm2": lambda: LlamaConfig(
        **SMALL, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True
    ),
    "llama-wide-heads": lambda: LlamaConfig(**SMALL, num_attention_heads=3, num_key_value_heads=1, head_dim=20),
    "llama-biases": lambda: LlamaConfig(
        **SMALL, num_attention_heads=4, num_key_value_heads=2, attention_bias=True, mlp_bias=True
    ),
    "llama-gelu": lambda: LlamaConfig(**SMALL, num_attention_heads=4, hidden_act="gelu_pytorch_tanh"),
    "llama-rope-linear": lambda: LlamaConfig(
        **SMALL, num_attention_heads=4, rope_parameters={"rope_type": "linear", "factor": 2.5, "rope_theta": 5e3}
    ),
    "llama-rope-llama3": lambda: LlamaConfig(
        **SMALL,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "llama-rope-yarn": lambda: LlamaConfig(
        **SMALL,
        num_attention_heads=4,
        head_dim=32,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 4.0,
        },
    ),
    "llama-rope-yarn-mscale": lambda: LlamaConfig(
        **SMALL,
        num_attention_heads=4,
        head_dim=32,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
    ),
    "mistral": lambda: MistralConfig(
        **SMALL, num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=None
    ),
    "mistral-sliding": lambda: MistralConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2, sliding_window=5),
    "qwen2": lambda: Qwen2Config(**SMALL, num_attention_heads=6, num_key_value_heads=3),
    "qwen2-tied-sliding": lambda: Qwen2Config(
        **SMALL,
        num_attention_heads=4,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
    ),
    "qwen3": lambda: Qwen3Config(**SMALL, num_attention_heads=4, num_key_value_heads=2, head_dim=32),
    "qwen3-tied-biases": lambda: Qwen3Config(
        **SMALL,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=10,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(**MOE, num_attention_heads=4, num_key_value_heads=2, head_dim=16),
    "qwen3_moe-normalised-dense-first": lambda: Qwen3MoeConfig(
        **MOE,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        tie_word_embeddings=True,
    ),
    "qwen3_moe-every-other": lambda: Qwen3MoeConfig(
        **{**MOE, "num_hidden_layers": 4},
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        decoder_sparse_step=2,
    ),
    "qwen3_next": lambda: Qwen3NextConfig(**SHARED, **HYBRID),
    "qwen3_next-dense-first-biases-three-values": lambda: Qwen3NextConfig(
        **SHARED,
        **{**HYBRID, "linear_num_value_heads": 6, "head_dim": 8, "num_attention_heads": 3, "num_key_value_heads": 1},
        linear_conv_kernel_dim=2,
        attention_bias=True,
        mlp_only_layers=[0],
        norm_topk_prob=False,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5},
    ),
    "qwen3_next-one-head-no-experts": lambda: Qwen3NextConfig(
        **{**SHARED, "num_experts": 0},
        **{**HYBRID, "linear_num_key_heads": 1, "linear_num_value_heads": 1},
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e3,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "partial_rotary_factor": 0.25,
        },
    ),
    "qwen3_5_text": lambda: Qwen3_5TextConfig(
        **SMALL, **{**HYBRID, "layer_types": ["full_attention", "linear_attention"]}
    ),
    "qwen3_5_text-tied-one-value-each": lambda: Qwen3_5TextConfig(
        **{**SMALL, "num_hidden_layers": 4},
        **{**HYBRID, "layer_types": None, "linear_num_key_heads": 3, "linear_num_value_heads": 3},
        linear_conv_kernel_dim=3,
        tie_word_embeddings=True,
    ),
    "qwen3_5_moe_text": lambda: Qwen3_5MoeTextConfig(
        **{key: value for key, value in SHARED.items() if key != "intermediate_size"}, **HYBRID
    ),
    "olmo3": lambda: Olmo3Config(
        **{**SMALL, "num_hidden_layers": 4}, num_attention_heads=4, num_key_value_heads=2, sliding_window=5
    ),
    "olmo3-yarn-tied": lambda: Olmo3Config(
        **{**SMALL, "num_hidden_layers": 2},
        num_attention_heads=3,
        num_key_value_heads=1,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        tie_word_embeddings=True,
        attention_bias=True,
    ),
    "granitemoehybrid": lambda: GraniteMoeHybridConfig(
        **GRANITE,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mamba_n_groups=norm_groups(2),
        num_local_experts=5,
        num_experts_per_tok=3,
    ),
    "granitemoehybrid-dense": lambda: GraniteMoeHybridConfig(
        **GRANITE,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        mamba_n_groups=norm_groups(3),
        mamba_d_conv=2,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        attention_bias=True,
        num_local_experts=0,
        position_embedding_type="rope",
        tie_word_embeddings=True,
    ),
    "nemotron_h": lambda: NemotronHConfig(
        **NEMOTRON,
        layers_block_type=["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "moe"],
        mamba_num_heads=6,
        mamba_head_dim=7,
        n_groups=3,
        chunk_size=8,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=1.7,
    ),
    "nemotron_h-latent": lambda: NemotronHConfig(
        **NEMOTRON,
        layers_block_type=["linear_attention", "moe", "full_attention"],
        mamba_num_heads=2,
        mamba_head_dim=12,
        n_groups=1,
        conv_kernel=2,
        chunk_size=4,
        use_bias=True,
        use_conv_bias=False,
        moe_latent_size=12,
        norm_topk_prob=False,
    ),
    "mamba2": lambda: Mamba2Config(**MAMBA, num_heads=6, head_dim=8, n_groups=norm_groups(3), chunk_size=8),
    "mamba2-one-head": lambda: Mamba2Config(
        **MAMBA,
        num_heads=1,
        head_dim=48,
        n_groups=1,
        conv_kernel=2,
        chunk_size=3,
        use_bias=True,
        use_conv_bias=False,
        tie_word_embeddings=True,
    ),
}


# Going on from a cache, transformers does not hold time steps within the limit, as it does in a forward.
FORWARD_ALONE: dict[str, Callable[[], PretrainedConfig]] = {
    "mamba2-limited": lambda: Mamba2Config(
        **MAMBA, num_heads=4, head_dim=12, n_groups=norm_groups(2), chunk_size=256, time_step_limit=(0.5, 0.8)
    )
}


def transformers_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Returns a model with every parameter random and large enough to matter, including norms and biases."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    randomise(model, seed)
    return model.eval()


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int) -> None:
    """Randomises every parameter around its initial value: one or zero for norms, as stored, and zero for the rest."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.normal_(float(parameter.mean()) if "norm" in name else 0.0, 0.2, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.2, generator=generator)


def saved_model(config: PretrainedConfig, directory: Path, seed: int = 0) -> PreTrainedModel:
    """Returns the same model, also written to `directory`."""
    model = transformers_model(config, seed)
    model.save_pretrained(directory)
    return model

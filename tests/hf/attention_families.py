"""Small models with odd sizes of families with latent attention or sinks."""

from collections.abc import Callable

from transformers import DeepseekV3Config, Gemma3TextConfig, Glm4MoeConfig, GptOssConfig, PretrainedConfig

from tests.hf.sizes import SMALL

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "mscale_all_dim": 0.5,
}
LATENT = {
    **SMALL,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "kv_lora_rank": 14,
    "moe_intermediate_size": 24,
    "n_routed_experts": 9,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
EXPERTS = {name: value for name, value in LATENT.items() if "lora" not in name and "v_head" not in name}
for unknown in ("qk_nope_head_dim", "qk_rope_head_dim", "num_attention_heads", "num_key_value_heads"):
    EXPERTS.pop(unknown)
SINKS = {**SMALL, "num_hidden_layers": 3, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5}

# Older transformers have constants in their place.
BOUNDS = {"swiglu_alpha": 1.3, "swiglu_limit": 0.8} if hasattr(GptOssConfig(), "swiglu_alpha") else {}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "deepseek_v3": lambda: DeepseekV3Config(**LATENT, q_lora_rank=20, rope_parameters={**YARN, "mscale": 0.7}),
    "deepseek_v3-whole-queries": lambda: DeepseekV3Config(
        **LATENT | {"n_group": 1, "topk_group": 1, "n_shared_experts": 2, "first_k_dense_replace": 0},
        q_lora_rank=None,
        rope_interleave=False,
        attention_bias=True,
        norm_topk_prob=False,
        tie_word_embeddings=True,
    ),
    "gpt_oss": lambda: GptOssConfig(**SINKS, num_attention_heads=6, num_key_value_heads=2, head_dim=10),
    "gpt_oss-plain": lambda: GptOssConfig(
        **SINKS,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=8,
        attention_bias=False,
        **BOUNDS,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 5e3},
        tie_word_embeddings=True,
    ),
    "glm4_moe": lambda: Glm4MoeConfig(**EXPERTS, num_attention_heads=4, num_key_value_heads=2, use_qk_norm=True),
    "glm4_moe-biases": lambda: Glm4MoeConfig(
        **EXPERTS | {"first_k_dense_replace": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1},
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=20,
        attention_bias=True,
        norm_topk_prob=False,
        routed_scaling_factor=1.7,
        rope_parameters={"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.3},
        tie_word_embeddings=True,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SMALL | {"num_hidden_layers": 3},
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        query_pre_attn_scalar=12,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 5e3, "factor": 2.0},
        },
        final_logit_softcapping=9.0,
    ),
    "gemma3-untied-biases": lambda: Gemma3TextConfig(
        **SMALL,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=4,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
}

"""A tiny model of each family that configs/models trains: its config.json with small sizes, and random weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from postlude.hf.builtin import BYTE_VOCABULARY, END
from postlude.hf.load import byte_tokenizer
from postlude.recipes.config.packaged import DIRECTORY as PACKAGED
from tests.hf.families import randomise

ROOT = Path(__file__).parents[2]
RECIPES = PACKAGED / "models"

# Every degree of the small layouts divides these.
SIZES = {
    "vocab_size": BYTE_VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "sliding_window": 8,
    "full_attention_interval": 2,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 8,
    "hybrid_override_pattern": "M-*-",
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": END,
}
OWN = {"moonlight-16b-a3b": {"num_key_value_heads": 4}}


def tiny_model(name: str, directory: Path, layers: int = 2) -> Path:
    """Writes the model, every parameter random and large enough to matter, and returns its directory.

    Two layers are one of each kind, and two stages. A layer of Nemotron-H is half a layer of the others.
    """
    published = json.loads((RECIPES / "configs" / name / "config.json").read_text())
    small = {key: size for key, size in SIZES.items() if published.get(key) is not None} | OWN.get(name, {})
    small["num_hidden_layers"] = len(small.get("hybrid_override_pattern", "*" * layers))
    if "layer_types" in published:
        small["layer_types"] = (["sliding_attention", "full_attention"] * layers)[:layers]
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(published | small))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    randomise(model, seed=0)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory

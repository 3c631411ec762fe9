"""A Hugging Face family of your own: python examples/family.py, or torchrun --nproc-per-node 2 examples/family.py tp=2

Arcee is Llama with an ungated ReLU² MLP. Its log-probs equal transformers' in every layout.
"""

import sys

import torch
from transformers import ArceeConfig, AutoModelForCausalLM

from postlude import Batch, Engine, Layout, ModelConfig, ranks
from postlude.hf.decoder import ATTENTION_NAMES, MLP_NAMES, decoder_config
from postlude.hf.families import FAMILIES
from postlude.hf.family import Family
from postlude.model.blocks import MLPConfig


def to_model(hf: ArceeConfig) -> ModelConfig:
    mlp = MLPConfig(intermediate_size=hf.intermediate_size, activation="relu2", gated=False, bias=hf.mlp_bias)
    return decoder_config(hf, qkv_bias=hf.attention_bias, output_bias=hf.attention_bias, blocks={"-": mlp})


TABLE = {**FAMILIES, "arcee": Family("arcee", to_model, ATTENTION_NAMES | MLP_NAMES)}
SMALL = ArceeConfig(vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)


@torch.no_grad()
def largest_difference(layout: Layout) -> float:
    """Returns the largest difference between the log-probs of an engine and transformers' on the same weights."""
    tokens = torch.tensor(list(b"the same weights, the same log-probs"))
    engine = Engine(SMALL, families=TABLE, layout=layout)  # or a directory with such a model, in place of SMALL
    (logprobs,) = engine.logprobs(Batch([tokens])).logprob
    hf_model = AutoModelForCausalLM.from_config(SMALL)
    hf_model.load_state_dict(dict(engine.stream_weights()))  # by transformers' names, in any layout
    expected = hf_model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    return (logprobs[1:] - expected).abs().max().item()


if __name__ == "__main__":
    with ranks():
        layout = Layout.parse(sys.argv[1] if len(sys.argv) > 1 else "")
        difference = largest_difference(layout)
        print(f"{layout}: differs from transformers by at most {difference:.1e}")
        assert difference < 1e-5

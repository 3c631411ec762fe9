"""Small checkpoints with multi-token prediction, named as published, and what their depths compute.

transformers makes the trunk and the layers. The rest is written here from vLLM's and SGLang's models of these families:
hidden states go in after the final norm, and the half of the embedding comes first.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from tests.hf.families import CONFIGS, randomise, saved_model

FILE = "model.safetensors"
COPIES = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}


class Depth(nn.Module):
    """norm(W [norm(embedding); norm(hidden)]), with layers before the last norm."""

    def __init__(self, config: PretrainedConfig, layers: Sequence[nn.Module], norm_offset: float) -> None:
        super().__init__()
        size = config.hidden_size
        self.one, self.eps = norm_offset, getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
        self.layers = nn.ModuleList(layers)
        self.proj = nn.Parameter(torch.zeros(size, 2 * size))
        # Named so that `randomise` knows what they are, and around which value.
        self.embedding_norm, self.hidden_norm, self.norm = (
            nn.Parameter(torch.full((size,), 1.0 - norm_offset)) for _ in range(3)
        )

    def rms(self, values: Tensor, weight: Tensor) -> Tensor:
        scaled = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.eps)
        return scaled * (self.one + weight)

    def forward(self, hidden: Tensor, embedded: Tensor, rotary: nn.Module | None) -> Tensor:
        """Both [T, H] -> [T, H], of one sequence."""
        count = len(hidden)
        joined = torch.cat((self.rms(embedded, self.embedding_norm), self.rms(hidden, self.hidden_norm)), dim=-1)
        states = (joined @ self.proj.T)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        positions = torch.arange(count)[None]
        # Qwen3.5's has places in time, height and width; those of text are the same in all three.
        axes = positions.expand(3, 1, count) if "Qwen3_5" in type(rotary).__name__ else positions
        turned = {} if rotary is None else {"position_embeddings": rotary(states, position_ids=axes)}
        for layer in self.layers:
            recurrent = getattr(layer, "block_type", None) == "linear_attention"
            states = layer(states, attention_mask=None if recurrent else mask, position_ids=positions, **turned)
        return self.rms(states[0], self.norm)


@dataclass(frozen=True)
class Published:
    """A directory with a model, the same model in memory, and the stored tensors of its depths."""

    directory: Path
    trunk: PreTrainedModel
    depths: list[Depth]
    tensors: dict[str, Tensor]

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> list[Tensor]:
        """Returns the logits of each depth for one sequence, at positions with a token so far ahead."""
        decoder = self.trunk.model
        hidden, depth_outputs = decoder(tokens[None]).last_hidden_state[0], []
        for number, depth in enumerate(self.depths, start=1):
            ahead = tokens[number:]
            embedded = self.trunk.get_input_embeddings()(ahead)
            hidden = depth(hidden[: len(ahead)], embedded, getattr(decoder, "rotary_emb", None))
            depth_outputs.append(self.trunk.lm_head(hidden))
        return depth_outputs


def publish(
    name: str, directory: Path, depths: int = 1, *, mixers: Sequence[str] = ("full_attention", "moe"), **changes: Any
) -> Published:
    """Writes a tiny checkpoint of a changed config of `CONFIGS`; `mixers` are the blocks of one Nemotron-H depth."""
    config = CONFIGS[name]()
    for field, value in changes.items():
        setattr(config, field, value)
    kind = config.model_type
    setattr(config, "mtp_num_hidden_layers" if kind.startswith("qwen3_5") else "num_nextn_predict_layers", depths)
    if kind == "nemotron_h":
        config.mtp_layers_block_type = list(mixers)
    trunk = saved_model(config, directory)
    mtp_depths = [_depth(trunk, number) for number in range(depths)]
    tensors = {}
    for number, depth in enumerate(mtp_depths):
        randomise(depth, seed=number + 1)
        tensors |= dict(_published_names(trunk, depth, number))
    save(directory, {**load_file(directory / FILE), **tensors})
    return Published(directory, trunk, mtp_depths, tensors)


def save(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a checkpoint as one file."""
    save_file({name: tensor.detach().clone() for name, tensor in tensors.items()}, directory / FILE, {"format": "pt"})


def _depth(trunk: PreTrainedModel, number: int) -> Depth:
    config, kind = copy.deepcopy(trunk.config), type(trunk.model.layers[-1])
    if config.model_type == "nemotron_h":
        config.layer_types = config.mtp_layers_block_type
        return Depth(config, [kind(config, index) for index in range(len(config.layer_types))], 0.0)
    if config.model_type.startswith("qwen3"):
        config.layer_types, config.mlp_only_layers = ["full_attention"], []
        return Depth(config, [kind(config, 0)], 1.0)
    return Depth(config, [kind(config, config.num_hidden_layers + number)], 0.0)


def _published_names(trunk: PreTrainedModel, depth: Depth, number: int) -> Iterator[tuple[str, Tensor]]:
    """Returns the tensors of a depth by their published names."""
    kind, count = trunk.config.model_type, len(depth.layers)
    if kind.startswith("qwen3"):
        mtp_names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
        prefixes = ["mtp.layers.0"]
    elif kind == "nemotron_h":
        prefixes = [f"mtp.layers.{number * count + index}" for index in range(count)]
        mtp_names = tuple(f"{prefixes[0]}.{name}" for name in ("enorm", "hnorm", "eh_proj"))
        mtp_names = (*mtp_names, f"{prefixes[-1]}.final_layernorm")
    else:
        prefixes = [f"model.layers.{trunk.config.num_hidden_layers + number}"]
        mtp_names = tuple(f"{prefixes[0]}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
        trunk_state = trunk.state_dict()
        yield from ((f"{prefixes[0]}.{copy}.weight", trunk_state[f"{of}.weight"]) for copy, of in COPIES.items())
    weights = (depth.embedding_norm, depth.hidden_norm, depth.proj, depth.norm)
    yield from zip((f"{name}.weight" for name in mtp_names), weights, strict=True)
    for prefix, layer in zip(prefixes, depth.layers, strict=True):
        for name, tensor in layer.state_dict().items():
            yield from _unstack_experts(f"{prefix}.{name}", tensor)


def _unstack_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Returns one tensor per expert, as files have them; transformers stacks them."""
    stem, _, leaf = name.rpartition(".")
    if not stem.endswith(".experts"):
        yield name, tensor
        return
    for expert, matrix in enumerate(tensor):
        if leaf == "gate_up_proj":
            gate, up = matrix.chunk(2)
            yield f"{stem}.{expert}.gate_proj.weight", gate
            yield f"{stem}.{expert}.up_proj.weight", up
        else:
            yield f"{stem}.{expert}.{leaf}.weight", matrix

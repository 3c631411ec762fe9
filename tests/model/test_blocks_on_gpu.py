"""Attention and MLP blocks on a GPU, in bf16 with their kernels, equal the same blocks in float64 on the CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from postlude import LanguageModel, Microbatch, pack
from postlude.model.block_config import BlockConfig
from postlude.model.blocks import AttentionConfig, MLPConfig, SlidingAttentionConfig
from postlude.ops.linear import DeferredWgrads, defer_wgrad, flush_wgrad, set_main_grad
from tests.equality import assert_equal
from tests.model.small import small_config

HEADS: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16}
BLOCKS: dict[str, BlockConfig] = {
    "head norms": AttentionConfig(**HEADS, qk_norm="head"),
    "window": SlidingAttentionConfig(**HEADS, sliding_window=30),
    "gated MLP": MLPConfig(intermediate_size=48),
    "MLP without gate": MLPConfig(intermediate_size=48, gated=False, activation="relu2"),
}
SYMBOLS = {AttentionConfig: "*", SlidingAttentionConfig: "S", MLPConfig: "-"}


def one_block_model(block: str, recompute: Any = "none") -> LanguageModel:
    """Returns a model with this block alone, and weights that bf16 holds exactly."""
    symbol = SYMBOLS[type(BLOCKS[block])]
    config = small_config(symbol, hidden_size=32, vocab_size=256, blocks={symbol: BLOCKS[block]})
    torch.manual_seed(0)
    return LanguageModel(config, recompute=recompute).to(torch.bfloat16)


def microbatch() -> Microbatch:
    (packed,) = pack([list(range(3, 40)), [7], list(range(100, 230))], budget=256)
    return packed


def make_weights_adjacent(model: LanguageModel) -> None:
    """Moves weights that are multiplied with the same rows next to each other in memory, as the engine has them."""
    (block,) = model.blocks
    for layers in block.fused_projections():
        weights = [layer.weight for layer in layers]
        joined = torch.cat([weight.detach() for weight in weights])
        for weight, part in zip(weights, joined.split([len(weight) for weight in weights]), strict=True):
            weight.data = part


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("gradients", ["of separate weights", "of adjacent weights", "in main_grad", "deferred"])
@pytest.mark.parametrize("block", list(BLOCKS))
def test_block_equals_float64(block: str, gradients: str, recompute: str) -> None:
    exact = one_block_model(block).double()
    expected = exact(microbatch(), targets=True)
    (expected.sum() / len(expected)).backward()

    model = one_block_model(block, recompute).cuda()
    if gradients != "of separate weights":
        make_weights_adjacent(model)
    totals: dict[str, Tensor] = {}
    if gradients == "in main_grad":
        (layer,) = model.blocks
        for name, parameter in layer.named_parameters(prefix=layer.name):
            totals[name] = torch.ones_like(parameter, dtype=torch.float32)
            set_main_grad(parameter, totals[name])
    queue: DeferredWgrads | None = [] if gradients == "deferred" else None
    with defer_wgrad(queue):
        losses = model(microbatch().to("cuda"), targets=True)
    (losses.sum() / len(losses)).backward()
    assert queue is None or queue
    flush_wgrad(queue or [])

    assert_equal(losses.cpu(), expected, "losses", 1e-2)
    for name, parameter in exact.named_parameters():
        gradient = model.get_parameter(name).grad
        if name in totals:
            assert gradient is None
            gradient = totals[name] - 1
        assert_equal(gradient.cpu(), parameter.grad, f"gradient of {name}", 3e-2)

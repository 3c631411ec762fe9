"""Blocks on a GPU, in bf16 with their kernels, equal the same blocks in float64 on the CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from postlude import LanguageModel, Microbatch, pack
from postlude.model.block_config import BlockConfig
from postlude.model.blocks import AttentionConfig, MLPConfig, MoEConfig, SlidingAttentionConfig
from postlude.model.context import ForwardContext
from postlude.model.parallel import fuse_weights
from postlude.model.steps import run_steps
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


class RoutingState:
    """Takes the place of a decoding cache: keeps the experts of tokens."""

    choice: Tensor

    def record_routing(self, name: str, choice: Tensor) -> None:
        self.choice = choice


ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sigmoid": {"scores": "sigmoid", "selection_bias": True, "router_fp32": True, "shared_intermediate_size": 64},
    "clamped": {"expert_bias": True, "router_bias": True, "alpha": 1.702, "limit": 2.0, "up_offset": 1.0},
    "gated shared": {"shared_intermediate_size": 32, "shared_gate": True},
    "ungated": {"gated": False, "activation": "relu2", "weight_scale": 2.5, "normalise": False},
}


@pytest.mark.gpu
@pytest.mark.parametrize("router", list(ROUTERS))
@pytest.mark.parametrize("tokens", [3, 16, 100])
@torch.no_grad()
def test_decoded_experts_equal_float64(tokens: int, router: str) -> None:
    """For tokens with the same experts. Roundings may change the choice of a few."""
    config = MoEConfig(experts=8, top_k=2, intermediate_size=48, **ROUTERS[router])
    hidden = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    (packed,) = pack([list(range(tokens))], budget=256)
    results, choices = [], []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float64)):
        generator, state = torch.Generator().manual_seed(0), RoutingState()
        model = LanguageModel(small_config("E", hidden_size=64, vocab_size=256, blocks={"E": config}))
        for name, parameter in model.named_parameters():
            values = (0.3 * torch.randn(parameter.shape, generator=generator)).bfloat16()
            stays_fp32 = device == "cuda" and config.router_fp32 and ".router." in name
            parameter.data = values.to(device, torch.float32 if stays_fp32 else dtype)
        (block,) = model.to(device).blocks
        for layers in block.fused_projections():
            fuse_weights(layers)
        context: Any = ForwardContext(packed.to(device), model.mesh, decode_state=state)  # type: ignore[arg-type]
        rows = hidden.to(device, dtype)
        decoded = block.fused_decode_or_none(rows, context)
        assert (decoded is None) == (device == "cpu")
        results.append(run_steps(block.steps(), rows, context).cpu() if decoded is None else decoded.cpu())
        choices.append(state.choice.sort(-1).values.cpu())
    same = (choices[0] == choices[1]).all(-1)
    assert same.float().mean() > 0.9
    assert_equal(results[0][same], results[1][same], tolerance=2e-2)

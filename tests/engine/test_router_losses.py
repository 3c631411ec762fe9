"""Auxiliary losses of routers that an engine is given, and a balance loss over the whole batch in every layout."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from postlude import Batch, Engine, Layout
from postlude.model.blocks import MoEConfig
from postlude.objectives import MTP, SFT
from postlude.router_losses import RouterLosses
from tests.equality import assert_equal
from tests.hf.families import randomise
from tests.meshes import mesh
from tests.model.small import sequences, small_config, small_microbatch, small_model

EXPERTS = MoEConfig(experts=4, top_k=2, intermediate_size=12)
LENGTHS = (20, 17, 3, 25, 6, 11, 9, 14, 2, 12, 19, 23)
TOP_K, COEFFICIENT, Z = 2, 0.6, 0.2


def test_balance_over_a_batch_equals_transformers(ranks: Any, tmp_path: Any) -> None:
    """Its function is given one layer at a time; its own loss multiplies means over all layers."""
    hf_config = Qwen3MoeConfig(
        vocab_size=31,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=5,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=8,
    )
    hf_model = Qwen3MoeForCausalLM(hf_config).eval()
    randomise(hf_model, 0)
    hf_model.save_pretrained(tmp_path)
    tokens = [(torch.arange(length) * 7 + length) % 31 for length in LENGTHS]
    nll, layers = torch.zeros(()), list[tuple[Tensor, ...]]()
    for sequence in tokens:
        hf_output = hf_model(sequence[None], output_router_logits=True)
        nll = nll + nn.functional.cross_entropy(hf_output.logits[0, :-1], sequence[1:], reduction="sum")
        layers.append(hf_output.router_logits)
    loss = nll / (sum(LENGTHS) - len(LENGTHS))
    for logits in map(torch.cat, zip(*layers, strict=True)):
        loss = loss + COEFFICIENT / TOP_K * load_balancing_loss_func((logits,), 5, TOP_K)
        loss = loss + Z * logits.logsumexp(-1).square().mean()
    loss.backward()
    expected = {name: p.grad for name, p in hf_model.named_parameters() if "gate.weight" in name or "embed" in name}
    for budget in (32, 256):
        (actual,) = ranks(1, hf_gradients, str(tmp_path), tokens, budget)
        assert len(expected) == 3
        for name, gradient in expected.items():
            assert_equal(actual[name], gradient, f"{name} with a budget of {budget}")


def hf_gradients(group: Any, path: str, tokens: list[Tensor], budget: int) -> dict[str, Tensor]:
    losses = RouterLosses(balance_coefficient=COEFFICIENT, z_coefficient=Z, balance="batch")
    engine = Engine(path, budget=budget, router_losses=losses)
    result = engine.forward_backward(Batch(tokens), SFT())
    assert (result.microbatches > 1) == (budget == 32)
    return dict(engine.gradients())


def pass_in(
    group: Any, layout: str, budget: int, pattern: str, options: dict[str, Any]
) -> tuple[dict[str, Tensor], list[float]]:
    """Returns the gradients and the layers' balance losses, of a second pass after other tokens."""
    losses = RouterLosses(balance_coefficient=COEFFICIENT, z_coefficient=Z, balance="batch")
    source, ahead = small_config(pattern, blocks={"E": EXPERTS}), "/" in pattern
    engine = Engine(source, budget=budget, mesh=mesh(Layout.parse(layout)), router_losses=losses, mtp=ahead, **options)
    objective = MTP(objective=SFT()) if ahead else SFT()
    engine.forward_backward(Batch(sequences(*LENGTHS[:5], seed=1)), objective)
    engine.zero_grad()
    engine.logprobs(Batch(sequences(*LENGTHS[:5], seed=2)))  # an evaluation does not count
    result = engine.forward_backward(Batch(sequences(*LENGTHS)), objective)
    return dict(engine.gradients()), [value for name, value in result.metrics.items() if "balance_loss" in name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("dp_shard=2,ep=2", {"overlap": True}),
        ("pp=2", {"recompute": "full"}),
        pytest.param("cp=2,ep=2", {}, marks=pytest.mark.thorough),
        pytest.param("tp=2", {}, marks=pytest.mark.thorough),
        pytest.param("pp=2,dp_shard=2,ep=2", {"overlap": True}, marks=pytest.mark.thorough),
    ],
)
def test_balance_over_a_batch_is_equal_in_every_layout(ranks: Any, layout: str, options: dict[str, Any]) -> None:
    pattern = "[*E]{2}/[*E]"
    ((expected, losses),) = ranks(1, pass_in, "", 256, pattern, {})
    for actual, actual_losses in ranks(Layout.parse(layout).world_size, pass_in, layout, 32, pattern, options):
        assert actual_losses == pytest.approx(losses, rel=1e-5)
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            assert_equal(actual[name], gradient, name)


def test_balance_over_a_batch_needs_its_counts() -> None:
    experts = MoEConfig(experts=4, top_k=2, intermediate_size=12, balance_coefficient=0.1, balance="batch")
    model = small_model("[*E]", blocks={"E": experts})
    with pytest.raises(RuntimeError, match=r"layers\.0\.moe balances its experts over the whole batch, but no forward"):
        model(small_microbatch(), targets=True)


@pytest.mark.parametrize(
    ("pattern", "losses", "sentence"),
    [
        ("[*-]", RouterLosses(z_coefficient=0.1), r"z_coefficient is 0.1, but \[\*-\] has no router"),
        ("[*E]", RouterLosses(balance="batch"), "no router of .* has a balance loss. Set router_losses.balance_coef"),
    ],
)
def test_router_losses_without_effect_are_refused(pattern: str, losses: RouterLosses, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        small_config(pattern).with_router_losses(losses)
    with pytest.raises(ValueError, match="balance_coefficient is -1, but it must be a number of at least 0"):
        RouterLosses(balance_coefficient=-1.0)
    with pytest.raises(ValueError, match=r"router_losses\.balance is 'layer', but the choices are 'sequence', 'batch'"):
        RouterLosses(balance="layer")  # type: ignore[arg-type]

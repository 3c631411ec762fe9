"""MoE equals two of transformers' routers; auxiliary losses equal their formulas."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DeepseekV3Config, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

from postlude import LanguageModel, load_model, pack
from postlude.model.blocks import MoE, MoEConfig
from postlude.model.context import ForwardContext
from postlude.model.parallel import fuse_weights
from postlude.model.steps import run_steps
from postlude.ops.decode_linear import COUNTERS
from postlude.ops.norm import Norm
from postlude.world.mesh import Mesh
from tests.equality import assert_equal
from tests.model.small import small_config, small_microbatch, small_model

HIDDEN = 16


def block(**settings) -> MoE:
    config = MoEConfig(experts=8, top_k=2, intermediate_size=12, **settings)
    moe = MoE(config, small_config(hidden_size=HIDDEN, blocks={"E": config}), "layers.0.moe", Mesh.single_rank())
    moe.norm = nn.Identity()  # transformers' MoE blocks have the norm outside
    return moe


def randomise(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.normal_(0.0, 0.4, generator=generator)


def copy_experts(moe: MoE, hf_block: nn.Module) -> None:
    gate, up = hf_block.experts.gate_up_proj.chunk(2, dim=1)
    moe.experts.gate_proj.weight.data.copy_(gate)
    moe.experts.up_proj.weight.data.copy_(up)
    moe.experts.down_proj.weight.data.copy_(hf_block.experts.down_proj)
    moe.router.weight.data.copy_(hf_block.gate.weight)


def copy_shared(moe: MoE, hf_block: nn.Module) -> None:
    for name in ("gate_proj", "up_proj", "down_proj"):
        moe.shared.get_submodule(name).weight.data.copy_(hf_block.get_submodule(name).weight)


def compare(moe: MoE, hf_block: nn.Module) -> None:
    hidden = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(0), requires_grad=True)
    upstream = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(1))
    output = run_steps(moe.steps(), hidden, ForwardContext(small_microbatch(40))) - hidden
    gradient, router, experts = torch.autograd.grad(
        output, (hidden, moe.router.weight, moe.experts.down_proj.weight), upstream
    )
    expected = hf_block(hidden[None])
    expected = (expected[0] if isinstance(expected, tuple) else expected)[0]
    expected_gradient, expected_router, expected_experts = torch.autograd.grad(
        expected, (hidden, hf_block.gate.weight, hf_block.experts.down_proj), upstream
    )
    assert_equal(output, expected, "output")
    assert_equal(gradient, expected_gradient, "gradient of hidden")
    assert_equal(router, expected_router, "gradient of the router")
    assert_equal(experts, expected_experts, "gradient of the experts")


@pytest.mark.parametrize("normalise", [False, True])
def test_sigmoid_scores_groups_bias_and_shared_experts_equal_deepseek_v3(normalise: bool) -> None:
    hf_block = DeepseekV3MoE(
        DeepseekV3Config(
            hidden_size=HIDDEN,
            moe_intermediate_size=12,
            n_routed_experts=8,
            num_experts_per_tok=4,
            n_group=4,
            topk_group=2,
            n_shared_experts=2,
            routed_scaling_factor=2.5,
            norm_topk_prob=normalise,
        )
    )
    randomise(hf_block)
    config = MoEConfig(
        experts=8,
        top_k=4,
        intermediate_size=12,
        scores="sigmoid",
        groups=4,
        top_groups=2,
        normalise=normalise,
        weight_scale=2.5,
        selection_bias=True,
        router_fp32=True,
        shared_intermediate_size=24,
    )
    moe = MoE(config, small_config(hidden_size=HIDDEN, blocks={"E": config}), "layers.0.moe", Mesh.single_rank())
    moe.norm = nn.Identity()
    copy_experts(moe, hf_block)
    copy_shared(moe, hf_block.shared_experts)
    moe.selection_bias.copy_(hf_block.gate.e_score_correction_bias)
    compare(moe, hf_block)


@pytest.mark.parametrize("normalise", [False, True])
def test_gated_shared_expert_equals_qwen2_moe(normalise: bool) -> None:
    hf_block = Qwen2MoeSparseMoeBlock(
        Qwen2MoeConfig(
            hidden_size=HIDDEN,
            moe_intermediate_size=12,
            shared_expert_intermediate_size=20,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=normalise,
        )
    )
    randomise(hf_block)
    moe = block(normalise=normalise, shared_intermediate_size=20, shared_gate=True)
    copy_experts(moe, hf_block)
    copy_shared(moe, hf_block.shared_expert)
    moe.shared.token_gate.weight.data.copy_(hf_block.shared_expert_gate.weight)
    compare(moe, hf_block)


@pytest.mark.parametrize("budget", [23, 32, 64])
@pytest.mark.parametrize("lengths", [(23,), (23, 4, 11, 1, 17)])
def test_balance_loss_and_its_gradient_equal_transformers_on_one_layer(tmp_path, lengths, budget) -> None:
    """One layer, because transformers multiplies means over all layers instead of each layer's own.

    Theirs is of one batch; ours is of each sequence, weighted by its length, however the sequences are packed.
    """
    config = Qwen3MoeConfig(
        vocab_size=31,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        output_router_logits=True,
        router_aux_loss_coef=0.3,
    )
    hf_model = Qwen3MoeForCausalLM(config).eval()
    randomise(hf_model)
    hf_model.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    sequences = [(torch.arange(length) * 7 + length) % 31 for length in lengths]
    for sequence in sequences:
        hf_output = hf_model(sequence[None], output_router_logits=True)
        nll = nn.functional.cross_entropy(hf_output.logits[0, :-1], sequence[1:], reduction="sum")
        loss = nll / (sum(lengths) - len(lengths)) + 0.3 * hf_output.aux_loss * len(sequence) / sum(lengths)
        loss.backward()
    for microbatch in pack(sequences, budget=budget):
        (model(microbatch, targets=True).sum() / microbatch.batch_targets).backward()
    assert_equal(model.layers["0"].moe.router.weight.grad, hf_model.model.layers[0].mlp.gate.weight.grad, "router")
    assert_equal(model.embedding.weight.grad, hf_model.model.embed_tokens.weight.grad, "embedding")


def gradients(model: nn.Module, batches: list) -> dict[str, Tensor]:
    model.zero_grad()
    for microbatch in batches:
        (model(microbatch, targets=True).sum() / microbatch.batch_targets).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_z_loss_adds_the_gradient_of_the_mean_squared_logsumexp() -> None:
    settings = {"experts": 5, "top_k": 2, "intermediate_size": 12}
    microbatches = pack([torch.arange(9), torch.arange(20, 26)], budget=9)
    with_z = small_model("[*E]", blocks={"E": MoEConfig(**settings, z_coefficient=0.5)})
    without = small_model("[*E]", blocks={"E": MoEConfig(**settings)})
    moe = without.layers["0"].moe
    for microbatch in microbatches:
        hidden = without.layers["0"].attention._sublayer_and_residual(
            without.embedding(microbatch.tokens), ForwardContext(microbatch)
        )
        logits, _ = moe.score(moe.norm(hidden["hidden"]))
        (0.5 * logits.logsumexp(-1).square().sum() / 15).backward()
        (without(microbatch, targets=True).sum() / microbatch.batch_targets).backward()
    actual = gradients(with_z, microbatches)
    for name, parameter in without.named_parameters():
        assert_equal(actual[name], parameter.grad, name)


def test_auxiliary_losses_have_gradients_only_in_training() -> None:
    config = MoEConfig(experts=5, top_k=2, intermediate_size=12, balance_coefficient=0.5)
    model = small_model("[*E]", blocks={"E": config})
    microbatch = small_microbatch()
    training = gradients(model, [microbatch])
    model.eval()
    evaluating = gradients(model, [microbatch])
    plain = gradients(small_model("[*E]"), [microbatch])
    router = "layers.0.moe.router.weight"
    assert_equal(evaluating[router], plain[router])
    assert (training[router] - plain[router]).abs().max() > 1e-4


class OperatorCounter(TorchDispatchMode):
    """Counts operators other than views: each is about one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_metrics_take_few_operators() -> None:
    moe, counted = block(), []
    microbatch = small_microbatch(16)
    for measured in (False, True):
        context = ForwardContext(microbatch)
        if not measured:
            context.is_first_call("layers.0.moe.metrics")  # as in a layer that is recomputed
        with OperatorCounter() as operators:
            moe.route(torch.randn(16, HIDDEN), context)
        counted.append(operators.count)
    assert 5 < counted[1] - counted[0] <= 16


def test_selection_bias_stays_in_fp32() -> None:
    config = small_config("[*E]", blocks={"E": MoEConfig(experts=8, top_k=2, intermediate_size=8, selection_bias=True)})
    model = LanguageModel(config).to(torch.bfloat16)
    with pytest.raises(TypeError, match=r"has its selection bias in torch\.bfloat16"):
        model(small_microbatch())


def test_selection_bias_balances_load_and_changes_no_weight() -> None:
    moe = block(selection_bias=True, selection_bias_rate=0.002)
    randomise(moe)
    moe.selection_bias.zero_()
    moe.load.zero_()
    tokens = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(5))
    _, scores = moe.score(moe.norm(tokens))
    microbatch = small_microbatch(len(scores))
    moe.route(tokens, ForwardContext(microbatch))
    first = torch.bincount(moe.choose(scores).flatten(), minlength=8)
    assert torch.equal(moe.load, first.float())
    before = moe.selection_bias.clone()
    moe.after_optimizer_step()
    assert torch.equal(moe.selection_bias - before, 0.002 * torch.sign(first.float().mean() - first))
    for _ in range(400):
        for counted in moe.token_counters():
            counted.zero_()
        moe.route(tokens, ForwardContext(microbatch))
        moe.after_optimizer_step()
    last = torch.bincount(moe.choose(scores).flatten(), minlength=8).float()
    assert last.std() < 0.25 * first.float().std()
    assert not list(block().token_counters())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"top_k": 9}, "top_k=9 of 8 experts"),
        ({"groups": 3}, "groups divide the experts"),
        ({"groups": 4, "top_groups": 3, "top_k": 4}, "top_groups divides top_k"),
        ({"groups": 4, "top_groups": 1, "top_k": 4}, "hold at least top_k"),
        ({"scores": "relu"}, "scores is 'relu', but the choices are 'softmax', 'sigmoid'"),
        ({"shared_gate": True}, "needs a shared expert"),
    ],
)
def test_invalid_routers_are_refused(settings: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        MoEConfig(**({"experts": 8, "top_k": 2, "intermediate_size": 4} | settings))


@torch.no_grad()
def test_fused_decoding_of_a_shared_expert_equals_it() -> None:
    config = MoEConfig(experts=8, top_k=2, intermediate_size=12, shared_intermediate_size=20)
    (moe,) = small_model("E", blocks={"E": config}).blocks
    for layers in moe.fused_projections():
        fuse_weights(layers)
    hidden = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(0))
    norm = Norm(moe.norm.weight, moe.norm.eps, moe.norm.offset)
    counters = torch.zeros(COUNTERS, dtype=torch.int32)
    actual = moe.shared.fused_decode(hidden.clone(), norm, counters)
    assert_equal(actual, hidden + moe.shared(moe.norm(hidden)), "with the shared expert")

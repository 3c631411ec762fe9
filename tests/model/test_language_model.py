"""LanguageModel: stages equal the full model, sequences are isolated, parameter names are global."""

from dataclasses import replace

import pytest
import torch

from postlude import LanguageModel, Layout, ModelConfig, Pattern, Stage, pack, unpack
from postlude.model.blocks import BLOCKS, AttentionConfig
from postlude.model.context import ForwardContext
from postlude.model.parallel import RMSNorm
from postlude.model.pattern import PatternError
from postlude.ops.rotary import RotaryConfig, rotary_table, rotate
from tests.equality import assert_equal, difference
from tests.model.small import assert_packed_equals_alone, sequences, small_config, small_microbatch, small_model

PATTERNS = ["[*-]{4}", "*-*E", "[*-][S-][*E]*", "[S*-][*E]{3}"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_packed_equals_each_sequence_alone(pattern: str) -> None:
    assert_packed_equals_alone(small_model(pattern), 6, 1, 9, 2, 6, 4)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_attention_is_causal_and_sequences_are_isolated(pattern: str) -> None:
    """Changing one token changes no earlier position and no other sequence."""
    model = small_model(pattern)
    batch = sequences(6, 5, 7)
    (microbatch,) = pack(batch, budget=64)
    before = unpack([microbatch], [model(microbatch)], shifted=False)
    batch[1] = batch[1].clone()
    batch[1][3] = (batch[1][3] + 1) % 37
    (changed,) = pack(batch, budget=64)
    after = unpack([changed], [model(changed)], shifted=False)
    assert_equal(after[0], before[0])
    assert_equal(after[2], before[2])
    assert_equal(after[1][:3], before[1][:3])
    assert difference(after[1][3:], before[1][3:]) > 0.01


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("pattern", "count"), [("[*-]{4}", 2), ("[*-]{4}", 4), ("*-|*E|[S-]", 3), ("|[*-]{3}|", 3)])
def test_consecutive_stages_equal_the_full_model(pattern: str, count: int, tied: bool) -> None:
    full_model = small_model(pattern, tied_head=tied)
    stages = [small_model(pattern, tied_head=tied, stage=Stage(i, count)) for i in range(count)]
    microbatch = small_microbatch()
    hidden = None
    for stage in stages[:-1]:
        hidden = stage(microbatch, hidden)
    losses = stages[-1](microbatch, hidden, targets=True)
    expected = full_model(microbatch, targets=True)
    assert torch.equal(losses, expected)  # the same weights by name, so the same bits

    losses.sum().backward()
    expected.sum().backward()
    whole_parameters = dict(full_model.named_parameters())
    gradients: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, whole_parameters[name])
            gradients[name] = gradients.get(name, 0) + parameter.grad
    assert gradients.keys() == whole_parameters.keys()
    for name, gradient in gradients.items():
        assert_equal(gradient, whole_parameters[name].grad, name)


def test_stage_builds_only_its_own_layers() -> None:
    names = {name for name, _ in small_model("[*-]{4}", stage=Stage(1, 4)).named_parameters()}
    assert names
    assert all(name.startswith("layers.1.") for name in names)


def test_a_stage_refuses_the_wrong_hidden_states() -> None:
    stage, microbatch = small_model("[*-]{2}", stage=Stage(1, 2)), small_microbatch(4)
    with pytest.raises(ValueError, match=r"continues from hidden states \(4, 16\), but got nothing"):
        stage(microbatch)
    with pytest.raises(ValueError, match=r"but got \(3, 16\)"):
        stage(microbatch, torch.zeros(3, 16))


def test_a_token_past_the_vocabulary_is_refused() -> None:
    (microbatch,) = pack([[1, 37]], budget=4)
    with pytest.raises(ValueError, match="token 37 is out of range: the vocabulary ends at 36"):
        small_model()(microbatch)


def test_blocks_of_one_kind_in_a_layer_have_distinct_names() -> None:
    names = {name for name, _ in small_model("[S*-]").named_parameters()}
    assert {
        "layers.0.attention.q_proj.weight",
        "layers.0.attention_2.q_proj.weight",
        "layers.0.mlp.up_proj.weight",
    } <= names


def test_initialisation_depends_only_on_seed_and_name() -> None:
    model, last_stage = small_model("[*-]{3}"), small_model("[*-]{3}", stage=Stage(2, 3))
    parameters = dict(model.named_parameters())
    assert all(torch.equal(parameter, parameters[name]) for name, parameter in last_stage.named_parameters())
    first, second = (parameters[f"layers.{layer}.mlp.up_proj.weight"] for layer in (0, 1))
    assert not torch.equal(first, second)
    model.reset(seed=1)
    assert not torch.equal(model.embedding.weight, small_model("[*-]{3}").embedding.weight)


def test_invalid_model_is_refused_with_clear_error() -> None:
    fewer = {symbol: block for symbol, block in BLOCKS.items() if symbol != "M"}
    with pytest.raises(ValueError, match=r"uses 'M' \(mamba\), which has no block yet"):
        LanguageModel(small_config("[M-]"), blocks=fewer)
    with pytest.raises(ValueError, match="uses 'G', but `blocks` has configs for '-' only"):
        ModelConfig(
            pattern=Pattern.parse("[G-]"), hidden_size=4, vocab_size=4, blocks={"-": small_config().blocks["-"]}
        )
    with pytest.raises(TypeError, match=r"blocks\['-'\] of the config is a AttentionConfig; '-' needs a MLPConfig"):
        small_model("*-", blocks={"-": AttentionConfig(heads=1, kv_heads=1, head_dim=2)})


@pytest.mark.parametrize("symbol", small_config().blocks)
@pytest.mark.parametrize("norm", ["pre", "both"])
def test_a_blocks_output_is_scaled(symbol: str, norm: str) -> None:
    block = replace(small_config(symbol).blocks[symbol], norm=norm)
    hidden, added = torch.randn(17, 16, generator=torch.Generator().manual_seed(0)), []
    for scale in (1.0, 0.25):
        model = small_model(symbol, blocks={symbol: replace(block, residual_scale=scale)})
        added.append(model.layers["0"](hidden, ForwardContext(small_microbatch())) - hidden)
    assert_equal(added[1], 0.25 * added[0], "what is added")


def test_outside_blocks_are_passed_in_not_registered() -> None:
    config = small_config("[*-]")

    class Doubled(BLOCKS["-"]):
        def sublayer(self, hidden, context):
            return 2 * super().sublayer(hidden, context)

    microbatch = small_microbatch()
    plain, doubled = LanguageModel(config), LanguageModel(config, blocks={**BLOCKS, "-": Doubled})
    assert not torch.equal(plain(microbatch), doubled(microbatch))


@pytest.mark.parametrize("qk_norm", ["head", "full"])
def test_norms_around_zero_equal_norms_around_one(qk_norm: str) -> None:
    """The same function of a weight that is smaller by one: values and the gradients of every parameter."""
    attention = AttentionConfig(heads=4, kv_heads=2, head_dim=6, qk_norm=qk_norm)
    seeded = small_model("[*-]{2}", blocks={"*": attention})
    zero = small_model("[*-]{2}", blocks={"*": attention}, norm_offset=1.0)
    microbatch = small_microbatch()
    assert_equal(zero(microbatch), seeded(microbatch))  # both start from the same function
    with torch.no_grad():
        for (name, parameter), zero_parameter in zip(seeded.named_parameters(), zero.parameters(), strict=True):
            if name.endswith("norm.weight"):
                assert (zero_parameter == 0).all()
                parameter.normal_(1.0, 0.3)
            zero_parameter.copy_(parameter - 1 if name.endswith("norm.weight") else parameter)
    losses = [model(microbatch, targets=True).sum() for model in (seeded, zero)]
    assert_equal(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    for (name, parameter), zero_parameter in zip(seeded.named_parameters(), zero.named_parameters(), strict=True):
        assert_equal(zero_parameter[1].grad, parameter.grad, name)


def test_norm_around_zero_keeps_precision_in_bf16() -> None:
    norm = RMSNorm(4, 1e-6, offset=1.0).to(torch.bfloat16)
    with torch.no_grad():
        norm.weight.fill_(1e-3)
    hidden = torch.full((1, 4), 256.0, dtype=torch.bfloat16)
    exact = norm(hidden.float())
    assert norm(hidden).dtype == torch.bfloat16
    assert_equal(exact, torch.full((1, 4), 1.0 + norm.weight[0].item()))


def test_partial_rotary_rotates_only_the_first_features() -> None:
    positions, vectors = torch.arange(5), torch.randn(5, 2, 10)
    table = rotary_table(RotaryConfig(), positions, 4)
    turned = rotate(vectors, table)
    assert torch.equal(turned[..., 4:], vectors[..., 4:])
    assert torch.equal(turned[..., :4], rotate(vectors[..., :4], table))
    with pytest.raises(ValueError, match=r"rotary_dim=3 of head_dim=6: .* use an even number from 2 to 6"):
        AttentionConfig(heads=1, kv_heads=1, head_dim=6, rotary_dim=3)


def test_attention_output_gate() -> None:
    """sigmoid(0) is a half, so a gate of zeros halves the output of attention."""
    attention = {"heads": 4, "kv_heads": 2, "head_dim": 6}
    plain = small_model("*", blocks={"*": AttentionConfig(**attention)})
    gated = small_model("*", blocks={"*": AttentionConfig(**attention, output_gate=True)})
    with torch.no_grad():
        gated.layers["0"].attention.gate_proj.weight.zero_()
        gated.layers["0"].attention.o_proj.weight.mul_(2)
    assert_equal(gated(small_microbatch()), plain(small_microbatch()))


def test_middle_stage_has_only_layers() -> None:
    config = small_config("[*-]||[*-]|[*-]")
    with pytest.raises(PatternError, match=r"stage 2 of pp·vpp = 4 has no layer, and so nothing to run. Move a cut"):
        config.check_layout(Layout(pp=2, vpp=2))
    ends = small_config("|[*-]|[*-]|")
    ends.check_layout(Layout(pp=2, vpp=2))
    assert all(list(LanguageModel(ends, stage=Stage(index, 4)).parameters()) for index in range(4))

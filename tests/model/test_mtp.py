"""Multi-token prediction equals a naive implementation: each sequence alone, at positions with a later token."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from postlude import LanguageModel, Layout, Stage, pack
from postlude.data import IGNORE, Microbatch
from postlude.engine.normalizer import LossNormalizer
from postlude.model import OutputInputs
from postlude.model.blocks import MoEConfig
from postlude.model.context import ForwardContext
from postlude.objectives import MTP, SFT
from postlude.verify.cases import Case
from tests.equality import assert_equal
from tests.meshes import equal_to_one_rank
from tests.model.small import sequences, small_config, small_model

LENGTHS = (6, 1, 9, 2, 3, 4)
DEPTHS = [1, 2, 3]
PATTERNS = {"[*-]": "[*-]{2}", "*-": "[*-]", "[*E]": "[*E]"}


def pattern(depth_pattern: str, depths: int) -> str:
    return PATTERNS[depth_pattern] + f"/{depth_pattern}" * depths


def naive(model: LanguageModel, batch: list[Tensor]) -> list[list[Tensor]]:
    """Returns hidden states with gradients, by sequence and depth, at positions with a token that far ahead."""
    results = []
    for sequence in batch:
        (alone,) = pack([sequence], budget=64)
        hidden: Tensor = model(alone, output_processor=lambda inputs, _: inputs.hidden)
        depths = []
        for number in range(len(model.config.pattern.mtp)):
            module = model.mtp[0 if model.config.mtp_repeated else number]
            length = len(sequence) - number - 1
            if length < 1:
                break
            (shorter,) = pack([sequence[:length]], budget=64)
            embedded = model.embedding(sequence[number + 1 :])
            joined = torch.cat((module.embedding_norm(embedded), module.hidden_norm(hidden[:length])), dim=-1)
            hidden = F.linear(joined, module.proj.weight)
            for layer in module.layers.values():
                hidden = layer(hidden, ForwardContext(shorter))
            hidden = module.norm(hidden)
            depths.append(hidden)
        results.append(depths)
    return results


def naive_loss(model: LanguageModel, batch: list[Tensor], weight: float, masks: list[Tensor] | None = None) -> Tensor:
    """Returns SFT of the next token, plus the mean over depths of the same for later tokens."""
    weights = masks or [torch.ones(len(sequence)) for sequence in batch]
    parts = naive_parts(model, batch, weights)
    return parts[0] + sum(parts[1:]) * weight / len(parts[1:])


def naive_parts(model: LanguageModel, batch: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
    """Returns the mean loss of the next token, and that of each depth."""
    head = model.embedding.weight if model.config.tied_head else model.head.weight
    hidden, parts = naive(model, batch), []
    for depth in range(len(model.config.pattern.mtp) + 1):
        summed, count = torch.zeros(()), torch.zeros(())
        for sequence, own_hidden, mask in zip(batch, hidden, masks, strict=True):
            if len(sequence) < depth + 2:
                continue
            if depth == 0:
                (alone,) = pack([sequence], budget=64)
                states = model(alone, output_processor=lambda inputs, _: inputs.hidden)[:-1]
            else:
                states = own_hidden[depth - 1][:-1]
            losses = F.cross_entropy(F.linear(states, head), sequence[depth + 1 :], reduction="none")
            summed, count = summed + (losses * mask[depth + 1 :]).sum(), count + mask[depth + 1 :].sum()
        parts.append(summed / count.clamp_min(1.0))
    return parts


@pytest.mark.parametrize("depths", DEPTHS)
@pytest.mark.parametrize("kind", PATTERNS)
@pytest.mark.parametrize("repeated", [False, True], ids=["", "repeated"])
def test_every_depth_equals_a_naive_one(kind: str, depths: int, repeated: bool) -> None:
    model = small_model(pattern(kind, depths), mtp_repeated=repeated)
    batch = sequences(*LENGTHS)
    (microbatch,) = pack(batch, budget=64, depths=depths)
    assert len(model.mtp) == (1 if repeated else depths)
    outputs: list[OutputInputs] = model(microbatch, output_processor=lambda inputs, _: list(inputs.depths()))
    expected = naive(model, batch)
    for depth, output in enumerate(outputs):
        for sequence_expected, (start, stop) in zip(expected, microbatch.packing.slices(), strict=True):
            if depth < len(sequence_expected):
                assert_equal(output.hidden[start : stop - depth - 1], sequence_expected[depth], f"depth {depth + 1}")


@pytest.mark.parametrize("depths", DEPTHS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_losses_counts_and_gradients_equal_a_naive_model(depths: int, tied: bool, masked: bool) -> None:
    batch = sequences(*LENGTHS)
    masks = [torch.rand(len(sequence), generator=torch.Generator().manual_seed(7)) for sequence in batch]
    config = small_config(pattern("[*-]", depths), tied_head=tied)
    model, reference = LanguageModel(config), LanguageModel(config)
    microbatches = pack(batch, budget=16, columns={"mask": masks}, depths=depths)
    assert len(microbatches) > 1
    over = "mask" if masked else "tokens"
    objective, scale = MTP(objective=SFT(over=over), weight=0.3, over=over), LossNormalizer(microbatches)
    loss = torch.zeros(())
    for microbatch in microbatches:
        added = scale.loss(model(microbatch, output_processor=lambda inputs, _: objective(inputs)), microbatch)
        added.backward()
        loss += added.detach()
    for depth in range(depths + 1):
        expected_count = sum(
            float(mask[depth + 1 :].sum() if masked else max(0, len(mask) - depth - 1)) for mask in masks
        )
        assert scale.count(over, depth) == pytest.approx(expected_count)
        microbatch_counts = sum(_at(microbatch, depth).target_count for microbatch in microbatches)
        assert microbatch_counts == sum(max(0, length - depth - 1) for length in LENGTHS)
    expected = naive_loss(reference, batch, 0.3, masks if masked else None)
    expected.backward()
    assert_equal(loss, expected, "loss")
    for (name, parameter), expected_parameter in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert parameter.grad is not None
        assert expected_parameter.grad is not None
        assert_equal(parameter.grad, expected_parameter.grad, f"gradient of {name}")


def _at(microbatch: Microbatch, depth: int) -> Microbatch:
    return microbatch.mtp_microbatches[depth - 1] if depth else microbatch


def test_tokens_targets_and_columns_are_shifted_within_their_sequences() -> None:
    batch = sequences(4, 1, 3)
    (microbatch,) = pack(
        batch, budget=64, columns={"mask": [torch.arange(1.0, 5), torch.ones(1), torch.arange(5.0, 8)]}, depths=2
    )
    first, second = microbatch.mtp_microbatches
    a, c = batch[0].tolist(), batch[2].tolist()
    assert first.tokens.tolist() == [a[1], a[2], a[3], 0, 0, c[1], c[2], 0]
    assert first.targets.tolist() == [a[2], a[3], IGNORE, IGNORE, IGNORE, c[2], IGNORE, IGNORE]
    assert first.columns["mask"].tolist() == [3, 4, 0, 0, 0, 7, 0, 0]
    assert (first.batch_indices >= 0).tolist() == [True, True, True, False, False, True, True, False]
    assert second.tokens.tolist() == [a[2], a[3], 0, 0, 0, c[2], 0, 0]
    assert second.targets.tolist() == [a[3]] + [IGNORE] * 7
    assert (first.target_count, second.target_count, first.padding, second.padding) == (3, 1, 3, 5)
    assert (first.batch_targets, second.batch_targets) == (3, 1)


def test_stop_trunk_and_stop_head_stop_gradients() -> None:
    batch = sequences(*LENGTHS)
    (microbatch,) = pack(batch, budget=64, depths=1)

    def reached(**options: bool) -> set[str]:
        model = small_model("[*-]{2}/[*-]")
        objective = MTP(objective=lambda inputs: 0.0 * SFT()(inputs), weight=1.0, **options)
        LossNormalizer([microbatch]).loss(
            model(microbatch, output_processor=lambda i, _: objective(i)), microbatch
        ).backward()
        return {
            name for name, parameter in model.named_parameters() if parameter.grad is not None and parameter.grad.any()
        }

    everything = {name for name, _ in small_model("[*-]{2}/[*-]").named_parameters()}
    depth = {name for name in everything if name.startswith("mtp.")}
    assert reached() == everything
    assert reached(stop_head=True) == everything - {"head.weight"}
    assert reached(stop_trunk=True) == depth | {"head.weight"}
    assert reached(stop_trunk=True, stop_head=True) == depth


def test_a_custom_loss_is_called_for_each_depth() -> None:
    batch = sequences(*LENGTHS)
    masks = [torch.rand(len(sequence), generator=torch.Generator().manual_seed(3)) for sequence in batch]
    (microbatch,) = pack(batch, budget=64, columns={"mask": masks}, depths=2)
    model = small_model("[*-]{2}" + "/[*-]" * 2)
    requested_depths = []

    def processor(depth: int, inputs: OutputInputs, context: Any) -> Tensor:
        requested_depths.append((depth, context))
        return -depth * inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets).logprob

    def loss(**options: Any) -> float:
        objective = MTP(objective=lambda inputs: 0.0 * SFT()(inputs), weight=1.0, over="mask", **options)
        with torch.no_grad():
            actual = model(microbatch, output_processor=lambda inputs, _: objective(inputs))
        return float(LossNormalizer([microbatch]).loss(actual, microbatch))

    plain = [float(part.detach()) for part in naive_parts(model, batch, masks)[1:]]
    assert loss() == pytest.approx((plain[0] + plain[1]) / 2, rel=1e-5)
    assert loss(processor=processor, context="mine") == pytest.approx((plain[0] + 2 * plain[1]) / 2, rel=1e-5)
    assert requested_depths == [(1, "mine"), (2, "mine")]


def test_invalid_depths_are_refused() -> None:
    (microbatch,) = pack(sequences(4, 3), budget=64)
    with pytest.raises(ValueError, match=r"predicts 1 tokens further ahead, but the microbatch was packed for 0\."):
        small_model("[*-]/[*-]")(microbatch, output_processor=lambda inputs, _: list(inputs.depths()))
    with pytest.raises(ValueError, match=r"has no multi-token-prediction depths; write them after a '/'"):
        small_model("[*-]")(microbatch, output_processor=lambda inputs, _: list(inputs.depths()))


def test_separate_mtp_stage_applies_the_final_norm() -> None:
    config = small_config("[*-]{2}|/[*-]")
    stages = [LanguageModel(config, stage=Stage(index, 2)) for index in range(2)]
    assert not stages[1].layers
    full_model = LanguageModel(small_config("[*-]{2}/[*-]"))
    (microbatch,) = pack(sequences(*LENGTHS), budget=64, depths=1)
    ahead = [
        model(microbatch, hidden, output_processor=lambda inputs, _: (inputs.hidden, next(inputs.depths()).hidden))
        for model, hidden in ((full_model, None), (stages[1], stages[0](microbatch)))
    ]
    for first_hidden, second_hidden in zip(*ahead, strict=True):
        assert torch.equal(first_hidden, second_hidden)


@pytest.mark.parametrize(
    ("layout", "depths"),
    [
        *((layout, 3) for layout in ("pp=2", "cp=2", "tp=2", "own stage")),
        *(pytest.param(layout, 1, marks=pytest.mark.thorough) for layout in ("pp=2,vpp=2", "tp=2,pp=2,cp=2")),
    ],
)
@pytest.mark.slow
def test_every_layout_equals_one_rank(ranks: Any, layout: str, depths: int) -> None:
    is_own_stage = layout == "own stage"
    parsed_layout = Layout.parse("pp=2" if is_own_stage else layout)
    trunk = "[*-][*E]|" if is_own_stage else "[*-][*E]{3}" if parsed_layout.stages > 2 else "[*-][*E]"
    config = small_config(
        trunk + "/[*E]" * depths,
        tied_head=depths == 3,
        vocab_size=40,
        blocks={"E": MoEConfig(experts=4, top_k=2, intermediate_size=12)},
    )
    case = Case(config, layout=parsed_layout, objective="sft", initializer_range=0.1)
    assert set(equal_to_one_rank(ranks, case).gradients) == set(LanguageModel(config).state_dict())

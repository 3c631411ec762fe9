"""Routing replay: equals a router that makes the given choice, and the router's own choice at -1."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from postlude import LanguageModel, Microbatch, pack
from postlude.model.blocks import MoE, MoEConfig
from postlude.model.context import check_experts
from postlude.objectives import MTP, SFT
from tests.model.small import sequences, small_config

LENGTHS = (5, 1, 8, 3)
TOKENS = sum(LENGTHS)
EXPERTS = MoEConfig(
    experts=5,
    top_k=2,
    intermediate_size=12,
    shared_intermediate_size=8,
    selection_bias=True,
    selection_bias_rate=1e-3,
    balance_coefficient=0.1,
    z_coefficient=0.1,
    router_fp32=True,
)


def model(pattern: str = "[*E][*-][*E]", recompute: Any = "none", experts: MoEConfig = EXPERTS) -> LanguageModel:
    built = LanguageModel(small_config(pattern, blocks={"E": experts}), recompute=recompute)
    built.reset(0)
    return built


def random_routing(routers: int, tokens: int, experts: int = 5, top_k: int = 2, seed: int = 0) -> Tensor:
    """Two different experts a token and router, [tokens, routers, top_k] int16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, routers, experts, generator=generator).topk(top_k).indices.short()


def microbatch(routing: Tensor | None = None, depths: int = 0) -> Microbatch:
    columns = {} if routing is None else {"routing": routing.split(LENGTHS)}
    (packed,) = pack(sequences(*LENGTHS), budget=64, columns=columns, depths=depths)
    return packed


def learned(of: LanguageModel, batch: Microbatch, objective: Any = None) -> dict[str, Tensor]:
    """Returns logits or an objective's loss, every gradient, and the block counters."""
    of.zero_grad()
    for buffer in of.buffers():
        buffer.zero_()
    if objective is None:
        result = of(batch)
        result.square().sum().backward()
    else:
        result = of(
            batch, output_processor=lambda inputs, _: sum(part.values.sum() for part in objective(inputs).terms())
        )
        result.backward()
    gradients = {
        name: parameter.grad.clone() for name, parameter in of.named_parameters() if parameter.grad is not None
    }
    return {"output": result.detach()} | gradients | {name: buffer.clone() for name, buffer in of.named_buffers()}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert not [name for name in first if not torch.equal(first[name], second[name])]


def replayed(block: Any) -> tuple[float, float] | None:
    """Returns the number of replayed choices that differ from the router's, and of all; None if not measured."""
    sums = block.take_metric_sums()
    if sums is None:
        return None
    names = list(EXPERTS.metric_sums)
    parts = dict(zip(names, sums.split(list(EXPERTS.metric_sums.values())), strict=True))
    return float(parts["changed"]), float(parts["given"])


def own_choices(of: LanguageModel, batch: Microbatch, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Returns the experts that the trunk's routers choose, [T, routers, top_k]."""
    choices: dict[str, Tensor] = {}
    choose = MoE.choose
    with monkeypatch.context() as patch:
        patch.setattr(MoE, "choose", lambda self, scores: choices.setdefault(self.name, choose(self, scores)))
        of(batch)
    return torch.stack([choices[name] for name in of.config.routers], 1)


def test_routing_covers_the_trunk_routers_in_order() -> None:
    assert small_config("[*E]-[*E]/[*E]").routers == {"layers.0.moe": (2, 5), "layers.2.moe": (2, 5)}


def test_replaying_the_routers_own_choice_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = model()
    router_choices = own_choices(moe, microbatch(), monkeypatch)
    expected = learned(moe, microbatch())
    moe.blocks[1].take_metric_sums()
    assert_same(learned(moe, microbatch(router_choices.short())), expected)
    assert replayed(moe.blocks[1]) == (0, TOKENS * 2)
    assert_same(learned(moe, microbatch(torch.full_like(router_choices, -1))), expected)
    assert replayed(moe.blocks[1]) == (0, 0)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_replayed_choice_equals_a_router_that_makes_it(monkeypatch: pytest.MonkeyPatch, scores: Any) -> None:
    moe = model(experts=replace(EXPERTS, scores=scores))
    routing = random_routing(2, TOKENS)
    routing[3:6] = -1  # these choose
    routing[8, 1, 0] = -1  # as does one that is not told all
    chooses = (routing < 0).any(-1)
    actual = learned(moe, microbatch(routing))
    choose = MoE.choose

    def forced(self: MoE, scores: Tensor) -> Tensor:
        place = list(moe.config.routers).index(self.name)
        return torch.where(chooses[:, place, None], choose(self, scores), routing[:, place].long())

    assert not torch.equal(actual["output"], moe(microbatch()))
    with monkeypatch.context() as patch:
        patch.setattr(MoE, "choose", forced)
        assert_same(actual, learned(moe, microbatch()))


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_replay_with_recompute_is_equal_and_counted_once(recompute: Any) -> None:
    routing = random_routing(2, TOKENS)
    plain, recomputed = model(), model(recompute=recompute)
    assert_same(learned(recomputed, microbatch(routing)), learned(plain, microbatch(routing)))
    for plain_block, recomputed_block in zip(plain.blocks, recomputed.blocks, strict=True):
        sums, again_sums = plain_block.take_metric_sums(), recomputed_block.take_metric_sums()
        assert (sums is None) == (not isinstance(plain_block, MoE))
        assert (again_sums is None) if sums is None else torch.equal(sums, again_sums)


def test_mtp_depths_are_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trunk's experts are given; those of a depth's block are not, and do not count."""
    ahead = model("[*E]/[*E]")
    objective = MTP(objective=SFT())
    router_choices = own_choices(ahead, microbatch(depths=1), monkeypatch)
    for block in ahead.blocks:
        block.take_metric_sums()
    assert_same(
        learned(ahead, microbatch(router_choices, depths=1), objective), learned(ahead, microbatch(depths=1), objective)
    )
    assert [replayed(block) for block in ahead.blocks] == [None, (0, 2 * TOKENS), None, (0, 0)]


def test_fraction_of_changed_choices_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = model("[*E]")
    routing = own_choices(moe, microbatch(), monkeypatch)
    routing = routing.flip(-1)  # another order is no other choice
    for token in (2, 7):
        routing[token, 0, 0] = next(expert for expert in range(5) if expert not in routing[token, 0])
    routing[9:] = -1
    moe.blocks[1].take_metric_sums()  # of the forward above
    learned(moe, microbatch(routing))
    assert replayed(moe.blocks[1]) == (2, 18)
    assert replayed(moe.blocks[1]) is None
    with torch.no_grad():
        moe.eval()(microbatch(routing))
    assert replayed(moe.blocks[1]) is None


@pytest.mark.parametrize(
    ("routing", "complaint"),
    [
        (random_routing(1, TOKENS), r"\(1, 2\) per token.*2 experts in each of 2 blocks.*\[length, 2, 2\]"),
        (random_routing(2, TOKENS, top_k=3), r"\(2, 3\) per token"),
        (random_routing(2, TOKENS).float(), r"float32, but experts have numbers"),
    ],
)
def test_routing_that_fits_no_router_is_refused(routing: Tensor, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        model()(microbatch(routing))


def test_wrong_routing_columns_and_models_without_experts_raise() -> None:
    with pytest.raises(ValueError, match="this model has no router"):
        model("[*-]")(microbatch(random_routing(2, TOKENS)))
    with pytest.raises(ValueError, match=r"\[17, routers, top_k\]"):
        microbatch(torch.zeros(TOKENS))


@pytest.mark.parametrize("number", [-2, 5])
def test_expert_ids_out_of_range_are_refused(number: int) -> None:
    routing = random_routing(2, TOKENS)
    routing[4, 1, 0] = number
    with pytest.raises(ValueError, match=rf"expert {number} of layers\.2\.moe.*from 0 to 4"):
        check_experts(routing, model().config.routers)

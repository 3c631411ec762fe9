"""A custom block and a model without a Hugging Face family, trained in the engine on several ranks.

It is the block of examples/block.py and docs/architecture.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.block import CONFIG, TABLE
from torch import Tensor

from postlude import LanguageModel, Layout
from postlude.generate.distributed import SyncedGenerator
from postlude.model.block_config import LayerMetric
from postlude.model.blocks import Block, BlockConfig
from postlude.model.context import ForwardContext
from postlude.model.pattern import SYMBOLS, Pattern
from postlude.verify.cases import Case
from tests.engine.training import LENGTHS, batch, bitwise_equal, build, error_text, policy, train, weights
from tests.meshes import equal_to_one_rank


@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "dp_shard=2"])
@pytest.mark.slow
def test_custom_block_in_a_layout_equals_one_rank(ranks: Any, layout: str) -> None:
    case = Case(CONFIG, layout=Layout.parse(layout), objective="sft", initializer_range=0.1, blocks=TABLE)
    expected = LanguageModel(CONFIG, blocks=TABLE).state_dict()
    assert set(equal_to_one_rank(ranks, case).gradients) == set(expected)


def train_save_and_stream(group: Any, directory: str) -> tuple[Any, ...]:
    """Trains in one layout and continues its checkpoint in another. Returns what streams and what is refused."""
    engine = build("tp=2", CONFIG, blocks=TABLE)
    before = weights(engine)
    train(engine, [0, 1])
    engine.save(directory)
    second_engine = build("pp=2", CONFIG, blocks=TABLE, seed=1)
    second_engine.load(directory)
    full_model = LanguageModel(CONFIG, blocks=TABLE)
    second_engine.copy_weights(full_model)
    trained = weights(engine)
    return (
        [name for name in before if torch.equal(before[name], trained[name])],
        bitwise_equal(weights(second_engine), trained) and bitwise_equal(full_model.state_dict(), trained),
        error_text(lambda: engine.export_hf(f"{directory}/export")),
        error_text(lambda: SyncedGenerator(engine, None)),  # type: ignore[arg-type]
        error_text(lambda: build("cp=2", CONFIG, blocks=TABLE)),
        error_text(lambda: build("tp=2", CONFIG)),
    )


@pytest.mark.slow
def test_a_custom_model_is_saved_loaded_and_streamed_and_export_hf_refuses_it(ranks: Any, tmp_path: Path) -> None:
    for unmoved, is_equal, exported, generated, cut, unknown in ranks(
        2, train_save_and_stream, str(tmp_path / "checkpoint")
    ):
        assert not unmoved
        assert is_equal
        assert exported.startswith("ValueError: no Hugging Face family describes this model, [C-]{2}[*-]{2}, so it has")
        assert generated.startswith("ValueError: layers.0.convolution (Convolution) does not support decoding, so its")
        assert (
            cut
            == "ValueError: layers.0.convolution reads neighbouring tokens, which cp=2 puts on other ranks. Use cp=1."
        )
        assert unknown.startswith("ValueError: pattern [C-]{2}[*-]{2} uses 'C' (convolution), which has no block yet")


# --- what a block does after a step


@dataclass(frozen=True, kw_only=True)
class CountingConfig(BlockConfig):
    def flops(self, hidden_size: int) -> float:
        return 1.0

    @property
    def metric_sums(self) -> Mapping[str, int]:
        return {"tokens": 1, "starts": 2}

    def metrics(self, sums: Mapping[str, Sequence[float]]) -> Mapping[str, LayerMetric]:
        return {"tokens": LayerMetric(sums["tokens"][0])}


class Counting(Block):
    """Changes nothing, and counts the tokens of each step on every rank; counts are summed after the step."""

    Config = CountingConfig
    tokens: Tensor  # [1] of this rank, this step
    totals: Tensor  # [2] tokens and steps so far

    def __init__(self, config: CountingConfig, model: Any, name: str, mesh: Any) -> None:
        super().__init__(config, model, name, mesh)
        self.register_buffer("tokens", torch.zeros(1), persistent=False)
        self.register_buffer("totals", torch.zeros(2))

    def sublayer(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        if self.training:
            tokens = torch.ones(len(hidden)) if context.token_mask is None else context.token_mask
            self.tokens += tokens.sum()
            self.metric_sums.add({"tokens": tokens.sum()})
        return 0.0 * hidden

    def token_counters(self) -> tuple[Tensor, ...]:
        return (self.tokens,)

    def after_optimizer_step(self) -> None:
        self.totals += torch.stack((self.tokens[0], torch.ones(())))


COUNTING = replace(
    CONFIG,
    pattern=Pattern.parse("[*-][*Q]", symbols={**SYMBOLS, "Q": "counting"}),
    blocks={**CONFIG.blocks, "Q": CountingConfig()},
)


def counted_tokens(group: Any, layout: str) -> list[list[float]]:
    engine = build(layout, COUNTING, blocks={**TABLE, "Q": Counting})
    engine.forward_backward(batch(0), policy)
    engine.zero_grad()  # a step that is given up counts nothing
    engine.logprobs(batch(0))  # nor does an evaluation
    engine.forward_backward(batch(1, (5, 7)), policy)
    engine.forward_backward(batch(2, (4,)), policy)
    engine.optimizer_step()
    metrics, vectors = (result := engine.forward_backward(batch(3), policy)).metrics, result.layer_vectors
    engine.optimizer_step()
    names = ("counting/layer_01/tokens", "counting/tokens", "counting/tokens_worst")
    assert [metrics[name] for name in names] == [sum(LENGTHS)] * 3
    assert vectors == {"counting/layer_01/starts": [0.0, 0.0]}
    return [tensor.tolist() for name, tensor in engine.tensors.items() if name.endswith("totals")]


@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "dp_shard=2", "cp=2", ""])
@pytest.mark.slow
def test_counters_of_a_block_cover_the_step_in_every_layout(ranks: Any, layout: str) -> None:
    actual = ranks(Layout.parse(layout).world_size, counted_tokens, layout)
    totals = [counts for rank in actual for counts in rank]
    assert len(totals) == (1 if layout in ("", "pp=2") else 2)
    assert all(total == [16.0 + sum(LENGTHS), 2.0] for total in totals)

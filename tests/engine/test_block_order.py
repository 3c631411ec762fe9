"""MLP blocks anywhere in a group: layouts equal one rank, grouping changes nothing, decoding equals a forward."""

from typing import Any

import pytest
import torch

from postlude import LanguageModel, Layout, Recast
from postlude.generate.generator import Generator
from postlude.generate.sampling_params import SamplingParams
from postlude.hf.load import load_model
from postlude.model.blocks import MoEConfig
from postlude.verify.cases import Case
from tests.generate.test_generator import prompts, teacher_forced
from tests.meshes import equal_to_one_rank
from tests.model.small import VOCABULARY, small_config, small_microbatch

CONFIG = small_config(
    "[M-*][-*][*-M-][--E]",
    initializer_range=0.1,
    blocks={"E": MoEConfig(experts=4, top_k=2, intermediate_size=12, router_fp32=True)},
)


@pytest.mark.parametrize(
    ("layout", "options"),
    [("tp=2", {}), ("pp=2", {"overlap": True, "recompute": "full"}), ("dp_shard=2,ep=2", {"overlap": True})],
)
@pytest.mark.slow
def test_a_layout_equals_one_rank(ranks: Any, layout: str, options: dict[str, Any]) -> None:
    report = equal_to_one_rank(ranks, Case(CONFIG, layout=Layout.parse(layout), objective="sft", **options))
    assert {f"layers.2.{name}.up_proj.weight" for name in ("mlp", "mlp_2")} < report.gradients.keys()


def test_grouping_does_not_change_results() -> None:
    grouped = LanguageModel(CONFIG)
    ungrouped = load_model(Recast(CONFIG, "M-*-**-M---E"))
    ungrouped.load_state_dict(dict(zip(ungrouped.state_dict(), grouped.state_dict().values(), strict=True)))
    microbatch = small_microbatch()
    assert torch.equal(ungrouped(microbatch), grouped(microbatch))


def test_generation_equals_a_forward() -> None:
    model = LanguageModel(CONFIG)
    prompt_tokens = prompts(VOCABULARY, (5, 1, 8))
    answered = Generator(model, max_sequences=2).generate(prompt_tokens, SamplingParams(max_new_tokens=9, seed=3))
    for (completion,), logprobs in zip(answered, teacher_forced(model, prompt_tokens, answered), strict=True):
        torch.testing.assert_close(torch.tensor(completion.logprobs), logprobs, rtol=0, atol=1e-4)

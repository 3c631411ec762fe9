"""Mamba-2: layouts equal one rank, packed sequences equal each alone, decode steps equal a full forward."""

from typing import Any

import pytest
import torch

from postlude import LanguageModel, Layout, ModelConfig, load_model
from postlude.generate.generator import Generator
from postlude.generate.sampling_params import SamplingParams
from postlude.model.blocks import MambaConfig
from postlude.verify.cases import Case
from tests.equality import assert_equal
from tests.generate.test_generator import teacher_forced
from tests.meshes import equal_to_one_rank, mesh
from tests.model.small import assert_packed_equals_alone, sequences, small_config

LENGTHS = (9, 1, 14, 2, 3, 30)
SIZES: dict[str, Any] = {"heads": 8, "head_dim": 3, "state_size": 4, "chunk": 5, "time_step_start": (0.2, 1.0)}
KINDS = {
    "groups": MambaConfig(**SIZES, groups=4, norm_groups=4, bias=True),
    "one": MambaConfig(**SIZES, groups=1, conv_kernel=2, conv_bias=False, time_step_limit=(0.3, 0.8)),
    "gate-last": MambaConfig(**SIZES, groups=2, norm_groups=2, norm_before_gate=True),
}


def config(kind: str, pattern: str = "[M-][*-]M[ME]", **changes: Any) -> ModelConfig:
    """States matter, and no gradient is a small difference of large numbers: rounding the weights to fp32 once more
    changes none by more than 6e-6 of its scale."""
    return small_config(pattern, blocks={"M": KINDS[kind]}, **{"initializer_range": 0.1, "norm_eps": 1e-3, **changes})


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_equal_each_alone(kind: str) -> None:
    assert_packed_equals_alone(LanguageModel(config(kind)), *LENGTHS)


# --- layouts


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("groups", "tp=2"),  # tests/verify has these blocks in the other layouts
        ("one", "cp=2"),
        pytest.param("gate-last", "cp=2,tp=2", marks=pytest.mark.thorough),
        *(pytest.param(kind, "tp=4", marks=pytest.mark.thorough) for kind in KINDS),
        *(pytest.param(kind, "pp=2,vpp=2,tp=2", marks=pytest.mark.thorough) for kind in KINDS),
    ],
)
@pytest.mark.slow
def test_a_layout_equals_one_rank(ranks: Any, kind: str, layout: str) -> None:
    case = Case(config(kind), layout=Layout.parse(layout), objective=("sft", "grpo")[len(layout) % 2])
    report = equal_to_one_rank(ranks, case)
    assert set(report.gradients) == set(LanguageModel(case.source).state_dict())


@pytest.mark.parametrize(
    ("layout", "offered"),
    [("tp=3", "tp=2, cp=1"), ("cp=3", "tp=2, cp=1"), ("tp=2,cp=3", "tp=4, cp=1"), ("tp=16", "tp=8, cp=1")],
)
def test_layout_that_does_not_divide_the_heads_is_refused(layout: str, offered: str) -> None:
    parsed = Layout.parse(layout)
    with pytest.raises(ValueError, match=f"mamba has 8 heads in 4 groups.*Use {offered}.") as error:
        config("groups", "M").check_layout(parsed)
    assert f"tp={parsed.tp}, cp={parsed.cp} cannot share" in str(error.value)


# --- token by token


@pytest.fixture(scope="module", params=["groups", "one"])
def model(request: Any) -> LanguageModel:
    """Returns a model with weights large enough that the next token depends on earlier ones."""
    model = LanguageModel(config(request.param, initializer_range=0.4))
    return model.eval()


@pytest.mark.parametrize(
    "limits",
    [
        {"max_sequences": 4},  # answers of one prompt begin together or later, from the states it left
        {"max_batch_tokens": 50},  # a few at a time, the rest evicted when answers grow, and begun again
        {"max_prefill_tokens": 1},
    ],
    ids=str,
)
@pytest.mark.slow
def test_decode_steps_equal_a_full_forward(model: LanguageModel, limits: dict[str, int]) -> None:
    prompt_list = [sequence.tolist() for sequence in sequences(7, 1, 13, 2)]
    sampling = [SamplingParams(max_new_tokens=5 + 4 * place, seed=5) for place in range(4)]
    answered = Generator(model, **limits).generate(prompt_list, sampling, n=3)
    assert len({tuple(completion.tokens) for group in answered for completion in group}) == 12
    expected = teacher_forced(model, prompt_list, answered)
    for completion, logprobs in zip((completion for group in answered for completion in group), expected, strict=True):
        assert_equal(torch.tensor(completion.logprobs), logprobs, "log-probs")


def generated(group: Any, source: ModelConfig, layout: Layout) -> list[list[int]]:
    """Returns greedy completions, three at a time: with two ranks the batch is padded."""
    model = load_model(source, mesh=mesh(layout))
    prompt_list = [sequence.tolist() for sequence in sequences(7, 1, 13, 2, 5)]
    completions = Generator(model, max_sequences=3).generate(
        prompt_list, SamplingParams(max_new_tokens=9, temperature=0.0)
    )
    return [completion.tokens for (completion,) in completions]


@pytest.mark.slow
def test_tensor_parallel_completions_equal_one_rank(ranks: Any) -> None:
    source = config("one", initializer_range=0.4)
    expected = generated(None, source, Layout())
    assert len(set(map(tuple, expected))) == 5
    for outputs in ranks(2, generated, source, Layout(tp=2)):
        assert outputs == expected

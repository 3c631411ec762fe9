"""Batch-invariant mode: a completion is bit-identical in every batch, and its log-probs equal the trainer's."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from postlude import ranks as started
from postlude.data import Batch
from postlude.engine import Engine
from postlude.generate.distributed import SyncedGenerator
from postlude.generate.generator import Generator
from postlude.generate.protocol import Completion
from postlude.generate.sampling_params import SamplingParams
from postlude.hf.read_model import read_model
from postlude.layout import Layout
from postlude.lora import LoRA
from postlude.model import LanguageModel
from postlude.model.batch_invariant import check_batch_invariant
from postlude.objectives import SFT
from postlude.options import Recompute
from tests.engine.training import config
from tests.equality import assert_equal
from tests.generate.test_scheduler import EagerGenerator, GraphGenerator

TEMPERATURES = (1.0, 0.7, 0.0)
GPU = pytest.mark.gpu


def qwen3(layers: int = 28) -> Any:
    """The shape of Qwen3-0.6B with random weights, large enough that some tokens are likelier than others."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, initializer_range=0.04,
    )  # fmt: skip


def qwen3_moe() -> Any:
    """Six layers of the shape of Qwen3-30B-A3B, with half of its experts."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, num_hidden_layers=6, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, moe_intermediate_size=768, num_experts=64, num_experts_per_tok=8, norm_topk_prob=True,
        tie_word_embeddings=False, initializer_range=0.04,
    )  # fmt: skip


def model_of(source: Any, device: str, dtype: torch.dtype, *, batch_invariant: bool = True) -> LanguageModel:
    with torch.device(device):
        return LanguageModel(read_model(source)[1], dtype=dtype, batch_invariant=batch_invariant)


def requests(count: int, longest: int, vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Returns prompts and completions of uneven lengths, each with its own seed and temperature."""
    source = random.Random(0)
    prompts = [[source.randrange(vocab_size) for _ in range(source.randrange(1, longest))] for _ in range(count)]
    lengths = [source.randrange(1, longest) for _ in prompts]
    return prompts, [
        SamplingParams(max_new_tokens=length, seed=index, temperature=TEMPERATURES[index % 3], ignore_eos=True)
        for index, length in enumerate(lengths)
    ]


def bits(groups: list[list[Completion]]) -> list[tuple[list[int], list[float]]]:
    return [(completion.tokens, completion.logprobs) for group in groups for completion in group]


def diverging(actual: list[list[Completion]], expected: list[list[Completion]]) -> dict[str, float]:
    """Returns the fraction of tokens from the first differing token on, and of differing log-probs before it."""
    tokens = other_tokens = shared = other_logprobs = 0
    for (actual_tokens, logprobs), (expected_tokens, expected_logprobs) in zip(
        bits(actual), bits(expected), strict=True
    ):
        first_difference = next(
            (i for i, (a, b) in enumerate(zip(actual_tokens, expected_tokens, strict=False)) if a != b),
            len(expected_tokens),
        )
        tokens, other_tokens, shared = (
            tokens + len(expected_tokens),
            other_tokens + len(expected_tokens) - first_difference,
            shared + first_difference,
        )
        other_logprobs += sum(
            a != b for a, b in zip(logprobs[:first_difference], expected_logprobs[:first_difference], strict=True)
        )
    return {"tokens": tokens, "diverged": other_tokens / tokens, "other_logprobs": other_logprobs / max(shared, 1)}


@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    [
        (EagerGenerator, "tiny-dense", torch.float32),
        (GraphGenerator, "tiny-dense", torch.bfloat16),
        (EagerGenerator, "tiny-moe", torch.bfloat16),
    ],
)
def test_completion_is_bit_identical_in_every_batch_on_cpu(
    kind: type[Generator], name: str, dtype: torch.dtype
) -> None:
    model = model_of(config(name, num_hidden_layers=2), "cpu", dtype)
    prompts, samplings = requests(6, 14, 256)
    in_one_batch = bits(kind(model).generate(prompts, samplings))
    for index in (0, 5):
        assert bits(kind(model).generate(prompts[index : index + 1], samplings[index : index + 1])) == [
            in_one_batch[index]
        ]
    few_pages = kind(model, max_sequences=3, max_batch_tokens=100, max_prefill_tokens=8)
    assert bits(few_pages.generate(prompts[::-1], samplings[::-1])) == in_one_batch[::-1]


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-moe"])
def test_log_probs_are_bit_identical_to_the_trainer_on_cpu(name: str) -> None:
    compare_with_trainer(config(name, num_hidden_layers=2), "cpu", torch.bfloat16, requests(6, 14, 256), budget=64)


def compare_with_trainer(
    source: Any, device: str, dtype: torch.dtype, requests: tuple[list[list[int]], list[SamplingParams]], budget: int
) -> None:
    """Samples with a copy of the trainer's weights, at three temperatures, and scores the tokens with the trainer."""
    prompts, samplings = requests
    with started(device=device):
        engine = Engine(source, budget=budget, compute_dtype=dtype, batch_invariant=True)
        completions = SyncedGenerator(engine, None).generate(prompts, samplings)
        for temperature in TEMPERATURES:
            rows = [index for index, sampling in enumerate(samplings) if sampling.temperature == temperature]
            batch = Batch(
                [[*prompts[row], *completions[row][0].tokens] for row in rows], temperature=temperature or 1.0
            )
            scored = engine.logprobs(batch).logprob
            for row, logprobs in zip(rows, scored, strict=True):
                sampled = torch.tensor(completions[row][0].logprobs, dtype=torch.float64)
                assert torch.equal(logprobs[len(prompts[row]) :].double(), sampled)
            # The training forward, with gradients and the objective's own sweep.
            result = engine.forward_backward(batch, SFT())
            mean = sum(float(logprobs.double().sum()) for logprobs in engine.logprobs(batch).logprob)
            assert result.loss == pytest.approx(
                -mean / sum(len(sequence) - 1 for sequence in batch.sequences), rel=1e-6
            )


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_gradients_equal_those_without_the_mode_with_every_recompute(recompute: Recompute) -> None:
    gradients = []
    batch = Batch([torch.randint(256, (length,)) for length in (5, 9, 12)], {})
    for batch_invariant in (False, True):
        with started():
            engine = Engine(
                config("tiny-dense"), budget=64, recompute=recompute, batch_invariant=batch_invariant, seed=1
            )
            engine.forward_backward(batch, SFT())
            gradients.append({name: parameter.grad for name, parameter in engine.parameters.items()})
    for name, gradient in gradients[0].items():
        assert_equal(gradients[1][name], gradient, name)


@pytest.mark.parametrize(
    ("source", "options", "reason"),
    [
        ("tiny-hybrid", {}, "has 'M' (Mamba)"),
        ("tiny-dense", {"layout": Layout(tp=2)}, "needs tp=1, but tp is 2"),
        ("tiny-dense", {"options": {"lora": True}}, "leave lora out"),
        ("tiny-dense", {"options": {"overlap": "zero_bubble"}}, "overlap=zero_bubble"),
    ],
)
def test_options_that_depend_on_the_batch_are_refused(source: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=r"^batch_invariant ") as raised:
        check_batch_invariant(read_model(source)[1], **{"layout": Layout(), **options})
    assert reason in str(raised.value)


def test_an_engine_with_adapters_is_refused() -> None:
    with started(), pytest.raises(ValueError, match=r"^batch_invariant is not possible with lora=True"):
        Engine(config("tiny-dense"), lora=LoRA(rank=4), batch_invariant=True)


@GPU
@pytest.mark.parametrize("source", [qwen3, qwen3_moe])
@pytest.mark.parametrize("batch_invariant", [True, False], ids=["batch_invariant", "ordinary"])
def test_completion_is_bit_identical_in_every_batch_on_gpu(source: Any, batch_invariant: bool) -> None:
    """Alone, among others, and next to the prefill of other prompts; without the mode it differs."""
    model = model_of(source(), "cuda", torch.bfloat16, batch_invariant=batch_invariant)
    prompts, samplings = requests(201, 120, 151936)
    chosen, generator = (0, 1, 2, 77, 200), Generator(model)
    alone = [generator.generate(prompts[row : row + 1], samplings[row : row + 1])[0] for row in chosen]
    rates = {}
    for count in (7, 63, 200):
        rows = sorted({*chosen, *range(count + 1)})
        among = generator.generate([prompts[row] for row in rows], [samplings[row] for row in rows])
        rates[f"among {count}"] = diverging([among[rows.index(row)] for row in chosen], alone)
    among = generator.generate(prompts, samplings)
    small = Generator(model, max_sequences=50, max_batch_tokens=4096, max_prefill_tokens=256)
    rates["50 rows, preempted"] = diverging(small.generate(prompts[::-1], samplings[::-1])[::-1], among)
    shared = [replace(sampling, seed=7) for sampling in samplings[:4]]
    several = generator.generate(prompts[:4], shared, 3)
    one_by_one = [generator.generate(prompts[:4], shared, 1, first_index=number) for number in range(3)]
    regrouped = [[one_by_one[number][row][0] for number in range(3)] for row in range(4)]
    rates["prompts shared by 3"] = diverging(several, regrouped)
    print(json.dumps({"source": source.__name__, "batch_invariant": batch_invariant, **rates}))
    differs = any(rate["diverged"] or rate["other_logprobs"] for rate in rates.values())
    assert differs is not batch_invariant


@GPU
@pytest.mark.parametrize("source", [qwen3, qwen3_moe])
def test_bf16_log_probs_are_bit_identical_to_the_trainer_on_gpu(source: Any) -> None:
    compare_with_trainer(source(), "cuda", torch.bfloat16, requests(64, 300, 151936), budget=8192)


@GPU
def test_gradients_equal_those_without_the_mode_to_bf16_rounding_on_gpu() -> None:
    """bf16 keeps 8 bits, and rounding adds up over four layers: 2e-2 of the norm."""
    gradients = []
    generator = torch.Generator().manual_seed(0)
    batch = Batch([torch.randint(151936, (length,), generator=generator) for length in (700, 33, 1500)], {})
    for batch_invariant in (False, True):
        with started(device="cuda"):
            engine = Engine(qwen3(4), budget=4096, batch_invariant=batch_invariant, seed=1)
            engine.forward_backward(batch, SFT())
            gradients.append({name: parameter.grad.float() for name, parameter in engine.parameters.items()})
    gaps = {
        name: float((gradients[1][name] - ordinary).norm() / ordinary.norm()) for name, ordinary in gradients[0].items()
    }
    print("largest gap of a gradient", max(gaps.values()))
    assert max(gaps.values()) < 2e-2

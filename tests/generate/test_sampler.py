"""Sampling: chi-square tests of each setting against exact probabilities, with fixed seeds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from postlude import load_model, pack
from postlude.generate.counter_rng import gumbel, mix, rng_key
from postlude.generate.generator import Generator
from postlude.generate.sampler import SamplerSettings, sample
from postlude.generate.sampling_params import MAX_FP32, MIN_FP32, MIN_TEMPERATURE, SamplingParams

WAYS = {
    "plain": SamplingParams(),
    "hot": SamplingParams(temperature=1.7),
    "cold": SamplingParams(temperature=0.4),
    "top-k": SamplingParams(top_k=5),
    "top-k of one": SamplingParams(top_k=1),
    "top-k past all": SamplingParams(top_k=10_000),
    "top-p": SamplingParams(top_p=0.6),
    "tiny top-p": SamplingParams(top_p=1e-6),
    "min-p": SamplingParams(min_p=0.3),
    "all": SamplingParams(temperature=1.3, top_k=9, top_p=0.8, min_p=0.05),
    "top-k then top-p": SamplingParams(top_k=4, top_p=0.7),
}


def exact(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Returns the distribution by definition, fp64 [vocab]."""
    logits = logits.double() / (sampling.temperature or 1.0)
    order = logits.argsort(descending=True)
    keep = torch.ones_like(logits, dtype=torch.bool)
    if sampling.top_k:
        keep[order[sampling.top_k :]] = False
    kept = logits.masked_fill(~keep, -math.inf).softmax(-1)
    before = 0.0
    for token in order.tolist():
        if before >= sampling.top_p and sampling.top_p < 1:
            keep[token] = False
        before += kept[token].item()
    keep &= logits >= logits.max() + math.log(sampling.min_p or 1e-300)
    return logits.masked_fill(~keep, -math.inf).softmax(-1)


def chi_square_score(counts: Tensor, probabilities: Tensor) -> float:
    """Returns the standard normal score of the chi-square statistic (Wilson and Hilferty), with rare tokens merged."""
    expected = probabilities * counts.sum()
    often = expected >= 5
    pooled = torch.cat((expected[often], expected[~often].sum()[None]))
    observed = torch.cat((counts[often], counts[~often].sum()[None])).double()
    if pooled[-1] < 1e-9:
        assert observed[-1] == 0, "a token without probability was drawn"
        pooled, observed = pooled[:-1], observed[:-1]
    freedom = len(pooled) - 1
    if freedom == 0:
        return 0.0
    statistic = float(((observed - pooled) ** 2 / pooled).sum())
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def sample_many(logits: Tensor, sampling: SamplingParams, count: int) -> tuple[Tensor, Tensor, Tensor]:
    keys = [rng_key(sampling.seed, number) for number in range(count)]
    settings = SamplerSettings.of([sampling] * count, keys, len(logits), logits.device)
    return sample(logits.expand(count, -1), settings, torch.zeros(count, dtype=torch.int64))[:3]


def ways_and_sizes() -> list[Any]:
    """Every sampling setting with every vocabulary. `make test` has each setting with the smallest."""
    quick = [(way, 37) for way in WAYS]
    return [
        pytest.param(
            way, vocabulary, id=f"{way}-{vocabulary}", marks=() if (way, vocabulary) in quick else pytest.mark.thorough
        )
        for way in WAYS
        for vocabulary in (37, 256, 1000)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "vocabulary"), ways_and_sizes())
def test_tokens_are_sampled_from_the_distribution(way: str, vocabulary: int) -> None:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 2
    sampling = WAYS[way]
    probabilities = exact(logits, sampling)
    tokens, logprobs, sampled = sample_many(logits, sampling, 10_000)
    assert abs(chi_square_score(torch.bincount(tokens, minlength=vocabulary), probabilities)) < 4
    torch.testing.assert_close(sampled.double(), probabilities.log()[tokens], rtol=0, atol=1e-5)
    tempered = (logits.double() / sampling.temperature).log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), tempered[tokens], rtol=0, atol=1e-5)


def test_successive_draws_of_one_stream_are_independent() -> None:
    """Pairs of neighbouring samples have the product of the two distributions."""
    logits = torch.tensor([0.0, 1.0, -0.5, 0.3])
    count = 20_000
    settings = SamplerSettings.of([SamplingParams()] * count, [rng_key(7)] * count, 4, logits.device)
    tokens, *_ = sample(logits.expand(count, -1), settings, torch.arange(count))
    probabilities = logits.double().softmax(-1)
    assert (
        chi_square_score(
            torch.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16),
            torch.outer(probabilities, probabilities).flatten(),
        )
        < 4
    )


def test_rows_have_separate_settings() -> None:
    logits = torch.randn(len(WAYS) + 1, 300, generator=torch.Generator().manual_seed(0)) * 2
    samplings = [*WAYS.values(), SamplingParams(temperature=0.0)]
    keys = [rng_key(place) for place in range(len(samplings))]
    for count in range(20):
        counts = torch.full((len(samplings),), count)
        in_one_batch = sample(logits, SamplerSettings.of(samplings, keys, 300, logits.device), counts)[:3]
        for row, sampling in enumerate(samplings):
            settings = SamplerSettings.of([sampling], [keys[row]], 300, logits.device)
            alone = sample(logits[row : row + 1], settings, counts[:1])[:3]
            assert in_one_batch[0][row] == alone[0][0]
            for part, expected in zip(in_one_batch[1:], alone[1:], strict=True):
                torch.testing.assert_close(part[row], expected[0], rtol=0, atol=1e-5)
        assert in_one_batch[0][-1] == logits[-1].argmax()


def test_rows_have_their_own_top_k() -> None:
    """Also where no row has top-p, which the rows above have."""
    limits = [1 + row % 3 for row in range(60)]
    samplings, keys = [SamplingParams(top_k=limit) for limit in limits], [rng_key(row) for row in range(60)]
    logits = torch.linspace(0.0, 0.1, 9)
    settings = SamplerSettings.of(samplings, keys, len(logits), logits.device)
    tokens, *_ = sample(logits.expand(60, -1), settings, torch.zeros(60, dtype=torch.int64))
    for limit in (1, 2, 3):
        assert set(tokens[limit - 1 :: 3].tolist()) == set(range(9 - limit, 9))


@pytest.mark.parametrize(
    "limits",
    [
        {"temperature": MIN_TEMPERATURE},
        {"temperature": MAX_FP32},
        {"top_p": MIN_FP32},
        {"top_p": 1.0 - 1e-12},
        {"min_p": 1e-300},
        {"temperature": MIN_TEMPERATURE, "top_p": MIN_FP32, "min_p": 1.0},
    ],
    ids=str,
)
def test_extreme_values_give_a_token_with_finite_logprob(limits: dict) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)) * 100
    settings = SamplerSettings.of([SamplingParams(**limits)] * 3, [1, 2, 3], 300, logits.device)
    tokens, logprobs, sampled = sample(logits, settings, torch.zeros(3, dtype=torch.int64))[:3]
    assert torch.isfinite(torch.stack((logprobs, sampled))).all()
    assert ((tokens >= 0) & (tokens < 300)).all()


def test_nan_logits_affect_only_their_row() -> None:
    logits = torch.randn(len(WAYS) * 2, 300, generator=torch.Generator().manual_seed(0))
    logits[::2] = torch.nan
    samplings = [params for params in WAYS.values() for _ in range(2)]
    keys = list(range(len(samplings)))
    _, *spoiled = sample(
        logits, SamplerSettings.of(samplings, keys, 300, logits.device), torch.zeros(len(keys), dtype=torch.int64)
    )[:3]
    own_settings = SamplerSettings.of(samplings[1::2], keys[1::2], 300, logits.device)
    _, *alone = sample(logits[1::2], own_settings, torch.zeros(len(WAYS), dtype=torch.int64))[:3]
    for actual, expected in zip(spoiled, alone, strict=True):
        assert actual[::2].isnan().all()
        torch.testing.assert_close(actual[1::2], expected, rtol=0, atol=1e-5)


def test_top_p_with_more_tokens_than_the_first_top_k() -> None:
    logits = torch.linspace(0.0, 0.5, 6000)  # nearly even: the edge lies thousands of tokens down
    sampling = SamplingParams(top_p=0.9)
    probabilities = exact(logits, sampling)
    tokens, _, sampled = sample_many(logits, sampling, 500)
    assert (probabilities[tokens] > 0).all()
    torch.testing.assert_close(sampled.double(), probabilities.log()[tokens], rtol=0, atol=1e-4)


def test_noise_is_gumbel_and_depends_only_on_its_position() -> None:
    noise = gumbel(torch.tensor([[rng_key(1)]]), torch.arange(200_000))[0]
    ranked, ideal = noise.sort().values, (torch.arange(200_000).double() + 0.5) / 200_000
    assert (torch.exp(-torch.exp(-ranked)) - ideal).abs().max() < 1.95 / math.sqrt(200_000)  # Kolmogorov, p = 0.001
    lagged = torch.corrcoef(torch.stack((noise[:-1], noise[1:])))[0, 1]
    assert abs(float(lagged)) < 4 / math.sqrt(200_000)
    two_positions = gumbel(torch.tensor([[rng_key(1)]]), torch.tensor([5, 77_777]))[0]
    assert torch.equal(two_positions, noise[[5, 77_777]])


def test_mix_equals_splitmix64() -> None:
    # The first numbers of the stream that starts at 0, from the generator's reference implementation.
    golden = 0x9E3779B97F4A7C15 - (1 << 64)
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    stream = mix(torch.tensor([1, 2, 3]) * golden).tolist()
    assert [value % (1 << 64) for value in stream] == expected
    assert rng_key(0) % (1 << 64) == expected[0]


@pytest.mark.parametrize("way", ["plain", "cold", "all"])
def test_generator_samples_from_the_models_distribution(way: str) -> None:
    model = load_model("tiny-dense")
    prompt = list(b"chi square")
    (microbatch,) = pack([prompt], budget=len(prompt))
    with torch.no_grad():
        model.embedding.weight.mul_(5)
        probabilities = exact(model(microbatch)[-1], WAYS[way])
    generator = Generator(model, max_sequences=2048, max_batch_tokens=200_000)
    sampling = SamplingParams(**{**vars(WAYS[way]), "max_new_tokens": 1, "seed": 4})
    (results,) = generator.generate([prompt], sampling, n=6000)
    counts = torch.bincount(torch.tensor([answer.tokens[0] for answer in results]), minlength=len(probabilities))
    assert abs(chi_square_score(counts, probabilities)) < 4


@pytest.mark.parametrize(
    ("wrong", "error", "sentence"),
    [
        ({"max_new_tokens": 0}, ValueError, "a completion has at least 1 token"),
        ({"max_new_tokens": 1.5}, TypeError, "max_new_tokens=1.5: give a whole number"),
        ({"temperature": -1.0}, ValueError, "temperature=-1.0: give 0"),
        ({"temperature": math.nan}, ValueError, "temperature=nan"),
        ({"temperature": 1e-46}, ValueError, "temperature=1e-46: give 0 .* from 1e-05 to 3.4e"),
        ({"temperature": 1e39}, ValueError, "temperature=1e.39: give 0"),
        ({"temperature": 10**400}, ValueError, r"temperature=10\*\*400 or so: give 0"),
        ({"temperature": True}, TypeError, "temperature=True: give a number"),
        ({"temperature": "1"}, TypeError, "temperature='1': give a number"),
        ({"top_k": -1}, ValueError, "top_k=-1"),
        ({"top_k": -(10**5000)}, ValueError, r"top_k=-10\*\*5000 or so"),
        ({"top_p": 1e-50}, ValueError, "top_p=1e-50: give a probability above 0, at least 1.18e-38"),
        ({"top_p": 0.0}, ValueError, "top_p=0.0: give a probability above 0"),
        ({"min_p": 1.1}, ValueError, "min_p=1.1"),
        ({"stop": "word"}, TypeError, "give a tuple of str"),
        ({"stop": ("",)}, ValueError, "at least one letter"),
        ({"stop_tokens": [1]}, TypeError, "give a tuple of int"),
        ({"stop_tokens": (True,)}, TypeError, "give a tuple of int"),
        ({"ignore_eos": "no"}, TypeError, "ignore_eos='no': give True or False"),
    ],
)
def test_invalid_settings_are_refused(wrong: dict, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        SamplingParams(**wrong)

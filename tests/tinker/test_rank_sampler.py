"""RankSampler: what one client asks about its prompts does not hold up others."""

from collections.abc import Callable

import numpy as np
import pytest

from postlude import Engine, load_tokenizer
from postlude import ranks as started
from postlude.generate.sampling_params import SamplingParams
from postlude.tinker.backend import SampleRequest, SampleResult
from postlude.tinker.rank_sampler import RankSampler, SampleCall, SamplerWeights
from postlude.tinker.settings import WorkerSettings

BUDGET, NOISY_CALLS = 32, 6


def call(number: int, client: str, *, topk: int = 0, adapter: str | None = None) -> SampleCall:
    request = SampleRequest(
        np.arange(1, BUDGET - 4, dtype=np.int32),
        SamplingParams(max_new_tokens=1, seed=number),
        prompt_logprobs=True,
        topk_sample_logprobs=topk,
        client=(client, "session"),
    )
    return SampleCall(number, SamplerWeights(adapter), request, streamed=False, rank=0)


@pytest.fixture
def sampler() -> RankSampler:
    with started(device="cpu"):
        engine = Engine("tiny-dense")
        settings = WorkerSettings(name="tiny", source="tiny-dense", budget=BUDGET)
        made = RankSampler(engine, load_tokenizer("tiny-dense"), settings)
        engine.copy_weights(made.generator.model)
        return made


def run(sampler: RankSampler, until: Callable[[dict[int, SampleResult | Exception]], bool]) -> dict[int, object]:
    finished: dict[int, SampleResult | Exception] = {}
    while not until(finished):
        finished |= sampler.step().finished
    return dict(finished)


def test_a_client_with_many_prompts_to_score_does_not_hold_up_another(sampler: RankSampler) -> None:
    sampler.add([call(number, "noisy") for number in range(NOISY_CALLS)])
    sampler.add([call(NOISY_CALLS, "quiet", topk=2)])
    finished = run(sampler, lambda finished: NOISY_CALLS in finished)
    assert len(finished) <= 3, "one of the noisy client's was before it, and one ran while it was sampled"
    finished |= run(sampler, lambda finished: not sampler.busy)
    assert len(finished) == NOISY_CALLS + 1
    first, *others = (finished[number].prompt.logprobs for number in range(NOISY_CALLS + 1))  # type: ignore[attr-defined]
    assert all(np.array_equal(first, other, equal_nan=True) for other in others)


def test_cancelled_and_failed_calls_leave_the_others(sampler: RankSampler) -> None:
    too_long = SampleCall(
        9, SamplerWeights(), SampleRequest(np.ones(2, np.int32), SamplingParams(max_new_tokens=10**7)), False, 0
    )
    sampler.add([*(call(number, "one", topk=1) for number in range(3)), too_long, call(7, "two", adapter="gone")])
    sampler.cancel([1])
    finished = run(sampler, lambda _: not sampler.busy)
    assert finished.keys() == {0, 2, 7, 9}
    assert "context_length" in str(finished[9])
    assert "gone" in str(finished[7])

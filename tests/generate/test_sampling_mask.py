"""The tokens that could be sampled are returned exactly, in every way of stepping, and cost nothing when not asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from postlude import LanguageModel, pack
from postlude.generate.generator import Generator
from postlude.generate.protocol import Completion
from postlude.generate.sampling_params import SamplingParams
from tests.generate.test_logit_rules import DRAFTS, PATTERN, PROMPTS, WAYS
from tests.model.small import small_model

BOTH = SamplingParams(max_new_tokens=12, temperature=0.8, seed=2, top_k=20, top_p=0.7, return_sampling_mask=True)
SAMPLINGS = [
    BOTH,
    replace(BOTH, top_k=3, top_p=1.0, temperature=1.3),
    replace(BOTH, top_k=0, top_p=0.5),
    replace(BOTH, top_k=0, top_p=1.0, min_p=0.4),
]


def kept(probabilities: torch.Tensor, sampling: SamplingParams) -> set[int]:
    """Returns the tokens that are left by the definition of `SamplingParams`; there are no ties here."""
    ranked = probabilities.argsort(descending=True)[: sampling.top_k or None]
    shares = probabilities[ranked] / probabilities[ranked].sum()
    before = shares.cumsum(0) - shares
    likely = probabilities[ranked] >= sampling.min_p * probabilities.max()
    return set(ranked[(before < sampling.top_p) & likely].tolist())


def check(model: LanguageModel, prompt: list[int], sampling: SamplingParams, completion: Completion) -> None:
    tokens = completion.tokens
    with torch.no_grad():
        logits = model(pack([prompt + tokens], budget=64)[0]).double()[len(prompt) - 1 :] / sampling.temperature
    assert completion.sampling_mask is not None
    assert len(completion.sampling_mask) == len(tokens)
    for place, (token, mask) in enumerate(zip(tokens, completion.sampling_mask, strict=True)):
        assert len(mask) == len(set(mask))
        assert set(mask) == kept(logits[place].softmax(-1), sampling)
        among = logits[place, torch.tensor(mask)].log_softmax(-1)[list(mask).index(token)]
        assert completion.policy_logprobs[place] == pytest.approx(float(among), abs=1e-5)


@WAYS
@DRAFTS
def test_masks_have_the_tokens_that_could_be_sampled(way: type[Generator], draft: Any) -> None:
    """Rows with and without masks join, move and leave, and some are preempted."""
    model = small_model(PATTERN)
    plain = replace(BOTH, return_sampling_mask=False)
    for limits in ({}, {"max_sequences": 3, "max_batch_tokens": 40}):
        generator = way(model, draft=draft, **limits)
        for prompt, sampling, group in zip(
            PROMPTS, SAMPLINGS, generator.generate(PROMPTS, SAMPLINGS, n=2), strict=True
        ):
            for completion in group:
                check(model, prompt, sampling, completion)
        mixed = generator.generate(PROMPTS, [BOTH, plain, plain, plain])
        check(model, PROMPTS[0], BOTH, mixed[0][0])
        (alone,) = way(model, draft=draft).generate([PROMPTS[0]], plain)
        for (completion,) in mixed[1:]:
            assert completion.sampling_mask is None
            assert completion.policy_logprobs == completion.logprobs
        assert alone[0].tokens == mixed[0][0].tokens


@pytest.mark.parametrize("changes", [{}, {"top_k": 5, "temperature": 0.0}], ids=["without a filter", "greedy"])
def test_without_a_choice_of_tokens_there_is_no_mask(changes: dict[str, Any]) -> None:
    sampling = SamplingParams(max_new_tokens=3, return_sampling_mask=True, **changes)
    ((completion,),) = Generator(small_model(PATTERN)).generate([[3]], sampling)
    assert completion.sampling_mask is None
    assert completion.policy_logprobs == completion.logprobs


def test_a_mask_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postlude.generate.logit_rules.MAX_SAMPLING_MASK", 4)
    with pytest.raises(ValueError, match=r"sampled from \d+ tokens, but a sampling mask holds at most 4. Set top_k"):
        Generator(small_model(PATTERN)).generate([[3]], replace(BOTH, top_k=9, top_p=1.0))

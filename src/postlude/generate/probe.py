"""WeightProbe: checks by a few log-probs that a rollout engine has the weights that the trainer has just sent.

The trainer scores a fixed sequence of tokens when it sends weights, and keeps the likeliest tokens of some positions.
It requests the likeliest token after the same prefixes from every rollout engine, and compares the log-probs when the
replies arrive, so it does not wait for servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import torch

from postlude.data import Batch
from postlude.data.chat_tokenizer import AnyTokenizer
from postlude.engine import Engine
from postlude.generate.counter_rng import rng_key
from postlude.generate.protocol import Completion, Request
from postlude.generate.sampling_params import SamplingParams
from postlude.model.fp8 import without_fp8

POSITIONS, STRIDE = 8, 4  # prefixes, and how many tokens each is longer than the one before
TOP_TOKENS = (
    16  # tokens that the trainer keeps of each position: the sampler's choice is among them if weights are equal
)
EARLIER_VERSIONS = 16  # versions of the weights, besides the newest, that a sampler may still have
ROUNDING_UNITS, MIN_LIMIT = 16, 1e-3  # the default limit in units of the dtype's precision, and the least
OUTLIER_FACTOR = 4.0  # the mean is divided by this before it is compared with the median
STALE_FRACTION = 0.125
"""A sampler has earlier weights if its log-prob at every position differs from theirs by less than this
fraction of `logprob_diff`. Independent rounding of 8 positions does so with a probability of 5e-10."""
NOTICEABLE_FRACTION = 0.01  # of the limit: a smaller difference between two versions of the weights may be rounding
GREEDY = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)


class WeightsDiffer(ValueError):
    """A sampler has other weights than the trainer. The message is a whole sentence."""


@dataclass(frozen=True)
class TrainerScores:
    """The trainer's log-probs with the weights of one optimizer step."""

    step: int
    likeliest: Sequence[Mapping[int, float]]
    """The log-probs of the likeliest tokens after each prefix."""

    def greedy(self) -> list[tuple[int, float]]:
        """Returns the likeliest token after each prefix and its log-prob: the reply of a sampler with these weights."""
        return [max(logprobs.items(), key=lambda item: item[1]) for logprobs in self.likeliest]


@dataclass(frozen=True)
class ProbeResult:
    """The difference between a sampler's log-probs and the trainer's."""

    step: int
    """The optimizer step whose weights it was given."""
    sampled: Sequence[tuple[int, float]]
    """Its tokens and their log-probs."""
    logprob_diff: float
    """The median of the differences, or a quarter of their mean if that is larger: in bf16 a mixture-of-experts model
    sends a few tokens to other experts, which does not mean that its weights differ."""
    problem: str
    """What is wrong with its weights, as text that follows the sampler's name; "" if nothing is."""


@dataclass(frozen=True)
class Probe:
    """Requests to a sampler that was given new weights, and the trainer's log-probs to compare its replies with."""

    requests: Sequence[Request]
    scores: TrainerScores
    earlier: Sequence[TrainerScores]
    limit: float
    repeatable: bool = True
    """Whether the trainer's log-probs are the same to the last bit with the same weights."""

    def compare(self, completions: Sequence[Completion], previous: ProbeResult | None = None) -> ProbeResult:
        """Compares a sampler's completions of `requests`. `previous` is its last result without a problem."""
        sampled = _sampled(completions)
        difference = _logprob_diff(self.scores, sampled)
        return ProbeResult(self.scores.step, sampled, difference, self._problem(sampled, difference, previous))

    def logprob_diff(self, completions: Sequence[Completion]) -> float:
        """Returns the log-prob difference of a sampler's completions of `requests`: see `ProbeResult`."""
        return _logprob_diff(self.scores, _sampled(completions))

    def _problem(self, sampled: Sequence[tuple[int, float]], difference: float, previous: ProbeResult | None) -> str:
        step, stale = self.scores.step, self._stale_scores(sampled, difference, previous)
        if stale is not None:
            return (
                f"has the weights of optimizer step {stale.step} after it was given those of step {step}: its "
                f"log-probs differ by {_logprob_diff(stale, sampled):.2g} from the trainer's at that step, and by "
                f"{difference:.2g} from its current ones"
            )
        if difference <= self.limit:
            return ""
        return (
            f"has other weights than the trainer after it was given those of optimizer step {step}: its log-probs "
            f"differ by {difference:.2g}, and rounding explains {self.limit:.2g} (set rollout.probe_limit if it "
            "computes with less precision than the trainer)"
        )

    def _stale_scores(
        self, sampled: Sequence[tuple[int, float]], difference: float, previous: ProbeResult | None
    ) -> TrainerScores | None:
        """Returns the scores of the earlier weights that the sampler still has, or None."""
        noticeable = NOTICEABLE_FRACTION * self.limit
        for earlier_scores in self.earlier:
            # The rounding of the sampler is not the trainer's, and hides a small step. It does not hide that the
            # sampler repeats its log-probs to the last bit.
            repeats = previous is not None and (previous.step, previous.sampled) == (earlier_scores.step, sampled)
            if repeats and self.repeatable and _logprob_diff(self.scores, earlier_scores.greedy()) > noticeable:
                return earlier_scores
        if difference <= noticeable or not self.earlier:
            return None
        nearest = min(self.earlier, key=lambda earlier_scores: max(_differences(earlier_scores, sampled)))
        return nearest if max(_differences(nearest, sampled)) < STALE_FRACTION * difference else None


class WeightProbe:
    """Scores the fixed tokens with an engine's weights.

    `limit` is the largest `logprob_diff` of a sampler with the same weights; None derives it from the dtype. Requests
    have at most `max_length` tokens. The tokens are the same on every rank. They are not text: a model predicts text
    with log-probs near 0, which hardly depend on the weights.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: AnyTokenizer | None = None,
        limit: float | None = None,
        max_length: int | None = None,
    ) -> None:
        self.engine = engine
        precision = torch.finfo(engine.compute_dtype).eps
        self.limit = max(MIN_LIMIT, ROUNDING_UNITS * precision) if limit is None else limit
        positions = min(POSITIONS, (min(engine.options.budget, max_length or engine.options.budget) - 1) // STRIDE)
        self.tokens = probe_tokens(1 + STRIDE * positions, engine.config.vocab_size, tokenizer)
        self.lengths = range(STRIDE, len(self.tokens), STRIDE)
        self.requests = [Request(tuple(self.tokens[:length]), GREEDY) for length in self.lengths]
        self._history: list[TrainerScores] = []
        self._repeatable = True

    def score(self) -> Probe:
        """Returns the probe of the engine's current weights. Every rank calls it."""
        scores, earlier = self._scores(), self._history
        if not earlier:
            self._repeatable = scores == self._scores()
        # The first scores are always kept: a sampler that never takes new weights still has those.
        self._history = [*earlier[:1], *earlier[1:][2 - EARLIER_VERSIONS :], scores]
        return Probe(self.requests, scores, tuple(earlier), self.limit, self._repeatable)

    def _scores(self) -> TrainerScores:
        top = min(TOP_TOKENS, self.engine.config.vocab_size)
        blocks = [block for stage in self.engine.stage_models.values() for block in stage.blocks]
        with without_fp8(blocks):  # weights are compared, not FP8 with the generator's precision
            (logprobs,), (ids,) = self.engine.topk(Batch([self.tokens]), top)
        likeliest = [dict(zip(ids[length].tolist(), logprobs[length].tolist(), strict=True)) for length in self.lengths]
        return TrainerScores(self.engine.step, likeliest)


def probe_tokens(count: int, vocab_size: int, tokenizer: AnyTokenizer | None) -> list[int]:
    """Returns token ids of the vocabulary's middle, by a hash of their position; none that the tokenizer added.

    Special tokens are first or last in most vocabularies, and servers may treat them specially.
    """
    added = set(tokenizer.added_tokens_decoder) if tokenizer is not None else set()
    candidates = [token for token in range(vocab_size // 8, vocab_size // 2 + 1) if token not in added]
    return [candidates[rng_key(position) % len(candidates)] for position in range(count)]


def _sampled(completions: Sequence[Completion]) -> list[tuple[int, float]]:
    return [(completion.tokens[0], completion.logprobs[0]) for completion in completions]


def _logprob_diff(scores: TrainerScores, sampled: Sequence[tuple[int, float]]) -> float:
    """Returns the difference between sampled tokens' log-probs and the trainer's: see `ProbeResult`."""
    differences = _differences(scores, sampled)
    return max(median(differences), fmean(differences) / OUTLIER_FACTOR)


def _differences(scores: TrainerScores, sampled: Sequence[tuple[int, float]]) -> list[float]:
    """Returns the difference at each position; a lower bound of it for a token that the trainer has not listed."""
    differences = []
    for likeliest, (token, logprob) in zip(scores.likeliest, sampled, strict=True):
        highest, lowest = max(likeliest.values()), min(likeliest.values())
        # The sampler gives no token more than `logprob`, and the trainer gives an unlisted one at most `lowest`.
        token_difference = abs(logprob - likeliest[token]) if token in likeliest else logprob - lowest
        differences.append(max(token_difference, highest - logprob))
    return differences

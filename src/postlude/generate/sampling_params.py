"""SamplingParams: how completions are sampled and when they end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

MIN_TEMPERATURE = 1e-5  # above 0; below it vLLM samples greedily, and fp32 logits may overflow
PENALTIES = {"presence_penalty": (-2, 2), "frequency_penalty": (-2, 2), "repetition_penalty": (0.01, 100)}
MAX_TOP_LOGPROBS = 20
MAX_SAMPLING_MASK = 1024  # tokens that a token was sampled from, if they are returned
MAX_MASKED_TOP_K = MAX_SAMPLING_MASK // 2  # leaves room for tokens that are as likely as the last of the top k
MAX_STOPS, MAX_STOP_CHARACTERS, MAX_STOP_TOKENS = 64, 1024, 1024
MAX_SCHEMA = 65_536  # characters of a JSON schema or a grammar
MAX_BIASES, MAX_BIAS = 300, 100.0  # of logits: how many tokens, and how much
MIN_FP32, MAX_FP32 = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127  # normal numbers; below them a device may round to 0


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of the completions of one prompt.

    Logits are divided by `temperature`; 0 is greedy. Then `top_k` keeps the k likeliest tokens, `top_p` the smallest
    set of those with total probability p, and `min_p` those at least p times as likely as the likeliest. 0, 1.0 and
    0.0 keep all. Tokens as likely as the last one that is kept are kept too.

    Before that `repetition_penalty` divides positive logits, and multiplies negative ones, of all tokens of prompt and
    completion; `frequency_penalty` is subtracted for each time that the completion has a token, and `presence_penalty`
    once. Then `logit_bias`, pairs of a token and a number, is added. `json_schema`, the text of a JSON schema, allows
    only tokens that continue JSON of it; `grammar`, in llguidance's form of Lark, those that continue a text of it.
    `top_logprobs` is how many of the likeliest tokens are returned with each token. With `return_sampling_mask` the
    tokens that top-k, top-p and min-p left to sample from are returned.

    A completion ends with any of `stop_tokens`, with the end-of-sequence token unless `ignore_eos`, when a string of
    `stop` appears in its text, or after `max_new_tokens`.

    The random numbers depend on `seed`, on the completion's index and, with one `SamplingParams` for all prompts, on
    the prompt's index in the call. With these equal the completion is the same, whatever else is generated with it: to
    the bit if the model is `batch_invariant`, else up to the rounding of its dtype.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    json_schema: str | None = None
    grammar: str | None = None
    top_logprobs: int = 0
    return_sampling_mask: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        self._check_values()

    def _check_types(self) -> None:
        for name in ("max_new_tokens", "top_k", "seed", "top_logprobs"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}={value!r}: give a whole number.")
        for name in ("temperature", "top_p", "min_p", *PENALTIES):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, float | int | Real):
                raise TypeError(f"{name}={value!r}: give a number.")
        for name in ("ignore_eos", "return_sampling_mask"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r}: give True or False.")
        for name in ("json_schema", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise TypeError(f"{name}={getattr(self, name)!r:.60}: give the text of one.")
        if not isinstance(self.logit_bias, tuple) or not all(map(_is_bias, self.logit_bias)):
            raise TypeError(f"logit_bias={self.logit_bias!r:.60}: give a tuple of pairs of a token id and a number.")
        for name, kind in (("stop", str), ("stop_tokens", int)):
            values = getattr(self, name)
            wrong = not isinstance(values, tuple) or not all(isinstance(value, kind) for value in values)
            if wrong or (kind is int and any(isinstance(value, bool) for value in values)):
                raise TypeError(f"{name}={values!r}: give a tuple of {kind.__name__}; for one value, (value,).")

    def _check_values(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={format_number(self.max_new_tokens)}: a completion has at least 1 token.")
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature <= MAX_FP32:
            raise ValueError(
                f"temperature={format_number(self.temperature)}: give 0 for the likeliest token, or a positive number "
                f"from {MIN_TEMPERATURE:g} to {MAX_FP32:.3g}."
            )
        if self.top_k < 0:
            raise ValueError(f"top_k={format_number(self.top_k)}: give how many tokens to choose from, or 0 for all.")
        if not MIN_FP32 <= self.top_p <= 1.0:
            raise ValueError(
                f"top_p={format_number(self.top_p)}: give a probability above 0, at least {MIN_FP32:.3g} since it is "
                "compared in fp32; 1 leaves all tokens."
            )
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(
                f"min_p={format_number(self.min_p)}: give a share between 0 and 1 of the likeliest token's probability."
            )
        for name, (lowest, highest) in PENALTIES.items():
            if not lowest <= getattr(self, name) <= highest:
                raise ValueError(f"{name}={getattr(self, name)}: give a number from {lowest:g} to {highest:g}.")
        if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"top_logprobs={format_number(self.top_logprobs)}: give 0 to {MAX_TOP_LOGPROBS}.")
        for token, bias in self.logit_bias:
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise ValueError(f"logit_bias of token {token} is {bias}: give a number from -100 to 100.")
        if self.json_schema is not None and self.grammar is not None:
            raise ValueError("json_schema and grammar are both given; a completion can have one.")
        self._check_sizes()
        if "" in self.stop:
            raise ValueError(f"stop={self.stop!r}: every stop string has at least one letter.")

    def _check_sizes(self) -> None:
        """Refuses what is compared with every token, or read before the first, if it is too large."""
        for name, size, limit, noun in (
            ("stop", len(self.stop), MAX_STOPS, "strings"),
            ("a string of stop", max(map(len, self.stop), default=0), MAX_STOP_CHARACTERS, "characters"),
            ("stop_tokens", len(self.stop_tokens), MAX_STOP_TOKENS, "tokens"),
            ("logit_bias", len(self.logit_bias), MAX_BIASES, "tokens"),
            ("json_schema", len(self.json_schema or ""), MAX_SCHEMA, "characters"),
            ("grammar", len(self.grammar or ""), MAX_SCHEMA, "characters"),
        ):
            if size > limit:
                raise ValueError(f"{name} has {size}; the limit is {limit} {noun}.")

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p restrict the tokens to sample from."""
        return bool(self.top_k) or self.top_p < 1.0 or bool(self.min_p)

    @property
    def masked(self) -> bool:
        """Whether the tokens that could be sampled are returned. They are not if all could, or if it is greedy."""
        return self.return_sampling_mask and self.filtered and not self.greedy

    @property
    def penalized(self) -> bool:
        """Whether a penalty changes the logits."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def has_rules(self) -> bool:
        """Whether sampling needs `LogitRules`: for penalties, biases, a grammar or the likeliest tokens."""
        return self.penalized or bool(self.logit_bias) or self.constrained or self.top_logprobs > 0

    @property
    def constrained(self) -> bool:
        """Whether a grammar restricts the tokens."""
        return self.json_schema is not None or self.grammar is not None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self.temperature == 0.0


def _is_bias(pair: object) -> bool:
    if not isinstance(pair, tuple) or len(pair) != 2:
        return False
    token, bias = pair
    return all(not isinstance(value, bool) for value in pair) and isinstance(token, int) and isinstance(bias, Real)


def format_number(value: float) -> str:
    """Returns a number for an error message. A very large integer is shown as a power of ten."""
    if isinstance(value, int) and abs(value) > MAX_FP32:
        return f"{'-' if value < 0 else ''}10**{int(math.log10(abs(value)))} or so"
    return str(value)


def sampling_per_prompt(sampling: SamplingParams | Sequence[SamplingParams], prompts: int) -> list[SamplingParams]:
    if isinstance(sampling, SamplingParams):
        return [sampling] * prompts
    if len(sampling) != prompts:
        raise ValueError(
            f"there are {prompts} prompts, but {len(sampling)} samplings. Give one for each prompt, or one for all."
        )
    return list(sampling)

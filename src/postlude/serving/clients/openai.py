"""OpenAI's /v1/completions, of servers that take and return token ids."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from postlude.generate.protocol import Completion, Request
from postlude.generate.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from postlude.serving.clients.api import SendRequest, ServerAPI, make_completion
from postlude.serving.errors import InvalidResponse, RequestRefused

COMPLETIONS = "/v1/completions"
NO_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
FILTERED = -9999.0  # what vLLM writes for a log-prob of -inf
SHARE_ROUNDING = 1e-4  # of the sum of probabilities
TOKEN_PREFIX = "token_id:"  # how vLLM writes a token when it returns ids in place of text


class OpenAIAPI(ServerAPI):
    """Any server of OpenAI's protocol."""

    name = "openai"

    def __init__(self, extra: Mapping[str, Any] | None = None, vocab_size: int | None = None) -> None:
        self.extra = dict(extra or {})
        """Fields added to every request."""
        self.vocab_size = vocab_size
        """The size of the model's vocabulary, if it is known."""

    async def detect_features(self, send: SendRequest) -> None:
        """Does nothing: the server may have no list of models."""

    async def max_length(self, send: SendRequest, model: str) -> int | None:
        """Returns max_model_len of /v1/models, if the server has that."""
        try:
            return await super().max_length(send, model)
        except RequestRefused:
            return None

    async def generate(self, send: SendRequest, model: str, request: Request) -> Completion:
        body = {
            "model": model,
            "prompt": list(request.prompt),
            **sampling_fields(request.sampling),
            "seed": request.seed,
            "logprobs": self.likeliest_count(request.sampling) or 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        try:
            choice = only_choice(await send("POST", COMPLETIONS, body | self.extra))
            completion = _completion(choice)
            return replace(completion, sampling_mask=_masks(choice)) if request.sampling.masked else completion
        except RequestRefused as error:
            if "status 422" in str(error):  # unknown fields
                raise RequestRefused(f"{error}; a server must take and return token ids", error.status) from error
            raise

    def likeliest_count(self, sampling: SamplingParams) -> int:
        """Returns how many of the likeliest tokens a request asks for, to get its sampling mask; 0 without one.

        They are twice `top_k`: vLLM may also sample from tokens as likely as the last of the top k, which are common
        among logits in bf16. A vocabulary may have fewer.
        """
        if not sampling.masked:
            return 0
        count = 2 * sampling.top_k or MAX_TOP_LOGPROBS
        return count if self.vocab_size is None else min(count, self.vocab_size)


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Returns every sampling field, so that vLLM takes none from the model's generation_config.json."""
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        **NO_PENALTIES,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_tokens),
        "ignore_eos": sampling.ignore_eos,
    }


def only_choice(reply: Any) -> Mapping[str, Any]:
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        count = f"{len(choices)} choices" if isinstance(choices, list) else "no choices"
        raise InvalidResponse(f"gave {count} where one was requested")
    choice: Mapping[str, Any] = choices[0]
    return choice


def _completion(choice: Mapping[str, Any]) -> Completion:
    stated = choice.get("logprobs") or {}
    logprobs = stated.get("token_logprobs")
    if logprobs is None:
        raise InvalidResponse("gave no log-probs; a server that supports `logprobs` is needed")
    tokens = choice.get("token_ids")
    if tokens is None:
        written = [str(token) for token in stated.get("tokens") or []]
        if len(written) != len(logprobs) or not all(token.startswith(TOKEN_PREFIX) for token in written):
            raise InvalidResponse(
                "gave text but no token ids, and text cannot be turned back into the tokens that were sampled; a "
                "server that supports return_token_ids or return_tokens_as_token_ids is needed, such as vLLM"
            )
        try:
            tokens = [int(token.removeprefix(TOKEN_PREFIX)) for token in written]
        except ValueError as error:
            raise InvalidResponse(f"gave token ids that are not numbers: {error}") from error
    return make_completion(tokens, logprobs, choice.get("finish_reason"), choice.get("text"))


def sampling_mask(likeliest: Iterable[tuple[int, float]]) -> array[int]:
    """Returns the tokens that could be sampled, given the likeliest ones and their log-probs after filtering.

    They must have all of the probability: then no other token could be sampled.
    """
    kept = [(token, logprob) for token, logprob in likeliest if logprob > FILTERED]
    share = sum(math.exp(logprob) for _, logprob in kept)
    if abs(share - 1.0) > SHARE_ROUNDING:
        raise InvalidResponse(
            f"gave {len(kept)} likeliest tokens with {share:.6f} of the probability, where those that could be sampled "
            "have all of it. Start vLLM with --logprobs-mode processed_logprobs, and --max-logprobs of at least "
            "twice sampling.top_k"
        )
    return array("i", [token for token, _ in kept])


def read_token(entry: Mapping[str, Any]) -> int:
    """Returns the token of an entry of log-probs, which has its id or is named by it."""
    return int(entry["token_id"] if "token_id" in entry else str(entry["token"]).removeprefix(TOKEN_PREFIX))


def _masks(choice: Mapping[str, Any]) -> list[array[int]]:
    try:
        places = [
            [(read_token({"token": token}), float(logprob)) for token, logprob in place.items()]
            for place in choice["logprobs"]["top_logprobs"]
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidResponse(f"gave no likeliest tokens that can be read: {error!r}") from error
    return [sampling_mask(place) for place in places]

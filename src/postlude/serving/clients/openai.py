"""OpenAI's /v1/completions, of servers that take token ids and give them back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from postlude.generate.protocol import Completion, Request
from postlude.generate.sampling_params import SamplingParams
from postlude.serving.clients.api import Ask, ServerAPI, completion
from postlude.serving.errors import InvalidResponse, RequestRefused

PATH = "/v1/completions"
NO_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
TOKEN_PREFIX = "token_id:"  # how vLLM writes a token when asked for its id in place of its text


class OpenAIAPI(ServerAPI):
    """A server that is known by its answers alone."""

    name = "openai"

    def __init__(self, extra: Mapping[str, Any] | None = None) -> None:
        self.extra = dict(extra or {})
        """Goes into every request beside what `SamplingParams` asks for."""

    async def meet(self, ask: Ask) -> None:
        """It may have no list of models; its first answer shows that it is there."""

    async def longest(self, ask: Ask, model: str) -> int | None:
        """As others say it at /v1/models, if it has that."""
        try:
            return await super().longest(ask, model)
        except RequestRefused:
            return None

    async def answer(self, ask: Ask, model: str, request: Request) -> Completion:
        """One answer."""
        body = {
            "model": model,
            "prompt": list(request.prompt),
            **all_sampling_words(request.sampling),
            "seed": request.seed,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        try:
            return _completion(only_choice(await ask("POST", PATH, body | self.extra)))
        except RequestRefused as error:
            if "status 422" in str(error):  # fields it does not know
                raise RequestRefused(f'{error}; a server of text alone needs api="text"', error.status) from error
            raise


def sampling_words(sampling: SamplingParams) -> dict[str, Any]:
    """How answers are drawn, as /v1/completions has it. What is not in OpenAI's own is sent where it says something."""
    unusual = {
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_tokens),
        "ignore_eos": sampling.ignore_eos,
    }
    usual = {"max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p}
    return usual | {name: value for name, value in unusual.items() if value}


def all_sampling_words(sampling: SamplingParams) -> dict[str, Any]:
    """Every value that a server would else fill in: vLLM does so by the model's generation_config.json."""
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


def only_choice(answer: Any) -> Mapping[str, Any]:
    """The one choice of an answer."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        got = f"{len(choices)} choices" if isinstance(choices, list) else "no choices"
        raise InvalidResponse(f"gave {got} where one was asked for")
    found: Mapping[str, Any] = choices[0]
    return found


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
            raise InvalidResponse(f"gave token ids that are no numbers: {error}") from error
    return completion(tokens, logprobs, choice.get("finish_reason"), choice.get("text"))

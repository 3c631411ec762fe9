"""llama.cpp's server: /completion takes token ids and returns ids and log-probs. It takes no new weights."""

from __future__ import annotations

import dataclasses
from typing import Any

from postlude.generate.protocol import Completion, FinishReason, Request
from postlude.serving.clients.api import SendRequest, ServerAPI, make_completion
from postlude.serving.errors import InvalidResponse, RequestRefused

FINISH_REASONS: dict[str, FinishReason] = {"eos": "stop", "word": "stop", "limit": "length"}
SAMPLERS = ("temperature", "top_k", "top_p", "min_p")  # in `SamplingParams`'s order; llama.cpp applies temperature last
# Values that its command line may have set for all requests. Mirostat would replace the samplers, and the range would
# replace the temperature. Penalties are not among `SAMPLERS`, so they are unused.
NEUTRAL = {"mirostat": 0, "dynatemp_range": 0.0, "min_keep": 0, "repeat_penalty": 1.0, "logit_bias": []}
SEEDS = (1 << 32) - 1  # its seeds have 32 bits, and the last of them means "random"


class LlamaCppAPI(ServerAPI):
    """A llama.cpp server. Its log-probs are those at temperature 1, whatever the temperature.

    If a stop string ends a completion, the token that completes the string is not among the tokens.
    """

    name = "llama.cpp"
    omits_stop_tokens = True

    async def max_length(self, send: SendRequest, model: str) -> int | None:
        try:
            length = (await send("GET", "/props"))["default_generation_settings"]["n_ctx"]
        except (RequestRefused, KeyError, TypeError):
            return None
        return length if isinstance(length, int) and length > 0 else None

    async def generate(self, send: SendRequest, model: str, request: Request) -> Completion:
        sampling = request.sampling
        body: dict[str, Any] = {
            "prompt": list(request.prompt),
            "n_predict": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "samplers": list(SAMPLERS),
            **NEUTRAL,
            "seed": request.seed % SEEDS,
            "stop": list(sampling.stop),
            "ignore_eos": sampling.ignore_eos,
            "n_probs": 1,
            "return_tokens": True,
        }
        return _completion(await send("POST", "/completion", body), sampling.stop_tokens)


def _completion(reply: Any, stop_tokens: tuple[int, ...]) -> Completion:
    probabilities = reply.get("completion_probabilities") if isinstance(reply, dict) else None
    if not isinstance(probabilities, list):
        raise InvalidResponse(
            "gave no completion_probabilities at /completion; a llama.cpp server that supports n_probs is needed"
        )
    try:
        tokens, logprobs = [entry["id"] for entry in probabilities], [entry["logprob"] for entry in probabilities]
    except (KeyError, TypeError) as error:
        raise InvalidResponse(f"gave a completion without token ids or log-probs at /completion: {error!r}") from error
    completion = make_completion(tokens, logprobs, reply.get("stop_type"), reply.get("content"), FINISH_REASONS)
    # It has no stop tokens in requests: cut the completion after the first one.
    end = next((index for index, token in enumerate(completion.tokens, 1) if token in stop_tokens), None)
    if end is None:
        return completion
    truncated = {name: getattr(completion, name)[:end] for name in ("tokens", "logprobs", "sampled_logprobs")}
    return dataclasses.replace(completion, finish_reason="stop", text=None, **truncated)

"""llama.cpp's server: /completion, which takes token ids and gives ids and log-probs. It takes no new weights."""

from __future__ import annotations

import dataclasses
from typing import Any

from postlude.generate.protocol import Completion, FinishReason, Request
from postlude.serving.clients.api import Ask, ServerAPI, completion
from postlude.serving.errors import InvalidResponse, RequestRefused

FINISH: dict[str, FinishReason] = {"eos": "stop", "word": "stop", "limit": "length"}
ORDER = ("temperature", "top_k", "top_p", "min_p")  # as `SamplingParams` has it; llama.cpp's own divides last
# What its command line may have set for all requests: mirostat would take the samplers' place, the range the
# temperature's. Penalties and others are not among `ORDER`, and so not used.
NOTHING_ELSE = {"mirostat": 0, "dynatemp_range": 0.0, "min_keep": 0, "repeat_penalty": 1.0, "logit_bias": []}
SEEDS = (1 << 32) - 1  # its seeds have 32 bits, and the last of them means "any"


class LlamaCppAPI(ServerAPI):
    """One llama.cpp server. Its log-probs are of the logits as they are, whatever the temperature.

    Of an answer that a stop text ended, the token that completed the text is not among its tokens.
    """

    name = "llama.cpp"
    leaves_out_stops = True

    async def longest(self, ask: Ask, model: str) -> int | None:
        """The room of one of its slots."""
        try:
            stated = (await ask("GET", "/props"))["default_generation_settings"]["n_ctx"]
        except (RequestRefused, KeyError, TypeError):
            return None
        return stated if isinstance(stated, int) and stated > 0 else None

    async def answer(self, ask: Ask, model: str, request: Request) -> Completion:
        """One answer."""
        sampling = request.sampling
        body: dict[str, Any] = {
            "prompt": list(request.prompt),
            "n_predict": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "samplers": list(ORDER),
            **NOTHING_ELSE,
            "seed": request.seed % SEEDS,
            "stop": list(sampling.stop),
            "ignore_eos": sampling.ignore_eos,
            "n_probs": 1,
            "return_tokens": True,
        }
        return _completion(await ask("POST", "/completion", body), sampling.stop_tokens)


def _completion(answer: Any, stop_tokens: tuple[int, ...]) -> Completion:
    probabilities = answer.get("completion_probabilities") if isinstance(answer, dict) else None
    if not isinstance(probabilities, list):
        raise InvalidResponse(
            "gave no completion_probabilities at /completion; a llama.cpp server that knows n_probs is needed"
        )
    try:
        tokens, logprobs = [each["id"] for each in probabilities], [each["logprob"] for each in probabilities]
    except (KeyError, TypeError) as error:
        raise InvalidResponse(f"gave an answer without token ids or log-probs at /completion: {error!r}") from error
    found = completion(tokens, logprobs, answer.get("stop_type"), answer.get("content"), FINISH)
    # It knows no stop tokens of the caller's: what was sampled after one is as if it had not been.
    ends = next((place for place, token in enumerate(found.tokens, 1) if token in stop_tokens), None)
    if ends is None:
        return found
    kept = {name: getattr(found, name)[:ends] for name in ("tokens", "logprobs", "sampled_logprobs")}
    return dataclasses.replace(found, finish_reason="stop", text=None, **kept)

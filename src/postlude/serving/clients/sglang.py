"""SGLang: /generate. Written to its documented protocol; no SGLang server was at hand to run it against."""

from __future__ import annotations

from typing import Any

from postlude.generate.protocol import Completion, Request
from postlude.serving.clients.api import Ask, ServerAPI, completion
from postlude.serving.clients.openai import NO_PENALTIES
from postlude.serving.errors import InvalidResponse, RequestRefused


class SGLangAPI(ServerAPI):
    """One SGLang server."""

    name = "sglang"
    reloads = True

    async def answer(self, ask: Ask, model: str, request: Request) -> Completion:
        """One answer."""
        sampling = request.sampling
        drawn: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "min_new_tokens": 0,
            "ignore_eos": sampling.ignore_eos,
            "sampling_seed": request.seed,
            **NO_PENALTIES,
        }
        drawn |= {"stop": list(sampling.stop)} if sampling.stop else {}
        drawn |= {"stop_token_ids": list(sampling.stop_tokens)} if sampling.stop_tokens else {}
        body = {"input_ids": list(request.prompt), "sampling_params": drawn, "return_logprob": True}
        return _completion(await ask("POST", "/generate", body))

    async def version(self, ask: Ask) -> str | None:
        """What it calls its weights: "default" until it is told."""
        try:
            found = await ask("GET", "/weight_version")
        except RequestRefused:  # the name it had before
            found = await ask("GET", "/get_weight_version")
        return str(found["weight_version"] if isinstance(found, dict) else found)

    async def reload(self, ask: Ask, directory: str, version: str) -> None:
        """Answers in flight go back to the queue, and on from what they have with the new weights.

        Where that fails it stays paused: which weights it has then, nobody knows.
        """
        await ask("POST", "/pause_generation", {"mode": "retract"})
        told = await ask(
            "POST",
            "/update_weights_from_disk",
            {"model_path": directory, "weight_version": version, "flush_cache": True},
        )
        if not (isinstance(told, dict) and told.get("success")):
            raise InvalidResponse(
                f"did not take new weights: {told.get('message') if isinstance(told, dict) else told}"
            )
        await ask("POST", "/continue_generation", {})


def _completion(answer: Any) -> Completion:
    try:
        meta = answer["meta_info"]
        pairs = meta["output_token_logprobs"]  # [log-prob, id, text or None] of each
        logprobs, tokens = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        reason = meta["finish_reason"]["type"]
    except (KeyError, TypeError, IndexError) as error:
        raise InvalidResponse(f"gave an answer without token ids or log-probs at /generate: {error!r}") from error
    return completion(tokens, logprobs, reason, answer.get("text"))

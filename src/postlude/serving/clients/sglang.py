"""SGLang: /generate. Written to its documented protocol; it was not run against an SGLang server."""

from __future__ import annotations

from typing import Any

from postlude.generate.protocol import Completion, Request
from postlude.serving.clients.api import SendRequest, ServerAPI, make_completion
from postlude.serving.clients.openai import NO_PENALTIES
from postlude.serving.errors import InvalidResponse, RequestRefused


class SGLangAPI(ServerAPI):
    name = "sglang"
    can_reload_weights = True

    async def generate(self, send: SendRequest, model: str, request: Request) -> Completion:
        sampling = request.sampling
        params: dict[str, Any] = {
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
        params |= {"stop": list(sampling.stop)} if sampling.stop else {}
        params |= {"stop_token_ids": list(sampling.stop_tokens)} if sampling.stop_tokens else {}
        body = {"input_ids": list(request.prompt), "sampling_params": params, "return_logprob": True}
        return _completion(await send("POST", "/generate", body))

    async def weights_version(self, send: SendRequest) -> str | None:
        """Returns the name of its weights: "default" until a reload names them."""
        try:
            reply = await send("GET", "/weight_version")
        except RequestRefused:  # the path of older versions
            reply = await send("GET", "/get_weight_version")
        return str(reply["weight_version"] if isinstance(reply, dict) else reply)

    async def reload(self, send: SendRequest, directory: str, version: str) -> None:
        """Loads weights. Running completions return to the queue and continue with the new weights.

        The server stays paused if this fails, since it may hold some of the new weights.
        """
        await send("POST", "/pause_generation", {"mode": "retract"})
        body = {"model_path": directory, "weight_version": version, "flush_cache": True}
        reply = await send("POST", "/update_weights_from_disk", body)
        if not (isinstance(reply, dict) and reply.get("success")):
            message = reply.get("message") if isinstance(reply, dict) else reply
            raise InvalidResponse(f"did not take new weights: {message}")
        await send("POST", "/continue_generation", {})


def _completion(reply: Any) -> Completion:
    try:
        meta = reply["meta_info"]
        pairs = meta["output_token_logprobs"]  # [log-prob, id, text or None] of each token
        logprobs, tokens = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        reason = meta["finish_reason"]["type"]
    except (KeyError, TypeError, IndexError) as error:
        raise InvalidResponse(f"gave a completion without token ids or log-probs at /generate: {error!r}") from error
    return make_completion(tokens, logprobs, reason, reply.get("text"))

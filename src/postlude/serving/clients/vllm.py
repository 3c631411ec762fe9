"""vLLM: /v1/completions, or /inference/v1/generate where it is open, which tells the weights of every token.

New weights need `VLLM_SERVER_DEV_MODE=1` in the server's environment, the other path `--enable-scale-out`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from postlude.generate.protocol import Completion, Request, VersionSpan
from postlude.serving.clients.api import Ask, TensorSpecs, completion
from postlude.serving.clients.openai import OpenAIAPI, all_sampling_words, only_choice
from postlude.serving.errors import InvalidResponse, RequestRefused, ServerUnavailable

GENERATE = "/inference/v1/generate"
OTHER_WAYS = ("ipc", "sparse_nccl", "sharded_rdt", "nccl_m2n")  # of vLLM's, for trainers that know them
SEND_BYTES = 1 << 30
"""The most that one broadcast of new weights carries, unless one tensor alone is more."""


class VLLMAPI(OpenAIAPI):
    """One vLLM server."""

    name = "vllm"
    reloads = True
    receives = True
    hashes = True

    def __init__(self, extra: Mapping[str, Any] | None = None) -> None:
        super().__init__(extra)
        self.by_tokens = False  # whether it has GENERATE

    async def meet(self, ask: Ask) -> None:
        """Whether it has the path of token ids: what it says to an empty request tells."""
        await ask("GET", "/v1/models")
        try:
            await ask("POST", GENERATE, {})
        except RequestRefused as refused:
            self.by_tokens = "status 404" not in str(refused)

    async def answer(self, ask: Ask, model: str, request: Request) -> Completion:
        """One answer. Texts that end an answer are known to /v1/completions alone."""
        if not self.by_tokens or request.sampling.stop:
            return await super().answer(ask, model, request)
        drawn = all_sampling_words(request.sampling) | {"seed": request.seed, "logprobs": 0, "detokenize": False}
        body = {"model": model, "token_ids": list(request.prompt), "sampling_params": drawn, "stream": False}
        return _completion(only_choice(await ask("POST", GENERATE, body)))

    async def version(self, ask: Ask) -> str | None:
        """What it calls its weights: "default" until it is told."""
        try:
            return str((await ask("GET", "/weight_info"))["weight_version"])
        except (RequestRefused, KeyError, TypeError) as error:
            raise InvalidResponse(
                "does not say which weights it has at /weight_info; start vLLM 0.32 or newer with "
                "VLLM_SERVER_DEV_MODE=1 in its environment"
            ) from error

    async def paused(self, ask: Ask) -> bool:
        """As it says itself."""
        try:
            found = await ask("GET", "/is_paused")
        except RequestRefused:  # its administration is not open
            return False
        return isinstance(found, dict) and found.get("is_paused") is True

    async def digests(self, ask: Ask) -> Mapping[str, str] | None:
        """SHA-256 of every parameter of every worker, as they are held: fused, cut, padded."""
        found = await ask("POST", "/weight_checker", {"action": "checksum"})
        sums = found.get("checksums") if isinstance(found, dict) else None
        return {str(name): str(digest) for name, digest in sums.items()} if isinstance(sums, dict) else None

    async def drawback(self, ask: Ask, *, tied_head: bool, sent: bool) -> str:
        """On a CPU it packs the head's weights once: one that is tied to the embedding is not packed anew (0.32)."""
        if not (tied_head or sent):
            return ""
        try:
            told = await ask("GET", "/server_info?config_format=json" if sent else "/server_info")
        except RequestRefused:
            return ""
        if sent:
            return _unready(told)
        if "device_config=cpu" not in str(told):
            return ""
        return (
            "is vLLM on a CPU, which does not renew a head that is tied to the embedding when it reads new weights: "
            "its answers would be by the old head. Serve on a GPU, train a model with a head of its own, or use "
            "rollout: native"
        )

    async def reload(self, ask: Ask, directory: str, version: str) -> None:
        """Answers in flight are kept: what is cached of them is computed anew with the new weights.

        Where that fails it stays paused: which weights it has then, nobody knows.
        """
        await self._pause(ask)
        await ask("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": directory}})
        await self._forget(ask)
        await ask("POST", "/update_weight_version", {"new_version": version})
        await ask("POST", "/resume")

    async def workers(self, ask: Ask) -> int:
        """Over tensor, pipeline and data parallelism together."""
        try:
            return int((await ask("GET", "/get_world_size"))["world_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidResponse("does not say at /get_world_size how many workers it has") from error

    async def join(self, ask: Ask, info: Mapping[str, Any], workers: int) -> None:
        """As ranks 1 and on. A channel that it may still have is let go first, and an update that was left open ended.

        What that leaves half new is never used: it is paused, and all weights follow.
        """
        try:
            await ask("POST", "/shutdown_weight_transfer_engine")
        except ServerUnavailable:
            await ask("POST", "/finish_weight_update")
            await ask("POST", "/shutdown_weight_transfer_engine")
        packed = {"packed": True, "packed_buffer_size_bytes": SEND_BYTES, "packed_num_buffers": 2}
        joined = {**info, "rank_offset": 1, "world_size": workers + 1, **packed}
        await ask("POST", "/init_weight_transfer_engine", {"init_info": joined})

    async def begin(self, ask: Ask) -> None:
        """Answers in flight are kept from here to `finish`."""
        await self._pause(ask)
        await ask("POST", "/start_weight_update")

    async def take(self, ask: Ask, tensors: TensorSpecs) -> None:
        """One broadcast: a send is no longer than `SEND_BYTES`, or is one tensor."""
        told = {"names": tensors.names, "dtype_names": tensors.dtypes, "shapes": tensors.shapes}
        await ask("POST", "/update_weights", {"update_info": told})

    async def finish(self, ask: Ask, version: str) -> None:
        """What is cached of answers in flight is computed anew. One that failed before stays paused: it is half new."""
        await ask("POST", "/finish_weight_update", {"weight_version": version})
        await self._forget(ask)
        await ask("POST", "/resume")

    async def _pause(self, ask: Ask) -> None:
        await ask("POST", "/pause?mode=keep&clear_cache=false")

    async def _forget(self, ask: Ask) -> None:
        cleared = await ask("POST", "/reset_prefix_cache?reset_running_requests=true")
        if isinstance(cleared, dict) and cleared.get("success") is False:
            raise InvalidResponse("kept what it had cached with older weights")


def _unready(told: Any) -> str:
    """Why it would take no weights over the network, by what it says of how it was started."""
    try:
        config = told["vllm_config"]
        backend = (config["weight_transfer_config"] or {}).get("backend")
    except (KeyError, TypeError, AttributeError):
        return ""  # it is newer or older, and says it in other words
    if backend is not None and backend not in OTHER_WAYS:
        return ""
    return (
        f"was started with {backend or 'nothing'} for weights over the network. Start vLLM on GPUs with "
        """--weight-transfer-config '{"backend": "nccl"}', or use rollout.sync: disk"""
    )


def _completion(choice: Mapping[str, Any]) -> Completion:
    try:
        tokens = choice["token_ids"]
        logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
        spans = choice.get("weight_versions") or ()
        versions = tuple(VersionSpan(str(each["version"]), int(each["start"]), int(each["end"])) for each in spans)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidResponse(f"gave an answer without token ids or log-probs at {GENERATE}: {error!r}") from error
    return replace(completion(tokens, logprobs, choice.get("finish_reason")), versions=versions)

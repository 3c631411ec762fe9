"""vLLM: /v1/completions, or /inference/v1/generate if it is enabled, which reports the weights version of each token.

Weight updates need `VLLM_SERVER_DEV_MODE=1` in the server's environment; /inference/v1/generate needs
`--enable-scale-out`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from postlude.generate.protocol import Completion, Request, VersionSpan
from postlude.serving.clients.api import SendRequest, TensorSpecs, make_completion
from postlude.serving.clients.openai import OpenAIAPI, only_choice, sampling_fields
from postlude.serving.errors import InvalidResponse, RequestRefused, ServerUnavailable

GENERATE, LOAD_ADAPTER = "/inference/v1/generate", "/v1/load_lora_adapter"
OTHER_BACKENDS = ("ipc", "sparse_nccl", "sharded_rdt", "nccl_m2n")  # vLLM's other ways to transfer weights
SEND_BYTES = 1 << 30
"""The maximum number of bytes of one broadcast of new weights, unless a single tensor has more."""


class VLLMAPI(OpenAIAPI):
    """The API of a vLLM server."""

    name = "vllm"
    can_reload_weights = True
    can_receive_weights = True
    reports_hashes = True

    def __init__(self, extra: Mapping[str, Any] | None = None) -> None:
        super().__init__(extra)
        self.has_generate = False  # whether the path GENERATE is enabled

    async def detect_features(self, send: SendRequest) -> None:
        """Detects with an empty request whether the path GENERATE is enabled."""
        await send("GET", "/v1/models")
        try:
            await send("POST", GENERATE, {})
        except RequestRefused as refused:
            self.has_generate = refused.status != 404

    async def generate(self, send: SendRequest, model: str, request: Request) -> Completion:
        """Returns one completion. Only /v1/completions takes stop strings."""
        if not self.has_generate or request.sampling.stop:
            return await super().generate(send, model, request)
        params = sampling_fields(request.sampling) | {"seed": request.seed, "logprobs": 0, "detokenize": False}
        body = {"model": model, "token_ids": list(request.prompt), "sampling_params": params, "stream": False}
        return _completion(only_choice(await send("POST", GENERATE, body)))

    async def weights_version(self, send: SendRequest) -> str | None:
        """Returns the name of its weights: "default" until the first update."""
        try:
            return str((await send("GET", "/weight_info"))["weight_version"])
        except (RequestRefused, KeyError, TypeError) as error:
            raise InvalidResponse(
                "does not report its weights at /weight_info; start vLLM 0.32 or newer with VLLM_SERVER_DEV_MODE=1 in "
                "its environment"
            ) from error

    async def is_paused(self, send: SendRequest) -> bool:
        """Whether generation is paused, by /is_paused."""
        try:
            reply = await send("GET", "/is_paused")
        except RequestRefused:  # the server is not in development mode
            return False
        return isinstance(reply, dict) and reply.get("is_paused") is True

    async def parameter_hashes(self, send: SendRequest) -> Mapping[str, str] | None:
        """Returns the SHA-256 of every parameter of every worker, as they are stored: fused, sharded, padded."""
        reply = await send("POST", "/weight_checker", {"action": "checksum"})
        hashes = reply.get("checksums") if isinstance(reply, dict) else None
        return {str(name): str(value) for name, value in hashes.items()} if isinstance(hashes, dict) else None

    async def update_problem(self, send: SendRequest, *, tied_head: bool, over_network: bool) -> str:
        """Checks the backend for weights over the network; else for tied heads on a CPU.

        There vLLM 0.32 packs the head's weights once, and does not update a head tied to the embedding.
        """
        if not (tied_head or over_network):
            return ""
        try:
            info = await send("GET", "/server_info?config_format=json" if over_network else "/server_info")
        except RequestRefused:
            return ""
        if over_network:
            return _transfer_problem(info)
        if "device_config=cpu" not in str(info):
            return ""
        return (
            "is vLLM on a CPU, which does not update a head that is tied to the embedding when it reads new weights: "
            "its completions would use the old head. Serve on a GPU, train a model with an untied head, or use "
            "rollout: native"
        )

    async def reload(self, send: SendRequest, directory: str, version: str) -> None:
        """Loads weights. Running completions continue, and their KV caches are recomputed.

        The server stays paused if this fails, since it may hold some of the new weights.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
        await self._load_paused(send, "/collective_rpc", body, version)

    async def adapter_problem(self, send: SendRequest) -> str:
        """Asks for an adapter without a name: a server that loads adapters refuses the request, others have no path."""
        try:
            await send("POST", LOAD_ADAPTER, {})
        except RequestRefused as refused:
            if refused.status != 404:
                return ""
        return "was started without --enable-lora, or without VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"

    async def load_adapter(self, send: SendRequest, name: str, directory: str, version: str) -> None:
        """Loads an adapter in the place of that of the same name. Running completions continue, with new KV caches."""
        body = {"lora_name": name, "lora_path": directory, "load_inplace": True}
        await self._load_paused(send, LOAD_ADAPTER, body, version)

    async def worker_count(self, send: SendRequest) -> int:
        """Returns the number of workers over tensor, pipeline and data parallelism together."""
        try:
            return int((await send("GET", "/get_world_size"))["world_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidResponse("does not report at /get_world_size how many workers it has") from error

    async def join_channel(self, send: SendRequest, info: Mapping[str, Any], workers: int) -> None:
        """Joins the channel: the trainer is rank 0, vLLM's workers are ranks 1 and up.

        Closes an earlier channel first, and finishes an unfinished update. Partially updated weights are never used:
        the server is paused, and all weights follow.
        """
        try:
            await send("POST", "/shutdown_weight_transfer_engine")
        except ServerUnavailable:
            await send("POST", "/finish_weight_update")
            await send("POST", "/shutdown_weight_transfer_engine")
        packed = {"packed": True, "packed_buffer_size_bytes": SEND_BYTES, "packed_num_buffers": 2}
        init_info = {**info, "rank_offset": 1, "world_size": workers + 1, **packed}
        await send("POST", "/init_weight_transfer_engine", {"init_info": init_info})

    async def begin_update(self, send: SendRequest) -> None:
        """Pauses running completions until `finish_update`."""
        await self._pause(send)
        await send("POST", "/start_weight_update")

    async def receive_tensors(self, send: SendRequest, specs: TensorSpecs) -> None:
        """Receives one broadcast: at most `SEND_BYTES`, or one tensor."""
        update = {"names": specs.names, "dtype_names": specs.dtypes, "shapes": specs.shapes}
        await send("POST", "/update_weights", {"update_info": update})

    async def finish_update(self, send: SendRequest, version: str) -> None:
        """Recomputes the KV caches of running completions and resumes."""
        await send("POST", "/finish_weight_update", {"weight_version": version})
        await self._clear_caches(send)
        await send("POST", "/resume")

    async def _load_paused(self, send: SendRequest, path: str, body: Mapping[str, Any], version: str) -> None:
        await self._pause(send)
        await send("POST", path, body)
        await self._clear_caches(send)
        await send("POST", "/update_weight_version", {"new_version": version})
        await send("POST", "/resume")

    async def _pause(self, send: SendRequest) -> None:
        await send("POST", "/pause?mode=keep&clear_cache=false")

    async def _clear_caches(self, send: SendRequest) -> None:
        reply = await send("POST", "/reset_prefix_cache?reset_running_requests=true")
        if isinstance(reply, dict) and reply.get("success") is False:
            raise InvalidResponse("did not reset its prefix cache, which older weights computed")


def _transfer_problem(info: Any) -> str:
    """Returns why the server cannot receive weights over the network by its reported config, or ""."""
    try:
        backend = (info["vllm_config"]["weight_transfer_config"] or {}).get("backend")
    except (KeyError, TypeError, AttributeError):
        return ""  # another version of vLLM reports it differently
    if backend is not None and backend not in OTHER_BACKENDS:
        return ""
    return (
        f"was started with {backend or 'nothing'} for weights over the network. Start vLLM on GPUs with "
        """--weight-transfer-config '{"backend": "nccl"}', or use rollout.sync: disk"""
    )


def _completion(choice: Mapping[str, Any]) -> Completion:
    try:
        tokens = choice["token_ids"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        spans = choice.get("weight_versions") or ()
        versions = tuple(VersionSpan(str(span["version"]), int(span["start"]), int(span["end"])) for span in spans)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidResponse(f"gave a completion without token ids or log-probs at {GENERATE}: {error!r}") from error
    return replace(make_completion(tokens, logprobs, choice.get("finish_reason")), versions=versions)

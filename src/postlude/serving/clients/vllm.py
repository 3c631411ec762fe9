"""vLLM: /v1/completions, or /inference/v1/generate if it is enabled, which reports the weights version of each token.

Weight updates need `VLLM_SERVER_DEV_MODE=1` in the server's environment; /inference/v1/generate needs
`--enable-scale-out`, and the experts of tokens `--enable-return-routed-experts`. What depends on vLLM's version is in
`serving/vllm/vllm_versions.py`.
"""

from __future__ import annotations

import base64
import binascii
import io
import logging
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from postlude.generate.protocol import Completion, Request, VersionSpan
from postlude.model import ModelConfig
from postlude.serving.clients.api import DraftCounts, SendRequest, TensorSpecs, make_completion
from postlude.serving.clients.openai import (
    OpenAIAPI,
    only_choice,
    read_token,
    sampling_fields,
    sampling_mask,
)
from postlude.serving.errors import InvalidResponse, RequestRefused, ServerUnavailable
from postlude.serving.vllm.vllm_versions import NEWEST_KNOWN, Feature, VLLMVersion

GENERATE, LOAD_ADAPTER = "/inference/v1/generate", "/v1/load_lora_adapter"
OTHER_BACKENDS = ("ipc", "sparse_nccl", "sharded_rdt", "nccl_m2n")  # vLLM's other ways to transfer weights
LOG = logging.getLogger("postlude")
SEND_BYTES = 1 << 30
"""The maximum number of bytes of one broadcast of new weights, unless a single tensor has more."""


class VLLMAPI(OpenAIAPI):
    name = "vllm"
    can_reload_weights = True
    can_receive_weights = True
    reports_hashes = True
    has_sampling_mask = True

    def __init__(self, extra: Mapping[str, Any] | None = None, vocab_size: int | None = None) -> None:
        super().__init__(extra, vocab_size)
        self.has_generate = False  # whether the path GENERATE is enabled
        self.has_masks = False  # whether it was started with --return-sampling-mask
        self.drafts = True  # whether it was started with --speculative-config; assumed until its metrics are read
        self.version = NEWEST_KNOWN

    async def detect_features(self, send: SendRequest) -> None:
        """Detects its version, and with an empty request whether the path GENERATE is enabled."""
        await send("GET", "/v1/models")
        await self._detect_version(send)
        try:
            await send("POST", GENERATE, {})
        except RequestRefused as refused:
            self.has_generate = refused.status != 404

    async def _detect_version(self, send: SendRequest) -> None:
        """Detects the version, and refuses those without the routes that are used."""
        try:
            reply = await send("GET", "/version")
        except RequestRefused:  # a proxy, which hides it
            return
        version = VLLMVersion.parse(str(reply.get("version", ""))) if isinstance(reply, dict) else None
        if version is None:
            return
        if version.unsupported_reason:
            raise InvalidResponse(version.unsupported_reason)
        is_new, self.version = version != self.version, version
        if is_new and version.unknown_reason:
            LOG.warning("A server %s.", version.unknown_reason)

    async def generate(self, send: SendRequest, model: str, request: Request) -> Completion:
        """Returns one completion. Only /v1/completions takes stop strings.

        A sampling mask is the server's own, which vLLM 0.28 and newer give with `--return-sampling-mask`, or else the
        likeliest tokens with a log-prob (`likeliest_count`).
        """
        if not self.has_generate or request.sampling.stop:
            return await super().generate(send, model, request)
        count = 0 if self.has_masks else self.likeliest_count(request.sampling)
        params = sampling_fields(request.sampling) | {"seed": request.seed, "logprobs": count, "detokenize": False}
        body = {"model": model, "token_ids": list(request.prompt), "sampling_params": params, "stream": False}
        choice = only_choice(await send("POST", GENERATE, body))
        self.has_masks = self.has_masks or choice.get("sampling_mask") is not None
        completion = _completion(choice)
        if (experts := choice.get("routed_experts")) is not None:
            length = len(request.prompt) + len(completion.tokens)
            completion = replace(completion, routing=read_routed_experts(experts, length))
        return replace(completion, sampling_mask=_masks(choice)) if request.sampling.masked else completion

    async def weights_version(self, send: SendRequest) -> str | None:
        """Returns the name of its weights: "default" until the first update."""
        if not self.version.has(Feature.WEIGHT_VERSION):
            return await self._kept_version(send)
        try:
            return str((await send("GET", "/weight_info"))["weight_version"])
        except (RequestRefused, KeyError, TypeError) as error:
            raise InvalidResponse(
                "does not report its weights at /weight_info; start it with VLLM_SERVER_DEV_MODE=1 in its environment"
            ) from error

    async def _kept_version(self, send: SendRequest) -> str:
        """Returns the version that our extension of its workers keeps."""
        try:
            replies = (await send("POST", "/collective_rpc", {"method": "postlude_weight_version"}))["results"]
            return str(replies[0]["weight_version"])
        except (RequestRefused, ServerUnavailable, LookupError, TypeError) as error:
            raise InvalidResponse(
                f"is vLLM {self.version.text}, which does not report the version of its weights. Use 0.27 or newer "
                "with VLLM_SERVER_DEV_MODE=1 in its environment, or let the run start it (rollout: vllm)"
            ) from error

    async def _name_weights(self, send: SendRequest, version: str) -> None:
        if self.version.has(Feature.WEIGHT_VERSION):
            await send("POST", "/update_weight_version", {"new_version": version})
        else:
            body = {"method": "postlude_set_weight_version", "kwargs": {"version": version}}
            await send("POST", "/collective_rpc", body)

    async def is_paused(self, send: SendRequest) -> bool:
        try:
            reply = await send("GET", "/is_paused")
        except RequestRefused:  # the server is not in development mode
            return False
        return isinstance(reply, dict) and reply.get("is_paused") is True

    async def draft_counts(self, send: SendRequest) -> DraftCounts | None:
        """Returns the sums over its engines of vLLM's counters. They are read again only where there are some."""
        if not self.drafts:
            return None
        try:
            text = str(await send("GET", "/metrics"))
        except RequestRefused:
            text = ""

        def total(name: str) -> int:
            values = re.findall(rf"(?m)^vllm:spec_decode_num_{name}_total\S* (\S+)", text)
            try:
                return sum(int(float(value)) for value in values)
            except (ValueError, OverflowError) as error:
                raise InvalidResponse(f"has metrics that cannot be read: {error}") from error

        self.drafts = "vllm:spec_decode_num_drafts_total" in text
        return DraftCounts(*map(total, ("drafts", "draft_tokens", "accepted_tokens"))) if self.drafts else None

    async def parameter_hashes(self, send: SendRequest) -> Mapping[str, str] | None:
        """Returns the SHA-256 of every parameter of every worker, as they are stored: fused, sharded, padded."""
        if not self.version.has(Feature.WEIGHT_CHECKER):
            return None
        reply = await send("POST", "/weight_checker", {"action": "checksum"})
        hashes = reply.get("checksums") if isinstance(reply, dict) else None
        return {str(name): str(value) for name, value in hashes.items()} if isinstance(hashes, dict) else None

    async def update_problem(self, send: SendRequest, *, tied_head: bool, over_network: bool) -> str:
        """Checks the backend for weights over the network; else for tied heads on a CPU.

        There vLLM 0.32 packs the head's weights once, and does not update a head tied to the embedding.
        """
        if over_network and not self.version.has(Feature.NCCL_ID):
            return (
                f"is vLLM {self.version.text}, but rollout.sync: network needs 0.30 or newer, whose workers join a "
                "communicator by its id. Use rollout.sync: disk"
            )
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
        if self.version.has(Feature.TRANSFER_SHUTDOWN):
            try:
                await send("POST", "/shutdown_weight_transfer_engine")
            except ServerUnavailable:
                await send("POST", "/finish_weight_update")
                await send("POST", "/shutdown_weight_transfer_engine")
        packed = {"packed": True, "packed_buffer_size_bytes": SEND_BYTES, "packed_num_buffers": 2}
        init_info = {**info, "rank_offset": 1, "world_size": workers + 1, **packed}
        await send("POST", "/init_weight_transfer_engine", {"init_info": init_info})

    async def sleep(self, send: SendRequest) -> None:
        """Frees the memory of weights and KV cache. Running completions end."""
        await send("POST", "/sleep?level=2&mode=abort")
        self.asleep = True

    async def wake(self, send: SendRequest) -> None:
        """Allocates the KV cache again, and resumes. The weights must have been sent since `sleep`."""
        await send("POST", "/wake_up?tags=kv_cache")
        await send("POST", "/resume")
        self.asleep = False

    async def begin_update(self, send: SendRequest) -> None:
        """Pauses running completions until `finish_update`; if it is asleep, allocates its weights only."""
        if self.asleep:
            await send("POST", "/wake_up?tags=weights")
        else:
            await self._pause(send)
        await send("POST", "/start_weight_update")

    async def receive_tensors(self, send: SendRequest, specs: TensorSpecs) -> None:
        """Receives one broadcast: at most `SEND_BYTES`, or one tensor."""
        update: dict[str, Any] = {"names": specs.names, "dtype_names": specs.dtypes, "shapes": specs.shapes}
        if specs.handles:
            update["handles"] = dict(specs.handles)
        await send("POST", "/update_weights", {"update_info": update})

    async def finish_update(self, send: SendRequest, version: str) -> None:
        """Recomputes the KV caches of running completions and resumes. If it is asleep it stays so until `wake`."""
        if self.version.has(Feature.WEIGHT_VERSION):
            await send("POST", "/finish_weight_update", {"weight_version": version})
        else:
            await send("POST", "/finish_weight_update")
            await self._name_weights(send, version)
        if not self.asleep:
            await self._clear_caches(send)
            await send("POST", "/resume")

    async def _load_paused(self, send: SendRequest, path: str, body: Mapping[str, Any], version: str) -> None:
        await self._pause(send)
        await send("POST", path, body)
        await self._clear_caches(send)
        await self._name_weights(send, version)
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


def _masks(choice: Mapping[str, Any]) -> list[array[int]]:
    """Returns the sampling masks in a reply: its own, or the likeliest tokens of each."""
    try:
        if (masks := choice.get("sampling_mask")) is not None:
            return [array("i", mask) for mask in masks]
        return [
            sampling_mask((read_token(entry), float(entry["logprob"])) for entry in place["top_logprobs"])
            for place in choice["logprobs"]["content"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidResponse(f"gave no sampling masks that can be read at {GENERATE}: {error!r}") from error


def read_routed_experts(encoded: Any, tokens: int) -> Tensor:
    """Returns the expert ids of `tokens` tokens, prompt and completion, [tokens, layers, top_k] int16.

    `encoded` is an array's npy file as base64. It lacks the last token, which was never an input and gets -1. Layers
    without experts are in it too.
    """
    try:
        array = np.load(io.BytesIO(base64.b64decode(encoded, validate=True)), allow_pickle=False)
    except (TypeError, ValueError, EOFError, OSError, binascii.Error) as error:
        raise InvalidResponse(f"gave routed_experts that are not an array: {error}") from error
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise InvalidResponse(f"gave routed_experts of shape {array.shape} and type {array.dtype}")
    if len(array) != tokens - 1:
        raise InvalidResponse(f"gave routed_experts of {len(array)} tokens, but {tokens - 1} were inputs")
    experts = torch.full((tokens, *array.shape[1:]), -1, dtype=torch.int16)
    experts[:-1] = torch.from_numpy(array.astype(np.int16))
    return experts


def select_layers(experts: Tensor, layers: Sequence[int]) -> Tensor:
    """Returns the experts of the layers that have some, as Hugging Face counts layers, [tokens, routers, top_k]."""
    if experts.shape[1] <= layers[-1]:
        raise InvalidResponse(
            f"reports experts of {experts.shape[1]} layers, but layer {layers[-1]} has some: it serves another model"
        )
    selected = experts[:, layers].contiguous()
    ordered = selected[:-1].sort(-1).values
    if (ordered[..., 1:] == ordered[..., :-1]).any():  # zeros, where nothing was recorded
        raise InvalidResponse(
            "reports an expert twice for one token: it does not record experts, as vLLM on a CPU does not. Set "
            "replay_routing to false"
        )
    return selected


def router_layers(config: ModelConfig) -> list[int]:
    """Returns the numbers of the layers that have experts, as Hugging Face counts them."""
    return [int(name.split(".")[1]) for name in config.routers]

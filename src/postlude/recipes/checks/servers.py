"""Preflight of servers: running ones get trial requests, launched ones are checked as far as possible."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from postlude.generate.generator import check_kv_cache_dtype
from postlude.generate.protocol import Request
from postlude.generate.sampling_params import SamplingParams
from postlude.hf.export import has_hf_config
from postlude.model.fp8 import check_quantization
from postlude.plan.memory import generator_bytes
from postlude.recipes.checks.preflight import Check, PreflightInputs
from postlude.recipes.config.rollout import (
    LaunchedGenerators,
    LaunchedVLLM,
    NativeRollout,
    Rollout,
    RunningServers,
    sleeps,
)
from postlude.recipes.config.settings import SamplingSettings
from postlude.recipes.report.formatting import format_bytes
from postlude.recipes.rollouts.engine import connect_servers
from postlude.recipes.rollouts.server_commands import (
    GENERATOR_LENGTH,
    VLLM_LENGTH,
    unused_gpus,
    vllm_max_length,
    vllm_python,
)
from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.remote_server import RemoteServer
from postlude.serving.clients.vllm import SEND_BYTES, router_layers, select_layers
from postlude.serving.errors import InvalidResponse, ServerError
from postlude.serving.vllm import vllm_versions
from postlude.serving.vllm.vllm_versions import Feature, VLLMVersion

PROGRAMS = 5 << 30  # bytes of two CUDA contexts, of vLLM's graphs and activations, and of what neither program frees


def check_shared_gpus(inputs: PreflightInputs, rollout: LaunchedVLLM) -> None:
    """Raises ValueError for servers that do not fit on the ranks' GPUs."""
    ranks, here = inputs.launch.ranks, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if inputs.launch.device != "cuda":
        raise ValueError(
            "rollout.share_gpu with rollout: vllm needs a trainer on cuda. Leave it out, or set device: cuda."
        )
    if ranks != here:
        raise ValueError(
            f"rollout.share_gpu with rollout: vllm works on one machine, but {here} of {ranks} ranks are on this "
            "one. Use Ray (--ray), or rollout: native."
        )
    if rollout.gpus != int(rollout.gpus) or rollout.count * rollout.gpus > ranks:
        raise ValueError(
            f"rollout.share_gpu gives vLLM the trainer's {ranks} GPUs, but rollout needs {rollout.count} servers with "
            f"{rollout.gpus:g} GPUs each. Set rollout.count and rollout.gpus to whole numbers whose product is at most "
            f"{ranks}."
        )
    if rollout.sync == "disk":
        raise ValueError(
            "rollout.sync is disk, but vLLM that shares the trainer's GPUs gets weights in their memory. Leave it out."
        )
    _check_memory(inputs, rollout)


def _check_memory(inputs: PreflightInputs, rollout: LaunchedVLLM) -> None:
    """Raises ValueError if trainer and vLLM do not fit while weights are synchronised, or vLLM alone does not."""
    room = min(torch.cuda.get_device_properties(gpu).total_memory for gpu in range(torch.cuda.device_count()))
    weights = generator_bytes(inputs.model[1], inputs.dtype.itemsize, fp8=False) // int(rollout.gpus)
    trainer = max(rank_memory.lasting for rank_memory in inputs.memory)
    if (needed := trainer + weights + 2 * SEND_BYTES + PROGRAMS) > room:
        raise ValueError(
            f"while vLLM gets new weights, a GPU holds {format_bytes(trainer)} of the trainer's state, "
            f"{format_bytes(weights)} of vLLM's weights, two buffers of {format_bytes(SEND_BYTES)} and about "
            f"{format_bytes(PROGRAMS)} of both programs, together {format_bytes(needed)}, but has "
            f"{format_bytes(room)}. Raise layout.dp_shard or rollout.gpus, or leave "
            "rollout.share_gpu out and give vLLM GPUs of its own."
        )


PROMPT = "The capital of France is Paris, and the capital of Italy is"
UNUSED_STOP = "\N{SNOWMAN}\N{SNOWMAN}\N{SNOWMAN}"  # a stop string, so that vLLM uses the path that returns text
TOLERANCE = 1e-4  # between two equal log-probs
PYTHON_TIMEOUT = 60.0  # seconds


@dataclass(frozen=True)
class LengthLimit:
    """The most tokens of prompt and completion together that a server takes."""

    tokens: int
    source: str
    """A clause that states the limit and where it comes from."""
    fix: str
    """How to raise it."""


@dataclass(frozen=True, kw_only=True)
class ServerUse:
    """What a recipe does with servers."""

    gets_weights: bool
    """Whether they get the trainer's weights."""
    compares_logprobs: bool = False
    """Whether their log-probs are compared with the trainer's."""
    masks_sampling: bool = False
    """Whether completions have sampling masks."""
    replays_routing: bool = False
    """Whether completions have the experts of their tokens."""


def server_checks(
    inputs: PreflightInputs, rollout: Rollout, sampling: SamplingSettings, use: ServerUse
) -> Iterator[Check]:
    """Yields the check that servers reply and can do what the recipe needs, or can be launched.

    Of the native generator it yields the check of FP8, if it has any.
    """
    if isinstance(rollout, NativeRollout):
        if rollout.kv_cache_dtype != "auto" or rollout.quantization is not None:
            yield Check("rollout", lambda: _check_native(inputs, rollout), after=("device", "model"))
        return

    def check() -> str:
        if use.gets_weights and not has_hf_config(inputs.model[1]):
            raise ValueError(
                f"servers read Hugging Face directories, but {inputs.config.model} has no Hugging Face family to be "
                "written as. Use rollout: native."
            )
        if isinstance(rollout, RunningServers):
            return _check_running(inputs, rollout, sampling, use)
        return _check_launched(inputs, rollout, sampling, use)

    yield Check("servers", check, after=("tokenizer",))


def _check_native(inputs: PreflightInputs, rollout: NativeRollout) -> str:
    device = torch.device(inputs.launch.device if inputs.launch.on_this_machine else "cpu")
    check_kv_cache_dtype(rollout.kv_cache_dtype, inputs.model[1], device)
    check_quantization(rollout.quantization, inputs.model[1], device)
    in_fp8 = ["weights"] * (rollout.quantization is not None) + ["keys and values"] * (rollout.kv_cache_dtype == "fp8")
    return f"native, {', '.join(in_fp8)} in FP8"


def _check_running(
    inputs: PreflightInputs,
    rollout: RunningServers,
    sampling: SamplingSettings,
    use: ServerUse,
) -> str:
    with closing(connect_servers(rollout, inputs.tokenizer, inputs.model[1].vocab_size, trial=True)) as client:
        servers = client.connect()
        for server in servers:
            if server.state == "excluded":
                raise ValueError(f"{server.url} {server.problem}.")
        up = [server for server in servers if server.state == "up"]
        for server in up:
            if (limit := client.run_on(server, server.max_length())) is not None:
                source = f"{server.url} takes {limit} tokens (its max_model_len)"
                _check_length(LengthLimit(limit, source, "Start it with a larger one"), inputs, sampling)
            if use.gets_weights:
                _check_takes_weights(client, server, rollout, tied_head=inputs.model[1].tied_head)
            _check_tokenizer(client, server, inputs)
            if use.replays_routing:
                _check_routing(client, server, inputs)
            if use.masks_sampling:
                _check_masks(client, server, inputs, sampling)
            elif use.compares_logprobs:
                _check_logprobs(client, server, inputs, sampling)
        kinds = ", ".join(sorted({server.api.name for server in up}))
        down = "".join(f"; {server.url} {server.problem}" for server in servers if server not in up)
        return f"{len(up)} of {len(servers)} reply ({kinds}){down}"


def _check_length(limit: LengthLimit, inputs: PreflightInputs, sampling: SamplingSettings) -> None:
    """Raises ValueError if a server would refuse the longest request."""
    longest, reason, lower = inputs.max_request(sampling)
    if longest > limit.tokens:
        raise ValueError(f"{limit.source}, but {reason}. {limit.fix}, or lower {lower}.")


def _check_takes_weights(
    client: GenerationClient, server: RemoteServer, rollout: RunningServers, *, tied_head: bool
) -> None:
    """Raises ValueError if a server would keep its first weights, or some of them."""
    if not server.api.can_reload_weights:
        raise ValueError(
            f"{server.url} is {server.api.name}, which takes no new weights while it runs, but training changes them "
            "with every step. Use vLLM or SGLang, or rollout: native; it can be used for evaluation."
        )
    if rollout.sync == "delta" and not server.api.takes_pieces:
        raise ValueError(
            f"{server.url} is {server.api.name}, which takes whole weights only, but rollout.sync is delta. Use disk "
            "or network, or postlude serve."
        )
    client.run_on(server, server.fetch_version())
    over_network = rollout.sync == "network"
    if problem := client.run_on(server, server.update_problem(tied_head=tied_head, over_network=over_network)):
        raise ValueError(f"{server.url} {problem}.")


def _check_tokenizer(client: GenerationClient, server: RemoteServer, inputs: PreflightInputs) -> None:
    """Refuses a server without token ids or log-probs, or with another tokenizer: its text must equal ours."""
    prompt = tuple(inputs.tokenizer.encode(PROMPT))
    greedy = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True, stop=(UNUSED_STOP,))
    completion = client.generate_on(server, Request(prompt, greedy))
    decoded = inputs.tokenizer.decode(completion.tokens, skip_special_tokens=True)
    if completion.text is not None and _alphanumeric(completion.text) != _alphanumeric(decoded):
        raise ValueError(
            f"{server.url} decodes its tokens as {completion.text!r}, but the tokenizer of {inputs.config.model} gives "
            f"{decoded!r}. It serves a model with another tokenizer."
        )


def _check_routing(client: GenerationClient, server: RemoteServer, inputs: PreflightInputs) -> None:
    """Refuses a server that does not report the experts of its tokens."""
    prompt = tuple(inputs.tokenizer.encode(PROMPT))
    greedy = SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True)
    routing = client.generate_on(server, Request(prompt, greedy)).routing
    if routing is not None:
        try:
            select_layers(routing, router_layers(inputs.model[1]))
        except InvalidResponse as problem:
            raise ValueError(f"{server.url} {problem}.") from problem
    else:
        raise ValueError(
            f"{server.url} does not report the experts of its tokens, which replay_routing needs. Start vLLM with "
            "--enable-return-routed-experts (and --enable-scale-out from 0.30 on), or set replay_routing to false."
        )


def _check_logprobs(
    client: GenerationClient, server: RemoteServer, inputs: PreflightInputs, sampling: SamplingSettings
) -> None:
    """Refuses log-probs of another distribution than the trainer's, softmax(logits / temperature) over all tokens.

    The likeliest token is sampled at two temperatures. Equal log-probs do not include the temperature; log-probs of 0
    are taken after top-k.
    """
    prompt = tuple(inputs.tokenizer.encode(PROMPT))

    def top_logprob(temperature: float) -> float:
        params = SamplingParams(max_new_tokens=1, temperature=temperature, top_k=1, ignore_eos=True)
        return client.generate_on(server, Request(prompt, params)).logprobs[0]

    temperature = sampling.temperature
    first, second = top_logprob(temperature), top_logprob(2.0 * temperature)
    if abs(first - second) < TOLERANCE < abs(first) and temperature != 1.0:
        raise ValueError(
            f"{server.url} gives log-probs at temperature 1, but the temperature is {temperature:g}, and ratios use "
            "the server's log-probs. Set old_logprobs to recompute, sampling.temperature to 1, or start vLLM with "
            "--logprobs-mode processed_logprobs."
        )
    if max(abs(first), abs(second)) < TOLERANCE and (cut := _truncation_setting(sampling)):
        raise ValueError(
            f"{server.url} gives log-probs among the tokens that sampling.{cut} leaves, but the trainer's are of all. "
            f"Set old_logprobs to recompute, leave {cut} out, or start vLLM with --logprobs-mode raw_logprobs."
        )


def _check_masks(
    client: GenerationClient, server: RemoteServer, inputs: PreflightInputs, sampling: SamplingSettings
) -> None:
    """Refuses a server that does not give sampling masks, or whose log-probs are not among their tokens."""
    prompt = tuple(inputs.tokenizer.encode(PROMPT))
    params = replace(sampling.params, max_new_tokens=1, ignore_eos=True, return_sampling_mask=True)
    try:
        client.generate_on(server, Request(prompt, params))
        completion = client.generate_on(server, Request(prompt, replace(params, top_k=1)))
    except ServerError as error:
        raise ValueError(f"{error} Or set sampling_mask to false.") from error
    if abs(completion.sampled_logprobs[0]) > TOLERANCE:  # the only token that could be sampled
        raise ValueError(
            f"{server.url} gives log-probs among all tokens, not among those that top_k, top_p and min_p leave. Start "
            "vLLM with --logprobs-mode processed_logprobs, or set sampling_mask to false."
        )


def _truncation_setting(sampling: SamplingSettings) -> str | None:
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return next((name for name, value in neutral.items() if getattr(sampling, name) != value), None)


def _alphanumeric(text: str) -> str:
    """Returns the part of a text that does not depend on how spaces and incomplete characters are decoded."""
    return re.sub(r"[^A-Za-z0-9]", "", text)


def _check_launched(
    inputs: PreflightInputs,
    rollout: LaunchedGenerators | LaunchedVLLM,
    sampling: SamplingSettings,
    use: ServerUse,
) -> str:
    start = inputs.launch
    if limit := _launched_limit(rollout, inputs):
        _check_length(limit, inputs, sampling)
    if any(argument.split("=")[0] in ("--api-key", "--api_key") for argument in rollout.arguments):
        raise ValueError(
            "rollout.arguments hold --api-key, but the run makes its own key for launched servers. Leave it out."
        )
    if isinstance(rollout, LaunchedVLLM) and use.gets_weights and sleeps(rollout, ray=start.ray):
        check_shared_gpus(inputs, rollout)
    elif not start.ray:
        _check_gpus(rollout, unused_gpus(start.ranks if use.gets_weights and start.device == "cuda" else 0))
    if isinstance(rollout, LaunchedGenerators):
        if start.ray and not rollout.gpus and (rollout.device or start.device) == "cuda":
            raise ValueError(
                "rollout.gpus is 0, and on Ray a server that requests no GPU sees none. Give it a whole one, or a "
                "share of the trainer's, such as rollout.gpus 0.4 with cluster.gpus_per_rank 0.6; or set "
                "rollout.device to cpu."
            )
        return f"{rollout.count} of postlude serve, to be launched"
    (package, version), *_ = _installed_vllm(rollout).items()
    parsed = VLLMVersion.parse(version)
    if parsed is not None and parsed.unsupported_reason:
        raise ValueError(f"{vllm_python(rollout)} {parsed.unsupported_reason}.")
    if parsed is not None and rollout.sync == "network" and not parsed.has(Feature.NCCL_ID):
        raise ValueError(
            f"{vllm_python(rollout)} has vLLM {version}, but rollout.sync: network needs 0.30 or newer. Use disk."
        )
    if use.gets_weights and not rollout.gpus and rollout.sync in ("network", "ipc") and inputs.model[1].tied_head:
        raise ValueError(
            f"vLLM on a CPU does not update a head that is tied to the embedding, as that of {inputs.config.model} is. "
            "Set rollout.sync to disk, which writes the head as a tensor of its own."
        )
    if use.compares_logprobs and not use.masks_sampling and (cut := _truncation_setting(sampling)):
        raise ValueError(
            f"vLLM gives log-probs among the tokens that sampling.{cut} leaves, but the trainer's are of all. Set "
            f"old_logprobs to recompute, or leave {cut} out."
        )
    return f"{rollout.count} of {package} {version}, to be launched"


def _launched_limit(rollout: LaunchedGenerators | LaunchedVLLM, inputs: PreflightInputs) -> LengthLimit | None:
    """Returns the limit in the config's arguments, or vLLM's for the model; None if there is none."""
    vllm = isinstance(rollout, LaunchedVLLM)
    option = VLLM_LENGTH if vllm else GENERATOR_LENGTH
    words = [part for argument in rollout.arguments for part in argument.split("=", 1)]
    names = [word.replace("_", "-") for word in words[:-1]]
    if option in names:
        value = words[names.index(option) + 1]
        source = f"rollout.arguments give servers {option} {value}"
        return LengthLimit(int(value), source, "Raise it") if value.isdecimal() else None
    limit = vllm_max_length(inputs.model[1], inputs.tokenizer)
    if not vllm or limit is None or inputs.config.context_length is not None:
        return None
    source = f"vLLM serves {inputs.config.model} with {limit} tokens, as its config.json and tokenizer_config.json say"
    return LengthLimit(limit, source, "Set context_length if it can read more, use rollout: generators")


def _check_gpus(rollout: LaunchedGenerators | LaunchedVLLM, unused: Sequence[str]) -> None:
    """Refuses more GPUs than the trainer leaves on this machine."""
    if 0 < rollout.gpus < 1:
        raise ValueError(
            f"rollout.gpus is {rollout.gpus:g}, but only Ray gives out shares of a GPU (--ray). Give a whole number, "
            "or 0, with which generators share the trainer's."
        )
    if rollout.count * rollout.gpus > len(unused):
        raise ValueError(
            f"rollout needs {rollout.count} servers with {rollout.gpus:g} GPUs each, but the trainer leaves "
            f"{len(unused)} of this machine's. Give fewer by rollout.count or rollout.gpus (0 for a CPU)."
        )


def _installed_vllm(rollout: LaunchedVLLM) -> dict[str, str]:
    """Returns the distributions of vLLM that the interpreter has, with their versions; `vllm` first."""
    python = vllm_python(rollout)
    try:
        done = subprocess.run(
            [python, vllm_versions.__file__],
            capture_output=True,
            text=True,
            timeout=PYTHON_TIMEOUT,
            check=True,
            env={**os.environ, "PYTHONPATH": ""},  # ours is for this interpreter
        )
        versions: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ValueError(f"rollout.python is {python}, which cannot be run as a Python interpreter: {error}") from error
    if not versions:
        raise ValueError(
            f"{python} has no vLLM. Install it there, or give rollout.python the interpreter of an environment that "
            "has it."
        )
    return versions

"""Who draws a recipe's answers: the generator here or servers, and what servers must be able to do for it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from postlude.engine import Engine
from postlude.generate.distributed import DistributedEngine, SyncedGenerator
from postlude.generate.protocol import Completion, Request
from postlude.generate.sampling_params import SamplingParams
from postlude.hf.export import has_hf_config
from postlude.hf.read_model import read_model
from postlude.recipes.checks.preflight import Check, PreflightInputs
from postlude.recipes.config.rollout import (
    ConnectionSettings,
    LaunchedGenerators,
    LaunchedServers,
    LaunchedVLLM,
    NativeRollout,
    Rollout,
    RunningServers,
    SyncSettings,
)
from postlude.recipes.config.settings import SamplingSettings
from postlude.recipes.server_commands import (
    MODEL,
    LengthLimit,
    build_server_command,
    check_server_command,
    generator_limits,
    launched_max_length,
    local_launcher,
    needs_untied_head,
    unused_gpus,
    vllm_max_length,
    write_model_description,
)
from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.remote_server import RemoteServer
from postlude.serving.engine import ServerEngine
from postlude.serving.launch.launcher import ServerCommand, ServerLauncher
from postlude.serving.launch.supervisor import ServerSupervisor, SupervisedClient

SERVERS = "servers"  # in the run's directory: logs of those that are started
QUESTION = "The capital of France is Paris, and the capital of Italy is"
UNSEEN = "\N{SNOWMAN}\N{SNOWMAN}\N{SNOWMAN}"  # a stop text, so that vLLM is asked where it writes text
SAME = 1e-4  # how far two log-probs of one number may be apart


def make_rollout_engine(
    rollout: Rollout,
    engine: Engine,
    tokenizer: Any,
    run: Path,
    answers: SamplingSettings,
    *,
    budget: int,
    routing: bool = False,
    launcher: ServerLauncher | None = None,
    beside: bool = False,
) -> DistributedEngine:
    """What samples with the weights of an engine that is trained. Servers are started on `launcher`, or on this one.

    `budget` is the most tokens that are asked for, prompt and answer together. `beside`: the trainer goes on meanwhile.
    """
    if isinstance(rollout, NativeRollout):
        return SyncedGenerator(engine, tokenizer, draft=answers.draft, routing=routing, **generator_limits(budget))
    way: dict[str, Any] = {}
    if isinstance(rollout, SyncSettings):
        way = {"sync": rollout.sync, "seconds": rollout.sync_timeout, "checksum_every": rollout.checksum_every}
    if isinstance(rollout, RunningServers):
        connected = partial(connect, rollout, tokenizer, engine.config.vocab_size)
        return ServerEngine(connected, engine=engine, directory=run, wait=not beside, **way)

    untied = needs_untied_head(rollout)

    def begin() -> GenerationClient:
        home, device = run.expanduser().absolute() / SERVERS, engine.device.type
        model = write_model_description(engine, tokenizer, home / MODEL, own_head=untied)
        own = vllm_max_length(engine.config, tokenizer)
        program = build_server_command(rollout, model, engine.compute_dtype, device, empty=True, budget=budget, own=own)
        where = launcher or local_launcher(home, training_on=device)
        return start(rollout, program, tokenizer, engine.config.vocab_size, where)

    return ServerEngine(begin, engine=engine, directory=run, untied=untied, wait=not beside, **way)


def make_eval_engine(
    rollout: RunningServers | LaunchedGenerators | LaunchedVLLM,
    model: str,
    tokenizer: Any,
    run: Path,
    dtype: torch.dtype,
    device: str,
    budget: int,
    launcher: ServerLauncher | None = None,
) -> DistributedEngine:
    """Servers of a model that stays as it is; `budget` as of `make_rollout_engine`."""
    if isinstance(rollout, RunningServers):
        return ServerEngine(partial(connect, rollout, tokenizer, read_model(model)[1].vocab_size))

    def begin() -> GenerationClient:
        config = read_model(model)[1]
        own = vllm_max_length(config, tokenizer)
        program = build_server_command(rollout, model, dtype, device, empty=False, budget=budget, own=own)
        home = run.expanduser().absolute() / SERVERS
        return start(
            rollout, program, tokenizer, config.vocab_size, launcher or local_launcher(home, training_on="cpu")
        )

    return ServerEngine(begin)


def start(
    rollout: LaunchedServers, program: ServerCommand, tokenizer: Any, vocab_size: int, launcher: ServerLauncher
) -> GenerationClient:
    """Servers of a program, when all are ready."""
    started = ServerSupervisor(program, rollout.count, launcher, max_restarts=rollout.max_restarts)
    key = program.key or None
    return SupervisedClient(started, tokenizer=tokenizer, vocab_size=vocab_size, api_key=key, **_asked(rollout))


def connect(rollout: RunningServers, tokenizer: Any, vocab_size: int, *, trial: bool = False) -> GenerationClient:
    """The servers of a config. On `trial` nobody is waited for."""
    key = None
    if rollout.api_key is not None:
        key = os.environ.get(rollout.api_key)
        if not key:
            raise ValueError(
                f"rollout.api_key names the environment variable {rollout.api_key}, which is not set. Export it."
            )
    return GenerationClient(
        rollout.urls,
        rollout.model,
        api=rollout.api,
        tokenizer=tokenizer,
        api_key=key,
        vocab_size=vocab_size,
        **_asked(rollout) | ({"retries": 1, "outage_timeout": 0.0} if trial else {}),
    )


def _asked(rollout: ConnectionSettings) -> dict[str, Any]:
    return {name: getattr(rollout, name) for name in ("timeout", "retries", "backoff", "concurrency", "outage_timeout")}


def check_servers(
    inputs: PreflightInputs, rollout: Rollout, answers: SamplingSettings, *, trained: bool, compared: bool = False
) -> Iterator[Check]:
    """Servers that answer, and can do what the recipe needs, by a trial request to each; or that could be started.

    `trained`: their weights are to follow the trainer's. `compared`: their log-probs are compared with the trainer's.
    """
    if isinstance(rollout, NativeRollout):
        return

    def look() -> str:
        if trained and not has_hf_config(inputs.model[1]):
            raise ValueError(
                f"servers read Hugging Face directories, but {inputs.config.model} has no Hugging Face family to be "
                "written as. Use rollout: native."
            )
        if not isinstance(rollout, RunningServers):
            start = inputs.launch
            if found := launched_max_length(
                rollout, inputs.config.model, vllm_max_length(inputs.model[1], inputs.tokenizer)
            ):
                _fits(found, inputs, answers)
            devices = None if start.ray else unused_gpus(start.ranks if trained and start.device == "cuda" else 0)
            return check_server_command(rollout, answers, device=start.device, devices=devices, compared=compared)
        with closing(connect(rollout, inputs.tokenizer, inputs.model[1].vocab_size, trial=True)) as engine:
            servers = engine.meet()
            for server in servers:
                if server.state == "out":
                    raise ValueError(f"{server.url} {server.problem}.")
            up = [server for server in servers if server.state == "up"]
            for server in up:
                if (limit := engine.longest(server)) is not None:
                    said = f"{server.url} takes {limit} tokens (its max_model_len)"
                    _fits(LengthLimit(limit, said, "Start it with a larger one"), inputs, answers)
                if trained:
                    _takes_weights(engine, server, rollout, tied_head=inputs.model[1].tied_head)
                _speaks_of_the_model(engine, server, inputs)
                if compared:
                    _compares(engine, server, inputs, answers)
            kinds = ", ".join(sorted({server.api.name for server in up}))
            away = "".join(f"; {server.url} {server.problem}" for server in servers if server not in up)
            return f"{len(up)} of {len(servers)} answer ({kinds}){away}"

    yield Check("servers", look, after=("tokenizer",))


def _fits(length: LengthLimit, inputs: PreflightInputs, answers: SamplingSettings) -> None:
    """Refuse a server that would refuse what it will be asked."""
    most, why, lower = inputs.max_request(answers)
    if most > length.most:
        raise ValueError(f"{length.said}, but {why}. {length.mend}, or lower {lower}.")


def _takes_weights(engine: GenerationClient, server: RemoteServer, rollout: RunningServers, *, tied_head: bool) -> None:
    """Refuse a server that would go on with the weights it was started with, or with some of them."""
    if not server.api.reloads:
        raise ValueError(
            f"{server.url} speaks {server.api.name}, which takes no new weights while it runs, but training "
            "changes them with every step. Use vLLM or SGLang, or rollout: native; to evaluate with, it will do."
        )
    engine.version(server)  # or a sentence
    if problem := engine.drawback(server, tied_head=tied_head, sent=rollout.sync == "network"):
        raise ValueError(f"{server.url} {problem}.")


def _speaks_of_the_model(engine: GenerationClient, server: RemoteServer, inputs: PreflightInputs) -> None:
    """Refuse a server without token ids or log-probs, or one of other tokens: its text must be what ours make."""
    prompt = tuple(inputs.tokenizer.encode(QUESTION))
    found = engine.ask(
        server, Request(prompt, SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True, stop=(UNSEEN,)))
    )
    size = inputs.model[1].vocab_size
    if not found.tokens or max(found.tokens) >= size or min(found.tokens) < 0:
        raise ValueError(
            f"{server.url} answered with tokens {found.tokens}, but the vocabulary of {inputs.config.model} goes from "
            f"0 to {size - 1}. It serves another model."
        )
    ours = inputs.tokenizer.decode(found.tokens, skip_special_tokens=True)
    if found.text is not None and _letters(found.text) != _letters(ours):
        raise ValueError(
            f"{server.url} writes its own tokens as {found.text!r}, but with the tokenizer of {inputs.config.model} "
            f"they are {ours!r}. It serves a model of other tokens."
        )


def _compares(
    engine: GenerationClient, server: RemoteServer, inputs: PreflightInputs, answers: SamplingSettings
) -> None:
    """Refuse log-probs of another distribution than the trainer's: softmax(logits / temperature) of all tokens.

    The likeliest token is asked for at two temperatures: if it has one log-prob, no temperature is in it; if that is 0,
    it is of what top-k left alone.
    """
    prompt = tuple(inputs.tokenizer.encode(QUESTION))

    def likeliest(temperature: float) -> float:
        drawn = SamplingParams(max_new_tokens=1, temperature=temperature, top_k=1, ignore_eos=True)
        found: Completion = engine.ask(server, Request(prompt, drawn))
        return found.logprobs[0]

    temperature = answers.temperature
    here, other = likeliest(temperature), likeliest(2.0 * temperature)
    plain, after_cuts = abs(here - other) < SAME and abs(here) > SAME, abs(here) < SAME and abs(other) < SAME
    if plain and temperature != 1.0:
        raise ValueError(
            f"{server.url} gives log-probs at temperature 1, but answers are drawn at {temperature:g}, and ratios are "
            "taken to what it says. Set old_logprobs to recompute, sampling.temperature to 1, or start vLLM with "
            "--logprobs-mode processed_logprobs."
        )
    cuts = [name for name, none in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)) if getattr(answers, name) != none]
    if after_cuts and cuts:
        raise ValueError(
            f"{server.url} gives log-probs among the tokens that sampling.{cuts[0]} leaves, but the trainer's are of "
            f"all. Set old_logprobs to recompute, leave {cuts[0]} out, or start vLLM with --logprobs-mode raw_logprobs."
        )


def _letters(text: str) -> str:
    """What is alike however a server treats spaces and letters of which bytes are missing."""
    return re.sub(r"[^A-Za-z0-9]", "", text)

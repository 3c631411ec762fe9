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
from postlude.hf.export import is_described
from postlude.hf.reading import read_model
from postlude.recipes.config.rollout import (
    Connections,
    Generators,
    Native,
    Rollout,
    Servers,
    StartedServers,
    StartedVLLM,
    Sync,
)
from postlude.recipes.config.settings import Answers
from postlude.recipes.preflight import Check, Subject
from postlude.recipes.started import (
    MODEL,
    Length,
    check_program,
    describe_model,
    devices_left,
    here,
    native_length,
    own_length,
    program_of,
    started_length,
    wants_untied,
)
from postlude.rollout.gathered import GatheredGenerator, RankedEngine
from postlude.rollout.protocol import Completion, Request
from postlude.rollout.sampling import Sampling
from postlude.rollout.served import ServedAnswers
from postlude.rollout.servers.engine import HTTPEngine
from postlude.rollout.servers.machine import Machine, Program
from postlude.rollout.servers.server import Server
from postlude.rollout.servers.starting import Started, StartedEngine

SERVERS = "servers"  # in the run's directory: logs of those that are started
QUESTION = "The capital of France is Paris, and the capital of Italy is"
UNSEEN = "\N{SNOWMAN}\N{SNOWMAN}\N{SNOWMAN}"  # a stop text, so that vLLM is asked where it writes text
SAME = 1e-4  # how far two log-probs of one number may be apart


def engine_of(
    rollout: Rollout,
    engine: Engine,
    tokenizer: Any,
    run: Path,
    answers: Answers,
    *,
    budget: int,
    routing: bool = False,
    machine: Machine | None = None,
    beside: bool = False,
) -> RankedEngine:
    """What samples with the weights of an engine that is trained. Servers are started on `machine`, or on this one.

    `budget` is the most tokens that are asked for, prompt and answer together. `beside`: the trainer goes on meanwhile.
    """
    if isinstance(rollout, Native):
        return GatheredGenerator(engine, tokenizer, draft=answers.draft, routing=routing, **native_length(budget))
    way: dict[str, Any] = {}
    if isinstance(rollout, Sync):
        way = {"sync": rollout.sync, "seconds": rollout.sync_timeout, "check_every": rollout.check_every}
    if isinstance(rollout, Servers):
        connected = partial(connect, rollout, tokenizer, engine.config.vocab_size)
        return ServedAnswers(connected, engine=engine, directory=run, wait=not beside, **way)

    untied = wants_untied(rollout)

    def begin() -> HTTPEngine:
        home, device = run.expanduser().absolute() / SERVERS, engine.device.type
        model = describe_model(engine, tokenizer, home / MODEL, own_head=untied)
        own = own_length(engine.config, tokenizer)
        program = program_of(rollout, model, engine.compute_dtype, device, empty=True, budget=budget, own=own)
        where = machine or here(home, training_on=device)
        return start(rollout, program, tokenizer, engine.config.vocab_size, where)

    return ServedAnswers(begin, engine=engine, directory=run, untied=untied, wait=not beside, **way)


def served(
    rollout: Servers | Generators | StartedVLLM,
    model: str,
    tokenizer: Any,
    run: Path,
    dtype: torch.dtype,
    device: str,
    budget: int,
    machine: Machine | None = None,
) -> RankedEngine:
    """Servers of a model that stays as it is; `budget` as of `engine_of`."""
    if isinstance(rollout, Servers):
        return ServedAnswers(partial(connect, rollout, tokenizer, read_model(model)[1].vocab_size))

    def begin() -> HTTPEngine:
        config = read_model(model)[1]
        own = own_length(config, tokenizer)
        program = program_of(rollout, model, dtype, device, empty=False, budget=budget, own=own)
        home = run.expanduser().absolute() / SERVERS
        return start(rollout, program, tokenizer, config.vocab_size, machine or here(home, training_on="cpu"))

    return ServedAnswers(begin)


def start(rollout: StartedServers, program: Program, tokenizer: Any, vocab_size: int, machine: Machine) -> HTTPEngine:
    """Servers of a program, when all are ready."""
    started = Started(program, rollout.count, machine, restarts=rollout.restarts)
    key = program.key or None
    return StartedEngine(started, tokenizer=tokenizer, vocab_size=vocab_size, api_key=key, **_asked(rollout))


def connect(rollout: Servers, tokenizer: Any, vocab_size: int, *, trial: bool = False) -> HTTPEngine:
    """The servers of a config. On `trial` nobody is waited for."""
    key = None
    if rollout.api_key is not None:
        key = os.environ.get(rollout.api_key)
        if not key:
            raise ValueError(
                f"rollout.api_key names the environment variable {rollout.api_key}, which is not set. Export it."
            )
    return HTTPEngine(
        rollout.urls,
        rollout.model,
        dialect=rollout.dialect,
        tokenizer=tokenizer,
        api_key=key,
        vocab_size=vocab_size,
        **_asked(rollout) | ({"retries": 1, "patience": 0.0} if trial else {}),
    )


def _asked(rollout: Connections) -> dict[str, Any]:
    return {name: getattr(rollout, name) for name in ("timeout", "retries", "backoff", "concurrency", "patience")}


def of_servers(
    subject: Subject, rollout: Rollout, answers: Answers, *, trained: bool, compared: bool = False
) -> Iterator[Check]:
    """Servers that answer, and can do what the recipe needs, by a trial request to each; or that could be started.

    `trained`: their weights are to follow the trainer's. `compared`: their log-probs are compared with the trainer's.
    """
    if isinstance(rollout, Native):
        return

    def look() -> str:
        if trained and not is_described(subject.model[1]):
            raise ValueError(
                f"servers read Hugging Face directories, but {subject.config.model} has no Hugging Face family to be "
                "written as. Use rollout: native."
            )
        if not isinstance(rollout, Servers):
            start = subject.start
            if found := started_length(rollout, subject.config.model, own_length(subject.model[1], subject.tokenizer)):
                _fits(found, subject, answers)
            devices = None if start.ray else devices_left(start.ranks if trained and start.device == "cuda" else 0)
            return check_program(rollout, answers, device=start.device, devices=devices, compared=compared)
        with closing(connect(rollout, subject.tokenizer, subject.model[1].vocab_size, trial=True)) as engine:
            servers = engine.meet()
            for server in servers:
                if server.state == "out":
                    raise ValueError(f"{server.url} {server.problem}.")
            up = [server for server in servers if server.state == "up"]
            for server in up:
                if (limit := engine.longest(server)) is not None:
                    said = f"{server.url} takes {limit} tokens (its max_model_len)"
                    _fits(Length(limit, said, "Start it with a larger one"), subject, answers)
                if trained:
                    _takes_weights(engine, server, rollout, tied_head=subject.model[1].tied_head)
                _speaks_of_the_model(engine, server, subject)
                if compared:
                    _compares(engine, server, subject, answers)
            kinds = ", ".join(sorted({server.dialect.name for server in up}))
            away = "".join(f"; {server.url} {server.problem}" for server in servers if server not in up)
            return f"{len(up)} of {len(servers)} answer ({kinds}){away}"

    yield Check("servers", look, after=("tokenizer",))


def _fits(length: Length, subject: Subject, answers: Answers) -> None:
    """Refuse a server that would refuse what it will be asked."""
    most, why, lower = subject.most(answers)
    if most > length.most:
        raise ValueError(f"{length.said}, but {why}. {length.mend}, or lower {lower}.")


def _takes_weights(engine: HTTPEngine, server: Server, rollout: Servers, *, tied_head: bool) -> None:
    """Refuse a server that would go on with the weights it was started with, or with some of them."""
    if not server.dialect.reloads:
        raise ValueError(
            f"{server.url} speaks {server.dialect.name}, which takes no new weights while it runs, but training "
            "changes them with every step. Use vLLM or SGLang, or rollout: native; to evaluate with, it will do."
        )
    engine.version(server)  # or a sentence
    if problem := engine.drawback(server, tied_head=tied_head, sent=rollout.sync == "network"):
        raise ValueError(f"{server.url} {problem}.")


def _speaks_of_the_model(engine: HTTPEngine, server: Server, subject: Subject) -> None:
    """Refuse a server without token ids or log-probs, or one of other tokens: its text must be what ours make."""
    prompt = tuple(subject.tokenizer.encode(QUESTION))
    found = engine.ask(
        server, Request(prompt, Sampling(max_new_tokens=8, temperature=0.0, ignore_eos=True, stop=(UNSEEN,)))
    )
    size = subject.model[1].vocab_size
    if not found.tokens or max(found.tokens) >= size or min(found.tokens) < 0:
        raise ValueError(
            f"{server.url} answered with tokens {found.tokens}, but the vocabulary of {subject.config.model} goes from "
            f"0 to {size - 1}. It serves another model."
        )
    ours = subject.tokenizer.decode(found.tokens, skip_special_tokens=True)
    if found.text is not None and _letters(found.text) != _letters(ours):
        raise ValueError(
            f"{server.url} writes its own tokens as {found.text!r}, but with the tokenizer of {subject.config.model} "
            f"they are {ours!r}. It serves a model of other tokens."
        )


def _compares(engine: HTTPEngine, server: Server, subject: Subject, answers: Answers) -> None:
    """Refuse log-probs of another distribution than the trainer's: softmax(logits / temperature) of all tokens.

    The likeliest token is asked for at two temperatures: if it has one log-prob, no temperature is in it; if that is 0,
    it is of what top-k left alone.
    """
    prompt = tuple(subject.tokenizer.encode(QUESTION))

    def likeliest(temperature: float) -> float:
        drawn = Sampling(max_new_tokens=1, temperature=temperature, top_k=1, ignore_eos=True)
        found: Completion = engine.ask(server, Request(prompt, drawn))
        return found.logprobs[0]

    temperature = answers.temperature
    here, other = likeliest(temperature), likeliest(2.0 * temperature)
    plain, after_cuts = abs(here - other) < SAME and abs(here) > SAME, abs(here) < SAME and abs(other) < SAME
    if plain and temperature != 1.0:
        raise ValueError(
            f"{server.url} gives log-probs at temperature 1, but answers are drawn at {temperature:g}, and ratios are "
            "taken to what it says. Set old_logprobs to recompute, answers.temperature to 1, or start vLLM with "
            "--logprobs-mode processed_logprobs."
        )
    cuts = [name for name, none in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)) if getattr(answers, name) != none]
    if after_cuts and cuts:
        raise ValueError(
            f"{server.url} gives log-probs among the tokens that answers.{cuts[0]} leaves, but the trainer's are of "
            f"all. Set old_logprobs to recompute, leave {cuts[0]} out, or start vLLM with --logprobs-mode raw_logprobs."
        )


def _letters(text: str) -> str:
    """What is alike however a server treats spaces and letters of which bytes are missing."""
    return re.sub(r"[^A-Za-z0-9]", "", text)

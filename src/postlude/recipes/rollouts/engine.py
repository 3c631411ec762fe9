"""Makes the rollout engine of a config: the generator in the ranks, running servers, or servers that are launched."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from postlude.engine import Engine
from postlude.generate.distributed import DistributedEngine, SyncedGenerator
from postlude.generate.probe import WeightProbe
from postlude.hf.read_model import read_model
from postlude.recipes.config.rollout import (
    ConnectionSettings,
    LaunchedGenerators,
    LaunchedServers,
    LaunchedVLLM,
    NativeRollout,
    Rollout,
    RunningServers,
    SyncSettings,
    sleeps,
    sync_method,
)
from postlude.recipes.config.settings import SamplingSettings
from postlude.recipes.rollouts.server_commands import (
    build_server_command,
    free_memory_fraction,
    generator_limits,
    local_launcher,
    needs_untied_head,
    peft_rank,
    vllm_max_length,
    write_model_files,
)
from postlude.recipes.run.schedule import StepTimer
from postlude.recipes.sequence_limit import SequenceLimit
from postlude.serving.clients.client import GenerationClient
from postlude.serving.engine import ServerEngine
from postlude.serving.launch.launcher import ServerCommand, ServerLauncher
from postlude.serving.launch.supervisor import ServerSupervisor, SupervisedClient
from postlude.serving.weights.sync import SyncOptions

SERVERS = "servers"  # in the run's directory: logs and model files of launched servers
MODEL = "model"  # in SERVERS: the model's files without weights


def make_rollout_engine(
    rollout: Rollout,
    engine: Engine,
    tokenizer: Any,
    run: Path,
    sampling: SamplingSettings,
    *,
    limit: SequenceLimit,
    record_routing: bool = False,
    launcher: ServerLauncher | None = None,
    background: bool = False,
) -> DistributedEngine:
    """Returns the rollout engine that samples with the weights of the trained `engine`.

    Servers are started by `launcher`; None starts them on this machine. `limit` is of prompt and completion together.
    With `background` the trainer works while servers generate.
    """
    probe = None if rollout.probe_limit == 0 else WeightProbe(engine, tokenizer, rollout.probe_limit, limit.tokens())
    if isinstance(rollout, NativeRollout):
        return SyncedGenerator(
            engine,
            tokenizer,
            probe=probe,
            draft=sampling.draft,
            record_routing=record_routing,
            kv_cache_dtype=rollout.kv_cache_dtype,
            quantization=rollout.quantization,
            **generator_limits(limit),
        )
    untied = not isinstance(rollout, RunningServers) and needs_untied_head(rollout)
    sync = SyncOptions(run, untied=untied, probe=probe, wait=not background)
    on_ray, asleep = launcher is not None, False
    if isinstance(rollout, SyncSettings):
        asleep = isinstance(rollout, LaunchedVLLM) and sleeps(rollout, ray=on_ray)
        method = sync_method(rollout, ray=on_ray)
        sync = replace(
            sync, method=method, timeout=rollout.sync_timeout, checksum_every=rollout.checksum_every, sleep=asleep
        )
    make_client: Callable[[], GenerationClient]
    if isinstance(rollout, RunningServers):
        make_client = partial(connect_servers, rollout, tokenizer, engine.config.vocab_size)
    else:

        def make_client() -> GenerationClient:
            server_files, device = run.expanduser().absolute() / SERVERS, engine.device.type
            model = write_model_files(engine, tokenizer, server_files / MODEL, untied_head=untied)
            model_limit = vllm_max_length(engine.config, tokenizer)
            command = build_server_command(
                rollout,
                model,
                engine.compute_dtype,
                device,
                weights=False,
                limit=limit,
                model_limit=model_limit,
                adapter_rank=peft_rank(engine) if sync.method == "disk" else 0,
                sync=sync.method,
                memory_fraction=free_memory_fraction(engine.device) if asleep else None,
                record_routing=record_routing,
            )
            server_launcher = launcher or local_launcher(server_files, training_on=device, shares_gpus=asleep)
            # A server that sleeps is not restarted: it would need memory that the trainer may have.
            launched = rollout.model_copy(update={"max_restarts": 0}) if asleep else rollout
            return launch_servers(launched, command, tokenizer, engine.config.vocab_size, server_launcher)

    return ServerEngine(make_client, engine=engine, sync=sync, record_routing=record_routing)


@contextmanager
def offloading(engine: Engine | None, timer: StepTimer) -> Iterator[None]:
    """Moves the engine, if one is given, to host memory for the block, and back to its device after it."""
    if engine is None:
        yield
        return
    with timer("offload"):
        engine.offload()
    try:
        yield
    finally:
        with timer("onload"):
            engine.onload()


def make_eval_engine(
    rollout: RunningServers | LaunchedGenerators | LaunchedVLLM,
    model: str,
    tokenizer: Any,
    run: Path,
    dtype: torch.dtype,
    device: str,
    limit: SequenceLimit,
    launcher: ServerLauncher | None = None,
) -> DistributedEngine:
    """Returns the rollout engine of servers whose weights stay. Arguments are those of `make_rollout_engine`."""

    def make_client() -> GenerationClient:
        config = read_model(model)[1]
        if isinstance(rollout, RunningServers):
            return connect_servers(rollout, tokenizer, config.vocab_size)
        command = build_server_command(
            rollout, model, dtype, device, weights=True, limit=limit, model_limit=vllm_max_length(config, tokenizer)
        )
        server_launcher = launcher or local_launcher(run.expanduser().absolute() / SERVERS, training_on="cpu")
        return launch_servers(rollout, command, tokenizer, config.vocab_size, server_launcher)

    return ServerEngine(make_client)


def launch_servers(
    rollout: LaunchedServers, command: ServerCommand, tokenizer: Any, vocab_size: int, launcher: ServerLauncher
) -> GenerationClient:
    """Launches the servers of a config. Returns their client when all are ready."""
    supervisor = ServerSupervisor(command, rollout.count, launcher, max_restarts=rollout.max_restarts)
    settings = _connection_settings(rollout)
    return SupervisedClient(supervisor, tokenizer=tokenizer, vocab_size=vocab_size, **settings)


def connect_servers(
    rollout: RunningServers, tokenizer: Any, vocab_size: int, *, trial: bool = False
) -> GenerationClient:
    """Returns a client of the running servers of a config. A `trial` does not wait for servers."""
    api_key = None
    if rollout.api_key is not None:
        api_key = os.environ.get(rollout.api_key)
        if not api_key:
            raise ValueError(
                f"rollout.api_key names the environment variable {rollout.api_key}, which is not set. Export it."
            )
    return GenerationClient(
        rollout.urls,
        rollout.model,
        api=rollout.api,
        tokenizer=tokenizer,
        api_key=api_key,
        vocab_size=vocab_size,
        **_connection_settings(rollout) | ({"retries": 1, "outage_timeout": 0.0} if trial else {}),
    )


def _connection_settings(rollout: ConnectionSettings) -> dict[str, Any]:
    return {name: getattr(rollout, name) for name in ("timeout", "retries", "backoff", "concurrency", "outage_timeout")}

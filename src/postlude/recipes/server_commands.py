"""The servers that a recipe starts: which program they are, and whether it can be run."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from postlude.engine import Engine
from postlude.hf.export import ModelFiles, hf_export_config, untied
from postlude.model import ModelConfig
from postlude.recipes.config.rollout import LaunchedGenerators, LaunchedVLLM
from postlude.recipes.config.settings import SamplingSettings
from postlude.serving.clients.postlude import WEIGHTS
from postlude.serving.launch.launcher import LocalLauncher, ServerCommand

MODEL = "model"  # beside the logs: what a server is told of the model, which gets its weights later
ENTRY = "vllm.entrypoints.launchers.api_server.entry"  # since `vllm serve` asks for a package of the name vllm
FOUND_WITHIN = 60.0  # seconds
VLLM_LENGTH, GENERATOR_LENGTH = "--max-model-len", "--max-batch-tokens"
USUAL_LENGTH = 65_536  # what a generator has room for by itself
STRETCHED = ("linear", "dynamic")  # where vLLM takes positions for those before they are stretched
LOOK = """
import importlib.metadata as found, json
names = {each.metadata["Name"].lower().replace("_", "-"): each.version for each in found.distributions()}
print(json.dumps({name: version for name, version in names.items() if name.startswith("vllm")}))
"""
# One that began without weights would begin so every time that it is told to read some.
READS = (
    "/collective_rpc",
    {"method": "update_config", "kwargs": {"overrides": {"load_config": {"load_format": "auto"}}}},
)
VLLM_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # without it, weights stay as they are
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": "",  # what is on ours is for this interpreter
}
KEYS = ("POSTLUDE_API_KEY", "VLLM_API_KEY")  # by which variable a server of either kind knows the run's key
CPU_SPACE = "VLLM_CPU_KVCACHE_SPACE"  # GiB for keys and values; unsaid, nearly all memory, where the trainer is, too


@dataclass(frozen=True)
class LengthLimit:
    """The most tokens, prompt and answer together, that a server takes."""

    most: int
    said: str
    """A clause that says so, and of whom."""
    mend: str
    """How to have more."""


def vllm_max_length(config: ModelConfig, tokenizer: Any) -> int | None:
    """The most tokens that vLLM serves a model with by itself, as it finds them; None where its config says nothing."""
    stated: Mapping[str, Any] = config.hf_config or {}
    stated = stated.get("text_config") or stated
    positions, rope = stated.get("max_position_embeddings"), stated.get("rope_parameters") or {}
    if not isinstance(positions, int):
        return None
    if rope.get("rope_type") in STRETCHED:
        positions = int(positions * (rope.get("factor") or 1.0))
    return min(positions, getattr(tokenizer, "model_max_length", positions))


def generator_limits(budget: int) -> dict[str, int]:
    """What a generator is to be told so that a sequence of the budget has room."""
    return {"max_batch_tokens": budget} if budget > USUAL_LENGTH else {}


def launched_max_length(rollout: LaunchedGenerators | LaunchedVLLM, model: str, own: int | None) -> LengthLimit | None:
    """What limits servers that are started: your words for them, or the model's own length; None if nothing does."""
    vllm = isinstance(rollout, LaunchedVLLM)
    name = VLLM_LENGTH if vllm else GENERATOR_LENGTH
    if (given := _given(rollout, name)) is not None:
        if not given.isdecimal():
            return None
        return LengthLimit(int(given), f"rollout.arguments give servers {name} {given}", "Raise it")
    if not vllm or own is None:
        return None
    said = f"vLLM serves {model} with {own} tokens, as its config.json and tokenizer_config.json say"
    return LengthLimit(own, said, "Raise max_position_embeddings or model_max_length there, use rollout: generators")


def _given(rollout: LaunchedGenerators | LaunchedVLLM, name: str) -> str | None:
    """The value of an option among the words of the user's for a server."""
    words = [part for word in rollout.arguments for part in word.split("=", 1)]
    options = [word.replace("_", "-") for word in words[:-1]]
    return words[options.index(name) + 1] if name in options else None


def build_server_command(
    rollout: LaunchedGenerators | LaunchedVLLM,
    model: str,
    dtype: torch.dtype,
    device: str,
    *,
    empty: bool,
    budget: int,
    own: int | None,
) -> ServerCommand:
    """What is started, with a new key. `empty` ones get weights before they are asked; `device` is the trainer's.

    They take `budget` tokens, prompt and answer together; vLLM no more than a model's `vllm_max_length`.
    """
    written = str(dtype).removeprefix("torch.")
    key, (ours, vllms) = secrets.token_urlsafe(32), KEYS
    if isinstance(rollout, LaunchedGenerators):
        where = rollout.device or device
        command = [sys.executable, "-m", "postlude", "serve", model, "--host", "{host}", "--port", "{port}"]
        command += ["--dtype", written, "--device", where, "--threads", str(rollout.threads)]
        command += ["--empty"] if empty else []
        command += [GENERATOR_LENGTH, str(budget)] if generator_limits(budget) else []
        environment, variable, guarded = {"OMP_NUM_THREADS": str(rollout.threads)}, ours, WEIGHTS
    else:
        command = [_python(rollout), "-m", ENTRY, "--model", model, "--host", "{host}", "--port", "{port}"]
        command += ["--dtype", written, "--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
        command += ["--generation-config", "vllm"]  # its eos tokens are read all the same, its sampling values are not
        command += ["--load-format", "dummy"] if empty else []
        command += [VLLM_LENGTH, str(budget)] if own is not None and budget < own else []
        command += ["--weight-transfer-config", '{"backend": "nccl"}'] if rollout.sync == "network" else []
        environment = VLLM_ENVIRONMENT | ({} if rollout.gpus else {CPU_SPACE: os.environ.get(CPU_SPACE, "4")})
        variable, guarded = vllms, "/is_paused"
    return ServerCommand(
        command=(*command, *rollout.arguments),
        environment={**environment, **rollout.env, variable: key},
        cpus=rollout.cpus,
        gpus=float(rollout.gpus),
        start_timeout=rollout.start_timeout,
        told=(READS,) if empty and isinstance(rollout, LaunchedVLLM) else (),
        key=key,
        guarded=guarded,
    )


def needs_untied_head(rollout: LaunchedGenerators | LaunchedVLLM) -> bool:
    """Whether a tied head must be given as one of its own: vLLM on a CPU does not renew a tied one (0.32)."""
    return isinstance(rollout, LaunchedVLLM) and not rollout.gpus


def write_model_description(engine: Engine, tokenizer: Any, directory: Path, *, own_head: bool) -> str:
    """Write what a server needs to know of the model, but for the weights. Returns where."""
    directory.mkdir(parents=True, exist_ok=True)
    config = untied(engine.config) if own_head else engine.config
    hf = hf_export_config(config, engine.compute_dtype, engine.families)[1]
    ModelFiles(hf, tokenizer, engine.generation).write(directory)
    return str(directory.absolute())


def local_launcher(logs: Path, *, training_on: str) -> LocalLauncher:
    """This machine, with the GPUs that the trainer's ranks leave."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return LocalLauncher(logs, unused_gpus(ranks if training_on == "cuda" else 0))


def unused_gpus(taken: int) -> list[str]:
    """The GPUs of this machine that so many ranks do not compute on: they take the first ones."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(each) for each in range(torch.cuda.device_count())] if visible is None else visible.split(",")
    return [name for name in names if name][taken:]


def check_server_command(
    rollout: LaunchedGenerators | LaunchedVLLM,
    answers: SamplingSettings,
    *,
    device: str,
    devices: Sequence[str] | None,
    compared: bool,
) -> str:
    """Refuse what could not be started, or would not do; what there is to say of it otherwise.

    `device` is the trainer's. `devices` are the GPUs there are for servers; None where Ray gives them out.
    """
    if any(word.split("=")[0] in ("--api-key", "--api_key") for word in rollout.arguments):
        raise ValueError(
            "rollout.arguments hold --api-key, but the run makes a key of its own for servers that it starts. Leave it "
            "out."
        )
    if devices is not None and 0 < rollout.gpus < 1:
        raise ValueError(
            f"rollout.gpus is {rollout.gpus:g}, but Ray alone gives out shares of a GPU (--ray). Give a whole number, "
            "or 0, with which generators share the trainer's."
        )
    if devices is not None and rollout.count * rollout.gpus > len(devices):
        raise ValueError(
            f"rollout wants {rollout.count} servers with {rollout.gpus:g} GPUs each, but the trainer leaves "
            f"{len(devices)} of this machine's. Give fewer by rollout.count or rollout.gpus (0 for a CPU)."
        )
    if isinstance(rollout, LaunchedGenerators):
        if devices is None and not rollout.gpus and (rollout.device or device) == "cuda":
            raise ValueError(
                "rollout.gpus is 0, and on Ray a server that asks for no GPU sees none. Give it a whole one, or a "
                "share of the trainer's, such as rollout.gpus 0.4 with cluster.gpus_per_rank 0.6; or set "
                "rollout.device to cpu."
            )
        return f"{rollout.count} of postlude serve, to be started"
    (package, version), *_ = _vllm(rollout).items()
    cuts = [name for name, none in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)) if getattr(answers, name) != none]
    if compared and cuts:
        raise ValueError(
            f"vLLM gives log-probs among the tokens that sampling.{cuts[0]} leaves, but the trainer's are of all. Set "
            f"old_logprobs to recompute, or leave {cuts[0]} out."
        )
    return f"{rollout.count} of {package} {version}, to be started"


def _vllm(rollout: LaunchedVLLM) -> dict[str, str]:
    """The distributions of vLLM that the interpreter has, with their versions."""
    python = _python(rollout)
    try:
        done = subprocess.run(
            [python, "-I", "-c", LOOK], capture_output=True, text=True, timeout=FOUND_WITHIN, check=True
        )
        found: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ValueError(f"rollout.python is {python}, which cannot be run as a Python interpreter: {error}") from error
    if not found:
        raise ValueError(
            f"{python} has no vLLM. Install it there, or give rollout.python the interpreter of an environment that "
            "has it."
        )
    return {name: found[name] for name in ("vllm", *found) if name in found}


def _python(rollout: LaunchedVLLM) -> str:
    return str(Path(rollout.python).expanduser()) if rollout.python else sys.executable

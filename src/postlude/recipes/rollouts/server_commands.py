"""Command lines of the servers that a recipe launches: `postlude serve` or vLLM."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch

from postlude.data.hub import hub_repo
from postlude.engine import Engine
from postlude.engine.adapters import plan_adapter_tensors
from postlude.generate.sampling_params import MAX_SAMPLING_MASK
from postlude.hf.export import ModelFiles, hf_export_config, untied
from postlude.hf.peft import to_peft
from postlude.hf.read_model import context_length
from postlude.model import ModelConfig
from postlude.options import SyncMethod
from postlude.recipes.config.rollout import LaunchedGenerators, LaunchedVLLM
from postlude.recipes.sequence_limit import SequenceLimit
from postlude.serving.clients.postlude import WEIGHTS
from postlude.serving.launch.launcher import LocalLauncher, ServerCommand
from postlude.serving.vllm import vllm_versions

VLLM_FILES = Path(vllm_versions.__file__).parent  # what vLLM's interpreter runs of ours
VLLM_PARALLEL = {"-tp", "-pp", "-dp", "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"}
VLLM_MEMORY = "--gpu-memory-utilization"
TRAINER_MEMORY = 3 << 30  # bytes of a shared GPU that vLLM leaves free: CUDA contexts, what the trainer allocates
VLLM_LENGTH, GENERATOR_LENGTH = "--max-model-len", "--max-batch-tokens"
DEFAULT_GENERATOR_LENGTH = 65_536
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
VLLM_LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"  # takes a --max-model-len above the model's own
# A vLLM that was started with dummy weights would otherwise load dummy weights at every reload.
LOAD_REAL_WEIGHTS = (
    "/collective_rpc",
    {"method": "update_config", "kwargs": {"overrides": {"load_config": {"load_format": "auto"}}}},
)
VLLM_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # enables the routes for new weights
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": "",  # ours is for this interpreter
}
POSTLUDE_KEY, VLLM_KEY = "POSTLUDE_API_KEY", "VLLM_API_KEY"  # environment variables of the servers' keys
VLLM_CPU_CACHE = "VLLM_CPU_KVCACHE_SPACE"  # GiB; by default vLLM takes nearly all memory, which the trainer needs too


def vllm_max_length(config: ModelConfig, tokenizer: Any) -> int | None:
    """Returns the default of vLLM's --max-model-len for a model; None where its config does not say."""
    length = context_length(config)
    return None if length is None else min(length, getattr(tokenizer, "model_max_length", length))


def generator_limits(limit: SequenceLimit) -> dict[str, int]:
    """Returns the settings of a generator with room for the longest sequence."""
    tokens = limit.tokens()
    return {"context_length": tokens} | ({"max_batch_tokens": tokens} if tokens > DEFAULT_GENERATOR_LENGTH else {})


def build_server_command(
    rollout: LaunchedGenerators | LaunchedVLLM,
    model: str,
    dtype: torch.dtype,
    device: str,
    *,
    weights: bool,
    limit: SequenceLimit,
    model_limit: int | None,
    adapter_rank: int = 0,
    sync: SyncMethod = "disk",
    memory_fraction: float | None = None,
    record_routing: bool = False,
) -> ServerCommand:
    """Returns the command of a server. `device` is the trainer's.

    Without `weights` the server starts empty and gets them later. `limit` is of prompt and completion
    together; vLLM takes no more than `model_limit` unless the config sets a context length. `adapter_rank` is the rank
    of the adapters that it is to load; 0 if none. `memory_fraction` of a GPU is for vLLM that sleeps while the trainer
    trains. With `record_routing`, vLLM returns the experts of each token.
    """
    dtype_name = str(dtype).removeprefix("torch.")
    setup_requests: tuple[tuple[str, Any], ...] = ()
    if isinstance(rollout, LaunchedGenerators):
        command = [sys.executable, "-m", "postlude", "serve", model, "--host", "{host}", "--port", "{port}"]
        command += ["--dtype", dtype_name, "--device", rollout.device or device, "--threads", str(rollout.threads)]
        command += [] if weights else ["--empty"]
        for name, value in generator_limits(limit).items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        environment, key_variable, protected_path = {"OMP_NUM_THREADS": str(rollout.threads)}, POSTLUDE_KEY, WEIGHTS
    else:
        tokens, chosen = limit.tokens(), limit.context_length is not None and limit.model is None
        longer = chosen and model_limit is not None and tokens > model_limit
        max_length = tokens if longer or (model_limit is not None and tokens < model_limit) else None
        command = _vllm_command(rollout, model, dtype_name, max_length, adapter_rank)
        command += _weight_arguments(rollout, sync, memory_fraction)
        command += ["--enable-return-routed-experts"] if record_routing else []
        if not weights:
            command += ["--load-format", "dummy"]
            setup_requests = (LOAD_REAL_WEIGHTS,)
        environment = _vllm_environment(rollout, adapter_rank) | ({VLLM_LONGER: "1"} if longer else {})
        key_variable, protected_path = VLLM_KEY, "/is_paused"
    return ServerCommand(
        command=(*command, *rollout.arguments),
        environment={**environment, **rollout.env},
        cpus=rollout.cpus,
        gpus=float(rollout.gpus),
        start_timeout=rollout.start_timeout,
        setup_requests=setup_requests,
        key_variable=key_variable,
        protected_path=protected_path,
    )


def _vllm_command(
    rollout: LaunchedVLLM, model: str, dtype: str, max_length: int | None, adapter_rank: int
) -> list[str]:
    """Returns vLLM's command line. `max_length` None is the model's own limit."""
    repo = hub_repo(model, "model")
    model_arguments = ["--model", model] if repo is None else ["--model", repo.id, "--revision", repo.revision]
    launch = str(VLLM_FILES / "launch_vllm.py")
    command = [vllm_python(rollout), launch, *model_arguments, "--host", "{host}", "--port", "{port}"]
    command += ["--dtype", dtype, "--logprobs-mode", "processed_logprobs"]
    command += ["--max-logprobs", str(MAX_SAMPLING_MASK)]  # for sampling masks
    command += ["--generation-config", "vllm"]  # read the model's eos tokens, but not its sampling values
    command += [] if max_length is None else [VLLM_LENGTH, str(max_length)]
    command += ["--enable-lora", "--max-lora-rank", str(vllm_lora_rank(adapter_rank))] if adapter_rank else []
    if rollout.gpus > 1 and not VLLM_PARALLEL & {word.partition("=")[0] for word in rollout.arguments}:
        command += ["--tensor-parallel-size", str(int(rollout.gpus))]
    return command


def _weight_arguments(rollout: LaunchedVLLM, sync: SyncMethod, memory_fraction: float | None) -> list[str]:
    backend = {"network": "nccl", "ipc": "postlude"}.get(sync)
    words = [] if backend is None else ["--weight-transfer-config", json.dumps({"backend": backend})]
    words += ["--worker-extension-cls", "postlude_worker.Extension"] if sync == "ipc" else []
    if memory_fraction is not None:
        given = any(word.partition("=")[0] == VLLM_MEMORY for word in rollout.arguments)
        words += ["--enable-sleep-mode", *([] if given else [VLLM_MEMORY, f"{memory_fraction:.2f}"])]
    return words


def free_memory_fraction(device: torch.device) -> float:
    """Returns the share of a GPU's memory that vLLM may take while the trainer is offloaded, rounded down."""
    free, total = torch.cuda.mem_get_info(device)
    return math.floor(100 * (free - TRAINER_MEMORY) / total) / 100


def _vllm_environment(rollout: LaunchedVLLM, adapter_rank: int) -> dict[str, str]:
    kv_cache = {} if rollout.gpus else {VLLM_CPU_CACHE: os.environ.get(VLLM_CPU_CACHE, "4")}
    lora = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if adapter_rank else {}
    return VLLM_ENVIRONMENT | kv_cache | lora


def vllm_lora_rank(rank: int) -> int:
    """Returns the smallest --max-lora-rank of vLLM that takes adapters of this rank."""
    fitting = [known for known in VLLM_LORA_RANKS if known >= rank]
    if not fitting:
        raise ValueError(
            f"in Hugging Face's modules the adapters have rank {rank}, but vLLM takes at most {VLLM_LORA_RANKS[-1]}. "
            "Use a smaller lora.rank, or rollout: native."
        )
    return fitting[0]


def peft_rank(engine: Engine) -> int:
    """Returns the largest rank of the engine's adapters as peft's files have them; 0 without adapters.

    Where Hugging Face has one module for several of our layers, its rank is the sum of their ranks.
    """
    configs = engine.adapters.configs
    if not configs:
        return 0
    shapes = {tensor.name: tensor.shape for tensor in plan_adapter_tensors(engine.config, engine.block_types, configs)}
    pairs = {
        layer: (
            torch.empty(shapes[f"{layer}.adapter.a"], device="meta"),
            torch.empty(shapes[f"{layer}.adapter.b"], device="meta"),
        )
        for layer in configs
    }
    written, _ = to_peft(pairs, configs, engine.config, engine.family, separate_experts=True, blocks=engine.block_types)
    ranks: list[int] = [written["r"], *written["rank_pattern"].values()]
    return max(ranks)


def needs_untied_head(rollout: LaunchedGenerators | LaunchedVLLM) -> bool:
    """Whether a tied head must be written as a tensor of its own: vLLM 0.32 on a CPU does not reload a tied one."""
    return isinstance(rollout, LaunchedVLLM) and not rollout.gpus


def write_model_files(engine: Engine, tokenizer: Any, directory: Path, *, untied_head: bool) -> str:
    """Writes the model's files without weights, for a server that starts empty. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = untied(engine.config) if untied_head else engine.config
    hf_config = hf_export_config(config, engine.compute_dtype, engine.families)[1]
    ModelFiles(hf_config, tokenizer, engine.generation_config).write(directory)
    return str(directory.absolute())


def local_launcher(logs: Path, *, training_on: str, shares_gpus: bool = False) -> LocalLauncher:
    """Returns a launcher for this machine, with the GPUs that the trainer's ranks do not use, or only those."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if shares_gpus:
        return LocalLauncher(logs, unused_gpus(0)[:ranks])
    return LocalLauncher(logs, unused_gpus(ranks if training_on == "cuda" else 0))


def unused_gpus(used: int) -> list[str]:
    """Returns the GPUs of this machine after the first `used`, which ranks compute on."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(torch.cuda.device_count())) if visible is None else visible.split(",")
    return [name for name in names if name][used:]


def vllm_python(rollout: LaunchedVLLM) -> str:
    return str(Path(rollout.python).expanduser()) if rollout.python else sys.executable

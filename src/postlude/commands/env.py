"""`postlude env`: versions, devices and kernels of this environment, to paste into a bug report."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from postlude.ops.kernels.capabilities import GPU, GPUS, KERNELS, OVERRIDE, dotted, gpu_of, why_not
from postlude.recipes.report.formatting import format_bytes
from postlude.version import __version__

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "rich", "tensorboard")
OPTIONAL: tuple[str, ...] = (
    "vllm",
    "ray",
    "fla-core",
    "reasoning-gym",
    "math-verify",
    "openenv",
    "gguf",
    "pyarrow",
    "peft",
)
OPTIONAL += ("wandb", "mlflow", "trackio")
VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TRITON_INTERPRET", OVERRIDE)  # none of them is a secret


def run(options: argparse.Namespace) -> None:
    environment = describe(options.gpu)
    print(json.dumps(environment, indent=1) if options.json else as_text(environment))


def describe(gpu_name: str | None = None) -> dict[str, Any]:
    """Returns the environment as plain data. A package that is not installed is None.

    Kernels are those of the first GPU, or of the one with this name in `GPUS`.
    """
    devices = [_gpu(index) for index in range(torch.cuda.device_count())]
    gpu = gpu_of(torch.device("cuda", 0)) if devices else None
    if gpu_name is not None:
        gpu = named_gpu(gpu_name)
    return {
        "postlude": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in (*PACKAGES, *OPTIONAL)},
        "cuda": {
            "torch": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if devices else None,
            "nccl": _nccl(),
        },
        "cpu": {"machine": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "gpus": devices,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "kernels_for": None if gpu is None else f"{gpu.name}, compute capability {dotted(gpu.capability)}",
        "kernels": {name: why_not(name, gpu) for name in KERNELS},
    }


def named_gpu(name: str) -> GPU:
    """Returns the GPU with this name, in any case. Raises ValueError if the table has none."""
    for gpu in GPUS.values():
        if gpu.name.lower() == name.lower():
            return gpu
    raise ValueError(f"GPU {name!r} is not in the table of kernels; it has {', '.join(GPUS)}.")


def as_text(environment: dict[str, Any]) -> str:
    packages: dict[str, str | None] = environment["packages"]
    installed = {name: text for name, text in packages.items() if text is not None}
    missing = [name for name in packages if name not in installed]
    cuda, cpu = environment["cuda"], environment["cpu"]
    lines = [
        f"postlude      {environment['postlude']}",
        f"python        {environment['python']}, {environment['platform']}",
        *(f"{name:<13} {text}" for name, text in installed.items()),
        f"not installed {', '.join(missing) or 'nothing'}",
        f"cuda          {cuda['torch'] or 'none: this torch is built for the CPU'}",
        f"cpu           {cpu['machine']}, {cpu['cores']} cores, {cpu['threads']} threads",
    ]
    if environment["gpus"]:
        lines[-1:-1] = [f"cudnn, nccl   {cuda['cudnn']}, {cuda['nccl']}"]
    for index, gpu in enumerate(environment["gpus"]):
        capability, memory = gpu["capability"], format_bytes(gpu["memory"])
        lines.append(f"gpu {index:<9} {gpu['name']}, compute capability {capability}, {memory}")
    lines += [f"{name}={text}" for name, text in environment["variables"].items()]
    return "\n".join([*lines, "", *_kernel_lines(environment["kernels"], environment["kernels_for"])])


def _kernel_lines(kernels: dict[str, str | None], gpu: str | None) -> list[str]:
    """Returns one line per kernel: whether it is used, what it computes, why it is not used and what that costs."""
    reasons = set(kernels.values())
    if len(reasons) == 1 and (reason := reasons.pop()) is not None:
        return [f"kernels       none of {len(kernels)} is used: {reason}. Operations run in torch."]
    lines = [f"kernels for {torch.bfloat16} on {gpu} (a call whose shapes a kernel does not take runs in torch)"]
    for name, reason in kernels.items():
        lines.append(f"  {name:<22} {'triton' if reason is None else 'torch '} {KERNELS[name].computes}")
        lines += [] if reason is None else [f"  {'':<22}        {note}" for note in (reason, KERNELS[name].cost)]
    return lines


def _nccl() -> str | None:
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    capability = f"{properties.major}.{properties.minor}"
    return {"name": properties.name, "capability": capability, "memory": properties.total_memory}


def _version(package: str) -> str | None:
    if package == "torch":
        return str(torch.__version__)
    try:
        return version(package)
    except PackageNotFoundError:
        return None

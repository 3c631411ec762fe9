"""Versions, commit, host and device of a start, for `run.json`."""

from __future__ import annotations

import functools
import os
import platform
import socket
import subprocess
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from postlude.version import __version__

PACKAGES = ("triton", "transformers", "safetensors")


def machine_info(device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
        "device": torch.cuda.get_device_name(device) if on_gpu else f"{platform.machine()} CPU",
        "versions": {"python": platform.python_version()}
        | _versions()
        | ({"cuda": torch.version.cuda} if on_gpu else {}),
        "commit": _commit(),
    }


@functools.cache
def _versions() -> dict[str, str]:
    versions = {"postlude": __version__, "torch": str(torch.__version__)}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _commit() -> str | None:
    """Returns the commit of the working directory, with a + if files differ from it."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    result = subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=10)
    return result.stdout.strip()

"""Whether an operation runs as Triton kernels. `auto` takes them where they can run and says once why it could not."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os

import torch

from postlude.options import Backend as Backend  # noqa: PLC0414
from postlude.options import ScanBackend as ScanBackend  # noqa: PLC0414

OLDEST_TRITON = (3, 6)  # what torch 2.11 comes with; older ones lack what kernels and their launches use
OLDEST_DEVICE = (8, 0)  # the first with bf16 tensor cores

KERNELS_IMPORT = ("triton.language", "triton.runtime", "triton.tools.tensor_descriptor")

log = logging.getLogger(__name__)


def use_kernel(
    name: str,
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
    *,
    refused: str | None = None,
    unwise: str | None = None,
) -> bool:
    """Whether the operation called `name` takes Triton's kernels for tensors on `device` computed in `dtype`.

    `refused`: why its kernels cannot do this call, if so. `unwise`: why, though they could, "auto" leaves it to torch.
    """
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f'backend is "auto", "torch" or "triton", but {backend!r} was given.')
    if backend == "torch":
        return False
    # Triton's interpreter runs kernels on any device, slowly: for tests that ask for it, never by itself.
    interpreted = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    impossible = why_no_triton(device, dtype, interpreted)
    if backend == "triton":
        if impossible or refused:
            raise RuntimeError(
                f'backend="triton" cannot run: {impossible or refused}. Use backend="auto" or backend="torch".'
            )
        return True
    if impossible and device.type == "cuda" and dtype != torch.float64:
        _warn_once(impossible)  # of the machine, whatever the operation
    elif impossible:
        _say_once(logging.WARNING if device.type == "cuda" else logging.INFO, name, impossible)
    elif refused or unwise:
        _say_once(logging.INFO, name, refused or unwise)
    return not (impossible or refused or unwise)


@functools.cache
def why_no_triton(device: torch.device, dtype: torch.dtype, interpreted: bool) -> str | None:
    """Why Triton's kernels cannot be used for tensors like these, or None if they can."""
    if dtype == torch.float64:
        return "its kernels compute in float32, and these tensors are float64"
    if device.type != "cuda" and not interpreted:
        return f"the tensors are on {device.type}, not cuda"
    if (why := _no_triton()) is not None:
        return why
    if device.type == "cuda" and torch.version.cuda and torch.cuda.get_device_capability(device) < OLDEST_DEVICE:
        return (
            f"{torch.cuda.get_device_name(device)} is older than compute capability {'.'.join(map(str, OLDEST_DEVICE))}"
        )
    return None


def _no_triton() -> str | None:
    """Why the installed Triton cannot be used, or None if it can."""
    try:
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        version = version_of("triton")
        if numbers_of(version) < OLDEST_TRITON:
            return f"triton {version} is older than {'.'.join(map(str, OLDEST_TRITON))}"
        for name in KERNELS_IMPORT:
            importlib.import_module(name)
    except Exception as error:  # whatever a Triton raises that does not fit its driver, its LLVM or its Python
        said = str(error).strip().split("\n", 1)[0].rstrip(".")
        return f"triton cannot be imported ({type(error).__name__}: {said})"
    return None


def version_of(package: str) -> str:
    """Of a package that is installed."""
    version: str = importlib.import_module(package).__version__
    return version


def numbers_of(version: str) -> tuple[int, ...]:
    """3.7.1+git123 -> (3, 7, 1)."""
    return tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:3] if part.isdigit())


@functools.cache
def _say_once(level: int, name: str, why: str | None) -> None:
    log.log(level, "%s uses the torch backend: %s", name, why)


@functools.cache
def _warn_once(why: str) -> None:
    log.warning("operations run without Triton's kernels, and slower: %s", why)

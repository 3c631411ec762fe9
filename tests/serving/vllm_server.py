"""A real vLLM server on this machine's CPU, from the environment that `make test-serving` makes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

PYTHON = Path(os.environ.get("VLLM_PYTHON", Path(__file__).parents[2] / ".venv-serving" / "bin" / "python"))
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # without it, weights stay as they are
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
ENTRY = "vllm.entrypoints.launchers.api_server.entry"  # `vllm serve` asks for a package of the name vllm
STARTED_WITHIN = 420.0


@contextlib.contextmanager
def vllm(directory: Path, home: Path, *options: str, path: Path | None = None) -> Iterator[str]:
    """Yields the address of a server of the model in `directory`, which ends with the context and all its processes.

    `path` is where it finds modules besides its own.
    """
    if not PYTHON.exists():
        pytest.skip(f"there is no {PYTHON}; `make test-serving` makes it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(PYTHON), "-m", ENTRY, "--model", str(directory), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--enable-scale-out", "--max-model-len", "2048", *options]
    environment = os.environ | ENVIRONMENT | {"HF_HOME": str(home), "VLLM_CACHE_ROOT": str(home)}
    environment |= {"VLLM_RPC_BASE_PATH": str(home)}
    environment.pop("PYTHONPATH", None)
    environment |= {} if path is None else {"PYTHONPATH": str(path)}
    log = home / "vllm.log"
    with log.open("w") as written:
        process = subprocess.Popen(
            command, env=environment, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + STARTED_WITHIN
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"vLLM did not come up:\n{log.read_text()[-4000:]}", pytrace=False)
            time.sleep(0.5)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

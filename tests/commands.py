"""Runs commands in forked processes that have already imported torch, which saves seconds per command."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from postlude.cli import main
from tests.conftest import PATIENCE, SERVER, Ranks


def run_command(words: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    """Runs `postlude *words` in a directory, on the CPU. Returns its exit code and output, as `subprocess.run` does."""
    with tempfile.TemporaryDirectory() as name:
        output = [Path(name, stream) for stream in ("stdout", "stderr")]
        process = SERVER.Process(target=_run, args=(words, str(directory), [str(path) for path in output]))
        process.start()
        process.join(2 * PATIENCE)
        if process.exitcode is None:
            process.kill()
            process.join()
        return subprocess.CompletedProcess(words, process.exitcode or 0, *(path.read_text() for path in output))


def run_on_shared_ranks(ranks: Ranks) -> Callable[..., Any]:
    """Returns a replacement for `run_on_ranks` that starts no ranks and uses the shared ones."""

    def run(function: Callable[..., Any], *arguments: Any, nproc: int, **_: Any) -> Any:
        return ranks(nproc, _call, function, *arguments)[0]

    return run


def _call(group: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _run(words: list[str], directory: str, output: list[str]) -> None:
    os.chdir(directory)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for number, path in enumerate(output, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.path.insert(0, directory)
    sys.argv = ["postlude", *words]
    try:
        code = main(words)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    sys.exit(code)

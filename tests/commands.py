"""Runs commands in forked processes that have already imported torch, which saves seconds per command."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from postlude.cli import main
from tests.conftest import PATIENCE, SERVER, Ranks


class StartedCommand:
    """`postlude *words` in a directory, on the CPU."""

    def __init__(self, words: list[str], directory: Path) -> None:
        self.words, self.output = words, tempfile.TemporaryDirectory()
        self.paths = [Path(self.output.name, stream) for stream in ("stdout", "stderr")]
        self.process = SERVER.Process(target=_run, args=(words, str(directory), [str(path) for path in self.paths]))
        self.process.start()

    def first_line(self) -> str:
        """Returns the first line of its output, as soon as it is there."""
        while not (self.paths[0].is_file() and "\n" in (text := self.paths[0].read_text())):
            assert self.process.is_alive(), self.complete()
            time.sleep(0.02)
        return text.splitlines()[0]

    def complete(self) -> subprocess.CompletedProcess[str]:
        """Waits for its end. Returns its exit code and output, as `subprocess.run` does."""
        self.process.join(2 * PATIENCE)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        stdout, stderr = (path.read_text() for path in self.paths)
        self.output.cleanup()
        return subprocess.CompletedProcess(self.words, self.process.exitcode or 0, stdout, stderr)


def run_command(words: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    """Runs `postlude *words` in a directory, on the CPU, to its end."""
    return StartedCommand(words, directory).complete()


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

"""`Isolation`: how a kind of sandbox makes command lines. `Prefix` puts words of yours before them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from postlude.rollout.sandboxes.process import SOCKET_NAME, ProcessLimits, SandboxError

INHERITED = re.compile(r"PATH|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|SSL_CERT_(FILE|DIR)")
ROOT_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")  # into /usr, on most systems
SYSTEM_ROOTS = ("/usr", *ROOT_LINKS, "/nix/store", "/gnu/store")
DIRECT = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}


@dataclass(frozen=True)
class Program:
    """A program to run in a sandbox, with the arguments of `Sandbox.run`."""

    argv: tuple[str, ...]
    workdir: Path
    environment: Mapping[str, str]
    proxy: str | None
    limits: ProcessLimits


@dataclass(frozen=True)
class Launch:
    """A command line to run, and what is needed around it."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    workdir: Path
    cleanup: tuple[tuple[str, ...], ...] = ()
    """Commands that remove what the run may leave."""
    in_cgroup: bool = False
    """Whether the command keeps the limits of memory, processes and files: its own processes are not counted."""
    proxy: str | None = None
    """HOST:PORT that `first_process.py` in the command line needs outside; None if it does not."""


class Isolation(Protocol):
    """A kind of sandbox, with its settings."""

    def check(self) -> None:
        """Raises `SandboxError` if its program is missing or cannot work on this machine."""

    def launch(self, program: Program) -> Launch:
        """Returns the command line that runs a program, and what is needed around it."""


def program_environment(workdir: Path, added: Mapping[str, str]) -> dict[str, str]:
    """Returns the whole environment of a program: a few variables of this process, which hold no secrets, and `added`.

    Its home is the work directory, so that episodes share no settings, histories or caches.
    """
    inherited = {name: value for name, value in os.environ.items() if INHERITED.fullmatch(name)}
    return {**inherited, **DIRECT, "HOME": str(workdir), **added}


def first_process(python: str, program: Program, processes: int = 0) -> tuple[str, ...]:
    """Returns the command line that becomes a program, after what has to be done inside its sandbox."""
    if program.proxy is not None and not re.fullmatch(r"127(\.\d+){3}:\d+", program.proxy):
        raise SandboxError(f"the proxy is at {program.proxy}, but sandboxes connect to 127.0.0.1 only.")
    code = Path(__file__).with_name("first_process.py").read_text()
    return (python, "-I", "-S", "-c", code, SOCKET_NAME, program.proxy or "", str(processes), *program.argv)


def is_below(path: str, roots: Iterable[str]) -> bool:
    """Returns whether a path is one of these directories and files, or in one."""
    return any(Path(os.path.normpath(path)).is_relative_to(root) for root in roots)


def named_files(program: Program, shown: Sequence[str]) -> list[str]:
    """Returns the files among the arguments of a program that have to be mounted, such as an agent's script."""
    roots = (*SYSTEM_ROOTS, "/dev", "/proc", *shown, str(program.workdir))
    words = [word for word in program.argv[1:] if word.startswith("/")]
    return [word for word in words if not is_below(word, roots) and os.path.isfile(word)]


def check_mounts(mounts: Sequence[str]) -> None:
    """Raises ValueError for a path that is not absolute or not normal."""
    for mount in mounts:
        if not mount.startswith("/") or os.path.normpath(mount) != mount or mount == "/":
            raise ValueError(
                f"mounts has {mount!r}, but needs absolute paths of directories and files, as /data/tools."
            )


@dataclass(frozen=True)
class Prefix:
    """Programs as processes of this user, behind a command of yours that may isolate them."""

    words: tuple[str, ...] = ()
    """Words put before each command line. Without any, nothing is isolated."""

    def check(self) -> None:
        """Accepts all words."""

    def launch(self, program: Program) -> Launch:
        environment = program_environment(program.workdir, program.environment)
        return Launch((*self.words, *program.argv), environment, program.workdir)

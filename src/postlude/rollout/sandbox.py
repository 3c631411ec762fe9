"""`open_sandbox`: runs programs that a model directs, such as agents, with limits, in a place that may isolate them.

    sandbox = open_sandbox(Bubblewrap(mounts=("/data/tools",)))

Without isolation, programs are processes of this user: they have limits, a clean environment, and are ended with all
that they started, but they may read this user's files, use the network and end this user's processes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from postlude.rollout.sandboxes.bubblewrap import Bubblewrap
from postlude.rollout.sandboxes.containers import Apptainer, Docker, Podman
from postlude.rollout.sandboxes.isolation import Isolation, Prefix, Program
from postlude.rollout.sandboxes.process import ProcessLimits, ProcessResult, SandboxError
from postlude.rollout.sandboxes.supervised import Supervisors

__all__ = [
    "Apptainer",
    "Bubblewrap",
    "Docker",
    "Isolation",
    "Podman",
    "Prefix",
    "ProcessLimits",
    "ProcessResult",
    "Sandbox",
    "SandboxError",
    "open_sandbox",
]


def open_sandbox(isolation: Isolation | None = None) -> Sandbox:
    """Opens a sandbox. None isolates nothing. Raises `SandboxError` if its program is missing or cannot work here."""
    if sys.platform != "linux":
        raise SandboxError(f"a sandbox needs Linux, but this is {sys.platform}.")
    isolation = isolation or Prefix()
    isolation.check()
    return Sandbox(isolation)


class Sandbox:
    """Runs programs under supervisors, isolated as `isolation` says. One sandbox runs many at once."""

    def __init__(self, isolation: Isolation) -> None:
        self.isolation = isolation
        self._supervisors = Supervisors()

    async def run(
        self,
        argv: Sequence[str],
        *,
        workdir: Path,
        environment: Mapping[str, str],
        proxy: str | None,
        limits: ProcessLimits,
    ) -> ProcessResult:
        """Runs a program until it ends, and ends all that it started. Cancelling this ends all of it too.

        `workdir` is its current directory, with the same path inside as outside, and the only one that it may write
        to besides a temporary one. `environment` is added to the few variables that it has. `proxy`, a HOST:PORT on
        loopback, is all that it reaches of the network, at the same address, unless the kind isolates nothing.
        Raises `SandboxError` if the program cannot be started.
        """
        program = Program(tuple(argv), workdir, environment, proxy, limits)
        return await self._supervisors.run(self.isolation.launch(program), limits)

    def close(self) -> None:
        """Releases what the sandbox holds. No program may be running."""
        self._supervisors.close()

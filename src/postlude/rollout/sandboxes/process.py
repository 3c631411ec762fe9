"""ProcessLimits and ProcessResult: what a program in a sandbox may use, and what is known of it at the end."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

MIB, GIB = 1 << 20, 1 << 30
SOCKET_NAME = ".model-proxy"
"""The Unix socket in the work directory through which a sandbox is connected to the proxy, while it starts."""

ProcessEnd: TypeAlias = Literal[
    "exited", "timed out", "memory limit", "process limit", "output limit", "file limit", "disk limit", "lost"
]
"""Why a program ended: by itself, for a limit, or `lost`: its supervisors were killed."""


class SandboxError(OSError):
    """A sandbox cannot be opened, or a program cannot be started in it."""


@dataclass(frozen=True)
class ProcessLimits:
    """What a program, and all that it starts, may use."""

    wall_seconds: float = 600.0
    """Seconds from its start."""
    memory_bytes: int | None = None
    """Memory of all its processes. None does not limit it."""
    processes: int | None = 512
    """Processes and threads at a time."""
    output_bytes: int = MIB
    """How many bytes of standard output, and of standard error, are kept: the last ones."""
    printed_bytes: int | None = GIB
    """How many bytes it may print in all. More ends it."""
    file_bytes: int | None = GIB
    """The largest file that it may write."""
    disk_bytes: int | None = 4 * GIB
    """All files in the work directory. It is looked at every few seconds, so it may be exceeded for a moment."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}, but a program needs more than 0.")


@dataclass(frozen=True)
class ProcessResult:
    """How a program ended, and the last part of what it printed."""

    exit_code: int | None
    """None if a signal or a limit ended it."""
    signal: int | None
    """The signal that ended it, if no limit did."""
    stdout: bytes
    stderr: bytes
    reason: ProcessEnd
    seconds: float
    """The time from its start to its end."""

    def describe(self, limits: ProcessLimits) -> str:
        """Returns the end of a sentence that says how the program ended."""
        sizes = {
            "timed out": f"took more than {limits.wall_seconds:g} s",
            "memory limit": f"used more than {limits.memory_bytes} bytes of memory",
            "process limit": f"had more than {limits.processes} processes and threads",
            "output limit": f"printed more than {limits.printed_bytes} bytes",
            "file limit": f"wrote a file of more than {limits.file_bytes} bytes",
            "disk limit": f"left more than {limits.disk_bytes} bytes in its work directory",
            "lost": "killed its supervisors",
        }
        if self.reason in sizes:
            return f"{sizes[self.reason]}, and was ended"
        return f"was ended by signal {self.signal}" if self.signal else f"ended with code {self.exit_code}"

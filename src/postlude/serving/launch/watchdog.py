"""`python watchdog.py PARENT COMMAND …`: runs a server, and ends it when the process PARENT ends.

It needs the standard library only. However the parent ends, also by SIGKILL, the server and all its child processes get
SIGTERM, and SIGKILL if they do not end. If the server ends first, this process exits with its code.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

GRACE = 5.0  # seconds between SIGTERM and SIGKILL
POLL_SECONDS = 0.1
PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> int:
    """Runs a server until it or `parent` ends, or a signal comes."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _exit)
    try:
        # If this process is killed, the kernel kills at least the server's first process.
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - there is one thread
        )
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    try:
        while child.poll() is None and os.getppid() == parent:
            time.sleep(POLL_SECONDS)
    finally:
        _stop(child)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _stop(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # the server, or children that it left
    child.wait()


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))

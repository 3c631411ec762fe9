"""Beside a server that Postlude started: `python keeper.py PARENT COMMAND …`. It ends the server with us.

It runs by itself, with the standard library alone. Whatever becomes of the process that started it, also a SIGKILL, the
server and all that it started are told to end, and killed if they do not; where the server ends first, so does this, by
the same code.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

GRACE = 5.0  # seconds between the request to end and the end
TICK = 0.1
PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> int:
    """Keep a server until it or `parent` ends, or a signal comes."""
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, _leave)
    try:
        # The last way out: where this is killed, at least the server's first process is.
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
            time.sleep(TICK)
    finally:
        _end(child)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # it, or what it left behind
    child.wait()


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))

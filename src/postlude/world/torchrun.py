"""torchrun for a scheduler's jobs: `python -m postlude.world.torchrun` takes its arguments, such as `-m -- postlude …`.

It differs in three points. A signal that asks the job to end goes to the ranks, which have all the time that the
scheduler leaves them to save (torchrun kills them after 30 s). The exit code is the ranks' own: 143 after SIGTERM and
138 after SIGUSR1, once they have saved (torchrun's is 1). A node that was replaced joins the others again.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import parse_args, run

from postlude.error_output import print_error

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
POLL_SECONDS = 0.1
VARIABLES = {
    "PET_SIGNALS_TO_HANDLE": "SIGQUIT",  # the other signals are handled here
    # torchrun's shared store has the keys of earlier starts, and a node that joins again waits for one that is not set.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TORCH_CPP_LOG_LEVEL": "FATAL",  # c10d logs pages when a rank is lost
}


class Forwarding:
    """While it is entered, a signal goes to the ranks that this process started, and ends it when they have ended."""

    def __init__(self) -> None:
        self.exit_code = 0
        """After a signal: 128 plus its number, or the code of a rank that failed while it ended."""
        self._received = False

    def __enter__(self) -> Forwarding:
        for number in FORWARDED:
            signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        for number in FORWARDED:
            signal.signal(number, signal.SIG_IGN)  # this process is about to exit

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Sends the signal to the ranks and waits for them: the agent would take their end for a failure."""
        ranks = _children()
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, number)
        if self._received:
            return  # the first call waits below
        self._received = True
        while None in (codes := [_exit_code(rank) for rank in ranks]):
            time.sleep(POLL_SECONDS)
        if codes and not any(codes):
            return  # they had finished
        self.exit_code = next((code for code in codes if code and 0 < code < 128), 128 + number)
        raise SignalException(f"{signal.Signals(number).name} ended the ranks.", signal.Signals(number))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs torchrun and returns the exit code of the ranks: 128 plus its number for a signal."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    options = parse_args(sys.argv[1:] if arguments is None else arguments)
    with Forwarding() as forwarding:
        try:
            run(options)
        except SignalException:
            return forwarding.exit_code
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode > 0:
                return failure.exitcode  # the rank has said why
            print_error(f"rank {rank} was killed by {signal.Signals(-failure.exitcode).name}.")
            return 128 - failure.exitcode
        except RendezvousError as error:
            reason = ": ".join(filter(None, (type(error).__name__, str(error))))
            print_error(f"the {options.nnodes} nodes did not all come together at {options.rdzv_endpoint} ({reason}).")
            return 1
    return 0


def _children() -> list[int]:
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended since
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                children.append(int(stat.parent.name))
    return children


def _exit_code(child: int) -> int | None:
    """Returns the exit code of a child, negative for a signal, or None while it runs. It is left to the agent, too."""
    try:
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0  # the agent knows its code
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


if __name__ == "__main__":
    sys.exit(main())

"""The supervisors of a worker process: they start the worker, and end every process that comes of it.

A process whose parent has ended becomes a child of the nearest supervisor, whatever its session and environment
(Linux). So a supervisor ends them all: when the worker ends, when the pool closes the pipe of calls, and when the
trainer is gone. Supervisors also stand between worker and trainer, so that a call that kills its parent does not kill
the trainer. There are two, of which each ends everything when the other is gone.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NoReturn

from postlude.pool.process_tree import become_subreaper, descendants, end_descendants, end_with_parent, reap
from postlude.pool.worker import serve

TOO_MANY_PROCESSES = 125  # the exit code of a supervisor whose worker had more processes than its limit
COUNT_INTERVAL = 0.5  # seconds between two counts of processes


def main() -> None:
    """Runs a worker under this process. The command line ends with two pipe descriptors and the limit of processes."""
    calls, replies, max_processes = map(int, sys.argv[-3:])
    become_subreaper()
    first_is_gone, open_while_first_lives = os.pipe()
    if second := os.fork():
        os.close(replies)
        _supervise(second, (calls,), 0)
    os.close(open_while_first_lives)
    become_subreaper()
    supervisor = os.getpid()
    if worker := os.fork():
        os.close(replies)
        _supervise(worker, (calls, first_is_gone), max_processes)
    os.close(first_is_gone)
    os.setsid()  # so that a signal to its own group does not reach the supervisors
    end_with_parent()
    if os.getppid() == supervisor:
        with contextlib.suppress(BrokenPipeError):  # the trainer was killed, so no process waits for a reply
            serve(Connection(calls, writable=False), Connection(replies, readable=False))


def _supervise(child: int, pipes: Sequence[int], max_processes: int) -> NoReturn:
    """Waits until the child ends or the other end of a pipe is closed. Ends all descendants, and exits as the child."""
    wake_receiver, wake_sender = os.pipe()
    os.set_blocking(wake_sender, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_sender, warn_on_full_buffer=False)
    poller = select.poll()
    for pipe in pipes:
        poller.register(pipe, 0)  # reports that the other end was closed
    poller.register(wake_receiver, select.POLLIN)
    exit_codes: dict[int, int] = {}  # by process
    closed = too_many = False
    while reap(exit_codes) and child not in exit_codes and not (closed or too_many):
        events = dict(poller.poll(1000 * COUNT_INTERVAL if max_processes else None))
        if wake_receiver in events:
            os.read(wake_receiver, 1 << 16)
        too_many = bool(max_processes) and sum(1 for _ in descendants(os.getpid())) > max_processes
        closed = not events.keys().isdisjoint(pipes)
    code = TOO_MANY_PROCESSES if too_many else exit_codes.get(child, 0)
    end_descendants(child, exit_codes)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)

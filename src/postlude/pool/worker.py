"""One worker process of `process_crew.py`: gets a function, then lists of calls, and answers each call as it is done.

It needs the standard library alone, so that a worker starts at once and replaces a lost one cheaply.
Calls come pickled. Answers go back as JSON, so that nothing a model wrote and a function evaluated can reach the
trainer as more than text and numbers.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from postlude.user_code import describe_error, load_callable

GRACE = 5.0  # seconds beyond the time limit after which a worker ends itself, if nobody was there to end it


def prepare(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function that has a `prepare` import and build what it needs before the first call is timed."""
    getattr(function, "prepare", lambda: None)()
    return function


def answer(function: Callable[..., Any], arguments: tuple[Any, ...] | bytes) -> dict[str, Any]:
    """Call the function with arguments, pickled or not: {"value": ...}, or {"failure": a kind, "error": a sentence}.

    A process that the function forks, and that comes back here instead of ending, ends: its parent alone answers.
    """
    process, code = os.getpid(), 0
    reply: dict[str, Any]
    try:
        value = function(*(pickle.loads(arguments) if isinstance(arguments, bytes) else arguments))
    except BaseException as error:  # sys.exit too: whatever a function does is its own sample's affair
        reply = {"failure": "raised", "error": describe_error(error)}
        said = error.code if isinstance(error, SystemExit) else 1
        code = said if isinstance(said, int) else int(said is not None)
    else:
        try:
            reply = {"value": plain(value)}
        except Exception as error:
            reply = {"failure": "invalid", "error": describe_error(error)}
    if os.getpid() != process:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)
    return reply


def plain(value: Any) -> Any:
    """The value as JSON has it: numbers of numpy and torch become Python's, anything else is refused."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return plain(value.item())
    raise TypeError(
        f"it returned a {type(value).__name__}, but it may return numbers, text, and lists or dicts of them"
    )


def _unpacked(start: Mapping[str, Any]) -> Callable[..., Any]:
    sys.path[:] = start["sys_path"]
    if start["pickled"] is not None:
        try:
            return prepare(pickle.loads(start["pickled"]))
        except (ImportError, AttributeError):
            if start["where"] is None:
                raise
    return prepare(load_callable(start["where"]))


def serve(calls: Connection, answers: Connection, timeout: float) -> None:
    """Answer calls until the other side goes away.

    Each answer has the id of its call and a secret that is sent here alone, so that nothing else written to the pipe is
    taken for an answer. Code that looks for the secret in this process can find it: this is no sandbox.
    """
    start = pickle.loads(calls.recv_bytes())
    secret = start.pop("secret")

    def send(reply: Mapping[str, Any]) -> None:
        answers.send_bytes(json.dumps({**reply, "secret": secret}).encode())

    try:
        function = _unpacked(start)
    except BaseException as error:
        known = isinstance(error, ValueError | FileNotFoundError | AttributeError | TypeError | ImportError)
        send({"error": str(error) if known else describe_error(error)})
        return
    send({})
    while True:
        try:
            batch = pickle.loads(calls.recv_bytes())
        except EOFError:
            return
        for call, arguments in batch:
            # Should the trainer be gone when a call hangs, this ends the worker, even inside C code.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, timeout + GRACE)
            reply = answer(function, arguments)
            signal.setitimer(signal.ITIMER_REAL, 0)
            send({**reply, "id": call})


def main() -> None:
    """The worker's whole life: pipe ends and the time limit stand on its command line."""
    calls, answers, timeout = sys.argv[-3:]
    serve(Connection(int(calls), writable=False), Connection(int(answers), readable=False), float(timeout))

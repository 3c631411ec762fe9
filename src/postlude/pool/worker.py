"""The program of a worker process of `ProcessPool`: loads a function, then makes calls and replies to each.

It needs the standard library alone, so that a worker starts fast and replaces a lost one cheaply. Calls arrive pickled.
Replies are JSON, so that code a model wrote reaches the trainer as text and numbers at most.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from postlude.pool.limits import WorkerLimits
from postlude.user_code import describe_error, load_callable

MAX_REPLY_BYTES = 1 << 30  # of workers without limits


def prepare(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls the function's method `prepare`, if it has one, so that imports are not timed as part of a call."""
    getattr(function, "prepare", lambda: None)()
    return function


def call_function(function: Callable[..., Any], arguments: tuple[Any, ...] | bytes) -> dict[str, Any]:
    """Calls the function with arguments, pickled or not: {"value": ...}, or {"failure": a kind, "error": a message}.

    A process that the function forks, and that comes back here instead of ending, ends: its parent alone replies.
    """
    pid, exit_code = os.getpid(), 0
    reply: dict[str, Any]
    try:
        value = function(*(pickle.loads(arguments) if isinstance(arguments, bytes) else arguments))
    except BaseException as error:  # sys.exit too: whatever a function does fails its own call alone
        reply = {"failure": "raised", "error": describe_error(error)}
        code = error.code if isinstance(error, SystemExit) else 1
        exit_code = code if isinstance(code, int) else int(code is not None)
    else:
        try:
            reply = {"value": to_json(value)}
        except Exception as error:
            reply = {"failure": "invalid", "error": describe_error(error)}
    if os.getpid() != pid:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(exit_code)
    return reply


def to_number(value: Any) -> Any:
    """Returns a number of numpy or torch as Python's, and any other value as it is."""
    is_scalar = getattr(value, "shape", None) == () and callable(getattr(value, "item", None))
    return value.item() if is_scalar else value


def to_json(value: Any) -> Any:
    """Returns a value as JSON has it: numbers of numpy and torch become Python's, anything else is refused."""
    value = to_number(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): to_json(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    raise TypeError(
        f"it returned a {type(value).__name__}, but it may return numbers, text, and lists or dicts of them"
    )


def _load(packed: Mapping[str, Any]) -> Callable[..., Any]:
    sys.path[:] = packed["sys_path"]
    if packed["pickled"] is not None:
        try:
            return prepare(pickle.loads(packed["pickled"]))
        except (ImportError, AttributeError):
            if packed["file"] is None:
                raise
    return prepare(load_callable(packed["file"]))


def max_reply_bytes(limits: WorkerLimits | None) -> int:
    return MAX_REPLY_BYTES if limits is None else int(limits.reply_mib * (1 << 20))


def serve(calls: Connection, replies: Connection) -> None:
    """Makes calls until the pool closes the pipe.

    Each reply has the id of its call and a secret that only this process was sent, so that nothing else written to the
    pipe is taken for a reply. Code that looks for the secret in this process can find it: this is no sandbox.
    """
    packed = pickle.loads(calls.recv_bytes())
    secret, limits = packed.pop("secret"), packed.pop("limits")
    largest = max_reply_bytes(limits)

    def send(reply: Mapping[str, Any], **identity: Any) -> None:
        data = json.dumps({**reply, **identity, "secret": secret}).encode()
        if len(data) > largest:
            message = f"its result has {len(data)} bytes, but the limit is {largest} (worker_limits.reply_mib)"
            data = json.dumps({"failure": "invalid", "error": message, **identity, "secret": secret}).encode()
        replies.send_bytes(data)

    try:
        if limits is not None:
            limits.apply()
        function = _load(packed)
    except BaseException as error:
        is_message = isinstance(error, ValueError | FileNotFoundError | AttributeError | TypeError | ImportError)
        send({"error": str(error) if is_message else describe_error(error)})
        return
    send({})
    while True:
        try:
            batch = pickle.loads(calls.recv_bytes())
        except EOFError:
            return
        for call_id, arguments in batch:
            send(call_function(function, arguments), id=call_id)

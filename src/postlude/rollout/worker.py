"""One worker process of `workers.py`: gets a function, then lists of calls, and answers each call as it is done.

It is run as a script, on the standard library alone, so that a worker starts at once and replaces a lost one cheaply.
Calls come pickled. Answers go back as JSON, so that nothing a model wrote and a function evaluated can reach the
trainer as more than text and numbers.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import pickle
import signal
import sys
import traceback
import zlib
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LONGEST_ERROR = 500  # letters
GRACE = 5.0  # seconds beyond the time limit after which a worker ends itself, if nobody was there to end it


def load(where: str) -> Callable[..., Any]:
    """Load path/to/file.py:name. The file is run, so name only files you trust."""
    path, colon, name = where.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        raise ValueError(f'"{where}" names no function. Write it as path/to/file.py:name.')
    module = _run(Path(path))
    if not hasattr(module, name):
        public = [each for each in vars(module) if not each.startswith("_")]
        near = difflib.get_close_matches(name, public, 3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(public) or 'no public names'}."
        raise AttributeError(f"{path} has no {name}; {hint}")
    found = getattr(module, name)
    if not callable(found):
        raise TypeError(f"{name} in {path} is a {type(found).__name__}, which cannot be called. Name a function.")
    return found  # type: ignore[no-any-return]


def _run(path: Path) -> Any:
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [each.name for each in path.parent.glob("*.py")], 1)
        hint = f"did you mean {path.parent / near[0]}?" if near else f"the current directory is {Path.cwd()}."
        raise FileNotFoundError(f"there is no file {path}; {hint}")
    name = f"postlude_function_{zlib.crc32(str(path.resolve()).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # it ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ImportError(f"{path} cannot be run: {describe(error)}") from error
    return module


def prepare(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function that has a `prepare` import and build what it needs before the first call is timed."""
    getattr(function, "prepare", lambda: None)()
    return function


def answer(function: Callable[..., Any], arguments: tuple[Any, ...] | bytes) -> dict[str, Any]:
    """Call the function with arguments, pickled or not: {"value": ...}, or {"failure": a kind, "error": a sentence}."""
    try:
        value = function(*(pickle.loads(arguments) if isinstance(arguments, bytes) else arguments))
    except BaseException as error:  # sys.exit too: whatever a function does is its own sample's affair
        return {"failure": "raised", "error": describe(error)}
    try:
        return {"value": plain(value)}
    except Exception as error:
        return {"failure": "invalid", "error": describe(error)}


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


def describe(error: BaseException) -> str:
    """An exception in a line: what, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    if len(text) > LONGEST_ERROR:
        text = f"{text[: LONGEST_ERROR - 3]}..."
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"


def _unpacked(start: Mapping[str, Any]) -> Callable[..., Any]:
    sys.path[:] = start["sys_path"]
    if start["pickled"] is not None:
        try:
            return prepare(pickle.loads(start["pickled"]))
        except (ImportError, AttributeError):
            if start["where"] is None:
                raise
    return prepare(load(start["where"]))


def serve(calls: Connection, answers: Connection, timeout: float) -> None:
    """Answer calls until the other side goes away."""
    try:
        function = _unpacked(pickle.loads(calls.recv_bytes()))
    except BaseException as error:
        known = isinstance(error, ValueError | FileNotFoundError | AttributeError | TypeError | ImportError)
        answers.send_bytes(json.dumps({"error": str(error) if known else describe(error)}).encode())
        return
    answers.send_bytes(b"{}")
    while True:
        try:
            batch = pickle.loads(calls.recv_bytes())
        except EOFError:
            return
        for arguments in batch:
            # Should the trainer be gone when a call hangs, this ends the worker, even inside C code.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, timeout + GRACE)
            reply = answer(function, arguments)
            signal.setitimer(signal.ITIMER_REAL, 0)
            answers.send_bytes(json.dumps(reply).encode())


if __name__ == "__main__":
    serve(
        Connection(int(sys.argv[1]), writable=False), Connection(int(sys.argv[2]), readable=False), float(sys.argv[3])
    )

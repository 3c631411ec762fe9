"""Loads user code that is named path/to/file.py:name, and describes its errors.

It needs the standard library only, so that a worker process that calls such code starts fast.
"""

from __future__ import annotations

import difflib
import importlib.util
import sys
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

MAX_ERROR_LENGTH = 500


class UserCodeError(ValueError):
    """User code could not be loaded. The message says why, and what to write instead."""


def load_callable(reference: str, *, kind: str = "function") -> Callable[..., Any]:
    """Loads path/to/file.py:name, a callable that messages call a `kind`. It runs the file: name only trusted ones."""
    path, colon, name = reference.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        raise UserCodeError(f'"{reference}" names no {kind}. Write it as path/to/file.py:name.')
    module = _run(Path(path).expanduser())
    if not hasattr(module, name):
        raise UserCodeError(f"{path} has no {name}; {_names(module, name)}")
    value = getattr(module, name)
    if not callable(value):
        raise UserCodeError(
            f"{name} in {path} is of type {type(value).__name__}, which cannot be called. Name a {kind}."
        )
    return value  # type: ignore[no-any-return]


def describe_error(error: BaseException, file: Path | None = None) -> str:
    """Returns an exception in one line: its text, and its line in `file`, or where it arose if it is elsewhere."""
    locations = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    text = " ".join(str(error).split())
    if isinstance(error, SyntaxError) and error.filename:  # its text has the place in another form
        text = error.msg
        locations.append((Path(error.filename), error.lineno))
    inside = [location for location in locations if file is not None and location[0] == file]
    position = "".join(f" ({path.name}, line {line})" for path, line in (inside or locations)[-1:])
    if len(text) > MAX_ERROR_LENGTH:
        text = f"{text[: MAX_ERROR_LENGTH - 3]}..."
    return f"{type(error).__name__}: {text}{position}" if text else f"{type(error).__name__}{position}"


def _run(path: Path) -> ModuleType:
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.py")], 1)
        hint = f"did you mean {path.parent / near[0]}?" if near else f"the current directory is {Path.cwd()}."
        raise UserCodeError(f"there is no file {path}; {hint}")
    name = f"postlude_user_code_{zlib.crc32(str(path.resolve()).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # it ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception | SystemExit):
            raise UserCodeError(f"{path} cannot be run: {describe_error(error, Path(spec.origin or path))}") from error
        raise
    return module


def _names(module: ModuleType, name: str) -> str:
    public = {key: value for key, value in vars(module).items() if not key.startswith("_") and callable(value)}
    near = difflib.get_close_matches(name, public, 3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    defined = [key for key, value in public.items() if getattr(value, "__module__", None) == module.__name__]
    return f"it has {', '.join(defined)}." if defined else "it defines nothing that can be called."

"""Code of the user, named path/to/file.py:name: the one place that finds it, runs it, and says what is wrong.

It needs the standard library alone, so that a worker process that calls such code starts at once.
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

LONGEST_ERROR = 500  # letters


class UserCodeError(ValueError):
    """What was named cannot be had: a sentence that says why, and what to write instead."""


def load_callable(where: str, *, kind: str = "function") -> Callable[..., Any]:
    """Load path/to/file.py:name, a `kind` of thing that can be called. The file is run: name only files you trust."""
    path, colon, name = where.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        raise UserCodeError(f'"{where}" names no {kind}. Write it as path/to/file.py:name.')
    module = _run(Path(path).expanduser())
    if not hasattr(module, name):
        raise UserCodeError(f"{path} has no {name}; {_names(module, name)}")
    found = getattr(module, name)
    if not callable(found):
        raise UserCodeError(
            f"{name} in {path} is of type {type(found).__name__}, which cannot be called. Name a {kind}."
        )
    return found  # type: ignore[no-any-return]


def describe_error(error: BaseException, file: Path | None = None) -> str:
    """An exception in a line: what, and where it was raised, or where in `file` if the way there went through it."""
    places = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    text = " ".join(str(error).split())
    if isinstance(error, SyntaxError) and error.filename:  # its text names the place, when shown, in other words
        text = error.msg
        places.append((Path(error.filename), error.lineno))
    inside = [place for place in places if file is not None and place[0] == file]
    where = "".join(f" ({path.name}, line {line})" for path, line in (inside or places)[-1:])
    if len(text) > LONGEST_ERROR:
        text = f"{text[: LONGEST_ERROR - 3]}..."
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"


def _run(path: Path) -> ModuleType:
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [each.name for each in path.parent.glob("*.py")], 1)
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
    public = {each: value for each, value in vars(module).items() if not each.startswith("_") and callable(value)}
    near = difflib.get_close_matches(name, public, 3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    own = [each for each, value in public.items() if getattr(value, "__module__", None) == module.__name__]
    return f"it has {', '.join(own)}." if own else "it defines nothing that can be called."

"""Loads user code that is named path/to/file.py:name, and describes its errors.

It needs the standard library only, so that a worker process that calls such code starts fast.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib.util
import inspect
import pickle
import sys
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

MAX_ERROR_LENGTH = 500


CALL = "call:"
"""Begins the name that a config has for a function of a call from Python."""


class UserCodeError(ValueError):
    """User code could not be loaded. The message says why, and what to write instead."""


class CallFunction(str):
    """A function that a call from Python was given and that no file holds, as the text "call:NAME" of a config.

    In this process it is the function itself. Other processes get it by cloudpickle. `digest` changes with its source,
    that of the functions of its file or notebook that it calls, and the numbers and text that it reads from there.
    """

    function: Callable[..., Any]
    digest: str

    def __new__(cls, function: Callable[..., Any]) -> CallFunction:
        name = getattr(function, "__name__", None) or type(function).__name__
        digest = hashlib.sha256(_identity(function, set()).encode(errors="replace")).hexdigest()[:16]
        return _call_function(f"{CALL}{name}", digest, function)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (str(self), self.digest, pickle_function(self.function))


def pickle_function(function: Any) -> bytes:
    """Returns a function, or an object that holds one, as bytes that another process reads by pickle."""
    import cloudpickle  # noqa: PLC0415 - only where a function is sent

    try:
        pickled: bytes = cloudpickle.dumps(function)
    except Exception as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise UserCodeError(
            f"{name} cannot be sent to another process, because of what it uses: {describe_error(error)}. Make that "
            "inside of the function, or put the function at the top of a file."
        ) from error
    return pickled


def _call_function(text: str, digest: str, function: Callable[..., Any]) -> CallFunction:
    reference = str.__new__(CallFunction, text)
    reference.function, reference.digest = function, digest
    return reference


def _unpickled(text: str, digest: str, pickled: bytes) -> CallFunction:
    return _call_function(text, digest, pickle.loads(pickled))


def _identity(value: Any, seen: set[int]) -> str:  # noqa: PLR0911 - one for each type
    """Returns text that is equal for equal code, also in another process."""
    if isinstance(value, int | float | complex | str | bytes | None):
        return repr(value)
    if isinstance(value, MethodType):
        return _identity((value.__func__, value.__self__), seen)
    if isinstance(value, functools.partial):
        return _identity((value.func, value.args, tuple(sorted(value.keywords.items()))), seen)
    if isinstance(value, tuple):
        return f"({', '.join(_identity(item, seen) for item in value)})"
    if not isinstance(value, FunctionType):
        code = value if isinstance(value, type) else type(value)
        return f"{code.__module__}.{code.__qualname__} {_source(code) if code.__module__ == '__main__' else ''}"
    if id(value) in seen:
        return value.__qualname__
    seen.add(id(value))
    variables = inspect.getclosurevars(value)
    used = {**variables.globals, **variables.nonlocals, "": value.__defaults__}
    return _source(value) + "".join(
        f" {name}={_identity(item, seen)}"
        if getattr(item, "__module__", value.__module__) == value.__module__
        else f" {name}={item.__module__}"
        for name, item in sorted(used.items())
        if not isinstance(item, ModuleType)
    )


def _source(value: FunctionType | type) -> str:
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):  # typed into an interpreter
        code = getattr(value, "__code__", None)
        return _bytecode(code) if code is not None else value.__qualname__


def _bytecode(code: CodeType) -> str:
    constants = (_bytecode(item) if isinstance(item, CodeType) else repr(item) for item in code.co_consts)
    return f"{code.co_code.hex()} {code.co_names} {' '.join(constants)}"


def load_callable(reference: str, *, kind: str = "function") -> Callable[..., Any]:
    """Loads path/to/file.py:name, a callable that messages call a `kind`. It runs the file: name only trusted ones."""
    if isinstance(reference, CallFunction):
        return reference.function
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

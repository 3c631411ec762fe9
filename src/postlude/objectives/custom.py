"""An objective of your own, named on a command line or in a config: `load_objective("path/to/file.py:name")`."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from postlude.objectives.loss import Objective


def load_objective(where: str, settings: Mapping[str, Any] | None = None) -> Objective:
    """Load `name` from a Python file. The file is run, so name only files you trust.

    `name` is a function of `OutputInputs`, an object that can be called with them, or a class of such objects. A class
    is built with `settings` as keywords; a function gets them as keywords at every call.
    """
    path, colon, name = where.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        raise ValueError(f'"{where}" names no objective. Write it as path/to/file.py:name.')
    found = _member(_run(Path(path)), name, path)
    if not callable(found):
        raise TypeError(
            f"{name} in {path} is a {type(found).__name__}, which cannot be called. "
            "An objective is a function of OutputInputs that returns a Loss."
        )
    try:
        objective = _with_settings(found, settings or {})
        inspect.signature(objective).bind(None)
    except TypeError as error:
        raise TypeError(
            f"{name} in {path} does not take what it is given: {error}. It is called with one argument, OutputInputs, "
            f"and these settings: {', '.join(settings or {}) or 'none'}."
        ) from error
    return objective


def _run(path: Path) -> ModuleType:
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [each.name for each in path.parent.glob("*.py")], 1)
        hint = f"did you mean {path.parent / near[0]}?" if near else f"the current directory is {Path.cwd()}."
        raise FileNotFoundError(f"there is no file {path}; {hint}")
    name = f"postlude_objective_{zlib.crc32(str(path.resolve()).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # it ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _member(module: ModuleType, name: str, path: str) -> Any:
    if hasattr(module, name):
        return getattr(module, name)
    public = [each for each in vars(module) if not each.startswith("_")]
    near = difflib.get_close_matches(name, public, 3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(public) or 'no public names'}."
    raise AttributeError(f"{path} has no {name}; {hint}")


def _with_settings(found: Any, settings: Mapping[str, Any]) -> Objective:
    if inspect.isclass(found):
        objective = found(**settings)
        if not callable(objective):
            raise TypeError("its objects cannot be called")
        return cast(Objective, objective)
    return functools.partial(found, **settings) if settings else cast(Objective, found)

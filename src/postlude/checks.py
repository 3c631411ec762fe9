"""Checks of settings: bounds of numbers, choices and paths, with the messages that refuse them."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, TypeAlias, get_args, get_origin, get_type_hints

USER_ERRORS = (ValueError, TypeError, OSError, ImportError, ArithmeticError)
"""Exceptions that a user's input or environment causes. Any other is a bug of ours, and shown with its traceback."""


def error_message(error: BaseException | str) -> str:
    """Returns the message of an error. Messages of the system about a file are rewritten as a sentence."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename} cannot be used: {error.strerror[:1].lower()}{error.strerror[1:]}."
    return str(error)


def check_writable(name: str, path: Path, option: str) -> Path:
    """Returns the absolute path of a directory given as `option`. Raises OSError if it cannot be made or written."""
    directory = path.expanduser().absolute()
    existing = nearest_existing(directory)
    if not existing.is_dir():
        raise NotADirectoryError(f"{name} is {path}, but {existing} is a file. Give {option} another directory.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(
            f"{name} is {path}, but {existing} cannot be written to. Give {option} another directory."
        )
    return directory


def nearest_existing(path: Path) -> Path:
    """Returns the path itself, or its closest parent that exists."""
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raises ValueError if the value is not among the choices."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, but the choices are {', '.join(map(repr, choices))}.")


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds of a finite number, declared with its type: `lr: Annotated[float, Bounds(least=0)]`.

    `check_bounds` enforces them in a dataclass, and pydantic in a config, whose JSON Schema shows them.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def check(self, name: str, value: Any) -> None:
        """Raises ValueError if the value is no number, or is outside."""
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ValueError(f"{name} is {value!r}, but it must be a {self}.")
        number = float(value)
        low = (self.least is None or number >= self.least) and (self.above is None or number > self.above)
        high = (self.most is None or number <= self.most) and (self.below is None or number < self.below)
        if not (low and high and math.isfinite(number)):
            raise ValueError(f"{name} is {number:g}, but it must be a {self}.")

    def __str__(self) -> str:
        words = {"of at least": self.least, "above": self.above, "of at most": self.most, "below": self.below}
        parts = [f"{word} {bound:g}" for word, bound in words.items() if bound is not None]
        return f"number {' and '.join(parts)}" if parts else "finite number"

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Returns pydantic's schema of the number, with the bounds. JSON Schema shows them too."""
        schema = handler(source)
        bounds = {"ge": self.least, "gt": self.above, "le": self.most, "lt": self.below}
        finite = {"allow_inf_nan": False} if schema["type"] == "float" else {}
        return schema | finite | {name: bound for name, bound in bounds.items() if bound is not None}


Finite: TypeAlias = Annotated[float, Bounds()]
Positive: TypeAlias = Annotated[float, Bounds(above=0)]
NonNegative: TypeAlias = Annotated[float, Bounds(least=0)]
Fraction: TypeAlias = Annotated[float, Bounds(least=0, below=1)]


def check_bounds(value: Any) -> None:
    """Raises ValueError if a field of a dataclass is outside the bounds of its type."""
    for name, hint in _hints(type(value)).items():  # type: ignore[arg-type]
        _check(name, hint, getattr(value, name))


def _check(name: str, hint: Any, value: Any) -> None:
    if get_origin(hint) is Annotated:
        for bound in hint.__metadata__:
            if isinstance(bound, Bounds):
                bound.check(name, value)
        _check(name, hint.__origin__, value)
    elif get_origin(hint) is tuple and value is not None:
        for index, (part, item) in enumerate(zip(get_args(hint), value, strict=False)):
            _check(f"{name}[{index}]", part, item)
    elif value is not None:
        for part in get_args(hint):  # of a union
            _check(name, part, value)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)

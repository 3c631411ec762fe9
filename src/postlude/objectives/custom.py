"""Loads an objective of the user: `load_objective("path/to/file.py:name")`."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Mapping
from typing import Any, cast

from postlude.objectives.loss import Objective
from postlude.user_code import load_callable


def load_objective(location: str, settings: Mapping[str, Any] | None = None) -> Objective:
    """Loads `name` from a Python file. The file is run, so name only files you trust.

    `name` is a function of `OutputInputs`, a callable object, or a class of such objects. A class is built with
    `settings` as keywords; a function gets them as keywords at every call.
    """
    target = load_callable(location, kind="function of OutputInputs that returns a Loss")
    _check_settings(target, settings or {}, location)
    try:
        objective = _with_settings(target, settings or {})
        inspect.signature(objective).bind(None)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{location} does not take what it is given: {error}. It is called with one argument, OutputInputs, "
            f"and these settings: {', '.join(settings or {}) or 'none'}."
        ) from error
    return objective


def _check_settings(target: Any, settings: Mapping[str, Any], location: str) -> None:
    """Refuses an unknown setting. The message names the nearest known one."""
    parameters = list(inspect.signature(target).parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in (parameters if inspect.isclass(target) else parameters[1:])]
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f'did you mean "{near[0]}"?' if near else f"it takes {', '.join(known) or 'none'}."
            raise TypeError(f'{location} has no setting "{name}"; {hint}')


def _with_settings(target: Any, settings: Mapping[str, Any]) -> Objective:
    if inspect.isclass(target):
        objective = target(**settings)
        if not callable(objective):
            raise TypeError("its objects cannot be called")
        return cast(Objective, objective)
    return functools.partial(target, **settings) if settings else cast(Objective, target)

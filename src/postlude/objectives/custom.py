"""An objective of your own, named on a command line or in a config: `load_objective("path/to/file.py:name")`."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Mapping
from typing import Any, cast

from postlude.objectives.loss import Objective
from postlude.user_code import load_callable


def load_objective(where: str, settings: Mapping[str, Any] | None = None) -> Objective:
    """Load `name` from a Python file. The file is run, so name only files you trust.

    `name` is a function of `OutputInputs`, an object that can be called with them, or a class of such objects. A class
    is built with `settings` as keywords; a function gets them as keywords at every call.
    """
    found = load_callable(where, kind="function of OutputInputs that returns a Loss")
    _check_settings(found, settings or {}, where)
    try:
        objective = _with_settings(found, settings or {})
        inspect.signature(objective).bind(None)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{where} does not take what it is given: {error}. It is called with one argument, OutputInputs, "
            f"and these settings: {', '.join(settings or {}) or 'none'}."
        ) from error
    return objective


def _check_settings(found: Any, settings: Mapping[str, Any], where: str) -> None:
    """Refuse a setting that it does not take, with the nearest that it does."""
    parameters = list(inspect.signature(found).parameters.values())
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return
    known = [each.name for each in (parameters if inspect.isclass(found) else parameters[1:])]
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f'did you mean "{near[0]}"?' if near else f"it takes {', '.join(known) or 'none'}."
            raise TypeError(f'{where} has no setting "{name}"; {hint}')


def _with_settings(found: Any, settings: Mapping[str, Any]) -> Objective:
    if inspect.isclass(found):
        objective = found(**settings)
        if not callable(objective):
            raise TypeError("its objects cannot be called")
        return cast(Objective, objective)
    return functools.partial(found, **settings) if settings else cast(Objective, found)

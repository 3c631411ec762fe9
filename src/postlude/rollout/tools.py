"""Tools: functions of the user that a model calls.

`data/tool_calls.py` has the formats in which a completion writes a call. The model reads what the function returns, or
the error it raises, as a message of the role "tool". A completion without a call ends the episode. Calls inside of
thoughts are ignored.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from postlude.data.tool_calls import MalformedCall, ParameterTypes, ToolCall, load_format
from postlude.user_code import load_callable

MAX_RESULT_LENGTH = 4000  # characters
TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", list: "array", dict: "object"}


@dataclass
class ToolReply:
    """Returns the results of a completion's calls or, without any, None, which ends the episode.

    It is the `reply` of a `MultiTurn` without thoughts, so it runs in worker processes: a tool that hangs or crashes
    fails its attempt.
    """

    tools: Sequence[str]
    """path/to/file.py:name of each tool."""
    format: str = "hermes"
    """Name of the tool-call format, or path/to/file.py:Class."""
    _loaded: dict[str, Callable[..., Any]] = field(default_factory=dict, repr=False, compare=False)

    def prepare(self) -> None:
        self._loaded, self._format = load_tools(self.tools), load_format(self.format)
        self._types: ParameterTypes = {name: parameter_types(tool) for name, tool in self._loaded.items()}

    def __call__(self, prompt: Any, completions: Sequence[str], example: Mapping[str, Any]) -> Any:
        """Returns messages to read, or None."""
        if not self._loaded:
            self.prepare()
        calls = self._format.parse(completions[-1], self._types)
        if not calls:
            return None
        return [{"role": "tool", "content": self._result(call)[:MAX_RESULT_LENGTH]} for call in calls]

    def _result(self, call: ToolCall | MalformedCall) -> str:
        if isinstance(call, MalformedCall):
            return f"error: {call.message}"
        if call.name not in self._loaded:
            return f"error: there is no tool {call.name!r}; there are {', '.join(self._loaded)}"
        try:
            value = self._loaded[call.name](**call.arguments)
            if inspect.iscoroutine(value):
                import asyncio  # noqa: PLC0415 - so that an error in a config is found without it

                value = asyncio.run(value)
        except Exception as error:  # the model reads it and may correct its call
            return f"error: {type(error).__name__}: {error}"
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

    def __getstate__(self) -> dict[str, Any]:
        return {"tools": tuple(self.tools), "format": self.format, "_loaded": {}}


def load_tools(tools: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Loads tools. Returns them by the names that a model calls them by."""
    functions: dict[str, Callable[..., Any]] = {}
    for path in tools:
        function = load_callable(path, kind="tool")
        name = path.rpartition(":")[2]
        if name in functions:
            raise ValueError(f"two tools are called {name}; a model could not tell them apart. Rename one.")
        functions[name] = function
    return functions


def tool_schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the JSON schema of a tool for the chat template: name, docstring, parameters and their types."""
    arguments = inspect.signature(function).parameters.values()
    required = [argument.name for argument in arguments if argument.default is inspect.Parameter.empty]
    properties = {parameter: {"type": kind} for parameter, kind in parameter_types(function).items()}
    parameters = {"type": "object", "properties": properties, "required": required}
    description = {"name": name, "description": inspect.getdoc(function) or "", "parameters": parameters}
    return {"type": "function", "function": description}


def parameter_types(function: Callable[..., Any]) -> dict[str, str]:
    """Returns the JSON type of each parameter; "string" where the function declares none that JSON has."""
    hints = get_type_hints(function)
    types = {name: hints.get(name, str) for name in inspect.signature(function).parameters}
    return {name: _json_type(hint) for name, hint in types.items()}


def _json_type(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):  # int | None takes an integer
        hint, *others = [part for part in get_args(hint) if part is not type(None)]
        hint = str if others else hint
    return TYPES.get(get_origin(hint) or hint, "string")

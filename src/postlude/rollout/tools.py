"""Tools: functions of yours that a model calls, as chat models are taught to.

A call stands in a completion as <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>. What the
function returns is what the model reads next, as a message of the role "tool"; what it raises is told to the model too.
A completion without a call is the answer. What stands in <think>...</think> is no call.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_origin, get_type_hints

from postlude.user_code import load_callable

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
# Reasoning, whose beginning may stand in the prompt and whose end may be missing.
REASONING = re.compile(r"\A(?:(?!<think>).)*?</think>|<think>.*?(?:</think>|\Z)", re.DOTALL)
LONGEST = 4000  # letters of a result
TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", list: "array", dict: "object"}


@dataclass
class ToolReply:
    """What comes of a completion: the results of its calls, or, without any, `reward(prompt, completion, example)`.

    It is a `reply` of `MultiTurn`, so it runs in worker processes: a tool that hangs or crashes costs its attempt.
    """

    tools: Sequence[str]
    """path/to/file.py:name of each."""
    reward: str | Callable[..., Any]
    _loaded: dict[str, Callable[..., Any]] = field(default_factory=dict, repr=False, compare=False)

    def prepare(self) -> None:
        """Load the tools and the reward."""
        self._loaded = load_tools(self.tools)
        self._reward = load_callable(self.reward) if isinstance(self.reward, str) else self.reward
        getattr(self._reward, "prepare", lambda: None)()

    def __call__(self, prompt: Any, completions: Sequence[str], example: Mapping[str, Any]) -> Any:
        """Messages to read, or what the answer earns."""
        if not self._loaded:
            self.prepare()
        calls = CALL.findall(REASONING.sub("", completions[-1]))
        if not calls:
            return self._reward(prompt, completions[-1], example)
        return [{"role": "tool", "content": self._result(call)[:LONGEST]} for call in calls]

    def _result(self, text: str) -> str:
        try:
            call = json.loads(text)
            name, arguments = call["name"], dict(call.get("arguments") or {})
        except (ValueError, TypeError, KeyError):
            return 'error: a call is {"name": "...", "arguments": {...}}'
        if name not in self._loaded:
            return f"error: there is no tool {name!r}; there are {', '.join(self._loaded)}"
        try:
            found = self._loaded[name](**arguments)
            found = _awaited(found) if inspect.iscoroutine(found) else found
        except Exception as error:  # what a model asks for is often impossible, and it may learn from being told
            return f"error: {type(error).__name__}: {error}"
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)

    def __getstate__(self) -> dict[str, Any]:
        return {"tools": tuple(self.tools), "reward": self.reward, "_loaded": {}}


def _awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    import asyncio  # noqa: PLC0415 - a config that is wrong is told so without it

    return asyncio.run(coroutine)


def load_tools(tools: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Functions by the names that a model calls them by."""
    found: dict[str, Callable[..., Any]] = {}
    for where in tools:
        function = load_callable(where, kind="tool")
        name = where.rpartition(":")[2]
        if name in found:
            raise ValueError(f"two tools are called {name}; a model could not tell them apart. Rename one.")
        found[name] = function
    return found


def tool_schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """What a chat template is told of a tool: its name, what its docstring says, its parameters and their types."""
    hints = get_type_hints(function)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        hint = hints.get(parameter.name, str)
        properties[parameter.name] = {"type": TYPES.get(get_origin(hint) or hint, "string")}
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    described = {"name": name, "description": inspect.getdoc(function) or "", "parameters": parameters}
    return {"type": "function", "function": described}

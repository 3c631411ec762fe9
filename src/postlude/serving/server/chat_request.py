"""ChatRequest: what the body of a request for a chat asks for, in whichever API."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from postlude.data.tool_calls import ParameterTypes
from postlude.data.tool_grammar import ToolGrammar
from postlude.generate.sampling_params import SamplingParams
from postlude.serving.server.chat_calls import ChatCall
from postlude.serving.server.completion_reader import CallableTools
from postlude.serving.server.served_model import ServedModel

JSON_TYPES = ("integer", "number", "boolean", "array", "object")


@dataclass(frozen=True)
class ToolChoice:
    """Which tools a completion may, or must, call."""

    required: bool = False
    """Whether it must call one."""
    name: str | None = None
    """The only one that it must call."""
    field: str = "tool_choice.name"
    """The field of the body that has the name."""
    parallel: bool = True
    """Whether it may have several calls."""
    strict: bool = False
    """Whether its calls must follow the schemas."""

    @classmethod
    def of(cls, tools: Sequence[dict[str, Any]], strict: Iterable[bool | None], **asked: Any) -> ToolChoice:
        """Returns the choice among these tools, of which some are strict. Raises ValueError if it is impossible."""
        choice = cls(**asked, strict=bool(tools) and any(strict))
        choice._check(tools)
        return choice

    def _check(self, tools: Sequence[dict[str, Any]]) -> None:
        if not tools and (self.required or self.name is not None):
            raise ValueError("tool_choice is given without tools: give the tools, or leave it out.")
        if self.name is not None and not self._named(tools):
            names = ", ".join(tool["function"]["name"] for tool in tools)
            raise ValueError(f"{self.field} is {self.name!r:.80}, but tools has {names:.200}.")

    def grammar(self, tools: Sequence[dict[str, Any]], grammar: ToolGrammar, *, in_thought: bool) -> str:
        """Returns the grammar of completions that may, or must, call these tools."""
        if self.name is not None:
            return grammar.required(self._named(tools), parallel=False, in_thought=in_thought)
        if self.required:
            return grammar.required(tools, parallel=self.parallel, in_thought=in_thought)
        return grammar.strict(tools)

    @property
    def has_grammar(self) -> bool:
        """Whether completions follow a grammar."""
        return self.required or self.strict or self.name is not None

    def _named(self, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [tool for tool in tools if tool["function"]["name"] == self.name]


@dataclass(frozen=True)
class ChatRequest:
    call: ChatCall
    model: str | None
    """The name of the model that it asks for."""
    max_tokens: int | None = None
    """The limit of a completion; None for what fits."""
    choice: ToolChoice = ToolChoice()
    logprobs: int | None = None
    """How many likeliest tokens are returned with the log-prob of each; None without log-probs."""
    stream: bool = False
    limit_to_room: bool = False
    """Whether a limit beyond what fits is what fits, instead of an error."""
    thinks: bool | None = None
    """Whether the model is to think first, if its chat template has an option for that; None for its default."""
    effort: str | None = None
    """How much it is to think, likewise."""

    def adapted(self, model: ServedModel) -> ChatRequest:
        """Returns the request with the options that the chat template has, and the roles that it knows."""
        wishes = {"enable_thinking": self.thinks, "reasoning_effort": self.effort}
        asked = {name: wish for name, wish in wishes.items() if wish is not None and model.template_has(name)}
        messages = self.call.messages
        if any(message["role"] == "developer" for message in messages) and not model.template_has("developer"):
            messages = tuple(
                message | {"role": "system"} if message["role"] == "developer" else message for message in messages
            )
        if messages is self.call.messages and not asked:
            return self
        return replace(self, call=replace(self.call, messages=messages, options={**asked, **self.call.options}))

    def tools(self, model: ServedModel) -> CallableTools | None:
        """Returns how calls are read; None without tools."""
        declared = self.call.tools
        return CallableTools(model.tool_format, _types(declared), self.choice.parallel) if declared else None

    def sampled_call(self, model: ServedModel, prompt: Sequence[int], *, in_thought: bool) -> ChatCall:
        """Returns the call with its sampling parameters after this prompt."""
        room = max(1, model.max_length - len(prompt))  # the generator refuses a prompt that leaves no room
        limit = room if self.max_tokens is None else self.max_tokens
        sampling = replace(self.call.sampling, max_new_tokens=min(limit, room) if self.limit_to_room else limit)
        if self.choice.has_grammar:
            if sampling.json_schema is not None:
                raise ValueError(
                    "the reply is to be JSON, but tool_choice or a strict tool asks for calls: give one of both."
                )
            grammar = self.choice.grammar(self.call.tools, model.tool_grammar, in_thought=in_thought)
            sampling = replace(sampling, grammar=grammar)
        return replace(self.call, sampling=sampling)


def sampling_params(max_new_tokens: int, *, seed: int | None = None, **values: Any) -> SamplingParams:
    """Returns sampling parameters, of which None is the default. Without a seed, each request gets a random one."""
    kept = {name: value for name, value in values.items() if value is not None}
    return SamplingParams(max_new_tokens=max_new_tokens, seed=secrets.randbits(48) if seed is None else seed, **kept)


def _types(tools: Sequence[dict[str, Any]]) -> ParameterTypes:
    """Returns the JSON type of each parameter of each tool; "string" for one that has none or several."""
    types: dict[str, dict[str, str]] = {}
    for tool in tools:
        properties = tool["function"]["parameters"].get("properties")
        named = properties.items() if isinstance(properties, dict) else ()
        kinds = {name: schema.get("type") if isinstance(schema, dict) else None for name, schema in named}
        types[tool["function"]["name"]] = {
            name: kind if kind in JSON_TYPES else "string" for name, kind in kinds.items()
        }
    return types

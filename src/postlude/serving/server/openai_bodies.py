"""The bodies of requests to OpenAI's routes. An unsupported field is refused, unless its value requests nothing."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from postlude.data.tool_calls import ParameterTypes
from postlude.data.tool_grammar import ToolGrammar
from postlude.generate.sampling_params import MAX_BIASES, MAX_STOP_TOKENS, MAX_TOP_LOGPROBS, SamplingParams
from postlude.serving.request_body import Texts, TokenLists, Tokens

MAX_TOOLS, MAX_MESSAGES, MAX_PARTS, MAX_OPTIONS = 128, 4096, 1024, 64
JSON_TYPES = ("integer", "number", "boolean", "array", "object")
NO_EFFECT: Mapping[str, tuple[Any, ...]] = {  # values of unsupported fields that ask for nothing
    "best_of": (1,),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "annotations": ([],),
}


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)

    def check_extra(self, prefix: str = "") -> None:
        """Refuses unsupported fields, unless they ask for nothing."""
        for name, value in (self.model_extra or {}).items():
            if value is not None and value not in NO_EFFECT.get(name, ()):
                known = ", ".join(type(self).model_fields)
                raise ValueError(f"{prefix}{name} is {value!r:.60}, which is not supported; there are {known}.")


class _StreamOptions(_Body):
    include_usage: bool = False


class _JSONSchema(_Body):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema", description="a JSON schema")] = None
    strict: bool | None = None
    """Accepted and ignored: the schema always holds."""


class _ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JSONSchema | None = None

    def schema_text(self) -> str | None:
        """Returns the JSON schema that a completion must have; None for text."""
        self.check_extra("response_format.")
        if self.type == "json_object":
            return json.dumps({"type": "object"})
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise ValueError("response_format.json_schema.schema is missing: give a JSON schema.")
        self.json_schema.check_extra("response_format.json_schema.")
        return json.dumps(self.json_schema.schema_)


Limit = Annotated[int | None, Field(ge=1)]


class CommonBody(_Body):
    """What requests to both routes have."""

    model: str | None = None
    max_tokens: Limit = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: Annotated[str | tuple[str, ...] | None, Field(description="text, or a list of texts")] = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], Field(max_length=MAX_BIASES)] | None = None
    response_format: _ResponseFormat | None = None
    user: str | None = None
    """Accepted and ignored."""
    # vLLM's additional fields
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Annotated[tuple[int, ...], Field(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None

    def sampling(self, max_new_tokens: int, top_logprobs: int, grammar: str | None = None) -> SamplingParams:
        """Returns the sampling parameters. Without a seed, each request gets a random one."""
        schema = None if self.response_format is None else self.response_format.schema_text()
        if schema is not None and grammar is not None:
            raise ValueError(
                "response_format is JSON, but tool_choice or a strict tool asks for calls: give one of both."
            )
        values: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "stop": (self.stop,) if isinstance(self.stop, str) else self.stop,
            "stop_tokens": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "seed": secrets.randbits(48) if self.seed is None else self.seed,
            "max_new_tokens": max_new_tokens,
            "top_logprobs": top_logprobs,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": tuple((self.logit_bias or {}).items()),
            "json_schema": schema,
            "grammar": grammar,
        }
        return SamplingParams(**{name: value for name, value in values.items() if value is not None})


class CompletionsBody(CommonBody):
    """The body of a request to COMPLETIONS."""

    prompt: Annotated[str | Texts | Tokens | TokenLists, Field(description="text, token ids, or a list of either")]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class _TextPart(_Body):
    type: str
    text: str | None = None


class _CalledFunction(_Body):
    name: str
    arguments: str = "{}"
    """A JSON object, as text."""


class _ToolCall(_Body):
    function: _CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    """Of a streamed call."""

    def plain(self, prefix: str) -> dict[str, Any]:
        """Returns the call as a chat template takes it: with its arguments as an object."""
        self.check_extra(prefix)
        self.function.check_extra(f"{prefix}function.")
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise ValueError(f"{prefix}function.arguments is {self.function.arguments!r:.60}: give a JSON object.")
        identity = {} if self.id is None else {"id": self.id}
        return {"type": "function", "function": {"name": self.function.name, "arguments": arguments}} | identity


class _Message(_Body):
    role: str
    content: Annotated[str | tuple[_TextPart, ...] | None, Field(description="text, or a list of parts of text")] = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[tuple[_ToolCall, ...], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None

    def plain(self, index: int) -> dict[str, Any]:
        """Returns the message as a chat template takes it."""
        prefix = f"messages.{index}."
        self.check_extra(prefix)
        if self.content is None and not self.tool_calls:
            raise ValueError(f"{prefix}content is missing: give text.")
        parts = () if self.content is None or isinstance(self.content, str) else self.content
        if len(parts) > MAX_PARTS:
            raise ValueError(f"{prefix}content has {len(parts)} parts; the limit is {MAX_PARTS}.")
        for place, part in enumerate(parts):
            if part.type != "text" or part.text is None:
                raise ValueError(
                    f"{prefix}content.{place} is a part of type {part.type!r:.60}, but only text is supported: give "
                    '{"type": "text", "text": "..."}.'
                )
            part.check_extra(f"{prefix}content.{place}.")
        content = "".join(part.text or "" for part in parts) if parts else self.content
        message: dict[str, Any] = {"role": self.role, "content": content}
        for name in ("name", "reasoning_content", "tool_call_id"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        if self.tool_calls:
            calls = enumerate(self.tool_calls)
            message["tool_calls"] = [call.plain(f"{prefix}tool_calls.{place}.") for place, call in calls]
        return message


class _Function(_Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object."""
    strict: bool | None = None


class _Tool(_Body):
    type: Literal["function"]
    function: _Function

    def plain(self, prefix: str) -> dict[str, Any]:
        """Returns the tool as a chat template takes it."""
        self.check_extra(prefix)
        self.function.check_extra(f"{prefix}function.")
        schema = self.function.parameters or {"type": "object", "properties": {}}
        function = {"name": self.function.name, "description": self.function.description or "", "parameters": schema}
        return {"type": "function", "function": function}


class _FunctionName(_Body):
    name: str


class _NamedTool(_Body):
    type: Literal["function"]
    function: _FunctionName


class ChatBody(CommonBody):
    """The body of a request to CHAT."""

    messages: Annotated[tuple[_Message, ...], Field(max_length=MAX_MESSAGES)]
    max_completion_tokens: Limit = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[tuple[_Tool, ...], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | _NamedTool | None,
        Field(description='"none", "auto", "required", or {"type": "function", "function": {"name": ...}}'),
    ] = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_OPTIONS)] | None = None
    """Passed to the chat template, such as enable_thinking; vLLM's field."""

    def plain_tools(self) -> list[dict[str, Any]]:
        """Returns the tools as a chat template takes them; none with tool_choice "none"."""
        tools = [tool.plain(f"tools.{place}.") for place, tool in enumerate(self.tools or ())]
        if self.tool_choice not in (None, "none") and not tools:
            raise ValueError("tool_choice is given without tools: give the tools, or leave it out.")
        return [] if self.tool_choice == "none" else tools

    def grammar(
        self, tools: Sequence[dict[str, Any]], make: Callable[[], ToolGrammar], *, in_thought: bool
    ) -> str | None:
        """Returns the grammar of a completion that may, or must, call these tools; None if it may be any text."""
        if self.tool_choice == "required":
            return make().required(tools, parallel=self.parallel_tool_calls is not False, in_thought=in_thought)
        if isinstance(self.tool_choice, _NamedTool):
            self.tool_choice.check_extra("tool_choice.")
            self.tool_choice.function.check_extra("tool_choice.function.")
            name = self.tool_choice.function.name
            named = [tool for tool in tools if tool["function"]["name"] == name]
            if not named:
                names = ", ".join(tool["function"]["name"] for tool in tools)
                raise ValueError(f"tool_choice.function.name is {name!r:.80}, but tools has {names:.200}.")
            return make().required(named, parallel=False, in_thought=in_thought)
        return make().strict(tools) if any(tool.function.strict for tool in self.tools or ()) else None


def parameter_types(tools: list[dict[str, Any]]) -> ParameterTypes:
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

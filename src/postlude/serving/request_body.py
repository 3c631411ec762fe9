"""parse: reads the JSON body of a request as a typed value, or raises one sentence about what is wrong.

`APIBody` is an object in the body of OpenAI's and Anthropic's APIs: unsupported fields may have only values that change
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError
from pydantic_core import ErrorDetails, from_json
from typing_extensions import TypeAliasType

# Validation of these stops at the first error, so that a list of a million errors gives one.
Tokens = TypeAliasType("Tokens", Annotated[tuple[int, ...], FailFast()])
TokenLists = TypeAliasType("TokenLists", Annotated[tuple[Tokens, ...], FailFast()])
Texts = TypeAliasType("Texts", Annotated[tuple[str, ...], FailFast()])
EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "model_type": "an object",
    "dict_type": "an object",
    "string_pattern_mismatch": "text that matches {pattern}",
    "int_parsing": "a whole number",
    "greater_than_equal": "{ge} or more",
    "less_than_equal": "{le} or less",
    "literal_error": "{expected}",
    "dataclass_type": "an object",
}
SHOWN = 60  # characters of a wrong value
MAX_TOOLS, MAX_MESSAGES, MAX_PARTS, MAX_OPTIONS = 128, 4096, 1024, 64
PLAIN = (str, int, float, dict)  # known at once; whether a value is of a pydantic class takes longer


class Body(BaseModel):
    """The body of a request: strict types, finite numbers, and no unknown field."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


Schema = TypeVar("Schema", bound=BaseModel)


def parse(schema: type[Schema], body: bytes) -> Schema:
    """Returns the body as a `schema`. Raises a ValueError with a sentence if it is none."""
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise ValueError(_sentence(schema, body, error)) from None


def _sentence(schema: type[BaseModel], body: bytes, error: ValidationError) -> str:
    problems = error.errors(include_url=False)
    first = problems[0]
    if first["type"] == "json_invalid":
        return f"the request is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}."
    value = from_json(body)
    path = _path(value, first)
    while (choices := _field(schema, path)[1]) and first["type"] != "missing":  # a union: each type has its errors
        inner = [
            problem
            for problem in problems
            if problem["loc"][: len(path)] == path and len(_path(value, problem)) > len(path)
        ]
        if len({problem["loc"][len(path)] for problem in inner}) != 1:
            return f"{_joined(path)} is {_shortened(first['input'])}: give {choices}."
        first = inner[0]
        path = _path(value, first)
    kind, context, name = first["type"], first.get("ctx", {}), _joined(path)
    if kind == "missing":
        return f"the request has no {name!r}, which it needs."
    if kind == "extra_forbidden":
        return f"{name} is not supported; there are {', '.join(_field(schema, path)[0].model_fields)}."
    if kind == "too_long":
        return f"{name} has {context['actual_length'] or 'too many'} items; the limit is {context['max_length']}."
    if first["loc"][-1:] == ("[key]",):
        name = f"a key of {_joined(path[:-1])}"
    give = f"give {EXPECTED[kind].format_map(context)}" if kind in EXPECTED else first["msg"]
    return f"{name or 'the request'} is {_shortened(first['input'])}: {give}."


def _path(value: Any, problem: ErrorDetails) -> tuple[str | int, ...]:
    """Returns where an error is, as the client wrote it: without pydantic's names of types."""
    path: list[str | int] = []
    for part in problem["loc"]:
        inner = dict(enumerate(value)) if isinstance(value, list) else value
        if isinstance(inner, dict) and part in inner:
            path.append(part)
            value = inner[part]
    return (*path, *problem["loc"][-1:]) if problem["type"] == "missing" else tuple(path)


def _field(schema: type[BaseModel], path: Sequence[str | int]) -> tuple[type[BaseModel], str | None]:
    """Returns the schema of the object that has the value at a path, and what the field takes if it is a union."""
    choices = None
    for place, part in enumerate(path):
        if isinstance(part, str):
            field = next((field for name, field in schema.model_fields.items() if part in (name, field.alias)), None)
            choices = field.description if field is not None else None
            if field is not None and place + 1 < len(path):
                schema = _model(field.annotation) or schema
        else:
            choices = None
    return schema, choices


def _model(annotation: Any) -> type[BaseModel] | None:
    """Returns the schema of objects in a type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model, get_args(annotation))), None)


def _joined(path: Sequence[str | int]) -> str:
    return ".".join(map(str, path))


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


class APIBody(BaseModel):
    """An object. `no_effect` are the values of unsupported fields that ask for nothing, besides null and objects of
    null, which LiteLLM's messages have."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)
    no_effect: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    def check_extra(self, prefix: str = "") -> None:
        """Refuses unsupported fields of this object and of those in it. `prefix` is where it is in the body."""
        for name, value in (self.model_extra or {}).items():
            if not _is_null(value) and value not in self.no_effect.get(name, ()):
                known = ", ".join(self._names())
                raise ValueError(f"{prefix}{name:.60} is {value!r:.60}, which is not supported; there are {known}.")
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value is None or isinstance(value, PLAIN):
                continue
            path = f"{prefix}{field.alias or name}."
            for place, item in enumerate(value) if isinstance(value, tuple) else [("", value)]:
                if not isinstance(item, PLAIN) and isinstance(item, APIBody):
                    item.check_extra(f"{path}{place}." if place != "" else path)

    def _names(self) -> Iterator[str]:
        return (field.alias or name for name, field in type(self).model_fields.items())


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(item is None for item in value.values()))


class TextPart(APIBody):
    """A part of a content, which must be text."""

    type: str
    text: str | None = None

    types: ClassVar[tuple[str, ...]] = ("text",)
    noun: ClassVar[str] = "part"

    def check_extra(self, prefix: str = "") -> None:
        """Refuses parts that are no text too."""
        if self.type not in self.types or self.text is None:
            raise ValueError(
                f"{prefix.removesuffix('.')} is a {self.noun} of type {self.type!r:.60}, but only text is supported "
                f'here: give {{"type": "{self.types[0]}", "text": "..."}}.'
            )
        super().check_extra(prefix)


def joined_text(content: str | Sequence[TextPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text or "" for part in content)


def check_type(body: Any, noun: str, needed: Mapping[str, tuple[str, ...]], location: str) -> None:
    """Refuses an object whose type is not in `needed`, or that lacks a field which its type needs."""
    if body.type not in needed:
        raise ValueError(
            f"{location} is {noun} of type {body.type!r:.60}, which is not supported; there are {', '.join(needed)}."
        )
    for field in needed[body.type]:
        if getattr(body, field) is None:
            raise ValueError(f"{location} is {noun} of type {body.type!r}, which needs {field!r}.")


def checked_parts(parts: tuple[Any, ...], location: str) -> tuple[Any, ...]:
    """Returns the parts of a content, which are not too many."""
    if len(parts) > MAX_PARTS:
        raise ValueError(f"{location} has {len(parts)} parts; the limit is {MAX_PARTS}.")
    return parts


def read_arguments(text: str, location: str) -> dict[str, Any]:
    """Returns the arguments of a call, written as JSON."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"{location} is {text!r:.60}: give a JSON object.")
    return arguments


def tool_schema(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a tool as a chat template takes it."""
    schema = dict(parameters or {}) or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": schema}}


def schema_text(kind: Literal["text", "json_object", "json_schema"], schema: Any, field: str) -> str | None:
    """Returns the JSON schema that a completion must have; None for text. `field` is where the client gives it."""
    if kind == "json_schema" and schema is None:
        raise ValueError(f"{field} is missing: give a JSON schema.")
    return {"text": None, "json_object": '{"type": "object"}', "json_schema": json.dumps(schema)}[kind]


def template_call(name: str, arguments: Mapping[str, Any], identity: str | None) -> dict[str, Any]:
    """Returns a call as a chat template takes it."""
    call = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
    return call if identity is None else call | {"id": identity}

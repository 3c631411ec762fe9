"""parse: reads the JSON body of a request as a typed value, or raises one sentence about what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar, get_args

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
    choices = _field(schema, path)[1]
    if choices and first["type"] != "missing":  # a union, each of whose types gives errors of its own
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

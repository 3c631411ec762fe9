"""parse: reads the JSON body of a request as a typed value, or raises one sentence about what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError
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
        raise ValueError(_sentence(schema, error)) from None


def _sentence(schema: type[BaseModel], error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    kind, location, value = first["type"], first["loc"], first["input"]
    if kind == "json_invalid":
        return f"the request is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}."
    name = ".".join(str(part) for part in location)
    if kind == "missing":
        return f"the request has no {name!r}, which it needs."
    if kind == "extra_forbidden":
        return f"{name} is not supported; there are {', '.join(_fields(schema, location[:-1]))}."
    field = schema.model_fields.get(str(location[0])) if location else None
    if field is not None and field.description:  # a union, in which each type would give its own error
        return f"{location[0]} is {_shortened(value)}: give {field.description}."
    give = f"give {EXPECTED[kind]}" if kind in EXPECTED else first["msg"]
    return f"{name or 'the request'} is {_shortened(value)}: {give}."


def _fields(schema: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """Returns the field names of the object at a location."""
    for part in location:
        inner = schema.model_fields[str(part)].annotation if str(part) in schema.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            break
        schema = inner
    return list(schema.model_fields)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"

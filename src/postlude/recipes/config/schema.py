"""The JSON Schema of a config. Help, editors and `load.py` use it; `keys.py` reads it.

A config is a `Settings` (pydantic) of other ones and of the core's dataclasses. The string under a field is its help,
its type has its bounds. `TaggedUnion` names the alternatives of a field:

    class Config(Settings):
        steps: PositiveInt = 100
        '''Optimizer steps.'''
        optimizer: Annotated[AdamW | SGD, TaggedUnion(adamw=AdamW, sgd=SGD)] = AdamW()
        '''Optimizer.'''
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from postlude.recipes.config.keys import (
    EXTENDS,
    KIND,
    LIST,
    NAME,
    PLACE,
    TEXT,
    Node,
    Option,
    alternatives,
    inline,
    is_covered,
    join,
    options_of,
)
from postlude.user_code import CALL, CallFunction


class Settings(BaseModel):
    """A config, or a section of one: frozen, without unknown keys, documented by the strings under its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, protected_namespaces=())

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Puts fields of a dataclass among its bases last, and keeps those that a base config declares otherwise."""
        fields, own = cls.model_fields, inspect.get_annotations(cls)
        inherited = {key: field for base in cls.__bases__ for key, field in getattr(base, "model_fields", {}).items()}
        for name in [name for name in {**inherited, **own, **fields} if name in fields]:
            field = fields.pop(name)
            fields[name] = field if name in own else inherited.get(name, field)


class InputPath:
    """Marks a field that is a path to read: `path: Annotated[Path, InputPath("path")]`.

    `kind` is "path" for a file or directory, "code" for path/to/file.py:name, "model" for a model's directory or name.
    In a config file, it is looked for next to that file first, then in the working directory.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Returns the field's schema with the mark."""
        return handler(core) | {PLACE: self.kind}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Returns the field's schema. Of code, it keeps functions of a call from Python."""
        schema = handler(source)
        return schema if self.kind != "code" else core_schema.no_info_wrap_validator_function(_check_code, schema)


def _check_code(value: Any, validate: Any) -> Any:
    if isinstance(value, CallFunction):
        return value
    if isinstance(value, str) and value.startswith(CALL):
        raise ValueError(
            f"{value} is a function that a call from Python was given and that no file holds. Continue the run with "
            f"that call, or put the function into a file and name it path/to/file.py:{value.removeprefix(CALL)}."
        )
    return validate(value)


class TaggedUnion:
    """The alternatives of a field by name: `Annotated[AdamW | SGD, TaggedUnion(adamw=AdamW, sgd=SGD)]`.

    One needs no name: `Annotated[Layout, TaggedUnion(Layout)]` says that it can be given as text. Text is read by a
    class's `parse`, or stands for the field that its `text_field` names. A list stands for that of its `list_field`.
    """

    def __init__(self, unnamed: type | None = None, /, **classes: type) -> None:
        self.classes: dict[str, type] = classes if unnamed is None else {"": unnamed, **classes}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Returns a tagged union that drops the key before validation and writes it again."""

        def section(cls: type) -> CoreSchema:
            return core_schema.no_info_before_validator_function(functools.partial(_contents, cls), handler(cls))

        return core_schema.tagged_union_schema(
            {name: section(cls) for name, cls in self.classes.items()},
            discriminator=self.name_of,
            serialization=core_schema.wrap_serializer_function_ser_schema(self._named, schema=handler(source)),
            metadata={KIND: self},
        )

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Returns any of the sections with its name, or the name alone, or text."""
        sections = []
        for name, choice in core["choices"].items():
            cls = self.classes[name]
            field = getattr(cls, "text_field", None)
            reads_text = {TEXT: field or True} if field or hasattr(cls, "parse") else {}
            reads_list = {LIST: cls.list_field} if hasattr(cls, "list_field") else {}
            sections.append(handler(choice) | {NAME: name} | reads_text | reads_list)
        names = [{"enum": list(self.classes)}] if "" not in self.classes else []
        texts = [{"type": "string"}] if any(TEXT in section for section in sections) else []
        lists = [{"type": "array", "items": {}}] if any(LIST in section for section in sections) else []
        return {"anyOf": [*sections, *names, *texts, *lists]}

    def name_of(self, value: Any) -> str | None:
        """Returns the name of a section, given as a value or as keys."""
        if isinstance(value, Mapping):
            return cast("str | None", value.get(KIND, "" if "" in self.classes else None))
        return next((name for name, cls in self.classes.items() if isinstance(value, cls)), None)

    def _named(self, value: Any, write: Any) -> Any:
        name = self.name_of(value)
        return {KIND: name} | write(value) if name else write(value)


def _contents(cls: type, value: Any) -> Any:
    """Returns the keys of `cls` to validate: without the kind, and with text parsed."""
    if not isinstance(value, Mapping):
        return value
    text = plain(cls.parse(value[TEXT])) if TEXT in value else {}  # type: ignore[attr-defined]
    return text | {name: item for name, item in value.items() if name not in (KIND, TEXT)}


class _JsonSchema(GenerateJsonSchema):
    """Writes defaults as in a config, and `none` for None."""

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        schema_with_default = super().default_schema(schema)
        default = schema["default_factory"]() if "default_factory" in schema else schema["default"]  # type: ignore[call-arg]
        inner: Any = schema["schema"]
        while inner["type"] == "nullable":
            inner = inner["schema"]
        kinds = inner.get("metadata", {}).get(KIND)
        name = kinds.name_of(default) if kinds is not None else None
        value = plain(default)
        return schema_with_default | {"default": {KIND: name} | value if name else value}

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return {"anyOf": [self.generate_inner(schema["schema"]), {"enum": [None, "none"]}]}

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def sort(self, value: JsonSchemaValue, parent_key: str | None = None) -> JsonSchemaValue:
        return value  # in the order of the fields


class _JsonSchemaWithHelp(_JsonSchema):
    """The same with the help of every field, read from the source files of the classes."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        return _with_help(super().model_schema(schema), schema["cls"])

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        return _with_help(super().dataclass_schema(schema), schema["cls"])


def _with_help(section: JsonSchemaValue, cls: type) -> JsonSchemaValue:
    """Adds the strings under the fields of a class to its schema."""
    bases = [base for base in reversed(cls.__mro__) if base.__module__ != "builtins"]
    helps = {name: text for base in bases for name, text in _read(base.__module__).get(base.__qualname__, {}).items()}
    for name, field in section.get("properties", {}).items():
        if name in helps:
            field.setdefault("description", helps[name])
    return section


@functools.cache
def _read(module: str) -> dict[str, dict[str, str]]:
    """Returns the strings under fields by class. Each file is parsed once; pydantic would parse it for each class."""
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None or not path.endswith(".py"):
        return {}
    return dict(_classes(ast.parse(Path(path).read_bytes()), ""))


def _classes(tree: ast.AST, within: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields every class by qualified name, with the strings under its fields."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield from _classes(node, f"{within}{node.name}.<locals>.")
        elif isinstance(node, ast.ClassDef):
            yield f"{within}{node.name}", dict(_strings(node))
            yield from _classes(node, f"{within}{node.name}.")


def _strings(body: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for line, below in itertools.pairwise(body.body):
        text = below.value if isinstance(below, ast.Expr) else None
        if isinstance(line, ast.AnnAssign) and isinstance(text, ast.Constant) and isinstance(text.value, str):
            yield ast.unparse(line.target), inspect.cleandoc(text.value)


def plain(value: Any) -> Any:
    """Returns a config, or a value in one, as mappings, lists and scalars."""
    if isinstance(value, BaseModel) or (is_dataclass(value) and not isinstance(value, type)):
        return plain(value.model_dump() if isinstance(value, BaseModel) else asdict(cast(Any, value)))
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def json_schema(config: type, *, helpful: bool = True) -> Node:
    """Returns the JSON Schema of a config. Without help it is faster."""
    full_schema = TypeAdapter(config).json_schema(schema_generator=_JsonSchemaWithHelp if helpful else _JsonSchema)
    for node in list(_nodes(full_schema)):
        if node.get(NAME):
            section = full_schema["$defs"][node["$ref"].rpartition("/")[2]]
            section["properties"] = {KIND: {"const": node[NAME]}} | section["properties"]
    return full_schema


def file_schema(config: type) -> Node:
    """Returns the JSON Schema of a config file, which may have required keys in the file that it extends."""
    full_schema = json_schema(config)
    text = "Config file to build on, relative to this one. The keys here override its keys."
    full_schema["properties"] = {EXTENDS: {"type": "string", "description": text}} | full_schema["properties"]
    if required := full_schema.pop("required", None):
        full_schema["anyOf"] = [{"required": required}, {"required": [EXTENDS]}]
    return full_schema


def _nodes(node: Any) -> Iterator[Node]:
    if isinstance(node, dict):
        yield node
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _nodes(child)


@functools.cache
def structure(config: type, *, helpful: bool = False) -> Node:
    """Returns the schema with all references inlined."""
    return inline(json_schema(config, helpful=helpful))


def options(config: type) -> Iterator[Option]:
    """Yields every field, depth first."""
    return options_of(structure(config, helpful=True))


@functools.cache
def _plain_options(config: type) -> tuple[Option, ...]:
    return tuple(options_of(structure(config)))


def default_values(config: type) -> dict[str, list[Any]]:
    """Returns the defaults of every field by its dotted path; several where kinds of a section have the same field."""
    defaults: dict[str, list[Any]] = {}
    for option in _plain_options(config):
        defaults.setdefault(option.path, []).append(option.default)
    return defaults


@functools.cache
def input_paths(config: type) -> tuple[tuple[str, str, str], ...]:
    """Returns the dotted path of every `InputPath` ("*" is any name or index), the kind of its section, and its own."""
    return tuple(
        (option.path, option.kind, node[PLACE])
        for option in _plain_options(config)
        for node in alternatives(option.node)
        if PLACE in node
    )


def input_values(config: Any) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """Yields the key and the value of every `InputPath` that is set, its kind, and the section that it is in."""
    paths = input_paths(type(config))  # type: ignore[arg-type]
    for key, value, section in _leaves(plain(config)):
        if isinstance(value, str):
            kinds = {
                kind
                for path, section_kind, kind in paths
                if is_covered(key, (path,)) and section.get(KIND, section_kind) == section_kind
            }
            yield from ((key, value, kind, section) for kind in sorted(kinds))


def _leaves(
    value: Any, path: str = "", section: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yields every value of a config that is no section or list, with its key and the section that it is in."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, join(path, str(name)), value)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, join(path, str(index)), section)
    else:
        yield path, value, section or {}

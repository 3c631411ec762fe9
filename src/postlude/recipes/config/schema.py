"""The JSON Schema of a config. Help, editors and `load.py` use it.

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
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from postlude.user_code import CALL, CallFunction

KIND = "kind"
"""The key that names the alternative of a section."""
EXTENDS = "extends"
"""The key of a config file that names the file it builds on."""
TEXT = "="
"""The key of text that is parsed to a section, next to keys that override it: layout=pp=2 and layout.vpp=2."""

LIST = "x-list"
"""In a schema, the field of a section that a list stands for."""

NAME = "x-kind"
"""In a schema, the name of a section in a `TaggedUnion`. Editors ignore it."""

PLACE = "x-path"
"""In a schema, marks text that is a path; see `InputPath`."""

Node = dict[str, Any]
WORDS = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text"}
BOUNDS = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "of at most", "exclusiveMaximum": "below"}


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
    full_schema = json_schema(config, helpful=helpful)
    definitions = full_schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, list):
            return [inlined(child) for child in node]
        if not isinstance(node, dict):
            return node
        target = definitions[node["$ref"].rpartition("/")[2]] if "$ref" in node else {}
        node = target | {key: child for key, child in node.items() if key != "$ref"}
        return {key: child if key == "default" else inlined(child) for key, child in node.items()}

    structure: Node = inlined(full_schema)
    return structure


def alternatives(node: Node) -> list[Node]:
    """Returns the alternatives of a field, without null."""
    flat = [alternative for part in node["anyOf"] for alternative in alternatives(part)] if "anyOf" in node else [node]
    return [alternative for alternative in flat if None not in alternative.get("enum", ())]


def optional(node: Node) -> bool:
    """Returns whether a field may be null."""
    return None in node.get("enum", ()) or any(optional(part) for part in node.get("anyOf", ()))


def sections(node: Node) -> dict[str, Node]:
    """Returns the alternatives with keys of their own, by kind. A single one has the kind ""."""
    with_keys = [section for section in alternatives(node) if "properties" in section]
    named = {section.get(NAME, ""): section for section in with_keys}
    if len(named) < len(with_keys):
        raise TypeError(
            f"a config cannot hold one of {', '.join(node['title'] for node in with_keys)}; name them by TaggedUnion."
        )
    return named


@dataclass(frozen=True)
class Option:
    """One field of a config. `default` is MISSING if it is required; `kind` is that of its section."""

    path: str
    node: Node
    default: Any
    help: str
    kind: str = ""


def options(config: type) -> Iterator[Option]:
    """Yields every field, depth first."""
    return options_of(structure(config, helpful=True))


def default_values(config: type) -> dict[str, list[Any]]:
    """Returns the defaults of every field by its dotted path; several where kinds of a section have the same field."""
    defaults: dict[str, list[Any]] = {}
    for option in options_of(structure(config)):
        defaults.setdefault(option.path, []).append(option.default)
    return defaults


def input_paths(config: type) -> Iterator[tuple[str, str, str]]:
    """Yields the dotted path of every `InputPath` ("*" is any name or index), the kind of its section, and its own."""
    for option in options_of(structure(config)):
        yield from ((option.path, option.kind, node[PLACE]) for node in alternatives(option.node) if PLACE in node)


def options_of(section: Node, path: str = "", default: Any = None, kind: str = "") -> Iterator[Option]:
    """Yields the fields of one section, with the values of `default` in place of their own."""
    for name, node in section["properties"].items():
        if name == KIND:
            continue  # listed with the field that holds the section
        option_path, fallback = join(path, name), default[name] if default is not None else node.get("default", MISSING)
        yield Option(option_path, node, fallback, node.get("description", ""), kind)
        inner, alternatives_by_kind = option_path, sections(node)
        for shape in () if alternatives_by_kind else alternatives(node):  # of a list, or of a mapping by name
            nested_node = shape.get("items") or shape.get("additionalProperties")
            inner, alternatives_by_kind = (
                join(option_path, "*"),
                sections(nested_node if isinstance(nested_node, dict) else {}),
            )
            fallback = MISSING
        if len(alternatives_by_kind) > 1 and "" not in alternatives_by_kind:
            named = fallback[KIND] if isinstance(fallback, dict) else MISSING
            yield Option(join(inner, KIND), {"enum": list(alternatives_by_kind)}, named, "Kind of this section.", kind)
        for nested_kind, nested in alternatives_by_kind.items():
            is_default_kind = isinstance(fallback, dict) and fallback.get(KIND, "") == nested_kind
            yield from options_of(nested, inner, fallback if is_default_kind else None, nested_kind or kind)


def describe(config: type) -> str:
    """Returns every option with its type, default and help, for `--help`.

    A section by name that has the kinds of an earlier one refers to it, and so does a list of sections within it.
    """
    lines, width = [], min(shutil.get_terminal_size().columns, 110) - 2
    described: dict[tuple[str, ...], str] = {}  # paths of sections by their classes
    repeated: list[str] = []
    for option in options(config):
        if option.path.startswith(tuple(repeated)):
            continue
        kind, nested = f" ({option.kind})" if option.kind else "", sections(option.node)
        lists = (shape["items"] for shape in alternatives(option.node) if isinstance(shape.get("items"), dict))
        items: Node = next(lists, {})
        nested = nested or sections(items)
        titles = tuple(section["title"] for section in nested.values() if LIST not in section)
        first = described.setdefault(titles, option.path)
        if len(nested) > 1 and first != option.path and ("*" in option.path or option.path.startswith(f"{first}.")):
            repeated.append(f"{option.path}.")
            lines += [
                f"--{option.path}: the keys of --{first}",
                *textwrap.wrap(option.help, width, initial_indent="    "),
            ]
            continue
        default = ", required" if option.default is MISSING else f", default {_default_text(option.default)}"
        if nested and (isinstance(option.default, dict) or (option.default is MISSING and "" in nested)):
            default = ""  # its fields have their own
        head = f"--{option.path}{kind}: {type_text(option.node)}{default}"
        lines += textwrap.wrap(head, width, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)
        lines += textwrap.wrap(option.help, width, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def type_text(node: Node) -> str:
    """Returns a description of the values that a field takes."""
    if nested := sections(node):
        kinds = [kind for kind in nested if kind and LIST not in nested[kind]]
        text = "keys and values" + (f" of kind {_listed(kinds)}" if len(kinds) > 1 else "")
        text += ", or text" if any(TEXT in alternative for alternative in nested.values()) else ""
        text += ", or a list of them" if any(LIST in alternative for alternative in nested.values()) else ""
    else:
        text = " or ".join(_takes(alternative) for alternative in alternatives(node))
    return f"{text} or none" if optional(node) else text


def _takes(node: Node) -> str:
    if "enum" in node or "const" in node:
        return _listed(node.get("enum") or [node["const"]])
    if "prefixItems" in node:
        return f"a list of {len(node['prefixItems'])}: {', '.join(map(type_text, node['prefixItems']))}"
    if node.get("type") == "array":
        return f"a list in brackets, each {type_text(node['items'])}"
    if node.get("type") == "object":
        value_node = node["additionalProperties"]
        return f"names and values, each {type_text(value_node if isinstance(value_node, dict) else {})}"
    if node.get("format") == "path":
        return "a path"
    bounds = [f"{phrase} {node[bound]:g}" for bound, phrase in BOUNDS.items() if bound in node]
    bounds += [f"that matches {node['pattern']}"] if "pattern" in node else []
    return " ".join([WORDS.get(node.get("type", ""), "any value"), *filter(None, [" and ".join(bounds)])])


def join(path: str, name: str) -> str:
    """Returns the full path of a key."""
    return f"{path}.{name}" if path else name


def _default_text(default: Any) -> str:
    return "none" if default is None else json.dumps(default, ensure_ascii=False)


def _listed(choices: list[Any]) -> str:
    *others, last = (f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in choices)
    return f"{', '.join(others)} or {last}" if others else last

"""Writes what is made of the classes of configs: the types of the recipe functions' keywords, and the stored schemas.

    python -m tests.recipes.keyword_types

A section is a TypedDict that inherits from those of its base classes. A field whose type a subclass changes is declared
by the subclasses only.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from postlude.recipes import __all__ as public
from postlude.recipes.config.keys import KIND, STORED_SCHEMAS
from postlude.recipes.config.schema import InputPath, TaggedUnion, json_schema
from postlude.recipes.registry import RECIPES

LONG = 100  # of the text of sections
FILE = Path(__file__).parents[2] / "src/postlude/recipes/keywords.pyi"
HEADER = '''\
"""The keywords of the recipe functions, for editors and type checkers.

Generated from the configs by `python -m tests.recipes.keyword_types`.
"""

# fmt: off
# ruff: noqa
# mypy: disable-error-code=misc
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, Protocol, TypedDict, Unpack

from postlude.recipes.api import Config, OnStep, RunResult

Path = str | PathLike[str]
Rows = Path | Iterable[Any]  # a DataFrame is one, too
Code = str | Callable[..., Any]

'''
CALL = """\
class {name}Function(Protocol):
    def __call__(
        self, config: Config = None, /, *, device: str | None = None, nproc: int | None = None,
        overwrite: bool = False, on_step: OnStep | None = None, **settings: Unpack[{config}],
    ) -> RunResult: ...
"""


class _Sections:
    """The sections that the fields of configs hold."""

    def __init__(self) -> None:
        self.fields: dict[type, dict[str, str]] = {}
        self.kinds: dict[type, dict[str, None]] = {}
        self.unions: dict[str, str] = {}

    def add(self, cls: type) -> str:
        """Returns the name of the TypedDict of a config's class."""
        if cls not in self.fields:
            self.fields[cls] = {}
            for base in cls.__bases__:
                if base is not BaseModel and (is_dataclass(base) or issubclass(base, BaseModel)):
                    self.add(base)
            hints = {
                name: hint for name, hint in get_type_hints(cls, include_extras=True).items() if name in _names(cls)
            }
            self.fields[cls] |= {name: self.text(hint, name) for name, hint in hints.items()}
        return cls.__name__

    def text(self, hint: Any, key: str = "") -> str:  # noqa: PLR0911 - one for each kind of type
        """Returns the values that a field takes, as source code."""
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is Annotated:
            for mark in hint.__metadata__:
                if isinstance(mark, TaggedUnion):
                    return self._named(self._union(mark), key)
                if isinstance(mark, InputPath) and mark.kind != "model":
                    return "Code" if mark.kind == "code" else "Rows" if key == "path" else "Path"
            return self.text(arguments[0], key)
        if origin in (Union, UnionType):
            return " | ".join(dict.fromkeys(self.text(argument, key) for argument in arguments))
        if origin is Literal:
            return f"Literal[{', '.join(map(repr, arguments))}]"
        if origin in (tuple, list):
            items = dict.fromkeys(self.text(argument, key) for argument in arguments if argument is not Ellipsis)
            return f"Sequence[{' | '.join(items)}]"
        if origin in (dict, Mapping):
            return f"Mapping[str, {self.text(arguments[1], key)}]"
        if isinstance(hint, type) and (is_dataclass(hint) or issubclass(hint, BaseModel)):
            return self.add(hint)
        return {NoneType: "None", Any: "Any", Path: "Path"}.get(hint) or hint.__name__

    def _named(self, text: str, key: str) -> str:
        """Returns the name of an alias, called after the first key that has these sections, where it is shorter."""
        if len(text) < LONG:
            return text
        if text not in self.unions:
            name = key.title()
            self.unions[text] = name if name not in self.unions.values() else f"{name}{len(self.unions)}"
        return self.unions[text]

    def _union(self, union: TaggedUnion) -> str:
        texts = []
        for kind, cls in union.classes.items():
            texts.append(self.add(cls))
            if kind:
                self.kinds.setdefault(cls, {})[kind] = None
                texts.append(f"Literal[{kind!r}]")
        for cls in union.classes.values():
            if hasattr(cls, "parse"):
                texts.append("str")
            for name in ("text_field", "list_field"):
                if hasattr(cls, name):
                    texts.append(self.fields[cls][getattr(cls, name)])
        if any(cls.__name__ in ("Examples", "Pairs", "LabelledExamples") for cls in union.classes.values()):
            texts.append("Rows")
        names = [text for text in texts if text.startswith("Literal[")]
        kinds = [f"Literal[{', '.join(name[8:-1] for name in names)}]"] if names else []
        return " | ".join(dict.fromkeys([*(text for text in texts if text not in names), *kinds]))

    def source(self) -> str:
        """Returns the TypedDicts, bases first."""
        declared: dict[type, set[str]] = {}
        blocks = []
        for cls in sorted(self.fields, key=lambda cls: len(cls.__mro__)):
            bases = [base for base in cls.__bases__ if base in self.fields]
            inherited = set[str]().union(*(declared[base] for base in bases))
            heirs = [heir for heir in self.fields if issubclass(heir, cls)]
            own = {
                name: text
                for name, text in self.fields[cls].items()
                if name not in inherited and all(self.fields[heir].get(name) == text for heir in heirs)
            }
            declared[cls] = inherited | own.keys()
            kinds = f"{KIND}: Literal[{', '.join(map(repr, self.kinds[cls]))}]" if cls in self.kinds else ""
            body = "; ".join(filter(None, [kinds, *(f"{name}: {text}" for name, text in own.items())])) or "pass"
            head = (
                f"class {cls.__name__}({', '.join([base.__name__ for base in bases] or ['TypedDict'])}, total=False):"
            )
            blocks.append("\n".join([head, *_wrapped(body)]))
        blocks += [f"{name} = {text}" for text, name in self.unions.items()]
        return "\n".join(blocks)


def _names(cls: type) -> set[str]:
    return set(cls.model_fields) if issubclass(cls, BaseModel) else {field.name for field in dataclass_fields(cls)}


def _wrapped(body: str) -> list[str]:
    """Returns lines of several fields each."""
    lines = [""]
    for field in body.split("; "):
        if lines[-1] and len(lines[-1]) + len(field) > 114:
            lines.append("")
        lines[-1] += f"; {field}" if lines[-1] else field
    return [textwrap.indent(line, "    ") for line in lines]


def source() -> str:
    """Returns the file."""
    sections = _Sections()
    configs = {recipe: sections.add(RECIPES[recipe].config) for recipe in RECIPES}
    functions = {name: configs.get(name, configs["eval"]) for name in public if name.islower()}
    calls = [CALL.format(name=config.removesuffix("Config"), config=config) for config in functions.values()]
    return f"{HEADER}{sections.source()}\n{''.join(calls)}"


def stored_schemas() -> str:
    """Returns the file of the JSON Schemas, a line for each key. Sections that recipes have alike are in it once."""
    schemas = {recipe: json_schema(RECIPES[recipe].config) for recipe in RECIPES}
    shared: dict[str, Any] = {}
    for full_schema in schemas.values():
        definitions = full_schema["$defs"]
        full_schema["$defs"] = {
            name: node for name, node in definitions.items() if shared.setdefault(name, node) != node
        }
    return _json({"$defs": shared, **schemas}) + "\n"


def _json(value: Any, key: str = "") -> str:
    """Returns JSON with a line for each section and for each key of one."""
    if isinstance(value, dict) and (key in ("", "$defs", "properties") or "properties" in value or "$defs" in value):
        items = [f"{json.dumps(name)}: {_json(item, name)}" for name, item in value.items()]
        return "{\n" + ",\n".join(items) + "\n}"
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    FILE.write_text(source())
    STORED_SCHEMAS.write_text(stored_schemas(), "utf-8")

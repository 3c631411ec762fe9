"""What a config can hold: its fields' types, defaults and help, read from (nested) dataclasses.

The string under a field is its help. Where a field may hold one of several dataclasses, each is named by a `Kind`:

    @dataclass(frozen=True, kw_only=True)
    class Config:
        steps: int = 100
        '''Optimizer steps.'''
        optimizer: Annotated[AdamW, Kind("adamw")] | Annotated[SGD, Kind("sgd")] = field(default_factory=AdamW)
        '''How weights are moved.'''
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

KIND = "kind"
"""The key that says which of several dataclasses a section is."""

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path", Any: "any value"}


@dataclass(frozen=True)
class Kind:
    """The name of a dataclass among those a field may hold: `Annotated[SGD, Kind("sgd")]`."""

    name: str


@dataclass(frozen=True)
class Option:
    """One field of a config. `default` is MISSING if it must be given; `kind` names the dataclass it belongs to."""

    path: str
    type: Any
    default: Any
    help: str
    kind: str = ""


def options(config: type, default: Any = None, path: str = "", kind: str = "") -> Iterator[Option]:
    """Every field, those of nested dataclasses after the one that holds them, with the defaults of `default`."""
    for each in settable(config):
        here, fallback = join(path, each.name), default_of(each, default)
        hint = hints(config)[each.name]
        yield Option(here, hint, fallback, helps(config).get(each.name, ""), kind)
        inner = here if sections(hint) else join(here, "*")
        found = sections(hint) or {name: cls for part in get_args(bare(hint)) for name, cls in sections(part).items()}
        if len(found) > 1:
            named = next((name for name, cls in found.items() if type(fallback) is cls), MISSING)
            yield Option(join(inner, KIND), Literal[tuple(found)], named, "Which of these it is.", kind)
        for name, cls in found.items():
            yield from options(cls, fallback if type(fallback) is cls else None, inner, name or kind)


def describe(config: type) -> str:
    """Every option with its type, default and help, as text for `--help`."""
    lines = []
    for option in options(config):
        kind, takes = f" ({option.kind})" if option.kind else "", words(option.type)
        default = ", required" if option.default is MISSING else f", default {_shown(option)}"
        if is_dataclass(option.default) or (option.default is MISSING and "" in sections(option.type)):
            default = ""  # that of each of its fields follows
        lines.append(f"--{option.path}{kind}: {takes}{default}")
        lines += textwrap.wrap(option.help, 108, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def undocumented(config: type) -> list[str]:
    """The paths of the fields without help."""
    return list(dict.fromkeys(option.path for option in options(config) if not option.help))


def words(annotation: Any) -> str:
    """What a field of this type takes, as it is said to a user."""
    kind = bare(members(annotation)[0])
    origin, args = get_origin(kind), get_args(kind)
    if found := sections(annotation):
        kinds = f" of kind {_alternatives(found)}" if len(found) > 1 else ""
        text = ", or text" if any(hasattr(cls, "parse") for cls in found.values()) else ""
        said = f"keys and values{kinds}{text}"
    elif len(members(annotation)) > 1:
        raise TypeError(f"a config cannot have the type {annotation}; a union is of dataclasses that each have a Kind.")
    elif kind in WORDS:
        said = WORDS[kind]
    elif origin is Literal:
        said = _alternatives(args)
    elif origin is list or (origin is tuple and Ellipsis in args):
        said = f"a list, each {words(args[0])}"
    elif origin is tuple:
        said = f"a list of {len(args)}: {', '.join(words(part) for part in args)}"
    elif origin in (dict, Mapping) and args[0] is str:
        said = f"names and values, each {words(args[1])}"
    else:
        raise TypeError(f"a config cannot have the type {annotation}.")
    return f"{said} or none" if optional(annotation) else said


def plain(annotation: Any, value: Any) -> Any:
    """A config's value as YAML has it: mappings, lists and scalars. Dataclasses of several kinds say which they are."""
    cls = type(value)
    if is_dataclass(cls):
        names = {each: name for name, each in sections(annotation).items() if name}
        head = {KIND: names[cls]} if names else {}
        return head | {each.name: plain(hints(cls)[each.name], getattr(value, each.name)) for each in settable(cls)}
    args = get_args(bare(members(annotation)[0]))
    if isinstance(value, Mapping):
        return {name: plain(args[1] if args else Any, each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part, each) for part, each in zip(items(args, len(value)), value, strict=True)]
    return str(value) if isinstance(value, Path) else value


def items(args: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """The types of a list's items, given the arguments of its type."""
    return args if len(args) > 1 and Ellipsis not in args else (args or (Any,))[:1] * count


def optional(annotation: Any) -> bool:
    """Whether it may be None."""
    return NoneType in get_args(bare(annotation))


def sections(annotation: Any) -> dict[str, type]:
    """The dataclasses a field may hold, by kind. One alone has the kind ""."""
    parts = members(annotation)
    if len(parts) == 1:
        return {"": bare(parts[0])} if is_dataclass(bare(parts[0])) else {}
    named = {extra.name: bare(part) for part in parts for extra in get_args(part)[1:] if isinstance(extra, Kind)}
    return named if len(named) == len(parts) else {}


def members(annotation: Any) -> tuple[Any, ...]:
    """The parts of a union but None; anything else by itself."""
    inner = bare(annotation)
    if get_origin(inner) not in (Union, UnionType):
        return (annotation,)
    return tuple(part for part in get_args(inner) if part is not NoneType)


def bare(annotation: Any) -> Any:
    """The type without its annotations."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def settable(config: type) -> list[Field[Any]]:
    """The fields that are given, not derived."""
    return [each for each in fields(config) if each.init]


def default_of(each: Field[Any], instance: Any) -> Any:
    """A field's value in `instance`; without one, its default, or MISSING."""
    if instance is not None:
        return getattr(instance, each.name)
    return each.default if each.default_factory is MISSING else each.default_factory()


def join(path: str, name: str) -> str:
    """A key's full path."""
    return f"{path}.{name}" if path else name


def hints(config: type) -> Mapping[str, Any]:
    """Field types with their annotations."""
    return get_type_hints(config, include_extras=True)


@functools.cache
def helps(config: type) -> Mapping[str, str]:
    """The strings under the fields, by field; those of base classes too."""
    found: dict[str, str] = {}
    for cls in reversed(config.__mro__):
        try:
            source = inspect.getsource(cls) if is_dataclass(cls) else ""
        except (OSError, TypeError):  # made without a file
            continue
        tree = ast.parse(f"if True:\n{source}" if source[:1].isspace() else source)
        for body in [node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)][:1]:
            for field, below in itertools.pairwise(body):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        found[name] = inspect.cleandoc(text)
    return found


def _shown(option: Option) -> str:
    value = plain(option.type, option.default)
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _alternatives(choices: Any) -> str:
    *most, last = (f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in choices)
    return f"{', '.join(most)} or {last}" if most else last

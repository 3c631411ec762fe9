"""A recipe's config: a frozen dataclass, read from a YAML file and the command line, and written back.

`schema.py` says what a config can hold, `written.py` reads what a user wrote; here the one becomes the other. The type
of a field decides how its text is read, not YAML's guess: `no` is text in a text field, `1e-6` a number in a number
field. A mistake is one sentence with the key, the place and, where a name is near, what was probably meant.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml

from postlude.recipes import schema
from postlude.recipes.schema import KIND, Kind, describe, join, undocumented
from postlude.recipes.written import NULL, ConfigError, Dumper, Loader, Written, read

__all__ = ["ConfigError", "Kind", "describe", "load", "to_yaml", "undocumented"]

Config = TypeVar("Config")


def load(config: type[Config], file: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Build `config` from its defaults, a YAML file over them, and `--a.b value` or `--a.b=value` over both.

    Of two overrides the later wins. Text is taken as it is; lists and mappings are written as in YAML: `[0.9, 0.95]`.
    A nested dataclass keeps the defaults its field has; a list or mapping that is given stands in place of its default.
    """
    return _build(config, read(file, overrides), None)


def to_yaml(config: Any) -> str:
    """The whole config as YAML, defaults included. `load` makes an equal one of it."""
    return yaml.dump(schema.plain(type(config), config), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def _value(annotation: Any, written: Written, default: Any) -> Any:
    """What was written at a field, in the field's type."""
    if written.null and schema.optional(annotation):
        return None
    if schema.sections(annotation):
        return _section(annotation, written, default)
    kind = schema.bare(schema.members(annotation)[0])
    if kind is Any and (written.entries or written.whole):
        kind = dict[str, Any]
    elif kind is Any and written.items is not None:
        kind = list[Any]
    if get_origin(kind) in (dict, Mapping):
        return _mapping(annotation, get_args(kind)[1], written, default)
    if get_origin(kind) in (list, tuple):
        return _list(annotation, kind, written)
    if written.entries and not written.whole:
        raise _wrong(annotation, written)
    try:
        return _scalar(kind, written.scalar)
    except (ValueError, yaml.YAMLError) as error:
        raise _wrong(annotation, written) from error


def _section(annotation: Any, written: Written, default: Any) -> Any:
    """A dataclass, or one of several kinds: the one that is written, or else the default's."""
    kinds = schema.sections(annotation)
    text = None if written.whole or written.scalar is None or written.scalar.tag == NULL else written.scalar.value
    chosen = next((name for name, cls in kinds.items() if type(default) is cls), None)
    if len(kinds) == 1:
        chosen = ""
    elif KIND in written.entries:
        chosen = _value(Literal[tuple(kinds)], written.entries[KIND], None)
    elif text in kinds:
        chosen = text
    elif text is not None:  # of the kinds, the one that is read from text
        chosen = next((name for name, cls in kinds.items() if hasattr(cls, "parse")), chosen)
    if text in kinds:
        text = None
    if written.items is not None or written.null:
        raise _wrong(annotation, written)
    if chosen is None:
        raise _missing(written, KIND, Literal[tuple(kinds)])
    cls = kinds[chosen]
    base = default if type(default) is cls else None
    if text is not None:
        if not hasattr(cls, "parse"):
            raise _wrong(annotation, written)
        try:
            base = cls.parse(text)
        except ValueError as error:
            raise _invalid(written, error) from error
    return _build(cls, written, base, chosen)


def _build(cls: type[Config], written: Written, base: Any, kind: str = "") -> Config:
    """The dataclass, from what is written, over the values of `base` or the class's own defaults."""
    known, types = {each.name: each for each in schema.settable(cls)}, schema.hints(cls)
    for name, each in written.entries.items():
        if name not in known and not (kind and name == KIND):
            raise _unknown(cls, kind, written.path, name, each)
    values = {}
    for name, option in known.items():
        annotation, value = types[name], schema.default_of(option, base)
        if name in written.entries:
            value = _value(annotation, written.entries[name], value)
        elif value is MISSING and "" in schema.sections(annotation) and not schema.optional(annotation):
            value = _value(annotation, Written(join(written.path, name), written.where), None)
        elif value is MISSING:
            raise _missing(written, name, annotation)
        values[name] = value
    try:
        return cls(**values)
    except (ValueError, TypeError) as error:
        raise _invalid(written, error) from error


def _mapping(annotation: Any, part: Any, written: Written, default: Any) -> dict[str, Any]:
    if not written.entries and not written.whole:
        raise _wrong(annotation, written)
    set_one_by_one = written.scalar is None and not written.whole
    values = dict(default) if set_one_by_one and isinstance(default, Mapping) else {}
    return values | {name: _value(part, each, values.get(name)) for name, each in written.entries.items()}


def _list(annotation: Any, kind: Any, written: Written) -> Any:
    if written.items is None or written.entries:
        raise _wrong(annotation, written)
    types = schema.items(get_args(kind), len(written.items))
    if len(types) != len(written.items):
        raise _wrong(annotation, written)
    return get_origin(kind)(_value(part, each, None) for part, each in zip(types, written.items, strict=True))


def _scalar(kind: Any, node: yaml.ScalarNode | None) -> Any:
    """The text as a value of this type, or a ValueError."""
    if node is None:
        raise ValueError("a list or a mapping")
    if kind is Any:
        return Loader("").construct_object(node)
    text: str = node.value
    value: Any = None
    if get_origin(kind) is Literal:
        value = next((choice for choice in get_args(kind) if text == str(choice)), None)
    elif kind is bool:
        value = {"true": True, "false": False}.get(text.lower())
    elif kind is int:
        value = int(text)
    elif kind is float:
        value = float(re.sub(r"^([-+]?)\.inf$", r"\1inf", text.lower()))
    elif kind in (str, Path) and (node.start_mark is None or node.tag != NULL or text.lower() == "none"):
        value = kind(text)  # a null in a file is no text; `none` may be
    if value is None or (kind is float and math.isnan(value)):
        raise ValueError(text)
    return value


def _wrong(annotation: Any, written: Written) -> ConfigError:
    takes = schema.words(annotation)
    for each in written.entries.values():
        return ConfigError(f'config key "{each.path}" is unknown {each.where}; "{written.path}" takes {takes}.')
    return ConfigError(f'config key "{written.path}" is {written} {written.where}; give {takes}.')


def _missing(section: Written, name: str, annotation: Any) -> ConfigError:
    path, where = join(section.path, name), section.where and f" {section.where}"
    listed = any(part.isdigit() for part in path.split("."))  # items of a list cannot be set one by one
    ways = [*(["there"] if section.where else []), *([] if listed else [f"as --{path}"])]
    takes = f"{schema.words(annotation)} {' or '.join(ways)}".rstrip()
    return ConfigError(f'config key "{path}" is missing{where}; give {takes}.')


def _invalid(written: Written, error: Exception) -> ConfigError:
    key = f'config key "{written.path}"' if written.path else "config"
    return ConfigError(f"{' '.join(filter(None, (key, written.places)))}: {error}")


def _unknown(cls: type, kind: str, above: str, name: str, written: Written) -> ConfigError:
    while not written.whole and len(written.entries) == 1:  # on the command line the whole path is one word
        (written,) = written.entries.values()
    known = [option.path for option in schema.options(cls, path=above) if "*" not in option.path]
    siblings = [each.name for each in schema.settable(cls)]
    near = [join(above, each) for each in difflib.get_close_matches(name, siblings, 1)]
    whole = [each + written.path.removeprefix(join(above, name)) for each in near]
    elsewhere = [path for path in known if path.rpartition(".")[2] == written.path.rpartition(".")[2]]
    if meant := [path for path in whole if path in known] or near or elsewhere:
        hint = f'did you mean "{meant[0]}"?'
    else:
        hint = f"the keys there are {', '.join(siblings)}."
    if "." in name:
        hint = "write what follows a dot on a line of its own, indented."
    return ConfigError(f'config key "{written.path}" is unknown{kind and f" for {kind}"} {written.where}; {hint}')

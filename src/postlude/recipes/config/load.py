"""A recipe's config, read from a YAML file and the command line, and written back.

`written.py` reads what a user wrote and `schema.py` says what a config can hold; here the one is laid over the defaults
of the other, and pydantic makes the config of it. The type of a field decides how its text is read, not YAML's guess:
`010` is text in a text field, `1e-6` a number in a number field. A mistake is one sentence with the key, the place and,
where a name is near, what was probably meant.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from postlude.recipes.config import schema
from postlude.recipes.config.paths import resolve_path
from postlude.recipes.config.raw import NULL, ConfigError, Dumper, Loader, RawValue, read
from postlude.recipes.config.schema import (
    KIND,
    PLACE,
    TEXT,
    Node,
    Settings,
    TaggedUnion,
    describe,
    join,
    undocumented,
    words,
)
from postlude.recipes.config.secrets import mask, refuse_masked

__all__ = ["ConfigError", "Settings", "TaggedUnion", "describe", "load", "to_yaml", "undocumented"]

Config = TypeVar("Config")


def load(
    config: type[Config],
    file: Path | None = None,
    overrides: Sequence[str] = (),
    settings: Sequence[Mapping[str, Any]] = (),
) -> Config:
    """Build `config` from its defaults, a YAML file over them, and `--a.b value` or `--a.b=value` over both.

    `settings` are values from Python, over the file: each mapping sets the keys that it has, and leaves others. Of two
    overrides the later wins. Text is taken as it is; lists and mappings are written as in YAML: `[0.9, 0.95]`. A nested
    section keeps the defaults its field has; a list or mapping that is given stands in place of its default.
    """
    written, node = read(file, overrides, settings), schema.structure(config)  # type: ignore[arg-type]
    data = _section(node, written, None)
    try:
        made = TypeAdapter(config).validate_python(data)
    except ValidationError as error:
        raise _sentence(error, node, written) from None
    refuse_masked(schema.plain(made))
    return made


def to_yaml(config: Any, *, masked: bool = False) -> str:
    """The whole config as YAML, defaults included. `load` makes an equal one of it, unless secrets are `masked`."""
    plain = schema.plain(config)
    return yaml.dump(mask(plain) if masked else plain, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def _value(node: Node, written: RawValue, default: Any) -> Any:
    """What pydantic is given for a field: what was written, over the default where that has keys."""
    if written.null and schema.optional(node):
        return None
    if schema.sections(node):
        return _section(node, written, default)
    shape = next(iter(schema.alternatives(node)), {})
    anything = not shape.keys() & {"type", "enum", "const"}
    if shape.get("type") == "object" or (anything and (written.entries or written.whole)):
        part = shape.get("additionalProperties", True)
        return _mapping(part if isinstance(part, dict) else {}, written, default)
    given_as_text = written.scalar is not None and not anything and shape.get("type") != "array"
    if written.entries and not (given_as_text and written.whole):
        (first, *_) = written.entries.values()
        raise ConfigError(f'config key "{first.path}" is unknown {first.where}; "{written.path}" takes {words(node)}.')
    if written.items is not None and not given_as_text:
        parts = iter(shape.get("prefixItems") or [shape.get("items", {})] * len(written.items))
        return [_value(next(parts, {}), each, None) for each in written.items]
    return _scalar(shape, written)


def _section(node: Node, written: RawValue, default: Any) -> Any:
    """Keys of one of the sections that a field may hold: the one that is written, or else the default's."""
    kinds = schema.sections(node)
    text = None if written.whole or written.scalar is None or written.scalar.tag == NULL else written.scalar.value
    chosen = (
        default[KIND]
        if isinstance(default, dict) and KIND in default
        else next((kind for kind in kinds if not kind), None)
    )
    if KIND in written.entries and "" not in kinds:
        chosen = _scalar({"enum": list(kinds)}, written.entries[KIND])
        if chosen not in kinds:
            raise _wrong(written.entries[KIND], {"enum": list(kinds)})
    elif text in kinds:
        chosen, text = text, None
    elif text is not None:  # of the kinds, the one that is read from text
        chosen = next((kind for kind, each in kinds.items() if TEXT in each), chosen)
    if written.items is not None or written.null or (text is not None and TEXT not in kinds.get(chosen or "", {})):
        raise _wrong(written, node)
    if chosen is None:
        raise _missing(written, KIND, {"enum": list(kinds)})
    known: Node = kinds[chosen]["properties"]
    same = isinstance(default, dict) and default.get(KIND, "") == chosen and text is None
    data = dict(default) if same else {}
    if text is not None:
        field = kinds[chosen][TEXT]
        data |= {TEXT: text} if field is True else {field: _scalar(known[field], written)}
    data |= {KIND: chosen} if chosen else {}
    for name, each in written.entries.items():
        if name not in known:
            raise _unknown(kinds[chosen], chosen, written.path, name, each)
        if name != KIND or not chosen:
            data[name] = _value(known[name], each, data.get(name, known[name].get("default")))
    for name in kinds[chosen].get("required", ()):
        if name not in data and "" in schema.sections(known[name]):  # what is missing is named in there
            data[name] = _value(known[name], RawValue(join(written.path, name), written.where), None)
    return data


def _mapping(part: Node, written: RawValue, default: Any) -> Any:
    if not written.entries and not written.whole:
        return _scalar({}, written)
    set_one_by_one = written.scalar is None and not written.whole
    values = dict(default) if set_one_by_one and isinstance(default, Mapping) else {}
    return values | {name: _value(part, each, values.get(name)) for name, each in written.entries.items()}


def _scalar(shape: Node, written: RawValue) -> Any:
    """The text of a scalar, where nothing but the field's type is to be known of it."""
    if written.scalar is None:
        return [] if written.items is not None else {}
    if not shape.keys() & {"type", "enum", "const"}:
        try:
            return Loader("").construct_object(written.scalar)
        except (ValueError, yaml.YAMLError):
            raise _wrong(written, {}) from None
    text: str = written.scalar.value
    for choice in shape.get("enum", ()):
        if text == str(choice):
            return choice
    if written.scalar.tag == NULL and written.scalar.start_mark is not None and text.lower() != "none":
        return None  # a null in a file is no text; `none` may be
    if PLACE in shape:
        return resolve_path(text, shape[PLACE], written)
    return re.sub(r"^([-+]?)\.(?=inf$)", r"\1", text.lower()) if shape.get("type") == "number" else text


def _sentence(error: ValidationError, node: Node, written: RawValue) -> ConfigError:
    """The first of pydantic's errors, said of the key it is about."""
    first = error.errors(include_url=False)[0]
    for place, part in enumerate(first["loc"]):
        kinds = schema.sections(node)
        if part in kinds and (len(kinds) > 1 or part == ""):
            node = kinds[str(part)]
            continue
        if not kinds and len(schema.alternatives(node)) > 1:
            break  # what follows is which of several it was not
        if first["type"] == "missing" and place == len(first["loc"]) - 1:
            return _missing(written, str(part), _inside(node, part))
        node = _inside(node, part)
        written = written.inside(part) or RawValue(join(written.path, str(part)), written.where)
    if first["type"] == "value_error":
        return _invalid(written, first["ctx"]["error"])
    return _wrong(written, node)


def _inside(node: Node, part: str | int) -> Node:
    for each in schema.alternatives(node):
        if "properties" in each and part in each["properties"]:
            return each["properties"][part]  # type: ignore[no-any-return]
        if isinstance(part, int) and each.get("type") == "array":
            return each["prefixItems"][part] if "prefixItems" in each else each["items"]  # type: ignore[no-any-return]
        if isinstance(each.get("additionalProperties"), dict):
            return each["additionalProperties"]  # type: ignore[no-any-return]
    return {}


def _wrong(written: RawValue, node: Node) -> ConfigError:
    return ConfigError(f'config key "{written.path}" is {written} {written.where}; give {words(node)}.')


def _missing(section: RawValue, name: str, node: Node) -> ConfigError:
    path, where = join(section.path, name), section.where and f" {section.where}"
    listed = any(part.isdigit() for part in path.split("."))  # items of a list cannot be set one by one
    ways = [*(["there"] if section.where else []), *([] if listed else [f"as --{path}"])]
    takes = f"{words(node)} {' or '.join(ways)}".rstrip()
    return ConfigError(f'config key "{path}" is missing{where}; give {takes}.')


def _invalid(written: RawValue, error: object) -> ConfigError:
    key = f'config key "{written.path}"' if written.path else "config"
    return ConfigError(f"{' '.join(filter(None, (key, written.places)))}: {error}")


def _unknown(section: Node, kind: str, above: str, name: str, written: RawValue) -> ConfigError:
    while not written.whole and len(written.entries) == 1:  # on the command line the whole path is one word
        (written,) = written.entries.values()
    known = [option.path for option in schema.options_of(section, above) if "*" not in option.path]
    siblings = [each for each in section["properties"] if each != KIND]
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

"""Reads a recipe's config from a YAML file and the command line, and writes it back.

`raw.py` reads what a user wrote, `schema.py` describes what a config can hold. Here values are merged into the
defaults, and pydantic validates the result. The type of a field decides how its text is read, not YAML: `010` is
text in a text field, `1e-6` a number in a number field. A mistake is one sentence with key, line and a suggestion.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from postlude.hf.builtin import BUILTIN, PACKAGED
from postlude.recipes.config import schema
from postlude.recipes.config.keys import (
    KIND,
    LIST,
    PLACE,
    TEXT,
    Node,
    alternatives,
    join,
    optional,
    options_of,
    recipes_with,
    sections,
    type_text,
)
from postlude.recipes.config.peer_keys import equivalent
from postlude.recipes.config.raw import NULL, ConfigError, Dumper, Loader, RawValue, read
from postlude.recipes.config.secrets import mask, refuse_masked

Config = TypeVar("Config")
LOG = logging.getLogger("postlude")


def load(
    config: type[Config],
    file: Path | None = None,
    overrides: Sequence[str] = (),
    settings: Sequence[Mapping[str, Any]] = (),
) -> Config:
    """Builds `config` from its defaults, a YAML file, `settings` from Python, and `--a.b value` or `--a.b=value`.

    Each overrides the ones before it, key by key. Lists and mappings of the command line are written as in YAML:
    `[0.9, 0.95]`. A section keeps the defaults of its field; a list or mapping replaces its default.
    """
    raw, node = read(file, overrides, settings), schema.structure(config)  # type: ignore[arg-type]
    unknown = _UnknownKeys(node)
    try:
        data = _section(node, raw, None, unknown)
    except ConfigError as error:
        unknown.messages.append(str(error))
    if unknown.messages:
        raise ConfigError("\n".join(unknown.messages))
    try:
        loaded = TypeAdapter(config).validate_python(data)
    except ValidationError as error:
        raise _sentence(error, node, raw) from None
    refuse_masked(schema.plain(loaded))
    return loaded


def to_yaml(config: Any, *, masked: bool = False) -> str:
    """Returns the whole config as YAML, defaults included. `load` reads it back, unless secrets are `masked`."""
    plain = schema.plain(config)
    return yaml.dump(mask(plain) if masked else plain, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


@dataclass
class _UnknownKeys:
    """Collects the unknown keys of a config, so that one start reports all of them."""

    root: Node
    messages: list[str] = field(default_factory=list)

    def add(self, kinds: Mapping[str, Node], kind: str, above: str, name: str, raw: RawValue) -> None:
        """Adds the key `name` of a section at the path `above`, which is of this one of its `kinds`."""
        section = kinds[kind]
        others = [other for other, keys in kinds.items() if other != kind and name in keys["properties"]]
        while not raw.full_mapping and len(raw.entries) == 1:  # on the command line the path is one argument
            (raw,) = raw.entries.values()
        known = [option.path for option in options_of(section, above) if "*" not in option.path]
        siblings = [key for key in section["properties"] if key != KIND]
        near = [join(above, key) for key in difflib.get_close_matches(name, siblings, 1)]
        rest = raw.path.removeprefix(join(above, name))
        full_paths = [key + rest for key in near if rest and key + rest in known]
        last = raw.path.rpartition(".")[2]
        elsewhere = [path for path in known if path.rpartition(".")[2] == last]
        if "." in name:
            hint = "write what follows a dot on a line of its own, indented."
        elif key := equivalent(last, {option.path for option in options_of(self.root)}):
            hint = f'use "{key}".'
        elif kind and others:
            hint = f"it is a key of {', '.join(others)}: set {join(above, KIND)}."
        elif not above and (recipes := recipes_with(name)):
            hint = f"it is a key of {', '.join(recipes)}." + (f' Did you mean "{elsewhere[0]}"?' if elsewhere else "")
        elif meant := full_paths or elsewhere or near:
            hint = f'did you mean "{meant[0]}"?'
        else:
            hint = f"the keys there are {', '.join(siblings)}."
        of_kind = f" for {kind}" if kind else ""
        self.messages.append(f'config key "{raw.path}" is unknown{of_kind} {raw.location}; {hint}')


def _value(node: Node, raw: RawValue, default: Any, unknown: _UnknownKeys) -> Any:  # noqa: PLR0911 - one for each shape
    """Returns the value of a field for pydantic: what was written, merged into a default that has keys."""
    if raw.null and optional(node):
        return None
    if kinds := sections(node):
        of_lists = [kind for kind in kinds if LIST in kinds[kind]] if raw.items is not None else []
        if not of_lists:
            return _section(node, raw, default, unknown)
        kind, field = of_lists[0], kinds[of_lists[0]][LIST]  # the list stands for this key of the section
        return {KIND: kind, field: _value(kinds[kind]["properties"][field], raw, None, unknown)}
    shape = next(iter(alternatives(node)), {})
    anything = not shape.keys() & {"type", "enum", "const"}
    if shape.get("type") == "object" or (anything and (raw.entries or raw.full_mapping)):
        value_node = shape.get("additionalProperties", True)
        return _mapping(value_node if isinstance(value_node, dict) else {}, raw, default, unknown)
    is_text = raw.scalar is not None and not anything and shape.get("type") != "array"
    if raw.entries and not (is_text and raw.full_mapping):
        (first, *_) = raw.entries.values()
        unknown.messages.append(
            f'config key "{first.path}" is unknown {first.location}; "{raw.path}" takes {type_text(node)}.'
        )
        return default
    if raw.items is not None and not is_text:
        item_nodes = iter(shape.get("prefixItems") or [shape.get("items", {})] * len(raw.items))
        return [_value(next(item_nodes, {}), item, None, unknown) for item in raw.items]
    return _scalar(shape, raw)


def _section(node: Node, raw: RawValue, default: Any, unknown: _UnknownKeys) -> Any:
    """Returns the keys of one of the sections that a field may hold: the written one, or the default's."""
    kinds = sections(node)
    text = None if raw.full_mapping or raw.scalar is None or raw.scalar.tag == NULL else raw.scalar.value
    chosen = (
        default[KIND]
        if isinstance(default, dict) and KIND in default
        else next((kind for kind in kinds if not kind), None)
    )
    names = [kind for kind in kinds if kind]
    if KIND in raw.entries and names:
        chosen = _scalar({"enum": names}, raw.entries[KIND])
        if chosen not in names:
            raise _wrong(raw.entries[KIND], {"enum": names})
    elif text in kinds:
        chosen, text = text, None
    elif text is not None:  # the kind that can be read from text
        chosen = next((kind for kind, section in kinds.items() if TEXT in section), chosen)
    if raw.items is not None or raw.null or (text is not None and TEXT not in kinds.get(chosen or "", {})):
        raise _wrong(raw, node)
    if chosen is None:
        raise _missing(raw, KIND, {"enum": names})
    known: Node = kinds[chosen]["properties"]
    is_default_kind = isinstance(default, dict) and default.get(KIND, "") == chosen and text is None
    data = dict(default) if is_default_kind else {}
    if text is not None:
        field = kinds[chosen][TEXT]
        data |= {TEXT: text} if field is True else {field: _scalar(known[field], raw)}
    data |= {KIND: chosen} if chosen else {}
    for name, entry in raw.entries.items():
        if name not in known:
            unknown.add(kinds, chosen, raw.path, name, entry)
            continue
        if name != KIND or not chosen:
            data[name] = _value(known[name], entry, data.get(name, known[name].get("default")), unknown)
    for name in kinds[chosen].get("required", ()):
        if name not in data and "" in sections(known[name]):  # the error there names what is missing
            data[name] = _value(known[name], RawValue(join(raw.path, name), raw.location), None, unknown)
    return data


def _mapping(value_node: Node, raw: RawValue, default: Any, unknown: _UnknownKeys) -> Any:
    if not raw.entries and not raw.full_mapping:
        return _scalar({}, raw)
    by_key = raw.scalar is None and not raw.full_mapping
    values = dict(default) if by_key and isinstance(default, Mapping) else {}
    return values | {name: _value(value_node, entry, values.get(name), unknown) for name, entry in raw.entries.items()}


def _scalar(shape: Node, raw: RawValue) -> Any:
    if raw.scalar is None:
        return [] if raw.items is not None else {}
    if not shape.keys() & {"type", "enum", "const"}:
        try:
            return Loader("").construct_object(raw.scalar)
        except (ValueError, yaml.YAMLError):
            raise _wrong(raw, {}) from None
    text: str = raw.scalar.value
    for choice in shape.get("enum", ()):
        if text == str(choice):
            return choice
    if raw.scalar.tag == NULL and raw.scalar.start_mark is not None and text.lower() != "none":
        return None  # a null in a file is no text, but `none` may be
    if PLACE in shape:
        return resolve_path(text, shape[PLACE], raw)
    return re.sub(r"^([-+]?)\.(?=inf$)", r"\1", text.lower()) if shape.get("type") == "number" else text


def resolve_path(text: str, kind: str, raw: RawValue) -> str:
    """Returns the text with its path relative to the working directory; `kind` is as in `InputPath`.

    A path in a config file is looked up next to that file first, then in the working directory. If it exists in both,
    a warning says which one is used. If it exists in neither, it is returned as it is, for its reader to refuse.
    """
    path, colon, name = text.rpartition(":") if kind == "code" else (text, "", "")
    built_in = kind == "model" and (text in BUILTIN or text in PACKAGED)
    if raw.file is None or not path or built_in or Path(path).expanduser().is_absolute():
        return text
    in_working_directory, next_to_config = Path(path), Path(os.path.normpath(raw.file.parent / path))
    if not next_to_config.exists():
        return text
    if (
        in_working_directory.exists()
        and not in_working_directory.samefile(next_to_config)
        and os.environ.get("RANK", "0") == "0"
    ):
        LOG.warning(
            'config key "%s" %s: %s exists next to the config and in the working directory; %s is used.',
            raw.path,
            raw.location,
            path,
            next_to_config,
        )
    return f"{next_to_config}{colon}{name}"


def _sentence(error: ValidationError, node: Node, raw: RawValue) -> ConfigError:
    """Returns the first of pydantic's errors as a sentence about its key."""
    first = error.errors(include_url=False)[0]
    for depth, key in enumerate(first["loc"]):
        kinds = sections(node)
        if key in kinds and (len(kinds) > 1 or key == ""):
            node = kinds[str(key)]
            continue
        if not kinds and len(alternatives(node)) > 1:
            break  # the rest names the alternatives that did not match
        if first["type"] == "missing" and depth == len(first["loc"]) - 1:
            return _missing(raw, str(key), _inside(node, key))
        node = _inside(node, key)
        raw = raw.inside(key) or RawValue(join(raw.path, str(key)), raw.location)
    if first["type"] == "value_error":
        name = f'config key "{raw.path}"' if raw.path else "config"
        return ConfigError(f"{' '.join(filter(None, (name, raw.places)))}: {first['ctx']['error']}")
    return _wrong(raw, node)


def _inside(node: Node, key: str | int) -> Node:
    for alternative in alternatives(node):
        if "properties" in alternative and key in alternative["properties"]:
            return alternative["properties"][key]  # type: ignore[no-any-return]
        if isinstance(key, int) and alternative.get("type") == "array":
            return alternative["prefixItems"][key] if "prefixItems" in alternative else alternative["items"]  # type: ignore[no-any-return]
        if isinstance(alternative.get("additionalProperties"), dict):
            return alternative["additionalProperties"]  # type: ignore[no-any-return]
    return {}


def _wrong(raw: RawValue, node: Node) -> ConfigError:
    return ConfigError(f'config key "{raw.path}" is {raw} {raw.location}; give {type_text(node)}.')


def _missing(section: RawValue, name: str, node: Node) -> ConfigError:
    path, location = join(section.path, name), section.location and f" {section.location}"
    listed = any(part.isdigit() for part in path.split("."))  # items of a list cannot be set on the command line
    ways = [*(["there"] if section.location else []), *([] if listed else [f"as --{path}"])]
    takes = f"{type_text(node)} {' or '.join(ways)}".rstrip()
    return ConfigError(f'config key "{path}" is missing{location}; give {takes}.')

"""The keys of a config, read from its JSON Schema: for its help, for completion, and for `load.py`.

Needs neither pydantic nor the classes of the config, so that help appears at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from postlude.options import COMMON

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
STORED_SCHEMAS = Path(__file__).with_name("schemas.json")
"""The JSON Schemas of all recipes' configs, written by `python -m tests.recipes.keyword_types`."""
MIXTURE = re.compile(r"(?<![^.])(?:datasets|environments)\.(?=\d)")  # the keys that a list of a mixture stands for
BOUNDS = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "of at most", "exclusiveMaximum": "below"}


def alternatives(node: Node) -> list[Node]:
    """Returns the alternatives of a field, without null."""
    flat = [alternative for part in node["anyOf"] for alternative in alternatives(part)] if "anyOf" in node else [node]
    return [alternative for alternative in flat if None not in alternative.get("enum", ())]


def optional(node: Node) -> bool:
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
    common: bool = False
    """Whether it and the sections that it is in are marked `Common`."""


def options_of(
    section: Node, path: str = "", default: Any = None, kind: str = "", *, common: bool = True
) -> Iterator[Option]:
    """Yields the fields of one section, with the values of `default` in place of their own.

    `common` is whether the section is.
    """
    for name, node in section["properties"].items():
        if name == KIND:
            continue  # listed with the field that holds the section
        option_path, fallback = join(path, name), default[name] if default is not None else node.get("default", MISSING)
        is_common = common and node.get(COMMON, False)
        yield Option(option_path, node, fallback, node.get("description", ""), kind, is_common)
        inner, alternatives_by_kind = option_path, sections(node)
        for shape in () if alternatives_by_kind else alternatives(node):  # of a list, or of a mapping by name
            nested_node = shape.get("items") or shape.get("additionalProperties")
            inner, alternatives_by_kind = (
                join(option_path, "*"),
                sections(nested_node if isinstance(nested_node, dict) else {}),
            )
            fallback, is_common = MISSING, False
        if len(alternatives_by_kind) > 1 and "" not in alternatives_by_kind:
            named = fallback[KIND] if isinstance(fallback, dict) else MISSING
            kinds: Node = {"enum": list(alternatives_by_kind)}
            yield Option(join(inner, KIND), kinds, named, "Kind of this section.", kind, is_common)
        for nested_kind, nested in alternatives_by_kind.items():
            is_default_kind = isinstance(fallback, dict) and fallback.get(KIND, "") == nested_kind
            values = fallback if is_default_kind else None
            yield from options_of(nested, inner, values, nested_kind or kind, common=is_common)


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


def _listed(choices: list[Any]) -> str:
    *others, last = (f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in choices)
    return f"{', '.join(others)} or {last}" if others else last


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def is_covered(path: str, by: Collection[str]) -> bool:
    keys = path.split(".")
    return any(
        len(keys) >= len(names := covering.split("."))
        and all(name in ("*", key) for name, key in zip(names, keys, strict=False))
        for covering in by
    )


def written_key(path: str) -> str:
    """Returns a key as users write it: environment.1.path for environment.environments.1.path."""
    return MIXTURE.sub("", path)


def inline(full_schema: Node) -> Node:
    definitions = full_schema.get("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, list):
            return [inlined(child) for child in node]
        if not isinstance(node, dict):
            return node
        target = definitions[node["$ref"].rpartition("/")[2]] if "$ref" in node else {}
        node = target | {key: child for key, child in node.items() if key != "$ref"}
        return {key: child if key == "default" else inlined(child) for key, child in node.items()}

    structure: Node = inlined({key: node for key, node in full_schema.items() if key != "$defs"})
    return structure


def stored_schema(recipe: str) -> Node:
    """Returns the JSON Schema of a recipe's config as the package has it in a file, with references inlined.

    To make it from the classes of the config takes most of a second, for a help or a completion too long.
    """
    stored: dict[str, Node] = json.loads(STORED_SCHEMAS.read_text("utf-8"))
    full_schema = stored[recipe]
    return inline(full_schema | {"$defs": stored["$defs"] | full_schema["$defs"]})


def recipes_with(key: str) -> list[str]:
    """Returns the recipes whose config has this key at its top."""
    stored: dict[str, Node] = json.loads(STORED_SCHEMAS.read_text("utf-8"))
    return [recipe for recipe, schema in stored.items() if key in schema.get("properties", ())]

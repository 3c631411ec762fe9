"""The text of `postlude RECIPE --help`: the keys that most users set, those of a section, or all."""

from __future__ import annotations

import difflib
import json
import re
import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import MISSING
from typing import Any

from postlude.recipes.config.keys import (
    KIND,
    LIST,
    PLACE,
    TEXT,
    Node,
    Option,
    alternatives,
    options_of,
    sections,
    type_text,
)

WIDEST = 110
COLUMN = 30  # of the text of a key in the short help
SHORT_CHOICES = 24  # characters of choices that are shown in place of a word
PLACEHOLDERS = {"integer": "N", "number": "X", "string": "TEXT", "array": "[...]", "object": "{...}"}
PLACES = {"path": "PATH", "model": "MODEL", "code": "FILE.py:NAME"}


def short_help(root: Node) -> str:
    """Returns the keys that are marked `Common`, by section, and the names of the others."""
    options = list(options_of(root))
    keys = _keys_by_section(options)
    rows = _common_rows(options, keys)
    top = {option.path: option for option in options if "." not in option.path}
    within = {section: [row for row in rows if row.startswith(f"{section}.")] for section in top}
    lines = [f"The {len(rows)} keys that most runs set, of {len(set().union(*keys.values()))} (--help-all):", ""]
    lines += [line for name in top if name in rows and not within[name] for line in rows[name]]
    for name, shown in within.items():
        if shown:
            more = len(keys[name] - rows.keys())
            notes = ["default none"] * (top[name].default is None) + [f"{more} more: --help {name}"] * (more > 0)
            lines += ["", name + (f" ({'; '.join(notes)})" if notes else "")]
            lines += [line for row in (name, *shown) for line in rows.get(row, [])]
    further = [name for name in top if name not in rows and not within[name]]
    further = [f"{name} ({_count(keys[name])})" if sections(top[name].node) else name for name in further]
    return "\n".join([*lines, "", "Further keys, explained by --help KEY:", *_wrapped(", ".join(further), 2)])


def key_help(root: Node, key: str) -> str:
    """Returns a key, or a section with all its keys. Raises ValueError if there is none of this name."""
    path = key.lstrip("-").replace("-", "_")
    options = list(options_of(root))
    described = [option for option, _ in _with_references(options) if _is_in(option.path, path)]
    if chosen := described or [option for option in options if _is_in(option.path, path)]:
        return describe(chosen)
    by_name = {option.path.rpartition(".")[2]: option.path for option in reversed(options)}  # the first of each name
    near = [by_name[path]] if path in by_name else difflib.get_close_matches(path, by_name.values(), 1)
    near = near or [by_name[name] for name in difflib.get_close_matches(path.rpartition(".")[2], by_name, 1, 0.7)]
    hint = f"did you mean {near[0]}?" if near else "`--help` lists the keys and sections."
    raise ValueError(f"{key!r} is not a key of the config; {hint}")


def full_help(root: Node) -> str:
    return describe(options_of(root))


def describe(options: Iterable[Option]) -> str:
    """Returns each key with its type, default and help.

    A section by name that has the kinds of an earlier one refers to it, and so does a list of sections within it. A key
    that several kinds of a section have alike is described once.
    """
    lines, width = list[str](), _width()
    merged: dict[tuple[str, ...], list[str]] = {}  # kinds by what is said of the key, which several may have
    for option, first in _with_references(options):
        default = ", required" if option.default is MISSING else f", default {_default_text(option.default)}"
        nested = _sections(option.node)
        if nested and (isinstance(option.default, dict) or (option.default is MISSING and "" in nested)):
            default = ""  # its fields have their own
        takes = f"the keys of --{first}" if first else f"{type_text(option.node)}{default}"
        merged.setdefault((option.path, takes, option.help), []).append(option.kind)
    for (path, takes, text), kinds in merged.items():
        of = ", ".join(dict.fromkeys(filter(None, kinds)))
        head = f"--{path}{f' ({of})' if of else ''}: {takes}"
        lines += textwrap.wrap(head, width, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)
        lines += _wrapped(text, 4)
    return "\n".join(lines)


def _with_references(options: Iterable[Option]) -> Iterable[tuple[Option, str]]:
    """Yields options, and for a section whose keys are those of an earlier one the path of that, without its keys."""
    described: dict[tuple[str, ...], str] = {}  # paths of sections by their classes
    repeated: list[str] = []
    for option in options:
        if option.path.startswith(tuple(repeated)):
            continue
        nested = _sections(option.node)
        titles = tuple(section["title"] for section in nested.values() if LIST not in section)
        first = described.setdefault(titles, option.path)
        if len(nested) > 1 and first != option.path and ("*" in option.path or option.path.startswith(f"{first}.")):
            repeated.append(f"{option.path}.")
            yield option, first
        else:
            yield option, ""


def _keys_by_section(options: list[Option]) -> dict[str, set[str]]:
    """Returns the paths of keys by the first name of the path. A section is one if it has kinds to choose from."""
    keys: dict[str, set[str]] = {option.path: set() for option in options if "." not in option.path}
    for option, first in _with_references(options):
        if not first and not sections(option.node):
            keys[option.path.partition(".")[0]].add(option.path.removesuffix(f".{KIND}"))
    return keys


def _sections(node: Node) -> dict[str, Node]:
    """Returns the sections that a field holds, or those of its list."""
    lists = (shape["items"] for shape in alternatives(node) if isinstance(shape.get("items"), dict))
    return sections(node) or sections(next(lists, {}))


def _is_in(path: str, key: str) -> bool:
    parts, names = path.split("."), key.split(".")
    return len(names) <= len(parts) and all(part in (name, "*") for part, name in zip(parts, names, strict=False))


def _common_rows(options: list[Option], keys: dict[str, set[str]]) -> dict[str, list[str]]:
    """Returns the lines of each common key by its path. The line of a section is that of its kind, or of its text."""
    rows = dict[str, list[str]]()
    by_path: dict[str, list[Option]] = {}
    for option in options:
        by_path.setdefault(option.path, []).append(option)
    for path, same in by_path.items():
        if not any(option.common for option in same) or path.endswith(f".{KIND}"):
            continue
        option = next((option for option in same if option.common and option.default is not MISSING), same[0])
        text, nested = first_sentence(option.help), sections(option.node)
        default = option.default.get(KIND) if isinstance(option.default, dict) else option.default
        kinds = [kind for kind in nested if kind and LIST not in nested[kind]]
        texts = [kind for kind in nested if TEXT in nested[kind]]
        if kinds:
            placeholder = "KIND"
            text = f"{text.removesuffix('.')}: {', '.join(kinds)}{''.join(f', or text for {kind}' for kind in texts)}."
        elif nested:
            if not texts:
                continue  # its keys have lines
            placeholder = "TEXT"
        else:
            placeholder = _placeholder(option.node)
            if placeholder == "NAME" and not all(choice in text for choice in _choices(option.node)):
                text = f"{text.removesuffix('.')}: {', '.join(_choices(option.node))}."
        of = [option.kind for option in same]
        above = by_path.get(path.rpartition(".")[0])
        if any(of) and above and len(of) < len(sections(above[0].node)):
            text = f"({of[0]}{', …' if len(of) > 1 else ''}) {text}"
        if nested and not kinds:
            text += f" {_count(keys[path])}: --help {path}."
        if default not in (MISSING, None, "", [], {}):
            text += f" Default {_default_text(default)}."
        rows[path] = _row(f"  --{path} {placeholder}", text)
    return rows


def _count(keys: set[str]) -> str:
    return f"{len(keys)} key{'s' * (len(keys) > 1)}"


def _choices(node: Node) -> list[str]:
    return [str(choice) for shape in alternatives(node) for choice in shape.get("enum", ())]


def _row(left: str, text: str) -> list[str]:
    wrapped = _wrapped(text, COLUMN)
    if len(left) + 2 <= COLUMN and wrapped:
        return [left.ljust(COLUMN) + wrapped[0].lstrip(), *wrapped[1:]]
    return [left, *wrapped]


def _placeholder(node: Node) -> str:
    """Returns a word for the values of a key, or its choices if they are short."""
    words = list[str]()
    for shape in alternatives(node):
        if "enum" in shape:
            words += map(str, shape["enum"])
        elif shape.get("type") == "boolean":
            words += ["true", "false"]
        elif PLACE in shape or shape.get("format") == "path":
            words.append(PLACES[shape.get(PLACE, "path")])
        else:
            words.append(PLACEHOLDERS.get(shape.get("type", ""), "VALUE"))
    listed = "|".join(dict.fromkeys(words))
    return listed if len(listed) <= SHORT_CHOICES else "NAME" if _choices(node) else words[0]


def first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s+(?=[A-Z0-9{\"])", " ".join(text.split()), maxsplit=1)[0]


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, _width(), initial_indent=" " * indent, subsequent_indent=" " * indent)


def _width() -> int:
    return min(shutil.get_terminal_size().columns, WIDEST) - 2


def _default_text(default: Any) -> str:
    return "none" if default is None else json.dumps(default, ensure_ascii=False)

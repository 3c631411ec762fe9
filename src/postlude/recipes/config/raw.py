"""RawValue: the untyped tree of a YAML file and the command line, with line numbers."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from yaml.representer import SafeRepresenter

from postlude.recipes.config.keys import EXTENDS, KIND, join
from postlude.recipes.config.packaged import config_names, find_config
from postlude.recipes.config.schema import plain
from postlude.user_code import CallFunction

COMMAND_LINE = "on the command line"
CALL = "in the call"
MAX_VALUES = 1_000_000  # of a config
NULL = "tag:yaml.org,2002:null"
RULES = {  # YAML 1.2's, and `none`. They decide what null is, and the type of values in untyped fields
    NULL: (r"~|null|Null|NULL|none|None|", ["~", "n", "N", ""]),
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "tag:yaml.org,2002:int": (r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    "tag:yaml.org,2002:float": (
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)",
        list("-+.0123456789"),
    ),
}


class ConfigError(ValueError):
    """A mistake in a config, as one sentence."""


class Loader(yaml.SafeLoader):
    """Safe YAML with these rules only."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - as in the base class


class Dumper(yaml.SafeDumper):
    """Quotes text that a YAML loader would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


class Representer(SafeRepresenter):
    """Keeps functions of a call."""


Representer.add_representer(CallFunction, lambda representer, text: representer.represent_str(text))


def _flat_list(dumper: Dumper, data: list[Any]) -> yaml.Node:
    flat = not any(isinstance(item, list | dict) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flat)


def _text(dumper: Dumper, data: str) -> yaml.Node:
    folded = not set(data).isdisjoint("\x85\u2028\u2029")  # PyYAML reads these line breaks back as spaces
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style='"' if folded else None)


Dumper.add_representer(list, _flat_list)
Dumper.add_representer(str, _text)
for _tag, (_pattern, _starts) in RULES.items():
    for _yaml in (Loader, Dumper):
        _yaml.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})\Z"), _starts)


@dataclass
class RawValue:
    """The value of a key: a scalar, a list, or entries. Entries next to a scalar override parts of it."""

    path: str
    location: str
    """The place where it was written, as text for messages."""
    scalar: yaml.ScalarNode | None = None
    items: list[RawValue] | None = None
    entries: dict[str, RawValue] = field(default_factory=dict)
    file: Path | None = None
    """The config file; None on the command line."""
    full_mapping: bool = False
    """Whether the entries were written as one mapping, and not set key by key."""

    def __str__(self) -> str:
        if self.scalar is not None:
            return f'"{self.scalar.value}"' if self.scalar.value else "empty"
        return "a list" if self.items is not None else "a mapping"

    def inside(self, key: str | int) -> RawValue | None:
        """Returns the value at a key, or at an index of a list. A list may stand for a key of its section."""
        if isinstance(key, int) and self.items is not None:
            return self.items[key]
        return self if self.items is not None else self.entries.get(str(key))

    @property
    def null(self) -> bool:
        return self.scalar is not None and self.scalar.tag == NULL and not self.entries

    @property
    def places(self) -> str:
        """The places where it and the keys below it were written."""
        override = COMMAND_LINE if self.location != COMMAND_LINE and self._on_command_line() else ""
        return " and ".join(filter(None, (self.location, override)))

    def _on_command_line(self) -> bool:
        return self.location == COMMAND_LINE or any(entry._on_command_line() for entry in self.entries.values())


def read(file: Path | None, overrides: Sequence[str], settings: Sequence[Mapping[str, Any]] = ()) -> RawValue:
    """Returns the tree of the file and of those that it extends, with settings and then overrides set in it."""
    raw = RawValue("", "") if file is None else _read_over_base(find_config(file))
    for values in settings:
        _drop_other_length(raw, values)
        _set_values(raw, plain(values))
    arguments = list(overrides)
    _drop_other_length(raw, [name[2:].partition("=")[0] for name in arguments if name.startswith("--")])
    while arguments:
        name, equals, value = arguments.pop(0).partition("=")
        if not name.startswith("--") or not all(name[2:].split(".")):
            raise ConfigError(
                f'"{name}" is not a config key; write --a.b VALUE or --a.b=VALUE, and a config file before them.'
            )
        if not equals and (not arguments or arguments[0].startswith("--")):
            raise ConfigError(f"{name} has no value; write {name} VALUE or {name}=VALUE.")
        _set(raw, name[2:], value if equals else arguments.pop(0))
    return raw


def _drop_other_length(raw: RawValue, names: Collection[str]) -> None:
    """Drops the length of a run if `names`, which override it, give the other one: steps or epochs."""
    given = {"steps", "epochs"}.intersection(names)
    if len(given) == 1:
        raw.entries.pop("epochs" if "steps" in given else "steps", None)


def _read_over_base(file: Path, named: str = "", above: tuple[Path, ...] = ()) -> RawValue:
    """Returns the tree of a file, merged into that of the file that it extends. `above` are those that extend it."""
    raw, chain = _read_file(file, named), (*above, file)
    extends = raw.entries.pop(EXTENDS, None)
    if extends is None:
        return raw
    if extends.scalar is None or not extends.scalar.value or extends.null:
        raise ConfigError(f'config key "{EXTENDS}" is {extends} {extends.location}; give the path of one config file.')
    base = Path(os.path.normpath(file.parent / Path(extends.scalar.value).expanduser()))
    if not base.exists():  # it may be the name of a packaged config
        packaged = find_config(Path(extends.scalar.value))
        base = packaged if packaged.is_absolute() else base
    if any(base.resolve() == extending.resolve() for extending in chain):
        cycle = " → ".join(map(str, (*chain, base)))
        raise ConfigError(f'config key "{EXTENDS}" {extends.location} leads back to a file that it extends: {cycle}.')
    base_raw = _read_over_base(base, f', which "{EXTENDS}" names {extends.location}', chain)
    _drop_other_length(base_raw, raw.entries)
    return _merge(base_raw, raw)


def _merge(base: RawValue, over: RawValue) -> RawValue:
    """Returns the base with the values of another file: of mappings key by key, unless their kinds differ."""
    kinds = [value.entries[KIND].scalar if KIND in value.entries else None for value in (over, base)]
    is_other_kind = kinds[0] is not None and (kinds[1] is None or kinds[0].value != kinds[1].value)
    if is_other_kind or not (base.full_mapping and over.full_mapping):
        return over
    merged = {
        name: _merge(base.entries[name], value) if name in base.entries else value
        for name, value in over.entries.items()
    }
    return replace(over, entries=base.entries | merged)


def _read_file(file: Path, named: str) -> RawValue:
    if file.is_dir():
        raise ConfigError(f'"{file}"{named} is a directory; give the config file itself.')
    if not file.is_file():
        known_files = {Path(name).stem: Path(name) for name in config_names()}
        known_files |= {path.stem: path for path in file.parent.glob("*.y*ml")}
        near = difflib.get_close_matches(file.stem, known_files, 1)
        hint = f'did you mean "{known_files[near[0]]}"?' if near else f"the current directory is {Path.cwd()}."
        raise ConfigError(f'there is no config file "{file}"{named}; {hint}')
    try:
        node = Loader(file.read_text("utf-8")).get_single_node()
        _check_size(node, f"in {file}")
        raw = RawValue("", f"in {file}") if node is None else _tree(node, "", f"in {file}", file)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        if isinstance(error, RecursionError):
            problem = "a value contains itself, or is nested too deeply"
        line = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{file}{line} is not YAML: {problem}.") from error
    if node is not None and not raw.full_mapping:
        raise ConfigError(f"{file} line {node.start_mark.line + 1} is not a config; write lines of `key: value`.")
    return raw


def _check_size(node: yaml.Node | None, location: str) -> None:
    """Refuses values whose aliases stand for more and more of them."""
    counts: dict[int, int] = {}

    def count(at: Any) -> int:
        if id(at) not in counts:
            inner = at if isinstance(at, tuple) else at.value if isinstance(at, yaml.CollectionNode) else ()
            counts[id(at)] = 1 + sum(map(count, inner))
        return counts[id(at)]

    if node is not None and (values := count(node)) > MAX_VALUES:
        raise ConfigError(f"there are {values:,} values {location} with its aliases; at most {MAX_VALUES:,} are read.")


def _tree(node: yaml.Node, path: str, location: str, file: Path | None = None) -> RawValue:
    def location_of(at: yaml.Node) -> str:
        return COMMAND_LINE if file is None else f"in {file} line {at.start_mark.line + 1}"

    if isinstance(node, yaml.ScalarNode):
        return RawValue(path, location, node, file=file)
    if isinstance(node, yaml.SequenceNode):
        items = [_tree(item, join(path, str(i)), location_of(item), file) for i, item in enumerate(node.value)]
        return RawValue(path, location, items=items)
    entries: dict[str, RawValue] = {}
    for key, value in node.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else "?"
        if name in entries:
            places = f"{entries[name].location} and {location_of(key)}"
            raise ConfigError(f'config key "{join(path, name)}" is given twice, {places}; keep one.')
        entries[name] = _tree(value, join(path, name), location_of(key), file)
    return RawValue(path, location, entries=entries, full_mapping=True)


def _set_values(raw: RawValue, values: Mapping[str, Any]) -> None:
    """Sets values from Python, those of a mapping one by one."""
    for name, value in values.items():
        path = join(raw.path, str(name))
        if isinstance(value, Mapping) and value:
            _set_values(raw.entries.setdefault(str(name), RawValue(path, CALL)), value)
            continue
        try:
            node = Representer().represent_data(_by_name(value))
        except yaml.YAMLError:
            raise ConfigError(
                f'config key "{path}" is a {type(value).__name__} {CALL}; give a number, text, a list or a mapping.'
            ) from None
        raw.entries[str(name)] = _tree(node, path, CALL)


def _by_name(value: Any) -> Any:
    """Returns a value with functions and classes as path/to/file.py:name, or as `CallFunction` if no file has them."""
    if isinstance(value, list | tuple):
        return [_by_name(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _by_name(item) for name, item in value.items()}
    if not callable(value):
        return value
    name = getattr(value, "__qualname__", "")
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    file = Path(getattr(module, "__file__", None) or "").resolve()
    at_top = name.isidentifier() and getattr(module, name, None) is value
    return f"{file}:{name}" if at_top and file.is_file() and file.suffix == ".py" else CallFunction(value)


def _set(raw: RawValue, path: str, text: str) -> None:
    *sections, name = path.split(".")
    for section in sections:
        raw = raw.entries.setdefault(section, RawValue(join(raw.path, section), COMMAND_LINE))
    value = RawValue(path, COMMAND_LINE)
    if text.startswith(("[", "{")):
        with contextlib.suppress(yaml.YAMLError):  # it may be text
            node = Loader(text).get_single_node() or yaml.ScalarNode(NULL, "")
            _check_size(node, COMMAND_LINE)
            value = _tree(node, path, COMMAND_LINE)
    value.scalar = yaml.ScalarNode(Loader("").resolve(yaml.ScalarNode, text, (True, False)), text)
    raw.entries[name] = value

"""A ModelConfig as plain JSON values, and back. Reading is strict: unknown names and wrong types are errors.

    {"pattern": "[M-][*-]", "hidden_size": 64, "vocab_size": 264, "blocks": {"*": {"heads": 4, …}, …}, …}

Every field is written, defaults too, so that a model does not change when a default does. Infinity is written as "inf".
`symbols` names the blocks that are not built in.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from postlude.model.blocks import BLOCKS, BlockTable
from postlude.model.config import ModelConfig
from postlude.model.pattern import SYMBOLS, Pattern

LEFT_OUT = ("family", "hf_config")  # the first is what such a model has not; the second is no part of its function
SIMPLE: Mapping[Any, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
    str: (str, "text"),
}


def config_to_json(config: ModelConfig, blocks: BlockTable = BLOCKS) -> dict[str, Any]:
    """Returns the config as JSON values, without its family and hf_config.

    Raises ValueError for one that would not be read back unchanged, such as a block config with a non-JSON field.
    """
    written = _stored_fields(config) | {"pattern": str(config.pattern)}
    custom_symbols = {symbol: config.pattern.symbols[symbol] for symbol in config.symbols if symbol not in SYMBOLS}
    data: dict[str, Any] = _plain({**written, **({"symbols": custom_symbols} if custom_symbols else {})})
    if config_from_json(data, blocks) != ModelConfig(**_stored_fields(config)):
        raise ValueError(f"the config of {config.pattern} has a value that JSON gives back as another: {data}.")
    return data


def config_from_json(data: Any, blocks: BlockTable = BLOCKS) -> ModelConfig:
    """Returns the config that `config_to_json` wrote. `blocks` is the table of blocks, including your own."""
    data = dict(_object("the config", data))
    symbols = {**SYMBOLS, **_read("symbols", dict[str, str], data.pop("symbols", {}))}
    known = [field for field in _init_fields(ModelConfig) if field.name not in LEFT_OUT]
    _check_names("the config", data, known)
    hints = get_type_hints(ModelConfig)
    simple = {
        name: _read(name, hints[name], value) for name, value in data.items() if name not in ("pattern", "blocks")
    }
    configs = {}
    for symbol, value in _object("blocks", data["blocks"]).items():
        if symbol not in blocks:
            raise ValueError(f"blocks has {symbol!r}, which is not a block; there are {', '.join(map(repr, blocks))}.")
        configs[symbol] = _read(f"blocks[{symbol!r}]", blocks[symbol].Config, value)
    pattern = Pattern.parse(_read("pattern", str, data["pattern"]), symbols=symbols)
    return ModelConfig(pattern=pattern, blocks=configs, **simple)


def _stored_fields(config: ModelConfig) -> dict[str, Any]:
    names = [field.name for field in _init_fields(ModelConfig) if field.name not in LEFT_OUT]
    return {name: getattr(config, name) for name in names} | {
        "blocks": {symbol: config.blocks[symbol] for symbol in config.symbols}
    }


def _init_fields(kind: Any) -> list[Field[Any]]:
    return [field for field in fields(kind) if field.init]


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in _init_fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if isinstance(value, str | int | NoneType) or (isinstance(value, float) and not math.isnan(value)):
        return value
    raise ValueError(f"a config holds {value!r}, a {type(value).__name__}, which JSON cannot represent.")


def _read(name: str, kind: Any, value: Any) -> Any:
    """Returns the value of a field of this type; raises ValueError if it is none."""
    origin, parts = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _read_dataclass(name, kind, value)
    if origin is Literal:
        return _chosen(name, value, parts)
    if origin in (Union, UnionType):
        return _read_any(name, parts, value)
    if origin is tuple:
        return _read_tuple(name, parts, value)
    if origin is dict:
        return {key: _read(f"{name}[{key!r}]", parts[1], item) for key, item in _object(name, value).items()}
    return _read_simple(name, kind, value)


def _read_simple(name: str, kind: Any, value: Any) -> Any:
    if kind not in SIMPLE:
        raise ValueError(f"{name} is of the type {kind}, which cannot be read from JSON.")
    if kind is float and value in ("inf", "-inf"):
        return float(value)
    types, words = SIMPLE[kind]
    if not isinstance(value, types) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} is {value!r}, but it must be {words}.")
    return float(value) if kind is float else value


def _read_any(name: str, kinds: tuple[Any, ...], value: Any) -> Any:
    """Returns the value read by the first type that accepts it; else raises the last one's error."""
    if value is None and NoneType in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not NoneType)
    for kind in kinds[:-1]:
        with suppress(ValueError):
            return _read(name, kind, value)
    return _read(name, kinds[-1], value)


def _read_dataclass(name: str, kind: Any, value: Any) -> Any:
    data = _object(name, value)
    _check_names(name, data, _init_fields(kind))
    hints = get_type_hints(kind)
    read = {field_name: _read(f"{name}.{field_name}", hints[field_name], item) for field_name, item in data.items()}
    try:
        return kind(**read)
    except ValueError as error:  # what the config itself refuses
        raise ValueError(f"{name}: {error}") from error


def _read_tuple(name: str, parts: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    endless = len(parts) == 2 and parts[1] is ...
    if not isinstance(value, list) or not (endless or len(value) == len(parts)):
        count = "a list" if endless else f"a list of {len(parts)}"
        raise ValueError(f"{name} is {value!r}, but it must be {count}.")
    kinds = parts[:1] * len(value) if endless else parts
    return tuple(_read(f"{name}[{i}]", kind, item) for i, (kind, item) in enumerate(zip(kinds, value, strict=True)))


def _chosen(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        raise ValueError(f"{name} is {value!r}, but the choices are {', '.join(map(repr, choices))}.")
    return value


def _object(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r}, but it must be an object with a name for every value.")
    return value


def _check_names(name: str, data: Mapping[str, Any], known: Iterable[Field[Any]]) -> None:
    names = {field.name: field for field in known}
    for field_name in data:
        if field_name not in names:
            near = difflib.get_close_matches(field_name, names, 1)
            fix = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}."
            raise ValueError(f"{name} has {field_name!r}, which is not one of its fields; {fix}")
    missing = [field_name for field_name, field in names.items() if field_name not in data and _is_required(field)]
    if missing:
        raise ValueError(f"{name} lacks {', '.join(map(repr, missing))}.")


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING

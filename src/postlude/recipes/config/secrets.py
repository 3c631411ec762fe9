"""Masks the secrets of a config in everything that a run writes and shows.

Secrets are every value of `rollout.env`, and in `environment.settings`, at any depth, text under a name whose last word
is one of `SECRET_WORDS`: api_key, hf_token, password. A resumed run needs them again; they are not part of its config.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

MASK = "***"
SECRET_WORDS = frozenset(
    {"key", "apikey", "token", "secret", "password", "passwd", "passphrase", "credential", "credentials", "auth"}
)
VARIABLES, SETTINGS = ("rollout", "env"), ("environment", "settings")


def mask(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config with `MASK` in place of every secret."""
    return {name: _changed(value, (str(name),), lambda *_: MASK) for name, value in config.items()}


def refuse_masked(config: Mapping[str, Any]) -> None:
    """Refuses a config that a run wrote, if its secrets are still masked."""
    masked = [".".join(path) for path, value in _secrets(config, ()) if value == MASK]
    if masked:
        raise ValueError(
            f"{masked[0]} is {MASK}, which stands in a run's files for a secret. Give it again: --{masked[0]} VALUE."
        )


def mask_arguments(words: Sequence[str]) -> list[str]:
    """Returns the arguments of a command with `MASK` in place of every value that holds a secret."""
    masked, remaining = list[str](), list(words)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        path = tuple(name.removeprefix("--").split("."))
        if equals and name.startswith("--") and _holds_secret(path, value):
            word = f"{name}={MASK}"
        elif word.startswith("--") and not equals and remaining and _holds_secret(path, remaining[0]):
            remaining[0] = MASK
        masked.append(word)
    return masked


def _holds_secret(path: tuple[str, ...], text: str) -> bool:
    value: Any = text
    if text.startswith(("{", "[")):
        import yaml  # imported here, because most commands do not need it

        with suppress(yaml.YAMLError):
            value = yaml.safe_load(text)
    return any(True for _ in _secrets(value, path))


def is_secret_name(name: str) -> bool:
    """Returns whether a setting of this name is a secret, by its last word."""
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()
    return re.split(r"[^a-z0-9]+", words)[-1] in SECRET_WORDS


def _secrets(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields every secret of a config with its path."""
    secrets: list[tuple[tuple[str, ...], Any]] = []

    def keep(path: tuple[str, ...], secret: Any) -> Any:
        secrets.append((path, secret))
        return secret

    _changed(value, path, keep)
    yield from secrets


def _changed(value: Any, path: tuple[str, ...], change: Callable[[tuple[str, ...], Any], Any]) -> Any:
    """Returns the value with `change` applied to each secret in it."""
    if isinstance(value, Mapping):
        return {name: _changed(inner, (*path, str(name)), change) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(inner, path, change) for inner in value]
    return change(path, value) if isinstance(value, str) and _is_secret(path) else value


def _is_secret(path: tuple[str, ...]) -> bool:
    """Returns whether text at this path of a config is a secret."""
    if path[-3:-1] == VARIABLES:
        return True
    inside = any(path[index : index + 2] == SETTINGS for index in range(len(path) - 2))
    return inside and is_secret_name(path[-1])

"""Masks the secrets of a config in everything that a run writes and shows.

Secrets are, wherever they stand in a config:
- every value of `rollout.env`;
- text and numbers whose name is that of a secret (`is_secret_name`), in settings of any names also all that is below;
- what follows such a name in a list: [--api-key, x], [API_KEY=x], ["Authorization: x"];
- the user of a URL with the password, and parameters of a URL that have such a name;
- the value of an environment variable that has such a name. It is masked as ***NAME***.
A resumed run needs them again; they are not part of its config.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from postlude.pool.limits import is_secret_name

MASK = "***"
VARIABLES = ("rollout", "env")
NOT_SECRET = ("rollout", "api_key")  # the name of a variable
ANY_NAMES = frozenset({"settings", "extra", "context", "template_variables"})  # sections of names that users choose
URL_USER = re.compile(r"(?<=://)[^/?#\s]+(?=@)")
URL_PARAMETER = re.compile(r"(?<=[?&;#])([\w.%-]+)=([^&;#\s]+)")
ASSIGNMENT = re.compile(r"(-{0,2}([\w.-]+)(?:=|:\s*))(.+)", re.DOTALL)
MASKED_VARIABLE = re.compile(r"\*\*\*([A-Za-z]\w*)\*\*\*")
MIN_VARIABLE = 8  # characters: a shorter value, such as EMPTY, is a placeholder, and is in other words by chance

Path: TypeAlias = tuple[str, ...]
Change: TypeAlias = Callable[[Path, Any, str], Any]
"""Gets a secret with its path and its mask, and returns what stands in its place."""


def mask(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config, or a part of it, with masks in place of every secret."""
    masked: dict[str, Any] = _Secrets(lambda path, secret, mask: mask).change(config, ())
    return masked


def refuse_masked(config: Mapping[str, Any]) -> None:
    """Refuses a config that a run wrote, if its secrets are still masked."""
    masked = [(".".join(path), mask) for path, secret, mask in _secrets(config, ()) if secret == mask]
    if masked:
        path, text = masked[0]
        raise ValueError(
            f"{path} has {text}, which stands in a run's files for a secret. Give it again: --{path} VALUE."
        )


def with_masks_of(written: Any, config: Any) -> Any:
    """Returns the masked config, with the text of the one `written` before where that has a variable masked.

    So it does not matter whether the environment still has that variable.
    """
    if isinstance(written, Mapping) and isinstance(config, Mapping):
        return {name: with_masks_of(written.get(name), value) for name, value in config.items()}
    if isinstance(written, list) and isinstance(config, list) and len(written) == len(config):
        return [with_masks_of(*pair) for pair in zip(written, config, strict=True)]
    if isinstance(written, str) and isinstance(config, str):
        pieces = MASKED_VARIABLE.sub("\0", written).split("\0")
        if len(pieces) > 1 and re.fullmatch(".+".join(map(re.escape, pieces)), config, re.DOTALL):
            return written
    return config


def mask_arguments(words: Sequence[str]) -> list[str]:
    """Returns the arguments of a command with masks in place of secrets."""
    masked, remaining = list[str](), list(words)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        path = tuple(name.removeprefix("--").split("."))
        if equals or not name:
            word = f"{name}{equals}{_mask_argument(path, value)}"
        elif remaining and not remaining[0].startswith("--"):
            remaining[0] = _mask_argument(path, remaining[0])
        masked.append(word)
    return masked


def _mask_argument(path: Path, text: str) -> str:
    if _holds_secret(text, path):
        return MASK
    return str(_Secrets(lambda path, secret, mask: mask).change(text, path))


def _holds_secret(text: str, path: Path) -> bool:
    """Returns whether text is YAML of a list or a mapping that has a secret."""
    if text.startswith(("{", "[")):
        import yaml  # imported here, because most commands do not need it

        with suppress(yaml.YAMLError):
            return bool(_secrets(yaml.safe_load(text), path))
    return False


def _secrets(value: Any, path: Path) -> list[tuple[Path, Any, str]]:
    """Returns every secret of a config with its path and its mask."""
    secrets: list[tuple[Path, Any, str]] = []

    def keep(path: Path, secret: Any, mask: str) -> Any:
        secrets.append((path, secret, mask))
        return secret

    _Secrets(keep).change(value, path)
    return secrets


class _Secrets:
    """Finds the secrets of a config, and replaces each by what `replace` returns."""

    def __init__(self, replace: Change) -> None:
        self.replace = replace
        values = {value: name for name, value in os.environ.items() if is_secret_name(name)}
        self.variables = {value: name for value, name in values.items() if len(value) >= MIN_VARIABLE}
        longest_first = sorted(self.variables, key=len, reverse=True)
        self.pattern = re.compile("|".join([MASKED_VARIABLE.pattern, *map(re.escape, longest_first)]))

    def change(self, value: Any, path: Path) -> Any:
        """Returns the value with each secret in it replaced."""
        if isinstance(value, Mapping):
            return {name: self.change(inner, (*path, *str(name).split("."))) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return self._change_list(value, path)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            return value
        if _is_secret(path):
            return self.replace(path, value, MASK)
        return self._change_text(value, path) if isinstance(value, str) else value

    def _change_list(self, items: Sequence[Any], path: Path) -> list[Any]:
        changed, follows = list[Any](), False
        for item in items:
            if not isinstance(item, str) or _is_secret(path):
                changed.append(self.change(item, path))
                continue
            assignment = ASSIGNMENT.fullmatch(item)
            if follows and not item.startswith("--"):  # such as the second of --api-key FIRST SECOND
                changed.append(self.replace(path, item, MASK))
            elif assignment and is_secret_name(assignment[2]):
                changed.append(f"{assignment[1]}{self.replace(path, assignment[3], MASK)}")
            elif _holds_secret(item, path):
                changed.append(self.replace(path, item, MASK))
            else:
                changed.append(self._change_text(item, path))
            if item.startswith("-"):
                follows = assignment is None and is_secret_name(item)
        return changed

    def _change_text(self, text: str, path: Path) -> str:
        def parameter(match: re.Match[str]) -> str:
            return f"{match[1]}={self.replace(path, match[2], MASK)}" if is_secret_name(match[1]) else match[0]

        def variable(match: re.Match[str]) -> str:
            name = match[1] or self.variables[match[0]]
            return str(self.replace(path, match[0], f"***{name}***")) if is_secret_name(name) else match[0]

        if "://" in text:
            text = URL_USER.sub(lambda match: str(self.replace(path, match[0], MASK)), text)
            text = URL_PARAMETER.sub(parameter, text)
        return self.pattern.sub(variable, text)


def _is_secret(path: Path) -> bool:
    """Returns whether text or a number at this path of a config is a secret."""
    if path[-3:-1] == VARIABLES:
        return True
    if not path or path[-2:] == NOT_SECRET:
        return False
    first = next((index for index, name in enumerate(path) if name in ANY_NAMES), len(path))
    return any(map(is_secret_name, (path[-1], *path[first:])))

"""Chooses the files of a configuration and a split among the files of a dataset, by the rules of Hugging Face datasets.

The `configs` at the start of README.md say which files belong to which. Without them, a folder is a configuration, and
a folder or a part of a file's name is a split: data/train-00000-of-00002.parquet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

DEFAULT_SPLIT = "train"
WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""The words that name a split in a path."""


def choose_files(files: Sequence[str], readme: str, config: str | None, split: str | None, name: str) -> list[str]:
    """Returns the files of a split in the order of their names. `name` is the dataset's, for errors."""
    by_split = _stated_splits(files, readme, config, name)
    if by_split is None:
        by_split = _splits_by_name(files, config, name)
    split_name = split or (DEFAULT_SPLIT if DEFAULT_SPLIT in by_split or len(by_split) != 1 else next(iter(by_split)))
    if not by_split.get(split_name):
        known = ", ".join(sorted(key for key, value in by_split.items() if value)) or "none"
        raise ValueError(f"dataset {name} has no split {split_name!r}; it has: {known}. Set split to one of them.")
    return sorted(by_split[split_name])


def _stated_splits(files: Sequence[str], readme: str, config: str | None, name: str) -> dict[str, list[str]] | None:
    """Returns the files of each split as README.md states them; None if it does not."""
    configs = {str(entry.get("config_name", "default")): entry for entry in _configs(readme) if "data_files" in entry}
    if not configs:
        return None
    chosen = config or next((key for key, entry in configs.items() if entry.get("default")), None)
    if chosen is None and len(configs) > 1 and "default" not in configs:
        raise ValueError(
            f"dataset {name} has the configurations {', '.join(configs)}, and none is the default. Set config to one."
        )
    chosen = chosen or ("default" if "default" in configs else next(iter(configs)))
    if chosen not in configs:
        raise ValueError(f"dataset {name} has no configuration {chosen!r}; it has: {', '.join(configs)}.")
    stated: Any = configs[chosen]["data_files"]
    if isinstance(stated, str) or (isinstance(stated, list) and all(isinstance(entry, str) for entry in stated)):
        stated = [{"split": DEFAULT_SPLIT, "path": stated}]
    folder = str(configs[chosen].get("data_dir", "")).strip("/")
    by_split: dict[str, list[str]] = {}
    for entry in stated:
        paths = [entry["path"]] if isinstance(entry["path"], str) else entry["path"]
        patterns = [_pattern(f"{folder}/{path}" if folder else path) for path in paths]
        matched = [file for file in files if any(pattern.fullmatch(file) for pattern in patterns)]
        by_split.setdefault(str(entry["split"]), []).extend(matched)
    return by_split


def _configs(readme: str) -> list[Mapping[str, Any]]:
    header = re.match(r"---\s*\n(.*?)\n---\s*(?:\n|\Z)", readme, re.DOTALL)
    try:
        metadata = yaml.safe_load(header[1]) if header else {}
    except yaml.YAMLError:
        return []
    configs = metadata.get("configs") if isinstance(metadata, Mapping) else None
    return [entry for entry in configs or [] if isinstance(entry, Mapping)]


def _splits_by_name(files: Sequence[str], config: str | None, name: str) -> dict[str, list[str]]:
    if config is not None:
        inside = [file for file in files if file.startswith(f"{config}/")]
        if not inside:
            folders = sorted({file.partition("/")[0] for file in files if "/" in file})
            raise ValueError(
                f"dataset {name} has no configuration {config!r}; its folders are: {', '.join(folders) or 'none'}."
            )
        files = inside
    by_split: dict[str, list[str]] = {}
    for file in files:
        by_split.setdefault(_split_of(file, config) or "", []).append(file)
    unnamed = by_split.pop("", [])
    return by_split or ({DEFAULT_SPLIT: unnamed} if unnamed else {})


def _split_of(file: str, config: str | None) -> str | None:
    words = re.split(r"[^a-z0-9]+", file.removeprefix(f"{config}/").lower())
    return next((split for split, names in WORDS.items() if any(word in names for word in words)), None)


def _pattern(glob: str) -> re.Pattern[str]:
    """Returns a glob as a pattern: * stays within a folder, ** does not."""
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile(re.sub(r"\*\*/|\*\*|\*|\?|[^*?]+", lambda part: parts.get(part[0]) or re.escape(part[0]), glob))

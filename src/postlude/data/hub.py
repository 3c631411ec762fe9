"""HubRepo: a model or dataset of the Hugging Face Hub, read through the cache that huggingface_hub shares.

Files are downloaded when they are needed. One process of a machine downloads, and the others wait for it. The list of
a repository's files is kept with the cache, so that an interrupted download is never taken for the whole, and a later
start asks the Hub for nothing. `hf download ID` renews a cached copy.

The files of a configuration and a split of a dataset are chosen by the rules of Hugging Face datasets. The `configs`
at the start of README.md say which files belong to which. Without them, a folder is a configuration, and a folder or a
part of a file's name is a split: data/train-00000-of-00002.parquet.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from postlude.durable_files import write_atomic

HUB_NAME = re.compile(r"(?P<id>[\w-][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
NO_OWNERS = ("datasets", "docs", "models", "spaces")  # pages of the Hub, so that no owner has such a name
FIRST_FILES = ["README.md", "config.json"]  # small; a download of them also records the commit of the revision
DEFAULT_SPLIT = "train"
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""The words that name a split in a path."""


@dataclass(frozen=True)
class HubSnapshot:
    """The files of a repository at one commit. Those that were downloaded are in `folder`."""

    folder: Path
    files: tuple[str, ...]


@dataclass(frozen=True)
class HubRepo:
    """A repository by its id, such as Qwen/Qwen3-0.6B, at a branch, tag or commit."""

    id: str
    kind: Literal["model", "dataset"]
    revision: str = "main"

    def snapshot(self) -> HubSnapshot:
        """Returns the list of files of the cached copy, or of the Hub if none is cached. Raises FileNotFoundError."""
        cached = self._cached()
        if cached is None:
            with self._lock():
                cached = self._cached() or self._ask()
        return cached

    def download(self, snapshot: HubSnapshot, files: Sequence[str]) -> list[Path]:
        if _missing(snapshot, files):
            with self._lock():
                if missing := _missing(snapshot, files):
                    self._fetch(snapshot.folder.name, missing)
                    if still_missing := _missing(snapshot, files):
                        raise FileNotFoundError(self._sentence(f"{still_missing[0]} did not arrive"))
        return [snapshot.folder / file for file in files]

    def _cached(self) -> HubSnapshot | None:
        ref = self._storage / "refs" / self.revision
        commit = ref.read_text().strip() if ref.is_file() else self.revision
        try:
            files = json.loads(self._list_of_files(commit).read_text())
        except (OSError, ValueError):
            return None
        return HubSnapshot(self._storage / "snapshots" / commit, tuple(files))

    def _ask(self) -> HubSnapshot:
        from huggingface_hub import HfApi

        folder = Path(self._fetch(self.revision, FIRST_FILES))
        try:
            files = HfApi().list_repo_files(self.id, revision=folder.name, repo_type=self.kind)
        except Exception as error:  # offline, and the folder was there: what is in it is all there is
            present = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
            if not present:
                raise FileNotFoundError(self._sentence(failure_reason(error))) from error
            return HubSnapshot(folder, tuple(present))
        record = self._list_of_files(folder.name)
        write_atomic(record, json.dumps(sorted(files)).encode())
        return HubSnapshot(folder, tuple(sorted(files)))

    def _fetch(self, revision: str, files: Sequence[str]) -> str:
        """Downloads files with a progress bar. Returns the folder of the snapshot."""
        from huggingface_hub import errors, snapshot_download

        try:
            return str(
                snapshot_download(
                    self.id,
                    repo_type=self.kind,
                    revision=revision,
                    allow_patterns=[glob.escape(file) for file in files],
                )
            )
        except errors.GatedRepoError as error:
            fix = f"Accept its terms at https://huggingface.co/{self._page}, then log in with `hf auth login`."
            raise FileNotFoundError(f"{self.kind} {self.id} is gated on the Hugging Face Hub. {fix}") from error
        except errors.RepositoryNotFoundError as error:
            fix = "Check the name; for a private one, log in with `hf auth login` or set HF_TOKEN."
            raise FileNotFoundError(
                f"{self.id!r} is no directory here, and the Hugging Face Hub has no {self.kind} of that name, or it is "
                f"private. {fix}"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise FileNotFoundError(
                f"{self.kind} {self.id} has no revision {self.revision!r} on the Hugging Face Hub. Give a branch, a "
                f"tag or a commit after the @."
            ) from error
        except Exception as error:  # whatever the library and its HTTP client raise
            raise FileNotFoundError(self._sentence(failure_reason(error))) from error

    def _sentence(self, reason: str) -> str:
        kind = " --repo-type dataset" if self.kind == "dataset" else ""
        return (
            f"{self.kind} {self.id} is no directory here, is not complete in the cache {_cache()}, and cannot be "
            f"downloaded: {reason}. Run `hf download {self.id}{kind}` where the Hub can be reached, with HF_HOME on a "
            "disk that this machine reads; or give a path."
        )

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Waits until no other process of this machine downloads this repository."""
        folder = self._list_of_files("").parent
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "postlude.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # a process that dies releases it
            yield

    @property
    def _storage(self) -> Path:
        return _cache() / self._folder

    @property
    def _folder(self) -> str:
        return "--".join([f"{self.kind}s", *self.id.split("/")])

    @property
    def _page(self) -> str:
        return self.id if self.kind == "model" else f"datasets/{self.id}"

    def _list_of_files(self, commit: str) -> Path:
        return _cache() / ".locks" / self._folder / f"postlude-{commit}.json"


def hub_repo(name: str | os.PathLike[str], kind: Literal["model", "dataset"]) -> HubRepo | None:
    """Returns the repository that ORG/NAME or ORG/NAME@REVISION names; None if it is a path.

    Text is a path if it exists, if the directory ORG does, or if the Hub cannot have an owner ORG, such as models.
    """
    text = os.fspath(name)
    match = HUB_NAME.fullmatch(text)
    if match is None or Path(text).exists() or Path(text).parent.is_dir() or text.split("/")[0] in NO_OWNERS:
        return None
    revision = match["revision"]
    return HubRepo(match["id"], kind) if revision is None else HubRepo(match["id"], kind, revision)


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _missing(snapshot: HubSnapshot, files: Sequence[str]) -> list[str]:
    return [file for file in files if not (snapshot.folder / file).is_file()]


def failure_reason(error: BaseException) -> str:
    """Returns why the Hub could not be used, in a clause."""
    from huggingface_hub import constants

    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    if any(isinstance(exception, OSError) and exception.errno == errno.ENOSPC for exception in chain):
        return "the disk of the cache is full (set HF_HOME to another)"
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    first: Any = str(error).strip().partition("\n")[0].removeprefix("Got: ").rstrip(".")
    return first or type(error).__name__


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
    return next((split for split, names in SPLIT_WORDS.items() if any(word in names for word in words)), None)


def _pattern(glob: str) -> re.Pattern[str]:
    """Returns a glob as a pattern: * stays within a folder, ** does not."""
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile(re.sub(r"\*\*/|\*\*|\*|\?|[^*?]+", lambda part: parts.get(part[0]) or re.escape(part[0]), glob))

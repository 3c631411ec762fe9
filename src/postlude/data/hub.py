"""HubRepo: a model or dataset of the Hugging Face Hub, read through the cache that huggingface_hub shares.

Files are downloaded when they are needed. One process of a machine downloads, and the others wait for it. The list of a
repository's files is kept with the cache, so that an interrupted download is never taken for the whole, and a later
start asks the Hub for nothing. `hf download ID` renews a cached copy.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from postlude.durable_files import write_atomic

HUB_NAME = re.compile(r"(?P<id>[\w-][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
NO_OWNERS = ("datasets", "docs", "models", "spaces")  # pages of the Hub, so that no owner has such a name
FIRST_FILES = ["README.md", "config.json"]  # small; a download of them also records the commit of the revision


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
        """Returns the paths of `files`, and downloads those that are not in the cache."""
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

"""--overwrite: deletes the run in a directory, so that another one starts there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from postlude.recipes.run.directory import CONFIG, RECORD
from postlude.recipes.run.lock import LOCK, RunLock
from postlude.recipes.run.start_mode import CHECKPOINTS, ROWS


def check_overwrite(run: Path, config: Mapping[str, Any]) -> None:
    """Refuses a directory that is no run, that a process is writing, or that the new run reads from."""
    path = run.expanduser().absolute()
    if not path.exists() or (path.is_dir() and not any(entry.name != ROWS for entry in path.iterdir())):
        return
    if not (path / CONFIG).is_file() or not ((path / RECORD).is_file() or (path / CHECKPOINTS).is_dir()):
        raise ValueError(
            f"{path} is no run directory (it has no {CONFIG} with {RECORD}), so --overwrite deletes nothing. Give "
            "another directory (--run)."
        )
    if (path / LOCK).exists():
        RunLock(path).release()  # raises if another process holds it
    for key, text in _texts(config):
        inside = Path(text.rpartition(":")[0] if ".py:" in text else text).expanduser().absolute()
        if key != "run" and path in (inside, *inside.parents) and inside.exists() and path / ROWS not in inside.parents:
            raise ValueError(
                f"{key} is {text}, in the run that --overwrite would delete. Move it, or give another directory "
                "(--run)."
            )


def delete_run(run: Path) -> None:
    """Deletes the run in a directory that `check_overwrite` accepted. Rows that a call gave stay."""
    path = run.expanduser().absolute()
    if os.environ.get("RANK", "0") != "0" or not path.exists():
        return
    lock = RunLock(path)
    try:
        (path / CONFIG).unlink(missing_ok=True)  # the first, so that what a kill leaves is no run
        for entry in path.iterdir():
            if entry.name in (ROWS, LOCK):
                continue
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    finally:
        lock.release()


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields every text of a config with its key."""
    if isinstance(value, str) and value:
        yield path, value
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from _texts(item, f"{path}.{name}" if path else str(name))

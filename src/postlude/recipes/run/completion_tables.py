"""CompletionTables: all completions of a run as Parquet. Each step has its own file, which a repeated step replaces."""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from postlude.durable_files import write_atomic
from postlude.recipes.run.start_mode import STEP


@dataclass(frozen=True)
class LoggedTurn:
    """What a model read since its last turn, and how many tokens it then wrote."""

    sequence: int
    """Number of the sequence in its trajectory. An agent that rewrites its history, or has several chats, has several:
    what a later one shares with an earlier one is read there."""
    read: str
    """The prompt, or an observation, as the chat template writes it."""
    tokens: int
    """The number of tokens of the turn."""


@dataclass(frozen=True)
class CompletionRow:
    """A row of the table."""

    step: int
    group: int
    """Number of the prompt in its step; completions of a prompt have the same."""
    environment: str
    """Name of the environment; "" if there is one."""
    prompt: str
    """The prompt, or its messages as JSON."""
    completion: str
    """The text of all turns, joined by "…"."""
    reward: float | None
    """None if the reward call failed."""
    components: Mapping[str, float]
    truncated: bool
    tokens: Sequence[int]
    logprobs: Sequence[float]
    error: str | None = None
    """Why the reward call, or the episode, failed."""
    turns: Sequence[LoggedTurn] = ()


class CompletionTables:
    """The files step-000100.parquet of a directory, which `pandas.read_parquet` reads as one table."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, step: int, rows: Sequence[CompletionRow]) -> None:
        pyarrow: Any = importlib.import_module("pyarrow")  # large, and only this file needs it
        parquet: Any = importlib.import_module("pyarrow.parquet")
        turn = {"sequence": pyarrow.int32(), "read": pyarrow.string(), "tokens": pyarrow.int32()}
        types = {
            "step": pyarrow.int64(),
            "group": pyarrow.int64(),
            **dict.fromkeys(("environment", "prompt", "completion"), pyarrow.string()),
            "reward": pyarrow.float64(),
            "components": pyarrow.map_(pyarrow.string(), pyarrow.float64()),
            "truncated": pyarrow.bool_(),
            "tokens": pyarrow.list_(pyarrow.int32()),
            "logprobs": pyarrow.list_(pyarrow.float32()),
            "error": pyarrow.string(),
            "turns": pyarrow.list_(pyarrow.struct(turn)),
        }
        table = pyarrow.Table.from_pylist([_row(row) for row in rows], schema=pyarrow.schema(types.items()))
        content = io.BytesIO()
        parquet.write_table(table, content, compression="zstd")
        self.path.mkdir(exist_ok=True)
        write_atomic(self.path / f"step-{step:06d}.parquet", content.getvalue())

    def drop_after(self, step: int) -> None:
        for path in self.path.glob("step-*.parquet"):
            if (match := STEP.fullmatch(path.stem)) and int(match[1]) > step:
                path.unlink()


def _row(row: CompletionRow) -> dict[str, Any]:
    values = asdict(row) | {"components": list(row.components.items())}
    values["turns"] = [{name: _utf8(value) for name, value in turn.items()} for turn in values["turns"]]
    return {name: _utf8(value) for name, value in values.items()}


def _utf8(value: Any) -> Any:
    """Returns a value whose text is UTF-8: half a surrogate pair must not end the run."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def check_completion_tables() -> str:
    """Refuses to save completions without pyarrow. Returns a line about them."""
    if find_spec("pyarrow") is None:
        raise ImportError(
            "save_completions writes Parquet, but the package pyarrow is missing. Run `pip install "
            "'postlude[parquet]'`, or leave it out."
        )
    return "completions/, Parquet"

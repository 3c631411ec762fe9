"""Structured logs: with `--log-format json` what a command prints and logs is one JSON object a line.

The variable POSTLUDE_LOG_FORMAT says so, and ranks inherit it. An object has time, level, rank, step, message, fields.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import traceback
from contextlib import suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

LOG_FORMAT = "POSTLUDE_LOG_FORMAT"
JSON_FORMAT, LOG_FORMATS = "json", ("text", "json")
STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "step", "taskName"}  # not a user's extra


def is_json() -> bool:
    """Returns whether this process logs JSON."""
    return os.environ.get(LOG_FORMAT) == JSON_FORMAT


def json_line(level: str, message: str, step: int | None = None, created: float | None = None, **fields: Any) -> str:
    """Returns a line without its end. Numbers that JSON does not have are text, as in metrics.jsonl."""
    now = datetime.now(UTC) if created is None else datetime.fromtimestamp(created, UTC)
    entry = {
        "time": now.isoformat(timespec="milliseconds"),
        "level": level,
        "rank": int(os.environ.get("RANK", "0")),
        "step": step,
        "message": message,
        "fields": _finite(fields),
    }
    return json.dumps(entry, default=str)


def print_line(message: str, step: int | None = None, **fields: Any) -> None:
    """Prints a message to standard output, as text or as JSON with these fields."""
    with suppress(OSError):  # the reader may be gone
        print(json_line("info", message, step, **fields) if is_json() else message, flush=True)


class JSONFormatter(logging.Formatter):
    """Writes a record as one line. A step that a filter added, and what the caller gave as `extra`, are in it."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        fields = {name: value for name, value in vars(record).items() if name not in STANDARD}
        fields["logger"] = record.name
        if record.exc_info and record.exc_info[1] is not None:
            fields["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        step = getattr(record, "step", None)
        return json_line(record.levelname.lower(), record.getMessage(), step, record.created, **fields)


def set_up_logging() -> None:
    """Has this process log JSON if `--log-format` asks for it."""
    if is_json():
        log_as_json()


def log_as_json(level: int = logging.WARNING) -> None:
    """Has all loggers, Python's warnings and uncaught exceptions of this process write JSON to standard error."""
    root = logging.getLogger()
    root.setLevel(level)
    if any(isinstance(handler.formatter, JSONFormatter) for handler in root.handlers):
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter())
    root.addHandler(handler)
    logging.captureWarnings(True)
    sys.excepthook = _print_uncaught


def _print_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    text = "".join(traceback.format_exception(kind, error, trace))
    print(json_line("critical", f"{kind.__name__}: {error}", traceback=text), file=sys.stderr, flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(name): _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value

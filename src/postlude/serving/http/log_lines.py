"""log_to_stderr: the log of the servers, in which a record is one line whatever a client sent."""

from __future__ import annotations

import logging
import textwrap
from typing import Any

from postlude.json_log import is_json, log_as_json


class OneLineFormatter(logging.Formatter):
    """Escapes line breaks and control characters of a message, and indents what follows it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escape(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """Returns the lines of a traceback, which may quote what a client sent."""
        lines = super().formatException(ei).split("\n")
        return textwrap.indent("\n".join(map(escape, lines)), "    ", lambda _: True)


def escape(text: str) -> str:
    """Returns text with escapes for every character that is not printed as itself."""
    return "".join(part if part.isprintable() else part.encode("unicode_escape").decode() for part in text)


def log_to_stderr(level: int) -> None:
    """Has all loggers of this process write to the standard error stream."""
    if is_json():
        log_as_json(level)
        return
    handler = logging.StreamHandler()
    handler.setFormatter(OneLineFormatter("%(asctime)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])

"""Where a path in a config file leads: beside the file that it was written in, else to the working directory."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from postlude.hf.builtin import BUILTIN, PACKAGED
from postlude.recipes.config.raw import RawValue

LOG = logging.getLogger("postlude")


def resolve_path(text: str, what: str, written: RawValue) -> str:
    """The same text with the path in it as the working directory sees it; `what` is as in `InputPath`.

    Only a path of a config file can lead beside that file. One that is there in both places is taken from beside the
    file, and that is said. One that is in neither is left as it is, for whoever reads it to refuse.
    """
    path, colon, name = text.rpartition(":") if what == "code" else (text, "", "")
    built_in = what == "model" and (text in BUILTIN or text in PACKAGED)
    if written.file is None or not path or built_in or Path(path).expanduser().is_absolute():
        return text
    here, beside = Path(path), Path(os.path.normpath(written.file.parent / path))
    if not beside.exists():
        return text
    if here.exists() and not here.samefile(beside) and os.environ.get("RANK", "0") == "0":
        LOG.warning(
            'config key "%s" %s: %s is there beside the config and in the working directory; %s is used.',
            written.path,
            written.where,
            path,
            beside,
        )
    return f"{beside}{colon}{name}"

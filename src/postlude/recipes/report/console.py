"""RunConsole: prints what a run shows. A reader that goes away, such as `| head`, does not end the run."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from rich.console import Console


class RunConsole(Console):
    """A console that prints nothing more once the reader of its output is gone; rich's own ends the process."""

    def on_broken_pipe(self) -> None:
        """Discards all later output."""
        self.quiet = True
        with suppress(OSError), open(os.devnull, "w") as nothing:  # Python writes to it once more when it ends
            os.dup2(nothing.fileno(), sys.stdout.fileno())

"""Delays the processes that tests start: the plugin puts this folder on their path."""

import os
import sys
from pathlib import Path

if seed := os.environ.get("POSTLUDE_TEST_DELAYS"):
    sys.path.insert(0, root := str(Path(__file__).parents[2]))
    from tests.delays import install

    sys.path.remove(root)
    install().seed = f"{seed} {os.getpid()}"

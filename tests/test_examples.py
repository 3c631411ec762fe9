"""Every example runs as it stands. Each ends in assertions of its own."""

from __future__ import annotations

import contextlib
import io
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ("selected_logprobs", "custom_loss", "value_head")


def printed(group: Any, name: str) -> str:
    """What an example prints, in a process that has run nothing of its kind before."""
    with contextlib.redirect_stdout(io.StringIO()) as told:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return told.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_example_runs_and_is_short(ranks: Ranks, name: str) -> None:
    source = (EXAMPLES / f"{name}.py").read_text()
    code = [line for line in source.splitlines() if line.strip() and not line.startswith(("import", "from", '"""'))]
    assert len(code) <= 25
    assert ranks(1, printed, name)[0].strip()

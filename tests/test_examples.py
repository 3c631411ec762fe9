"""Every example runs by itself, in a process without ranks, as a user starts it. Each ends in assertions of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ("selected_logprobs", "custom_loss", "value_head")


def run(name: str, told: Path) -> None:
    with told.open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_example_runs_and_is_short(tmp_path: Path, name: str) -> None:
    source = (EXAMPLES / f"{name}.py").read_text()
    code = [line for line in source.splitlines() if line.strip() and not line.startswith(("import", "from", '"""'))]
    assert len(code) <= 25
    process = multiprocessing.get_context("forkserver").Process(target=run, args=(name, tmp_path / "told"))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert (tmp_path / "told").read_text().strip()

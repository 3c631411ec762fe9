"""Every example runs as a user would run it. Each ends in assertions of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ("selected_logprobs", "custom_loss", "value_head")


@pytest.mark.parametrize("name", NAMES)
def test_example_runs_and_is_short(name: str) -> None:
    source = (EXAMPLES / f"{name}.py").read_text()
    code = [line for line in source.splitlines() if line.strip() and not line.startswith(("import", "from", '"""'))]
    assert len(code) <= 25
    result = run(f"{name}.py")
    assert result.stdout.strip()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    result = subprocess.run(
        [sys.executable, *arguments], cwd=EXAMPLES, capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    return result

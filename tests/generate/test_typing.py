"""Public signatures, as the type checker of a user sees them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import postlude

SCRIPT = """
from postlude import Engine
from postlude.generate.distributed import SyncedGenerator
from postlude.generate.generator import Generator
from postlude.hf.load import load_model, load_tokenizer

tokenizer = load_tokenizer("tiny-dense")
SyncedGenerator(Engine("tiny-dense"), tokenizer)
Generator(load_model("tiny-dense"), tokenizer)
"""


@pytest.mark.thorough  # mypy reads transformers and torch, for a minute
@pytest.mark.skipif(find_spec("mypy") is None, reason="needs mypy")
def test_generators_accept_a_tokenizer_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\nfollow_imports = silent\n")
    source = Path(postlude.__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=mypy.ini", "script.py"],
        check=False,
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert result.returncode == 0, result.stdout

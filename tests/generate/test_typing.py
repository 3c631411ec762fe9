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
from postlude.recipes import evaluate, grpo, sft

tokenizer = load_tokenizer("tiny-dense")
SyncedGenerator(Engine("tiny-dense"), tokenizer)
Generator(load_model("tiny-dense"), tokenizer)

rows = [{"prompt": "1+1=", "answer": "2"}]
grpo("my.yaml", steps=3, optimizer={"lr": 1e-5, "schedule": {"shape": "linear"}}, device="cpu")
grpo({"model": "a"}, epochs=2, environment={"kind": "dataset", "path": rows, "reward": lambda completion: 1.0})
grpo(environment=[{"kind": "dataset", "path": "a", "weight": 2.0}, {"kind": "reasoning_gym", "task": "chain_sum"}])
print(sft(data="rows.jsonl", lora={"rank": 8}, layout="tp=2", objective="mine.py:loss").summary.step)
print(evaluate(model="a", tasks=3, sampling={"temperature": 0.5}, rollout="http://localhost:8000").model)
sft(data="rows.jsonl", learning_rate=1e-3)  # type: ignore[call-arg]
grpo(optimizer={"lr": "high"})  # type: ignore[arg-type]
grpo(objective={"clip": 0.2})  # type: ignore[arg-type]
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

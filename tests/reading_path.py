"""Measures which lines of the source a GRPO step of the demo runs: python -m tests.reading_path

Prints, by file, the lines of the functions that the second step calls, most first. The first step starts what is
started once.
"""

from __future__ import annotations

import ast
import json
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

SOURCE = Path(__file__).parents[1] / "src" / "postlude"
OPTIONS = ("warm_start.steps=0", "steps=3", "evaluation.every=0", "loggers=[]", "export=false")


def called_functions() -> dict[str, set[int]]:
    """Returns the first lines of the functions that one step calls, by file."""
    from postlude import ranks
    from postlude.recipes.config.load import load
    from postlude.recipes.config.policy_configs import GRPOConfig
    from postlude.recipes.grpo import GRPOTrainer
    from postlude.recipes.training_run import TrainingRun

    called: dict[str, set[int]] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(SOURCE)):
            called.setdefault(code.co_filename[len(str(SOURCE)) + 1 :], set()).add(code.co_firstlineno)

    with tempfile.TemporaryDirectory() as directory, ranks():
        options = [f"--{option}" for option in (*OPTIONS, f"run={directory}/run")]
        trainer = GRPOTrainer(load(GRPOConfig, SOURCE / "configs" / "demo.yaml", options), "cpu")
        run = TrainingRun(trainer)
        run.start_or_resume()
        run.train_and_log_step()
        sys.setprofile(note)
        run.train_and_log_step()
        sys.setprofile(None)
        trainer.close()
    return called


def lines_of(file: str, starts: set[int]) -> int:
    """Returns how many lines the functions that begin at `starts` have, nested ones counted once."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse((SOURCE / file).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first in starts:
                lines.update(range(first, node.end_lineno + 1 if node.end_lineno else first))
    return len(lines)


def measure() -> dict[str, int]:
    """Returns the number of lines that a step runs, by file."""
    lines = {file: lines_of(file, starts) for file, starts in called_functions().items()}
    return {file: count for file, count in sorted(lines.items(), key=lambda item: -item[1]) if count}


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))

"""Startup time: help and user errors need no torch, and `info` imports only what it reads."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest

from postlude.hf.builtin import BUILTIN, FIELDS
from postlude.hf.read_model import model_from_hf, read_description

WATCHED = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from postlude.cli import main
ended = []
for words in json.loads(sys.argv[1]):
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        try:
            code = main(words)
        except SystemExit as stop:
            code = stop.code
    ended.append([code or 0, output.getvalue(), sorted(sys.modules)])
print(json.dumps(ended))
"""


def started(*commands: list[str]) -> list[tuple[int, str, set[str]]]:
    """Runs commands in one new process. Returns of each its exit code, its output, and the modules imported by then."""
    command = [sys.executable, "-c", WATCHED, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return [(code, output, set(modules)) for code, output, modules in json.loads(done.stdout)]


def imported(program: str) -> set[str]:
    """Returns the modules that a program has imported when it ends."""
    command = [sys.executable, "-c", f"{program}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return set(json.loads(done.stdout))


COMMANDS = (
    ("--help", 0, "COMMAND"),
    ("--version", 0, "postlude "),
    ("grpo --help", 0, "--optimizer.lr X"),
    ("grpo --help-all", 0, "--optimizer.lr (adamw)"),
    ("verify --help", 0, "--grid"),
    ("schema grpo", 0, '"exclusiveMinimum"'),
    ("", 2, "required: COMMAND"),
    ("dance", 2, "'dance' is not a command"),
    ("info tiny-dense --verbose", 2, "'--verbose' is not an option"),
    ("verify tiny-dense --grid --dtype int8", 2, "invalid choice: 'int8'"),
    ("verify tiny-dense --layout tp=x", 2, "'tp=x' is not of the form tp=N"),
    ("serve tiny-dense --threads 0", 2, "'0' is not a whole number of at least 1"),
    ("grpo demo --optimzer.lr 1", 2, 'did you mean "optimizer.lr"?'),
    ("grpo demo --steps many", 2, "give a whole number"),
    ("grpo demo --optimizer.lr -1", 2, '"optimizer.lr" is "-1"'),
    ("grpo dmo", 2, "did you mean"),
    ("status nothing", 2, "has no config.yaml"),
    ("launch slurm sft --data.path rows.jsonl", 0, "#SBATCH --nodes=1"),
    ("launch kubernetes sft --data.path rows.jsonl", 2, "needs --image"),
    ("sft --data.path rows.jsonl --optimizer.schedule.warmup -1", 2, '"optimizer.schedule.warmup" is "-1"'),
)


def test_help_and_user_errors_import_no_torch() -> None:
    results = started(*(arguments.split() for arguments, _, _ in COMMANDS))
    for (arguments, code, expected), (exit_code, output, modules) in zip(COMMANDS, results, strict=True):
        assert exit_code == code, arguments
        assert expected in output, arguments
        assert not modules & {"torch", "transformers", "tokenizers", "numpy", "asyncio"}, arguments


@pytest.mark.slow
def test_info_of_built_in_models_imports_only_what_it_needs() -> None:
    results = started(*(["info", model] for model in sorted(BUILTIN)))
    assert all(code == 0 and "parameters" in output for code, output, _ in results)
    *_, (_, _, modules) = results
    assert "torch" in modules
    assert not modules & {"transformers", "tokenizers", "torch.distributed.tensor", "sympy", "triton"}


@pytest.mark.parametrize("model", sorted(FIELDS))
def test_built_in_model_equals_transformers_config(model: str) -> None:
    family, config = model_from_hf(read_description(model))
    assert replace(family.to_model(FIELDS[model]), hf_config=config.hf_config) == config  # type: ignore[arg-type]


def test_torchrun_passes_options_after_two_dashes() -> None:
    from torch.distributed.run import get_args_parser

    words = ["grpo", "my.yaml", "--run", "runs/big", "--nproc", "2", "--seed=3"]
    read = get_args_parser().parse_args(["--nproc-per-node", "8", "-m", "--", "postlude", *words])
    assert read.module
    assert (read.training_script, read.training_script_args) == ("postlude", words)


def test_choices_are_the_same_everywhere() -> None:
    from postlude.options import Dtype, Recompute
    from postlude.recipes.config.settings import TrainingConfig
    from postlude.verify.choices import TOLERANCES

    assert get_args(get_type_hints(TrainingConfig)["recompute"]) == get_args(Recompute)
    assert tuple(TOLERANCES) == get_args(Dtype)

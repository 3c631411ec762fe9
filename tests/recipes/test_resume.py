"""Resuming: what may change, which checkpoint is loaded, and what a failed start leaves behind."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from postlude.cli import main
from postlude.recipes.config.load import load
from postlude.recipes.registry import RECIPES
from postlude.recipes.report.status import read_status
from postlude.recipes.run.config_changes import WHOLE, fingerprint, input_files, user_code_hashes
from postlude.recipes.run.files import CONFIG, read_metrics, read_record
from postlude.recipes.run.start_mode import RESUME_NEWEST, StartMode, find_checkpoint, parse_step, resume_command
from tests.conftest import Ranks
from tests.recipes.test_run import limit_file_size

SMALL = (
    "--budget=128",
    "--batch_size=4",
    "--save_every=1",
    "--keep_checkpoints=9",
    "--export=false",
    "--optimizer.lr=1e-3",
)


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """Returns the option of a dataset to train on."""
    path = tmp_path / "rows.jsonl"
    examples = [{"prompt": f"{number}+1=", "completion": str(number + 1)} for number in range(16)]
    path.write_text("".join(json.dumps(row) + "\n" for row in examples))
    return f"--data.path={path}"


def run_sft(group: Any, run: str, *overrides: str, start_mode: StartMode = RESUME_NEWEST) -> list[dict[str, Any]]:
    """Runs SFT and returns its metrics without times."""
    RECIPES["sft"].run(load(RECIPES["sft"].config, None, [*SMALL, "--run", run, *overrides]), "cpu", start_mode)
    return metrics_of(Path(run))


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [{name: row[name] for name in ("step", "loss", "grad_norm", "lr")} for row in read_metrics(run)]


def from_step(group: Any, step: int, run: str, *overrides: str) -> list[dict[str, Any]]:
    return run_sft(group, run, *overrides, start_mode=StartMode(step))


@pytest.mark.slow
def test_new_learning_rate_applies_from_the_resumed_step(ranks: Ranks, tmp_path: Path, rows: str) -> None:
    whole_run, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    (expected,) = ranks(1, run_sft, whole_run, rows, "--steps=4")
    ranks(1, run_sft, parts, rows, "--steps=2")
    (actual,) = ranks(
        1, run_sft, parts, rows, "--steps=4", "--optimizer.lr=1e-2", "--save_every=2", "--keep_checkpoints=1"
    )
    assert actual[:2] == expected[:2]
    assert [row["lr"] for row in actual] == [1e-3, 1e-3, 1e-2, 1e-2]
    assert actual[2]["loss"] == expected[2]["loss"], "its weights are those of the run so far"
    assert actual[3]["loss"] != expected[3]["loss"], "the third step went further"
    start = read_record(Path(parts))["starts"][-1]
    assert start["step"] == 2
    assert start["changed"] == {
        "steps": [2, 4],
        "optimizer.lr": [1e-3, 1e-2],
        "save_every": [1, 2],
        "keep_checkpoints": [9, 1],
    }
    with pytest.raises(pytest.fail.Exception, match=r"batch_size is 4 there and 8 here.*--from .*/parts/step-000004"):
        ranks(1, run_sft, parts, rows, "--steps=4", "--batch_size=8")
    before = read_status(Path(parts)), (Path(parts) / CONFIG).read_text()
    with pytest.raises(pytest.fail.Exception, match="is at step 4 already, but the run ends at step 3"):
        ranks(1, run_sft, parts, rows, "--steps=3")
    after = read_status(Path(parts)), (Path(parts) / CONFIG).read_text()
    assert (after[0].state, after[0].step, after[1]) == (before[0].state, 4, before[1]), "a refusal changes nothing"


@pytest.mark.slow
def test_resume_from_an_earlier_checkpoint(ranks: Ranks, tmp_path: Path, rows: str) -> None:
    run = str(tmp_path / "run")
    (expected,) = ranks(1, run_sft, run, rows, "--steps=4")
    with pytest.raises(pytest.fail.Exception, match="no checkpoint of step 7; it has step-000001, "):
        ranks(1, from_step, 7, run, rows, "--steps=4")
    (actual,) = ranks(1, from_step, 2, run, rows, "--steps=4")
    assert actual == expected
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    expected_names = [f"step-00000{step}" for step in ("1", "2", "3", "3.later", "4", "4.later")]
    assert names == expected_names, "what was saved after it is not lost"


@pytest.mark.slow
def test_run_starts_from_the_weights_of_another_runs_checkpoint(tmp_path: Path, rows: str) -> None:
    words = ["sft", rows, *SMALL, "--held_out.rows=3", "--held_out.every=1"]
    assert main([*words, "--run", str(tmp_path / "one"), "--steps=2"]) == 0
    second_command = [
        *words,
        "--run",
        str(tmp_path / "two"),
        "--from",
        str(tmp_path / "one" / "step-1"),
        "--batch_size=2",
    ]
    assert main([*second_command, "--steps=1"]) == 0
    measured = {row["step"]: row["eval/loss"] for row in read_metrics(tmp_path / "one")}
    first = read_metrics(tmp_path / "two")[0]
    assert (first["phase"], first["eval/loss"]) == ("start", measured[1])
    assert measured[0] != measured[1] != measured[2]
    assert main([*second_command, "--steps=2"]) == 0, "the same command goes on"
    assert [start["step"] for start in read_record(tmp_path / "two")["starts"]] == [0, 1]


@pytest.mark.slow
def test_run_ended_by_a_full_disk_resumes(tmp_path: Path, rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    def words(name: str, steps: int) -> list[str]:
        return ["sft", "--run", str(tmp_path / name), rows, *SMALL, f"--steps={steps}"]

    assert main(words("whole", 3)) == 0
    assert main(words("parts", 1)) == 0
    largest = max(path.stat().st_size for path in (tmp_path / "parts").rglob("*.safetensors"))
    with limit_file_size(largest // 2):
        assert main(words("parts", 3)) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert "after step 2 the run failed: OSError: " in message
    assert "step-000002 could not be written: rank 0 raised OSError: " in message
    assert message.endswith(f"When that is fixed, resume with: postlude {shlex.join(words('parts', 3))}")
    assert not (tmp_path / "parts" / "checkpoints" / "step-000002").exists()
    assert main(words("parts", 3)) == 0
    assert metrics_of(tmp_path / "parts") == metrics_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("--model=no/such/model", "no/such/model"),
        ("--data.path=no/rows.jsonl", "no/rows.jsonl"),
        ("--data.prompt=question", 'no column "question"'),
        ("--objective=nothing.py:mine", "nothing.py"),
        ("--held_out.rows=16", "16 rows are to be held out"),
        ("--budget=4", "too many for budget=4"),
    ],
)
def test_failed_start_leaves_no_directory(
    tmp_path: Path, rows: str, wrong: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {part.partition("=")[0]: part for part in (*SMALL, rows, "--steps=1", wrong)}
    assert main(["sft", "--run", str(tmp_path / "run"), *settings.values()]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_missing_checkpoint_leaves_no_directory(tmp_path: Path, rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["sft", "--run", str(run), rows, *SMALL, "--steps=1", "--resume-from=step-7"]) == 2
    assert f"{run} has no checkpoint of step 7; it has none." in capsys.readouterr().err
    assert not (run / "config.yaml").exists()


MINE = """
from postlude.objectives import SFT

def mine(inputs):
    return {factor} * SFT(over="loss_mask")(inputs)
"""


def test_changed_user_code_is_refused_unless_allowed(
    tmp_path: Path, rows: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    objective_file, run = tmp_path / "mine.py", tmp_path / "run"
    objective_file.write_text(MINE.format(factor=1.0))
    words = ["sft", "--run", str(run), rows, *SMALL, f"--objective={objective_file}:mine"]
    assert main([*words, "--steps=1"]) == 0
    assert main([*words, "--steps=2"]) == 0, "the same code goes on"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    objective_file.write_text(MINE.format(factor=2.0))
    capsys.readouterr()
    assert main([*words, "--steps=3"]) == 2
    message = capsys.readouterr().err.strip()
    assert message.startswith(
        f"postlude sft: {objective_file}:mine (objective.file) changed since {run} was last started. "
    )
    assert "--file_changes allow" in message
    assert len(message.splitlines()) == 1
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert main([*words, "--steps=3", "--file_changes=allow"]) == 0
    assert f"{objective_file}:mine (objective.file) changed since the run was last started" in caplog.text
    assert main([*words, "--steps=4"]) == 0, "what was allowed is the run's own code from then on"


def test_user_code_of_a_config_is_found_from_any_directory(tmp_path: Path) -> None:
    file = tmp_path / "tools.py"
    file.write_text("def one(): ...")
    config = {"environment": {"tools": [f"{file}:one", "math"], "settings": {"judge": f"{file}:two"}}, "run": "a.py:b"}
    hashes = user_code_hashes(config)
    assert {key: name for key, (name, _) in hashes.items()} == {
        "environment.tools.0": f"{file}:one",
        "environment.settings.judge": f"{file}:two",
    }
    file.write_text("def one(): return 1")
    assert user_code_hashes(config)["environment.tools.0"][1] != hashes["environment.tools.0"][1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["grpo", "a b.yaml"], "postlude grpo 'a b.yaml'"),
        (["grpo", "--resume-from", "step-1", "--lr=1"], "postlude grpo --lr=1"),
        (["grpo", "--resume-from=step-1", "--from", "a/step-2"], "postlude grpo --from a/step-2"),
    ],
)
def test_the_resume_command(words: list[str], expected: str) -> None:
    assert resume_command(words) == expected


def test_steps_and_checkpoints_are_selected_by_name(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000100"
    checkpoint.mkdir(parents=True)
    assert [parse_step(text) for text in ("step-100", "step-000100", "100")] == [100, 100, 100]
    for text in ("run/step-100", "run/step-000100", "run/checkpoints/step-000100"):
        assert find_checkpoint(str(tmp_path / text)) == checkpoint
    with pytest.raises(ValueError, match="'newest' names no step; write step-100"):
        parse_step("newest")
    with pytest.raises(ValueError, match="names no checkpoint; write RUN/step-100"):
        find_checkpoint(str(tmp_path / "run"))
    with pytest.raises(FileNotFoundError, match=r"no checkpoint .*/step-000099; .*/run has step-000100"):
        find_checkpoint(str(tmp_path / "run" / "step-99"))


@pytest.mark.slow
def test_lora_run_resumes_bit_exactly(ranks: Ranks, tmp_path: Path, rows: str) -> None:
    lora = ("--lora.rank=4", "--lora.alpha=8", "--lora.targets=attention,mlp", "--export=true")
    whole_run, parts = tmp_path / "whole", tmp_path / "parts"
    (expected,) = ranks(1, run_sft, str(whole_run), rows, "--steps=3", *lora)
    ranks(1, run_sft, str(parts), rows, "--steps=2", *lora)
    (actual,) = ranks(1, run_sft, str(parts), rows, "--steps=3", *lora)
    assert actual == expected
    for file in ("adapter/adapter_model.safetensors", "adapter/adapter_config.json", "model/model.safetensors"):
        assert (parts / file).read_bytes() == (whole_run / file).read_bytes()
    assert not (whole_run / "checkpoints" / "step-3" / "config.json").exists(), "adapters alone are no model"
    assert json.loads((parts / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == "tiny-dense"


def test_changed_data_or_models_are_refused_by_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, run, data = tmp_path / "model", tmp_path / "run", tmp_path / "pairs.jsonl"
    assert main(["convert", "tiny-dense", str(model)]) == 0
    lines = [f'{{"prompt": "{n}", "chosen": "good {n}", "rejected": "bad {n}"}}\n' for n in range(8)]
    data.write_text("".join(lines))
    words = ["dpo", f"--run={run}", f"--model={model}", f"--data.path={data}", "--batch_size=2", "--loggers=[]"]
    assert main([*words, "--steps=1", "--budget=128", "--export=false"]) == 0
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    def refusal() -> str:
        capsys.readouterr()
        assert main([*words, "--steps=2", "--budget=128"]) == 2
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
        return capsys.readouterr().err

    data.write_text("".join(reversed(lines)))
    assert f"{data} (data.path) changed since {run} was last started. Restore it, " in refusal()
    data.write_text("".join(lines))
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1  # another reference
    weights.write_bytes(content)
    assert f"{model} (model) changed since {run} was last started. Restore it, " in refusal()
    content[-3] ^= 1
    weights.write_bytes(content)
    (model / "README.md").write_text("Other words.")
    assert main([*words, "--steps=2", "--budget=128", "--export=false"]) == 0


def test_fingerprint_of_a_large_model_finds_what_training_changes(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tensors = {"embed": torch.zeros(4_500_000), "norm": torch.zeros(3000), "head": torch.zeros(1500)}
    save_file(tensors, file)
    assert file.stat().st_size > WHOLE
    fingerprints = {fingerprint([file])}
    for name, tensor in tensors.items():
        save_file({**tensors, name: tensor + 1}, file)
        fingerprints.add(fingerprint([file]))
    last = tensors["embed"].clone()
    last[-1] = 1  # a new token
    save_file({**tensors, "embed": last}, file)
    fingerprints.add(fingerprint([file]))
    assert len(fingerprints) == 5
    save_file(tensors, file)
    assert fingerprint([file]) in fingerprints


def test_only_the_kind_of_a_section_says_that_it_names_a_file(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "1", "answer": "1"}\n' * 70)
    judge = {"kind": "judge", "url": "http://localhost:1", "model": "org/served", "template": "{prompt}"}
    environment = {"kind": "dataset", "path": str(tmp_path / "p.jsonl"), "rewards": {"judge": judge}}
    config = RECIPES["grpo"].read(None, settings=[{"environment": environment}])
    assert input_files(config).keys() == {"model", "environment.path"}

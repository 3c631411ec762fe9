"""SFT, preference training and distillation from files: the same in every layout, and resumed bit-exactly."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from postlude.cli import main
from postlude.data.chat import EncodedSequence
from postlude.hf.export import export_hf
from postlude.hf.load import byte_tokenizer, load_model
from postlude.recipes.config.data import Examples, LabelledExamples, Pairs
from postlude.recipes.config.load import ConfigError, load
from postlude.recipes.config.schema import options
from postlude.recipes.dataset import EncodedRows
from postlude.recipes.distill import DistillTrainer
from postlude.recipes.kto import KTOTrainer, check_labels, unrelated_pairs
from postlude.recipes.pairs import DPOTrainer, RMTrainer
from postlude.recipes.registry import RECIPES
from postlude.recipes.row_sources import ShuffledRows, StepSizes
from postlude.recipes.run.files import read_metrics
from postlude.recipes.run.outcome import RunOutcome, read_outcome
from postlude.recipes.sequence_limit import SequenceLimit
from postlude.recipes.supervised import SFTTrainer
from postlude.recipes.training_run import run_training
from postlude.rollout.tasks import Task
from tests.conftest import Ranks

TRAINERS: dict[str, Callable[..., Any]] = {
    "sft": SFTTrainer,
    "dpo": DPOTrainer,
    "kto": KTOTrainer,
    "rm": RMTrainer,
    "distill": DistillTrainer,
}
COMMON = ("--budget=128", "--batch_size=4", "--steps=4", "--save_every=2", "--held_out.rows=3", "--held_out.every=2")
OBJECTIVE = """
from postlude.objectives import Loss, mean

def unlikelihood(inputs, *, scale=1.0):
    stats = inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets)
    return Loss(scale * stats.logprob, "loss_mask", {"mine": mean(stats.logprob, "loss_mask")})
"""


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def dataset(directory: Path, command: str) -> Path:
    """Writes sums: a few conversations, or pairs of a right and a wrong completion."""
    numbers = random.Random(0)
    rows: list[dict[str, Any]] = []
    for _ in range(19):
        first, second = numbers.randrange(50), numbers.randrange(50)
        question, answer = f"{first}+{second}=", str(first + second)
        if command in ("dpo", "rm"):
            rows.append({"prompt": question, "chosen": answer, "rejected": str(first)})
        elif command == "kto":
            right = bool(len(rows) % 2)
            rows.append({"prompt": question, "completion": answer if right else str(first), "label": right})
        else:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            rows.append({"messages": messages})
    return write(directory / f"{command}.jsonl", rows)


def config_of(command: str, directory: Path, *overrides: str) -> Any:
    recipe_options = {"distill": ["--teacher=tiny-moe", "--data=examples", "--top_k=8"]}.get(command, [])
    directory.mkdir(parents=True, exist_ok=True)
    path = ["--data.path", str(dataset(directory, command))]
    data_options = [] if any(override.startswith("--data") for override in overrides) else path
    return load(
        RECIPES[command].config,
        None,
        ["--run", str(directory / "run"), *COMMON, *recipe_options, *data_options, "--optimizer.lr=1e-3", *overrides],
    )


def trained(group: Any, command: str, directory: str, *overrides: str) -> list[dict[str, Any]]:
    config = config_of(command, Path(directory), *overrides)
    RECIPES[command].run(config, "cpu")
    rows = [json.loads(line) for line in (config.run / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in row.items() if not key.startswith(("time/", "tokens_per_second"))} for row in rows
    ]


@pytest.mark.parametrize("command", ["sft", "dpo", "kto", "rm", "distill"])
def test_run_trains_evaluates_and_exports_a_model(ranks: Ranks, tmp_path: Path, command: str) -> None:
    (rows,) = ranks(1, trained, command, str(tmp_path))
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["phase"] for row in rows] == ["start", *[command] * 4]
    measured = [row["eval/loss"] for row in rows if "eval/loss" in row]
    assert len(measured) == 3, "before the first step, after the second and after the last"
    assert measured[-1] < measured[0]
    assert rows[-1]["epoch"] == pytest.approx(1.0)
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    assert load_model(tmp_path / "run" / "model").config.vocab_size == 264


def test_kl_batch_pairs_prompts_with_other_completions() -> None:
    rows = [EncodedSequence([1, 2, 10], [0, 0, 1]), EncodedSequence([3, 20, 21, 22], [0, 1, 0, 1])]
    pairs = unrelated_pairs(rows, budget=4)
    assert [pair.tokens for pair in pairs] == [[1, 2, 20, 21], [3, 10]]
    assert [pair.mask for pair in pairs] == [[0, 0, 1, 0], [0, 1]]


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        ([True, "yes"], r"line 2 .*'yes' as its label, but a label is true or false"),
        ([1, 1], "every row of .* is desirable"),
    ],
)
def test_invalid_labels_are_refused(tmp_path: Path, labels: list[Any], sentence: str) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "1", "completion": "2", "label": label} for label in labels])
    with pytest.raises(ValueError, match=sentence):
        check_labels([LabelledExamples(path=path)])


def test_rows_with_a_held_out_prompt_are_not_trained_on(tmp_path: Path) -> None:
    """For any completion; pairs by their prompt; rows without a prompt by their full text."""
    prompts = [f"{number % 5}+1=" for number in range(20)]
    columns: dict[str, tuple[Any, Any]] = {
        "results": (Examples, lambda prompt, place: {"prompt": prompt, "completion": str(place)}),
        "pairs": (Pairs, lambda prompt, place: {"prompt": prompt, "chosen": str(place), "rejected": "no"}),
        "texts": (Examples, lambda prompt, place: {"text": prompt}),
    }
    sources: list[Any] = [[Task(prompt, {"place": place}) for place, prompt in enumerate(prompts)]]
    for name, (dataset, make) in columns.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(make(prompt, place)) + "\n" for place, prompt in enumerate(prompts)))
        sources.append(EncodedRows(dataset(path=file), byte_tokenizer(), SequenceLimit(64)))
    for rows in sources:
        batches: ShuffledRows[Any] = ShuffledRows(rows, held_out=3, seed=0)
        assert batches.held_out == [rows[place] for place in (17, 18, 19)]
        indices = batches.order.take(2 * batches.size)
        other_places = [place for place, prompt in enumerate(prompts) if prompt not in prompts[-3:]]
        assert sorted(indices) == sorted(2 * other_places), "twice each of the rows with the other two prompts"
    with pytest.raises(ValueError, match=r"5 rows are to be held out, but 20 rows have 5 different prompts"):
        ShuffledRows(sources[1], held_out=5, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    ["kto", *(pytest.param(command, marks=pytest.mark.thorough) for command in ("sft", "dpo", "rm", "distill"))],
)
def test_every_layout_gives_the_same_losses(ranks: Ranks, tmp_path: Path, command: str) -> None:
    unkept = ("--save_every=0", "--export=false")
    (alone,) = ranks(1, trained, command, str(tmp_path / "one"), *unkept)
    # A recipe's code knows stages and data-parallel ranks; the other layouts are the engine's.
    for layout in ("pp=2", "dp_shard=2") if command == "kto" else ("pp=2", "tp=2", "cp=2", "dp_shard=2"):
        spread, _ = ranks(2, trained, command, str(tmp_path / layout), *unkept, "--layout", layout)
        for expected, actual in zip(alone, spread, strict=True):
            assert actual.keys() == expected.keys()
            for name in {"loss", "eval/loss"} & expected.keys():
                assert actual[name] == pytest.approx(expected[name], abs=1e-4, rel=1e-4), layout


def interrupted(group: Any, command: str, directory: str, *overrides: str) -> None:
    class Stopped(TRAINERS[command]):  # type: ignore[misc]
        def train_batch(self, batch: Any, objective: Any) -> Any:
            metrics = super().train_batch(batch, objective)
            if self.step == 3:
                raise KeyboardInterrupt
            return metrics

    with suppress(KeyboardInterrupt):
        run_training(Stopped(config_of(command, Path(directory), *overrides), "cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sft", "dpo", "kto", "rm", "distill"])
def test_a_resumed_run_equals_an_uninterrupted_run(ranks: Ranks, tmp_path: Path, command: str) -> None:
    (expected,) = ranks(1, trained, command, str(tmp_path / "whole"))
    ranks(1, interrupted, command, str(tmp_path / "parts"))
    (actual,) = ranks(1, trained, command, str(tmp_path / "parts"))
    assert actual == expected


def test_custom_objective(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OBJECTIVE)
    objective_options = ("--objective", f"{tmp_path / 'mine.py'}:unlikelihood", "--objective.settings.scale=2")
    (rows,) = ranks(1, trained, "sft", str(tmp_path), *objective_options)
    assert rows[-1]["loss"] == pytest.approx(2 * rows[-1]["mine"])
    assert rows[-1]["eval/mine"] < rows[0]["eval/mine"], "these answers become less likely"


def test_gradients_that_are_not_finite_end_the_run(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OBJECTIVE)
    broken = ("--objective", f"{tmp_path / 'mine.py'}:unlikelihood", "--objective.settings.scale=.inf")
    ranks(1, trained, "sft", str(tmp_path), *broken, "--max_skipped_steps=1")
    ending = read_outcome(tmp_path / "run")
    assert ending is not None
    assert (ending.status, ending.exit_code) == ("failed", 1)
    assert "not finite in 2 optimizer steps in a row, up to step 2; max_skipped_steps is 1." in ending.message
    assert ending.message.endswith("No checkpoint was saved, and nothing was exported.")
    assert not (tmp_path / "run" / "model").exists()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    assert rows[1]["skipped_steps"] == 1.0


def test_a_last_step_that_is_not_finite_fails_the_run_and_keeps_its_weights(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OBJECTIVE)
    broken = ("--objective", f"{tmp_path / 'mine.py'}:unlikelihood", "--objective.settings.scale=.inf", "--steps=1")
    for _ in range(2):  # the second time it resumes after its last step
        ranks(1, trained, "sft", str(tmp_path), *broken)
        ending = read_outcome(tmp_path / "run")
        assert ending is not None
        assert (ending.status, ending.step, ending.exit_code) == ("failed", 1, 1)
        assert "not finite in the last optimizer step of the run, which ends at step 1. Raise steps" in ending.message
        assert "step-000001 is complete and its weights are finite" in ending.message
        assert not (tmp_path / "run" / "model").exists()


@pytest.mark.slow
def test_on_policy_distillation(ranks: Ranks, tmp_path: Path) -> None:
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": f"{index}+1="} for index in range(12)])
    (tmp_path / "judge.py").write_text(
        "def short(prompt, completion, example):\n    return float(len(completion) < 3)\n"
    )
    objective_options = (
        "--teacher=tiny-dense",
        "--data=on_policy",
        "--data.environment=dataset",
        f"--data.environment.path={prompts}",
        f"--data.environment.reward={tmp_path / 'judge.py'}:short",
        "--data.environment.workers=1",
        "--data.sampling.max_new_tokens=4",
        "--data.samples_per_prompt=2",
        "--objective.forward=0",
        "--top_k=264",
    )
    (rows,) = ranks(1, trained, "distill", str(tmp_path), *objective_options)
    assert len(rows[1]["rewards"]) == 8
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert steps == [step for step in (1, 2, 3, 4) for _ in range(8)], "what is held out is not shown as learned"
    assert rows[1]["loss"] == pytest.approx(0.0, abs=1e-5), "the teacher is what the student began as"


def ended(group: Any, command: str, directory: str, *overrides: str) -> RunOutcome:
    outcome: RunOutcome = RECIPES[command].run(config_of(command, Path(directory), *overrides), "cpu")
    return outcome


FAILING = """
async def run(task, client):
    raise RuntimeError("no disk")
"""


def test_distillation_without_a_sampled_token_ends_and_says_why(ranks: Ranks, tmp_path: Path) -> None:
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": f"{index}+1="} for index in range(12)])
    (tmp_path / "mine.py").write_text(FAILING)
    failing = (
        "--data=on_policy",
        "--data.environment=agent",
        f"--data.environment.path={prompts}",
        f"--data.environment.function={tmp_path / 'mine.py'}:run",
        "--data.sampling.max_new_tokens=4",
    )
    for rows, where in ((0, "step 1"), (2, "the held-out tasks")):
        settings = (*failing, f"--held_out.rows={rows}", f"--run={tmp_path / str(rows)}")
        (outcome,) = ranks(1, ended, "distill", str(tmp_path), *settings)
        assert (outcome.status, outcome.exit_code) == ("failed", 1)
        assert f"completions of {where}; the last error: {tmp_path / 'mine.py'}:run failed" in outcome.message
        assert "no disk" in outcome.message


UNLIKE_TEACHER = """
from postlude.objectives import Loss, mean

def away(inputs):
    logprob = inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets).logprob
    teacher = inputs.microbatch.column("teacher_logprobs")[:, 0]
    return Loss(logprob, "response_mask", {"teacher": mean(teacher, "response_mask")})
"""


def test_base_model_can_be_the_teacher_of_adapters(ranks: Ranks, tmp_path: Path) -> None:
    """It equals a second engine with the same weights while the adapters change, and needs no second model."""
    (tmp_path / "objective.py").write_text(UNLIKE_TEACHER)
    settings = ("--lora.rank=4", f"--objective={tmp_path / 'objective.py'}:away")
    export_hf(load_model("tiny-dense"), tmp_path / "copy")
    runs = []
    for teacher in ("tiny-dense", str(tmp_path / "copy")):
        runs += ranks(1, trained, "distill", str(tmp_path / Path(teacher).name), *settings, f"--teacher={teacher}")
    for below, above in zip(*runs, strict=True):
        assert below == above
    assert runs[0][-1]["loss"] < runs[0][1]["loss"] - 1e-4, "the student changed"
    assert config_of("distill", tmp_path, *settings, "--teacher=tiny-dense").other_models == ()


@pytest.mark.parametrize(
    ("rows", "settings", "sentence"),
    [
        (
            [{"question": "?"}],
            (),
            'has no column "messages", "prompt" or "text"; it has: "question". Name yours with data.messages, with',
        ),
        ([{"question": "?"}], ("--data.completion=question",), 'has no column "prompt"'),
        ([{"prompt": "1", "answer": "2"}], (), 'has no column "completion"'),
        (
            [{"prompt": "1", "completion": "2"}, {"prompt": "1"}],
            (),
            'line 2 of rows.jsonl has no value in column "completion"',
        ),
        ([], (), "has no rows"),
        (
            [{"prompt": "1" * 200, "completion": "2"}],
            (),
            r'line 1 of rows.jsonl has 202 tokens in "prompt" and "completion", too many for budget=128. Raise budget',
        ),
        (
            [{"prompt": "1" * 200, "completion": "2"}],
            ("--data.overlong=drop",),
            "every row of rows.jsonl is too long for budget=128",
        ),
        ([{"prompt": "1", "completion": "2"}] * 3, (), "3 rows are to be held out, but 3 rows have 1 different"),
    ],
)
def test_invalid_dataset_is_refused_before_the_run(
    ranks: Ranks, tmp_path: Path, rows: list[dict[str, Any]], settings: tuple[str, ...], sentence: str
) -> None:
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(pytest.fail.Exception, match=sentence):
        ranks(1, trained, "sft", str(tmp_path), f"--data.path={path}", *settings)


@pytest.mark.slow
def test_long_rows_may_be_dropped_or_truncated(ranks: Ranks, tmp_path: Path) -> None:
    rows = [{"text": "12345 " * length} for length in (2, 4, 60, 5, 6, 7)]
    path = write(tmp_path / "rows.jsonl", rows)
    tokens_by_setting = {}
    for overlong in ("drop", "cut"):
        (tmp_path / overlong).mkdir()
        settings = (
            f"--data.path={path}",
            f"--data.overlong={overlong}",
            "--batch_size=6",
            "--steps=1",
            "--held_out.rows=0",
        )
        (lines,) = ranks(1, trained, "sft", str(tmp_path / overlong), *settings)
        tokens_by_setting[overlong] = lines[-1]["tokens"]
    short_tokens = sum(len(row["text"]) + 1 for row in rows if len(row["text"]) < 100)
    assert tokens_by_setting["cut"] == short_tokens + 128
    assert tokens_by_setting["drop"] > short_tokens, "of five rows that are left, one comes twice"


@pytest.mark.parametrize("command", sorted(RECIPES))
def test_every_field_is_documented(command: str) -> None:
    assert [option.path for option in options(RECIPES[command].config) if not option.help] == []


@pytest.mark.parametrize(
    ("command", "override", "sentence"),
    [
        ("sft", "--batch_size=0", 'config key "batch_size" is "0" on the command line; give a whole number above 0'),
        ("sft", "--epochs=0", 'config key "epochs" is "0" on the command line; give a number above 0'),
        ("sft", "--data.overlong=squeeze", "refuse"),
        ("dpo", "--objective.beta=0", "beta"),
        ("distill", "--top_k=0", '"top_k" is "0"'),
        ("sft", "--keep_checkpoints=0", '"keep_checkpoints" is "0"'),
    ],
)
def test_invalid_configs_are_refused(tmp_path: Path, command: str, override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config_of(command, tmp_path, override, "--data.path=x") if "data" in override else config_of(
            command, tmp_path, override
        )


@pytest.mark.parametrize("least", [1, 2])
def test_a_run_with_more_epochs_takes_the_rows_that_a_short_last_step_left(least: int) -> None:
    for rows, size, first, more in itertools.product((5, 7, 12), (2, 3, 4, 20), (0.5, 1, 2), (2.5, 3)):
        before = StepSizes.of_epochs(size, first, rows, least=least)
        taken = [before.of_step(step) for step in range(before.steps)]
        assert before.rows_before(before.steps) == sum(taken)
        after = StepSizes.of_epochs(size, more, rows, least=least).continued(before.steps, sum(taken))
        taken += [after.of_step(step) for step in range(before.steps, after.steps)]
        assert after.of_step(after.steps) == 0
        assert after.total - least < sum(taken) <= after.total
        assert least <= min(taken)
        assert max(taken) <= size


def metrics_of_epochs(directory: Path, batch_size: int, *epochs: float) -> list[dict[str, Any]]:
    """Returns the metrics of a run over seven rows, resumed with each number of epochs."""
    file = directory / "seven.jsonl"
    file.write_text("".join(json.dumps({"text": "x" * (number + 1)}) + "\n" for number in range(7)))
    for number in epochs:
        words = [f"--run={directory / str(len(epochs))}", f"--data.path={file}", f"--batch_size={batch_size}"]
        assert main(["sft", *words, f"--epochs={number}", "--budget=32", "--export=false", "--loggers=[]"]) == 0
    return [
        {name: line[name] for name in ("step", "epoch", "tokens", "loss")}
        for line in read_metrics(directory / str(len(epochs)))
    ]


def test_the_last_step_has_the_rows_that_are_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "large").mkdir()
    (line,) = metrics_of_epochs(tmp_path / "large", 64, 1)
    tokens_of_an_epoch = line["tokens"]
    assert line["epoch"] == 1.0
    lines = metrics_of_epochs(tmp_path, 3, 3)
    assert len(lines) == 7
    assert lines[-1]["epoch"] == 3.0
    assert sum(line["tokens"] for line in lines) == 3 * tokens_of_an_epoch, "each row exactly three times"
    assert metrics_of_epochs(tmp_path, 3, 12 / 7, 3) == lines
    lines = metrics_of_epochs(tmp_path, 3, 1, 2, 3)
    assert [line["epoch"] for line in lines[2::3]] == [1.0, 2.0, 3.0]
    assert sum(line["tokens"] for line in lines) == 3 * tokens_of_an_epoch, "also after short last steps"
    assert "more than once" not in caplog.text

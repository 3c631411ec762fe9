"""Preflight checks everything that can be known before a rank starts or a directory is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from postlude.cli import main
from postlude.engine import AdamW, Engine
from postlude.hf.load import byte_tokenizer
from postlude.hf.read_model import model_from_hf, read_description
from postlude.layout import Layout
from postlude.model.parallel import local_shard
from postlude.plan.memory import estimate_memory
from postlude.recipes.checks.preflight import Check, PreflightError, busy_cpu_warning, preflight
from postlude.recipes.checks.second_model import check_teacher_tokens
from postlude.training_options import TrainingOptions
from tests.conftest import Ranks

ROWS = [{"prompt": f"{number} + 1 =", "completion": f" {number + 1}", "answer": f"{number + 1}"} for number in range(6)]


def dataset(directory: Path, rows: Any = ROWS) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def assert_refused(sentence: str) -> str:
    raise ValueError(sentence)


def test_the_preflight_reports_all_mistakes_but_none_that_follows_from_another() -> None:
    checks = [
        Check("one", lambda: "fine"),
        Check("two", lambda: assert_refused("the second is wrong.")),
        Check("three", lambda: assert_refused("never looked at."), after=("one", "two")),
        Check("four", lambda: assert_refused("the fourth is wrong.")),
    ]
    with pytest.raises(PreflightError) as raised:
        preflight(checks)
    assert str(raised.value) == "the second is wrong.\nthe fourth is wrong."
    assert preflight(checks[:1]) == {"one": "fine"}


def test_a_busy_machine_is_named_unless_the_threads_are_chosen() -> None:
    assert "load 7.9 on 4 cores" in busy_cpu_warning(7.9, 4, {})
    assert not busy_cpu_warning(7.9, 4, {"OMP_NUM_THREADS": "4"})
    assert not busy_cpu_warning(1.0, 4, {})
    assert not busy_cpu_warning(7.9, 1, {})  # one core has one thread


def test_an_internal_error_is_not_reported_as_a_user_error() -> None:
    with pytest.raises(KeyError):
        preflight([Check("ours", lambda: {}["missing"])])


def test_dry_run_reports_memory_per_rank_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = dataset(tmp_path)
    arguments = [f"--data.path={data}", f"--run={tmp_path}/run", "--layout=pp=2,tp=2", "--dry-run"]
    assert main(["sft", *arguments, "--fp8=true"]) == 0
    printed = capsys.readouterr().out
    assert "data: 6 rows" in printed
    assert "fp8: emulated in fp32, as cpu has none in FP8" in printed
    assert "layout: Layout(pp=2, tp=2) on 4 ranks" in printed
    for part in ("parameters", "gradients", "optimizer", "activations", "head"):
        assert part in printed
    assert list(tmp_path.iterdir()) == [data]


def test_a_dry_run_warns_of_rewards_for_a_random_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    arguments = ["--environment=dataset", f"--environment.path={tmp_path}/tasks.jsonl", "--environment.reward=exact"]
    arguments += ["--environment.workers=0", "--evaluation.every=0", f"--run={tmp_path}/run", "--dry-run"]
    for steps, warns in ((0, True), (5, False)):
        assert main(["grpo", *arguments, f"--warm_start.steps={steps}"]) == 0
        assert ("only chance finds a reward. Set warm_start.steps" in capsys.readouterr().out) == warns


def held_bytes(_: Any, model: str, layout: str) -> tuple[int, int]:
    engine = Engine(model, layout=Layout.parse(layout), optimizer=AdamW(lr=1e-3))
    return dist.get_rank(), sum(4 * local_shard(parameter).numel() for parameter in engine.parameters.values())


@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "dp_shard=2,ep=2"])
def test_estimated_memory_equals_that_of_an_engine(ranks: Ranks, layout: str) -> None:
    parsed = Layout.parse(layout)
    config = model_from_hf(read_description("tiny-moe"))[1]
    estimates = estimate_memory(config, TrainingOptions(layout=parsed, budget=64), compute_bytes=4)
    for rank, size in ranks(2, held_bytes, "tiny-moe", layout):
        expected = estimates[rank if parsed.pp == 2 else 0].parameters
        assert size == pytest.approx(expected, rel=0.02)  # every tensor-parallel rank has all of the small vectors


def test_model_that_does_not_fit_on_a_rank_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = dataset(tmp_path)
    monkeypatch.setattr("postlude.recipes.checks.preflight.os.sysconf", lambda name: 2000)  # bytes of a page, and pages
    assert main(["sft", f"--data.path={data}", f"--run={tmp_path}/run"]) == 2
    error_output = capsys.readouterr().err
    assert "a rank needs 12.5 MiB for weights, gradients and the optimizer's numbers, but has 3.8 MiB" in error_output
    assert "Raise layout.dp_shard, tp or pp" in error_output
    assert list(tmp_path.iterdir()) == [data]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("--head.backend=triton", "head.backend is triton, which cannot run: the tensors are on cpu, not cuda."),
        (
            "--head.memory_budget=0",
            'config key "head.memory_budget" is "0" on the command line; give a whole number of at least 1',
        ),
        ("--fp8=maybe", "fp8"),
        ("--selection_bias_rate=0.01", "selection_bias_rate is 0.01, but no router of [*-]{4} has a selection bias."),
    ],
)
def test_setting_unsupported_by_model_or_machine_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, message: str
) -> None:
    data = dataset(tmp_path)
    assert main(["sft", f"--data.path={data}", f"--run={tmp_path}/run", "--device=cpu", setting]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [data]


OBJECTIVES = """
from pathlib import Path
from postlude.objectives import Loss

def recording(inputs, *, over, to):
    batch = inputs.microbatch
    with Path(to).open("a") as file:
        file.write(" ".join(sorted(batch.columns)) + "\\n")
    return Loss(-inputs.head.logprobs(inputs.hidden, batch.targets).logprob, over)

def mistyped(inputs):
    return Loss(-inputs.microbatch.column("advantage"), "response_mask")

def broken(inputs):
    return Loss(inputs.hidden.no_such_thing(), "response_mask")

def leaving(inputs):
    raise SystemExit(3)

def over_nothing(inputs):
    return Loss(-inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets).logprob, "answer_mask")

def detached(inputs):
    return Loss(-inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets).logprob.detach(), "response_mask")
"""
SHORT = ("--steps=1", "--budget=256", "--export=false", "--save_every=0", "--loggers=[]")
BATCH_OF_2 = ("--batch_size=2", *SHORT)
GRPO = (
    "grpo",
    "--environment=dataset",
    "--environment.reward=exact",
    "--environment.workers=0",
    "--prompts_per_step=2",
    "--samples_per_prompt=2",
    "--sampling.max_new_tokens=4",
    "--evaluation.every=0",
    *SHORT,
)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("mistyped", 'has no column "advantage" (it has: "response_mask", "sequence_mean"'),
        ("broken", "AttributeError: 'Tensor' object has no attribute 'no_such_thing' (mine.py, line 15)"),
        ("leaving", "SystemExit: 3 (mine.py, line 18)"),
        ("over_nothing", 'has no column "answer_mask" (it has: "response_mask"'),
        ("detached", "ValueError: the loss has no gradient: the values that the objective returns do not depend on"),
    ],
)
def test_uncallable_objective_gives_clear_error(
    name: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objective_file = tmp_path / "mine.py"
    objective_file.write_text(OBJECTIVES)
    tasks = f"--environment.path={dataset(tmp_path)}"
    assert main([*GRPO, tasks, f"--objective={objective_file}:{name}", f"--run={tmp_path}/run"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"postlude grpo: the objective {objective_file}:{name} failed in its trial call: ")
    assert sentence in message
    assert "old_logprobs" in message, "the columns that exist are listed"
    assert len(message.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "recipe",
    ["sft", "dpo", "grpo", "grpo --reference=true", pytest.param("ppo", marks=pytest.mark.thorough), "distill"],
)
def test_trial_call_of_an_objective_has_the_columns_of_a_step(recipe: str, tmp_path: Path) -> None:
    data, columns_file = dataset(tmp_path), tmp_path / "columns"
    (tmp_path / "mine.py").write_text(OBJECTIVES)
    pairs = dataset(tmp_path / "pairs", [{"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}] * 3)
    objective_options = [
        f"--objective={tmp_path}/mine.py:recording",
        f"--objective.settings.to={columns_file}",
        f"--run={tmp_path}/run",
    ]
    over = "loss_mask" if recipe == "sft" else "response_mask"
    beside = {
        "sft": ["sft", f"--data.path={data}", *BATCH_OF_2],
        "dpo": ["dpo", f"--data.path={pairs}", *BATCH_OF_2],
        "distill": [
            "distill",
            "--teacher=tiny-dense",
            "--data=examples",
            f"--data.path={data}",
            "--batch_size=2",
            *SHORT,
        ],
    }.get(recipe, [recipe.split(maxsplit=1)[0], *GRPO[1:], f"--environment.path={data}", *recipe.split()[1:]])
    assert main([*beside, *objective_options, f"--objective.settings.over={over}"]) == 0
    first, *later_lines = columns_file.read_text().splitlines()
    assert later_lines, "a step was made"
    assert {first} == set(later_lines)


def test_teacher_with_another_vocabulary_is_refused_naming_the_first_difference(tmp_path: Path) -> None:
    student = byte_tokenizer()
    for name, vocab in (("same", {}), ("other", {"a": "b", "b": "a"})):
        tokenizer_json = json.loads(student.backend_tokenizer.to_str())
        known = tokenizer_json["model"]["vocab"]
        tokenizer_json["model"]["vocab"] = {vocab.get(token, token): number for token, number in known.items()}
        (tmp_path / name).mkdir()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(json.dumps(tokenizer_json)), eos_token="<|im_end|>"
        )
        tokenizer.save_pretrained(tmp_path / name)
        (tmp_path / name / "config.json").write_text('{"model_type": "llama"}')
    note = check_teacher_tokens("mine", student, str(tmp_path / "same"))
    assert note == "the student's tokens, with eos_token <|im_end|> where it has <|end|>"
    with pytest.raises(
        ValueError, match=r"token 97 is 'a' to the student mine and 'b' to the teacher .*other\. Distil"
    ):
        check_teacher_tokens("mine", student, str(tmp_path / "other"))
    student.add_tokens(["more"])
    with pytest.raises(ValueError, match=r"token 264 is 'more' to the student mine and no token to the teacher .*same"):
        check_teacher_tokens("mine", student, str(tmp_path / "same"))
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "config.json").write_text('{"model_type": "llama"}')
    assert "without a tokenizer to compare" in check_teacher_tokens("mine", student, str(tmp_path / "none"))

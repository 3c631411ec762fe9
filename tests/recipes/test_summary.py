"""The summary of a run, computed from its files, is the same in terminal and report."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from postlude.recipes.report.finish import print_summary
from postlude.recipes.report.formatting import format_number, format_share
from postlude.recipes.report.live import LiveView
from postlude.recipes.report.metrics import explain, glossary, known_metrics, title
from postlude.recipes.report.page import write_report
from postlude.recipes.report.summary import held_out_table, read_summary, summary_lines
from postlude.recipes.run.directory import RunDirectory
from postlude.recipes.run.outcome import RunOutcome, read_outcome, write_outcome

ROOT = Path(__file__).parents[2]


def grpo_run(directory: Path) -> Path:
    """Writes two supervised steps, the first evaluation and three GRPO steps with known numbers."""
    with RunDirectory(directory) as run:
        directory.mkdir(exist_ok=True)
        run.log(1, {"loss": 5.0, "skipped_steps": 1.0, "time": {"train": 1.0}}, phase="sft")
        before = {"reward_mean": 0.25, "pass@1": 0.125, "pass@4": 0.5, "length_mean": 3.0}
        run.log(2, {"loss": 2.0, "eval": before, "time": {"train": 1.0, "evaluation": 2.0}}, phase="sft")
        for step, reward in ((3, 0.3), (4, 0.6), (5, 0.5)):
            rewards = [reward] * 10
            expected_summary: dict[str, Any] = {
                "reward_mean": reward,
                "rewards": rewards,
                "loss": -0.1,
                "skipped_steps": 2.0 * (step == 4),
                "tokens": 400,
                "shared_tokens": 100 * (step - 3),
                "reused_prompt_tokens": 50 * (step - 3),
            }
            if step == 4:
                expected_summary |= {"reward/failed": 0.2, "grad_norm": math.inf}
            if step > 3:
                expected_summary["eval"] = {
                    "reward_mean": 1.5 * reward,
                    "pass@1": 0.5,
                    "pass@4": 0.75,
                    "length_mean": 2.0,
                }
            run.log(step, expected_summary | {"time": {"rollout": 10.0, "train": 2.0}}, phase="grpo")
    return directory


def printed_summary(run: Path) -> str:
    out = io.StringIO()
    print_summary(read_summary(run), Console(file=out, width=100))
    return out.getvalue()


def test_summary_numbers_equal_the_logged_ones(tmp_path: Path) -> None:
    summary = read_summary(grpo_run(tmp_path / "run"))
    assert summary.phases == ["sft", "grpo"]
    assert summary.score is not None
    assert (summary.score.metric, summary.score.first, summary.score.last) == ("eval/reward_mean", 0.25, 1.5 * 0.5)
    assert (summary.score.best, summary.score.best_step) == (pytest.approx(0.9), 4)
    assert summary.reward is not None
    assert (summary.reward.first, summary.reward.last, summary.reward.first_step) == (0.3, 0.5, 3)
    assert summary.loss is not None
    assert summary.loss.first == -0.1, "the warm start's loss is another thing's"
    assert (summary.completions, summary.failures, summary.skipped, summary.not_finite) == (30, 2, 3, 1)
    assert (summary.tokens, summary.shared_tokens) == (1200, 300)
    lines = [(line.label, line.text, line.note) for line in summary_lines(summary)]
    assert ("Shared tokens", "300", f"{format_share(300, 1200)} of 1,200 tokens, computed once") in lines
    assert ("Reused prompt tokens", "150", "not prefilled again in rollouts") in lines
    assert summary.seconds == {"train": 8.0, "evaluation": 2.0, "rollout": 30.0}
    assert held_out_table(summary) == [
        ["", "reward_mean", "pass@1", "pass@4", "length_mean"],
        ["before, step 2", "0.25", "0.125", "0.5", "3"],
        ["best, step 4", "0.9", "0.5", "0.75", "2"],
        ["after, step 5", "0.75", "0.5", "0.75", "2"],
    ]


def test_terminal_and_report_show_the_same_summary(tmp_path: Path) -> None:
    run = grpo_run(tmp_path / "run")
    page, terminal = write_report([run], run).read_text(), printed_summary(run)
    lines = summary_lines(read_summary(run))
    assert [fact.label for fact in lines[:3]] == ["Held-out reward", "Reward", "Reward failures"]
    assert lines[0].text == "0.25 → 0.75"
    for fact in lines:
        assert fact.text in terminal
        assert fact.text in page
    assert "pass@4" in terminal
    assert f"report: {run}/report.html" in terminal


def test_an_evaluation_after_the_first_steps_is_not_called_before(tmp_path: Path) -> None:
    for name, first in (("before", 2), ("first", 4)):
        run = grpo_run(tmp_path / name)
        metrics = run / "metrics.jsonl"
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        kept = [{key: line[key] for key in line if line["step"] >= first or "eval/" not in key} for line in lines]
        metrics.write_text("".join(json.dumps(line) + "\n" for line in kept))
        assert [row[0].partition(",")[0] for row in held_out_table(read_summary(run))[1:]][:1] == [name]


def test_an_evaluation_is_a_table(tmp_path: Path) -> None:
    tmp_path.mkdir(exist_ok=True)
    with RunDirectory(tmp_path) as run:
        scores = {"reward_mean": 0.5, "pass@1": 0.4375, "pass@2": 0.625, "pass@4": 0.8125, "length_mean": 7.0}
        run.log(0, {"eval": scores, "reward_mean": 0.5, "rewards": [0.5] * 8}, phase="eval")
    page, terminal = write_report([tmp_path], tmp_path).read_text(), printed_summary(tmp_path)
    for text in ("pass@1", "pass@2", "pass@4", "0.4375", "0.625", "0.8125"):
        assert text in terminal
        assert text in page
    assert "skipped" not in terminal


def test_names_are_not_truncated_in_a_narrow_terminal(tmp_path: Path) -> None:
    names = [f"a_rather_long_metric_{number}" for number in range(9)]
    with RunDirectory(tmp_path) as run:
        for step in (0, 1, 2):
            run.log(step, {"eval": {"reward_mean": step % 2, **dict.fromkeys(names, 0.5)}}, phase="sft")
    out = io.StringIO()
    print_summary(read_summary(tmp_path), Console(file=out, width=80))
    assert all(name in out.getvalue() for name in [*names, "before, step 0", "best, step 1", "after, step 2"])


@pytest.mark.parametrize("outcome", ["failed", "interrupted"])
def test_a_failure_is_the_first_line_of_the_summary(tmp_path: Path, outcome: Any) -> None:
    run = grpo_run(tmp_path / "run")
    sentence = "all rewards <failed>; look at reward.py."
    write_outcome(run, RunOutcome(outcome, 5, sentence))
    assert read_summary(run).failure.endswith(sentence)
    first = printed_summary(run).split("\n\n", 1)[0].strip().replace("\n", " ")
    assert first.startswith("The run ")
    assert sentence in first
    page = write_report([run], run).read_text()
    assert page.index("all rewards &lt;failed&gt;") < page.index("Held-out reward")
    write_outcome(run, RunOutcome("finished", 5))
    assert read_summary(run).failure == ""


def test_unreadable_ending_json_gives_clear_error(tmp_path: Path) -> None:
    assert read_outcome(tmp_path) is None
    (tmp_path / "ending.json").write_text("{")
    with pytest.raises(ValueError, match=r"ending.json does not say how a run ended"):
        read_outcome(tmp_path)


@pytest.mark.parametrize(
    ("logged", "metric"),
    [
        ({"eval/loss": 1.0, "eval/accuracy": 0.5}, "eval/accuracy"),
        ({"eval/loss": 1.0, "eval/mine": 0.5}, "eval/loss"),
        ({"loss": 1.0}, None),
        ({"eval/loss": math.nan}, None),
    ],
)
def test_score_is_the_recipes_main_metric(tmp_path: Path, logged: dict[str, float], metric: str | None) -> None:
    with RunDirectory(tmp_path) as run:
        run.log(1, logged, phase="sft")
    score = read_summary(tmp_path).score
    assert (score and score.metric) == metric


def test_the_best_loss_is_the_smallest(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        for step, loss in enumerate((3.0, 1.0, 2.0)):
            run.log(step, {"eval/loss": loss}, phase="sft")
    score = read_summary(tmp_path).score
    assert score is not None
    assert (score.best, score.best_step) == (1.0, 1)


def test_live_view_uses_the_names_of_the_summary() -> None:
    out = io.StringIO()
    with LiveView(8, console=Console(file=out, width=100), unit="task") as live:
        live.update(4, {"accuracy": 0.75, "loss": 0.5})
    assert out.getvalue().startswith("task 4/8  accuracy 0.75  loss 0.5  eta")


def test_fractions_are_not_rounded_to_0_or_100_percent() -> None:
    texts = [format_share(part, 1000).split() for part in (0, 1, 10, 500, 999, 1000)]
    assert [number for number, _ in texts] == ["0", "<1", "1", "50", ">99", "100"]
    assert format_number(0.82031) == "0.8203"


def test_glossary_equals_the_documentation() -> None:
    written = (ROOT / "docs" / "metrics.md").read_text()
    assert written == glossary(), "run `python -m postlude.recipes.report.metrics > docs/metrics.md`"


def test_every_metric_name_is_documented() -> None:
    for name in ("eval/pass@4", "reward/format", "time/train", "eval/kl_forward", "eval/accuracy", *known_metrics()):
        text = explain(name)
        assert text is not None, name
        assert all((text.title, text.meaning, text.range, text.watch)), name
    assert title("eval/pass@4") == "pass@4"
    assert explain("mine") is None
    assert title("mine/own_way") == "mine, own way"


def test_summary_of_a_running_run_ignores_incomplete_lines(tmp_path: Path) -> None:
    assert [fact.text for fact in summary_lines(read_summary(tmp_path))] == ["none"]
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "phase": "sft", "loss": 1.0}) + '\n{"step": 2')
    assert read_summary(tmp_path).step == 1


def test_the_remaining_time_has_the_evaluations_and_checkpoints_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was never measured makes it a lower bound: an evaluation before the first one, and the export."""
    now, seconds = 0.0, {"evaluation": 10.0, "checkpoint": 5.0}
    monkeypatch.setattr("time.monotonic", lambda: now)
    phases = {"evaluation": [25, 50, 75, 100], "checkpoint": [40, 80, 100]}
    for export in ([], [100]):
        now, out = 0.0, io.StringIO()
        console = Console(file=out, width=200)
        with LiveView(100, console=console, silent=False, phases={**phases, "export": export}) as live:
            for step in range(1, 100):
                now += 1.0 + sum(seconds[name] for name in seconds if step in phases[name])
                live.update(step, {"loss": 0.5})
                ahead = sum(seconds[name] * sum(later > step for later in phases[name]) for name in seconds)
                if step >= 40:
                    assert live.remaining() == (pytest.approx(100 - step + ahead), not export)
                else:
                    assert live.remaining()[1] is False
        assert ("eta at least" in out.getvalue().splitlines()[-1]) is bool(export)

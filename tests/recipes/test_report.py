"""The report is one file with everything that a run logged; logged text is escaped."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import random
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from postlude.recipes.report import page as report
from postlude.recipes.report.data import Series, thin
from postlude.recipes.report.formatting import format_number
from postlude.recipes.report.page import write_report
from postlude.recipes.run.directory import ReadOnlyRun, RunDirectory, Sample, open_run
from postlude.recipes.run.outcome import RunOutcome, write_outcome

VOID = {"meta", "br", "hr", "img", "input", "link"}
WORDS = [
    "the",
    "sum",
    "of",
    "these",
    "two",
    "numbers",
    "is",
    "so",
    "we",
    "add",
    "carry",
    "one",
    "4",
    "7",
    "12",
    "=",
    "+",
]
HERE = Path(report.__file__).parent
EVIL = "</script><script>alert('x')</script><img src=https://example.com/x onerror=alert(1)>"


@pytest.fixture(autouse=True)
def without_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables TensorBoard, which is no part of a report and slow for ten thousand steps."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)


def example_run(directory: Path, steps: int = 200, *, seed: int = 0, rollouts: int = 32, gain: float = 1.0) -> Path:
    """Writes a plausible GRPO run: rewards rise, completions shorten, one step goes wrong."""
    noise = random.Random(seed)
    config = {
        "model": "tiny-dense",
        "seed": seed,
        "steps": steps,
        "optimizer": {"lr": 1e-6 * gain, "betas": (0.9, 0.95)},
        "rollout": {"temperature": 1.0, "n": 8},
    }
    with open_run(directory, config) as run:
        run.resume_at(-1)
        for step in range(1, steps + 1):
            done = 1 - math.exp(-3 * gain * step / steps)
            rewards = [float(noise.random() < 0.15 + 0.7 * done) for _ in range(rollouts)]
            lengths = [max(1, round(noise.lognormvariate(5.2 - 0.8 * done, 0.4))) for _ in range(rollouts)]
            metrics: dict[str, Any] = {
                "reward_mean": sum(rewards) / rollouts,
                "length_mean": sum(lengths) / rollouts,
                "rewards": rewards,
                "lengths": lengths,
                "loss": noise.gauss(0.02 - 0.03 * done, 0.01),
                "kl": 0.02 * done + abs(noise.gauss(0, 0.002)),
                "entropy": 1.1 - 0.7 * done + noise.gauss(0, 0.03),
                "grad_norm": abs(noise.gauss(0.6, 0.1)) * (80 if step == steps // 2 else 1),
                "rollout_kl": abs(noise.gauss(4e-4, 1e-4)),
                "clip_ratio/high": abs(noise.gauss(0.01, 0.003)),
                "lr": 1e-6 * min(1.0, step / 20),
                "tokens_per_second": noise.gauss(5200, 250),
                "router/balance": noise.gauss(1.02, 0.01),
                "time": {"rollout": noise.gauss(3.1 - done, 0.2), "reward": 0.1, "train": noise.gauss(1.6, 0.1)},
            }
            if step == steps // 3:
                metrics |= {"loss": math.nan, "grad_norm": math.inf}
            if step % max(steps // 10, 1) == 0:
                metrics["eval"] = {"accuracy": 0.2 + 0.6 * done}
                run.log_samples(step, [_rollout(noise, done, index) for index in range(6)])
            run.log(step, metrics, phase="rollout/grpo")
    return directory


def _rollout(noise: random.Random, done: float, index: int) -> Sample:
    words = [" " + noise.choice(WORDS) for _ in range(noise.randint(20, 120))]
    words[5] = "\n"
    return Sample(
        prompt=f"What is {index + 3} + {index + 9}? Think step by step.",
        completion="".join(words),
        reward=float(noise.random() < done),
        components={"correct": float(noise.random() < done), "format": 0.1},
        tokens=[noise.randrange(32000) for _ in words],
        token_strings=words,
        logprobs=[-noise.expovariate(1.2 + 2 * done) for _ in words],
    )


class Page(HTMLParser):
    """Parses a page as a browser does; fails if elements are not properly nested."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.curves: list[str] = []
        self.links: list[str] = []
        self.scripts: list[dict[str, str | None]] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(path.read_text())
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        assert not any(name.startswith("on") for name in attributes), f"<{tag}> has code of its own: {attributes}"
        self.tags.append(tag)
        self.links += [str(attributes[name]) for name in ("src", "href", "action", "data") if name in attributes]
        if "data-curve" in attributes:
            self.curves.append(str(attributes["data-curve"]))
        if tag == "script":
            self.scripts.append(attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text += data


def test_every_metric_has_its_curve(tmp_path: Path) -> None:
    run = example_run(tmp_path / "run", steps=60)
    page = Page(write_report([run], tmp_path / "report.html"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    numbers = {key for line in lines for key, value in line.items() if isinstance(value, float)}
    assert {key for key in numbers if not key.startswith("time/")} == set(page.curves)
    assert len(page.curves) == len(set(page.curves))
    for words in (
        "Reward",
        "Policy gradient",
        "Other",
        "Where the time went",
        "rollout",
        "Distributions",
        "lengths",
        "optimizer.lr",
    ):
        assert words in page.text
    assert "best" in page.text
    assert "worst" in page.text
    assert "random" in page.text


def expert_run(directory: Path, steps: int = 4, layers: int = 2, experts: int = 4) -> Path:
    """Writes a run in which expert 0 gets all tokens of the last layer, and other layers are balanced."""
    directory.mkdir(parents=True)
    with RunDirectory(directory) as run:
        for step in range(1, steps + 1):
            names = [f"moe/layer_{layer:02d}" for layer in range(layers - 1)] + ["moe/mtp_1_layer_00"]
            loads = {name: [8.0] * experts for name in names} | {names[-1]: [32.0] + [0.0] * (experts - 1)}
            run.log_layers(step, {f"{name}/load": load for name, load in loads.items()})
            worst = {f"{name}/load_max_over_mean": max(load) * experts / sum(load) for name, load in loads.items()}
            run.log(step, {"loss": 1.0, "moe/load_max_over_mean": 2.5, **worst}, phase="sft")
    return directory


def test_expert_load_is_a_heat_map_per_layer(tmp_path: Path) -> None:
    target = write_report([expert_run(tmp_path / "run")], tmp_path)
    page, text = Page(target), target.read_text()
    assert page.curves == ["loss", "moe/load_max_over_mean"], "layers are rows of a map, and no curves"
    keys = ["moe/load_max_over_mean", "moe/layer_00/load", "moe/mtp_1_layer_00/load"]
    assert re.findall('data-heat="(.*?)"', text) == keys
    worst, even, idle = ((chart,) for key in keys for (chart,) in [charts(text, key, "heat")])
    assert even[0]["rows"] == ["5555"] * 4, "one shade, four steps each"
    assert idle[0]["rows"] == ["9999", "0000", "0000", "0000"]
    assert idle[0]["tips"] == ["most: 0, 4 times the mean\n3 of 4 without any"] * 4
    assert (worst[0]["rows"], worst[0]["names"]) == (["1111", "9999"], ["00", "mtp 1 00"]), "two layers, two shades"
    assert page.text.count("Load of the busiest expert") == 2


def test_heat_maps_of_a_large_model_stay_small(tmp_path: Path) -> None:
    run = expert_run(tmp_path / "run", steps=3, layers=60, experts=256)
    (run / "layers.jsonl").write_text(
        "".join(
            json.dumps({"step": step} | {f"moe/layer_{layer:02d}/load": noise.tolist() for layer in range(60)}) + "\n"
            for step, noise in enumerate(np.random.default_rng(0).integers(0, 99, (12, 256)), start=1)
        )
    )
    target = write_report([run], tmp_path)
    assert target.stat().st_size < 2_000_000
    maps = [chart for chart in every_chart(target.read_text())["charts"] if len(chart.get("rows", [])) == 256]
    assert len(maps) == 60
    assert {len(row) for chart in maps for row in chart["rows"]} == {6}, "fewer columns, all experts"


def test_runs_without_experts_or_without_the_file_have_no_heat_maps(tmp_path: Path) -> None:
    dense = example_run(tmp_path / "dense", steps=3)
    assert not (dense / "layers.jsonl").exists()
    heats = re.findall('data-heat="(.*?)"', write_report([dense], tmp_path / "dense.html").read_text())
    assert heats == ["rewards", "lengths"]
    old = expert_run(tmp_path / "old")
    (old / "layers.jsonl").unlink()
    assert re.findall('data-heat="(.*?)"', write_report([old], tmp_path).read_text()) == ["moe/load_max_over_mean"]


def test_report_is_one_file_without_external_resources(tmp_path: Path) -> None:
    target = write_report([example_run(tmp_path / "run", steps=20)], tmp_path / "report.html")
    page, text = Page(target), target.read_text()
    assert page.links == []
    assert not {"link", "iframe", "object", "embed", "img", "base"} & set(page.tags)
    library = (HERE / "uplot/uPlot.min.js").read_text()
    assert library in text
    assert (HERE / "uplot/LICENSE").read_text() in text, "the licence asks to be in every copy"
    assert not re.search(r"url\(|@import|\bfetch\(|XMLHttpRequest|https?://", text.replace(library, ""))


def test_only_the_scripts_of_the_report_may_run(tmp_path: Path) -> None:
    text = write_report([example_run(tmp_path / "run", steps=3)], tmp_path / "report.html").read_text()
    policy = re.search('http-equiv="Content-Security-Policy" content="(.*?)"', text)
    (code,) = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    assert policy is not None
    rules = dict(rule.split(" ", 1) for rule in policy[1].split("; "))
    assert (rules["default-src"], rules["script-src"]) == ("'none'", f"'sha256-{digest}'")


def evaluated(expression: str) -> Any:
    """Returns the value of an expression with the functions of `numbers.js`."""
    code = f"{(HERE / 'numbers.js').read_text()}\nconsole.log(JSON.stringify({expression}))"
    done = subprocess.run(["node", "-e", code], check=True, capture_output=True, timeout=300, text=True)
    return json.loads(done.stdout)


needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the script")


@needs_node
def test_report_script_is_valid_javascript(tmp_path: Path) -> None:
    code = tmp_path / "report.js"
    code.write_text("".join((HERE / name).read_text() for name in ("uplot/uPlot.min.js", "numbers.js", "page.js")))
    subprocess.run(["node", "--check", str(code)], check=True, capture_output=True, timeout=300)


@needs_node
def test_charts_format_numbers_as_python_does() -> None:
    numbers = [0, 1, -1.5, 0.123456, 9.9e-4, -3.21e-10, 1234.56, 12345.6, -9_999_999, 1e7, 2.5e300]
    assert evaluated(f"{numbers}.map(formatNumber)") == [format_number(number) for number in numbers]


@needs_node
def test_tick_labels_are_distinct_and_short() -> None:
    axes = [
        [start + step * count for count in range(6)]
        for step in (1e-9, 1e-7, 2.5e-4, 0.01, 0.25, 1, 2.5, 5, 250, 2000, 2.5e6, 1e12)
        for start in (0, step, 40 * step, -3 * step, 1000 * step)
    ]
    labels = evaluated(f"{axes}.map(ticks => ticks.map(tick => tickLabel(tick, ticks[1] - ticks[0])))")
    assert [len(set(texts)) for texts in labels] == [6] * len(axes)
    assert max(len(text) for texts in labels for text in texts) <= 10
    expected = [["0", "0.25", "0.5"], ["2.5", "5", "7.5"], ["12.5k", "15k", "17.5k"], ["1e-4", "1.5e-4", "2e-4"]]
    ticks = [[0, 0.25, 0.5], [2.5, 5, 7.5], [12_500, 15_000, 17_500], [1e-4, 1.5e-4, 2e-4]]
    actual = evaluated(f"{ticks}.map(ticks => ticks.map(tick => tickLabel(tick, ticks[1] - ticks[0])))")
    assert [[text.replace("e-0", "e-") for text in texts] for texts in actual] == expected


@needs_node
@pytest.mark.parametrize(("low", "high"), [(1, 1.2), (0.3, 1.1), (2e-7, 3e-4), (1e-300, 1e300)])
def test_logarithmic_ticks_are_few_and_within_the_range(low: float, high: float) -> None:
    ticks = evaluated(f"logTicks({low}, {high})")
    assert 2 <= len(ticks) <= 9
    assert all(low <= tick <= high * (1 + 1e-9) for tick in ticks)


@needs_node
def test_value_axes_leave_out_outliers_alone() -> None:
    values = [index / 100 for index in range(100)]
    assert evaluated(f"valueRange({values})") == pytest.approx([-0.0495, 1.0395])
    low, high = evaluated(f"valueRange({[*values, 1e6]})")
    assert low < 0
    assert 0.99 < high < 1.5
    assert [evaluated(f"valueRange({equal})") for equal in ([0], [3, 3], [])] == [[0, 1], [0, 3.75], None]


@needs_node
def test_smoothing_removes_noise_and_keeps_other_values() -> None:
    noisy = [step / 1000 + (0.5 if step % 2 else -0.5) for step in range(1000)]
    assert evaluated(f"[isNoisy({noisy}), isNoisy({sorted(noisy)}), isNoisy({noisy[:19]})]") == [True, False, False]
    calm = evaluated(f"runningMean({noisy}, 0.05)")
    np.testing.assert_allclose(calm[30:-30], np.arange(30, 970) / 1000, atol=0.02)


def test_logged_text_is_escaped(tmp_path: Path) -> None:
    evil = tmp_path / "<b>run"
    tokens = [EVIL, "<i>", "&amp;", '" onclick="alert(1)']
    with open_run(evil, {EVIL: EVIL, "nested": {"<u>": ["<s>", EVIL]}}) as run:
        run.log(1, {EVIL: 1.0, "time": {EVIL: 2.0}, f"list {EVIL}": [1.0, 2.0]}, phase=EVIL)
        sample = Sample(EVIL, EVIL, 1.0, {EVIL: 1.0}, [1, 2, 3, 4], tokens, [-0.1, -1.0, math.nan, -math.inf])
        run.log_samples(1, [sample, Sample(EVIL, EVIL)])
    safe = example_run(tmp_path / "safe", steps=2)
    page = Page(write_report([evil], tmp_path / "evil.html"))
    assert EVIL in page.text
    assert tokens[3] in page.text
    assert EVIL in page.curves
    assert page.links == []
    assert not {"img", "base", "u", "s"} & set(page.tags)
    plain = Page(write_report([safe], tmp_path / "safe.html"))
    code = [script for script in page.scripts if script.get("type") != "application/json"]
    assert len(code) == len([script for script in plain.scripts if script.get("type") != "application/json"]) == 1


def test_two_runs_are_drawn_in_the_same_charts(tmp_path: Path) -> None:
    first = example_run(tmp_path / "a" / "grpo", steps=30)
    second = example_run(tmp_path / "b" / "grpo", steps=50, seed=1, gain=3.0)
    target = write_report([first, second], tmp_path)
    page = Page(target)
    assert target == tmp_path / "report.html"
    assert page.curves.count("reward_mean") == 1
    (chart,) = charts(target.read_text(), "reward_mean")
    assert [series["run"] for series in chart["series"]] == [0, 1]
    assert [series["steps"][-1] for series in chart["series"]] == [30, 50]
    assert str(first) in page.text
    assert str(second) in page.text
    assert target.read_text().count('type="checkbox"') == 2
    different = re.search("How the configs differ</h2>(.*?)<h2>", target.read_text())
    assert different is not None
    assert re.findall(r"<code>(.*?)</code>", different[1]) == ["seed", "steps", "optimizer.lr"]


def test_hover_shows_the_values_that_were_logged(tmp_path: Path) -> None:
    run = example_run(tmp_path / "run", steps=30)
    text = write_report([run], tmp_path / "report.html").read_text()
    (chart,) = charts(text, "entropy")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert chart["series"][0]["steps"] == [line["step"] for line in lines]
    assert chart["series"][0]["values"] == pytest.approx([line["entropy"] for line in lines], rel=1e-7)
    assert (
        f'<span class="now">{format_number(lines[0]["entropy"])} → {format_number(lines[-1]["entropy"])}</span>' in text
    )


def two_phases(directory: Path, warm: int = 4, steps: int = 6) -> Path:
    """Writes a run whose warm start has a loss thousands of times that of the next phase."""
    directory.mkdir(parents=True)
    with RunDirectory(directory) as run:
        for step in range(1, warm + steps + 1):
            warming = step <= warm
            metrics: dict[str, Any] = {"loss": 5.0 - step if warming else 0.001 * step, "lr": 1e-3}
            if not warming:
                metrics["reward_mean"] = 0.1 * step
            if step >= warm:
                metrics["eval"] = {"reward_mean": 0.05 * step}
            run.log(step, metrics, phase="sft" if warming else "grpo")
    return directory


def every_chart(page: str) -> Any:
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert data is not None
    return json.loads(data[1])


def charts(page: str, key: str, kind: str = "curve") -> list[Any]:
    """Returns what each figure of a metric draws, with lists of steps in place of their indices."""
    data = every_chart(page)
    indices = re.findall(rf'data-{kind}="{key}".*?data-chart="(\d+)"', page, re.DOTALL)
    drawn = [data["charts"][int(index)] for index in indices]
    for series in (series for chart in drawn for series in chart.get("series", [])):
        series["steps"] = data["steps"][series["steps"]]
    return drawn


def test_losses_of_two_phases_are_not_joined_by_a_line(tmp_path: Path) -> None:
    page = write_report([two_phases(tmp_path / "run")], tmp_path).read_text()
    warm, main = charts(page, "loss")
    assert [series["steps"] for series in warm["series"]] == [[1, 2, 3, 4]]
    assert [series["steps"] for series in main["series"]] == [[5, 6, 7, 8, 9, 10]]
    assert [len(charts(page, key)) for key in ("eval/reward_mean", "reward_mean", "lr")] == [1, 1, 2]


def test_phases_are_bands_behind_curves_that_span_them(tmp_path: Path) -> None:
    page = write_report([two_phases(tmp_path / "run")], tmp_path).read_text()
    (chart,) = charts(page, "eval/reward_mean")
    assert chart["bands"] == [["sft", 1, 4], ["grpo", 5, 10]]
    assert len(chart["series"]) == 1, "one line through both"
    other_run = two_phases(tmp_path / "other", warm=2)
    (chart,) = charts(write_report([tmp_path / "run", other_run], tmp_path).read_text(), "eval/reward_mean")
    assert chart["bands"] == [], "these two have other phases at the same step"


def test_values_that_differ_little_stay_distinct(tmp_path: Path) -> None:
    close = {"a": 1000 + 1e-4, "b": 1e-9, "c": 123456.0, "d": 0.99999 + 1e-7, "e": 1e7}
    with RunDirectory(tmp_path) as run:
        for step, factor in enumerate((1.0, 1.0000005), start=1):
            run.log(step, {name: value * factor for name, value in close.items()}, phase="sft")
    page = write_report([tmp_path], tmp_path).read_text()
    for name in close:
        assert len(set(charts(page, name)[0]["series"][0]["values"])) == 2


def test_an_evaluation_has_no_curves(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        run.log(0, {"eval": {"reward_mean": 0.5, "pass@2": 0.625}, "reward_mean": 0.5, "rewards": [0, 1]}, phase="eval")
    page = Page(write_report([tmp_path], tmp_path / "report.html"))
    assert page.curves == []
    for word in ("pass@2", "0.625", "2 completions"):
        assert word in page.text


def test_several_runs_are_listed_side_by_side(tmp_path: Path) -> None:
    first, second = two_phases(tmp_path / "first"), two_phases(tmp_path / "second", steps=8)
    write_outcome(first, RunOutcome("finished", 10))
    write_outcome(second, RunOutcome("failed", 12, "no reward was left."))
    text = write_report([first, second], tmp_path).read_text()
    page = Page(tmp_path / "report.html")
    assert "second: The run failed after step 12: no reward was left." in page.text
    for word in ("finished", "failed", "0.2 → 0.5", "0.2 → 0.6"):
        assert word in page.text
    assert text.index("no reward was left") < text.index("<table")


def test_the_report_shows_the_recorded_machine(tmp_path: Path) -> None:
    run = two_phases(tmp_path / "run")
    assert "Machine" not in Page(write_report([run], tmp_path / "without.html")).text
    start = {"commit": "0123abc", "versions": {"torch": "2.11.0"}, "device": "NVIDIA H200"}
    (run / "run.json").write_text(json.dumps({"starts": [{"commit": "old"}, start]}))
    text = Page(write_report([run], tmp_path / "with.html")).text
    for word in ("Machine", "0123abc", "versions.torch", "2.11.0", "NVIDIA H200 · torch 2.11.0 · commit 0123abc"):
        assert word in text
    assert "old" not in text.split("Machine")[1]


@pytest.mark.slow
def test_a_report_of_ten_thousand_steps_is_small(tmp_path: Path) -> None:
    run = example_run(tmp_path / "run", steps=10_000, rollouts=8)
    target = write_report([run], tmp_path / "report.html")
    assert target.stat().st_size < 2_000_000
    assert "reward_mean" in Page(target).curves


@pytest.mark.parametrize("state", ["nothing", "opened", "torn"])
def test_report_of_an_empty_run(tmp_path: Path, state: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    if state != "nothing":
        open_run(run, {"lr": 1.0}).close()
    if state == "torn":
        (run / "metrics.jsonl").write_text('{"step": 1, "lo')
    page = Page(write_report([run], tmp_path / "report.html"))
    assert "run has no metrics yet" in page.text
    assert page.curves == []


def test_report_of_an_empty_and_a_full_run(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    page = Page(write_report([tmp_path / "empty", example_run(tmp_path / "run", steps=5)], tmp_path / "report.html"))
    assert "empty has no metrics yet" in page.text
    assert "reward_mean" in page.curves


def test_no_run_and_no_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one"):
        write_report([], tmp_path)
    with pytest.raises(FileNotFoundError, match="not a directory"):
        write_report([tmp_path / "gone"], tmp_path)


ODD = {
    "one step": [(1, {"loss": 1.0, "lengths": [3]})],
    "no number is finite": [(1, {"loss": math.nan}), (2, {"loss": math.inf, "tokens_per_second": math.nan})],
    "all equal": [(step, {"loss": 0.0, "lengths": [5, 5], "time": {"train": 0.0}}) for step in range(1, 4)],
    "huge and tiny": [(1, {"loss": 1e300, "x": 1e-300}), (2, {"loss": -1e300, "x": 2e-300})],
    "gaps": [(1, {"loss": 1.0}), (1000, {"other": 2}), (500_000, {"loss": 2.0, "time": {"train": 1.0}})],
    "not numbers": [(1, {"note": "text", "flag": True, "lengths": [], "mixed": ["a", 1.0, math.nan]})],
    "twice": [(1, {"loss": 1.0}), (1, {"eval": {"accuracy": 0.5}})],
}


@pytest.mark.parametrize("name", ODD)
def test_unusual_runs_are_drawn(tmp_path: Path, name: str) -> None:
    with RunDirectory(tmp_path) as run:
        for step, metrics in ODD[name]:
            run.log(step, metrics, phase="sft")
    target = write_report([tmp_path], tmp_path / "report.html")
    page = Page(target)
    logged = {key for _, metrics in ODD[name] for key, value in metrics.items() if isinstance(value, int | float)}
    assert logged <= set(page.curves)
    every_chart(target.read_text())


def test_long_completions_are_truncated(tmp_path: Path) -> None:
    count = 50_000
    words = [f" {index}" for index in range(count)]
    with RunDirectory(tmp_path) as run:
        run.log(1, {"loss": 1.0}, phase="sft")
        run.log_samples(1, [Sample("p" * count, "".join(words), 1.0, {}, list(range(count)), words, [-0.5] * count)])
    target = write_report([tmp_path], tmp_path / "report.html")
    text = Page(target).text
    assert target.stat().st_size < 200_000
    assert "49,200 tokens left out" in text
    assert "46,000 characters left out" in text
    assert " 599 …" in text.replace("  ", " ")
    assert " 49999" in text


def test_thinning_keeps_every_extreme_and_the_means() -> None:
    values = np.random.default_rng(0).normal(size=10_000)
    values[[17, 5000, 9_998]] = [50.0, -50.0, 70.0]
    series = Series(np.arange(10_000, dtype=float), values)
    extremes, means = thin(series, 500)
    assert len(extremes.values) <= 500
    assert {50.0, -50.0, 70.0} <= set(extremes.values.tolist())
    assert (np.diff(extremes.steps) > 0).all()
    assert means is not None
    np.testing.assert_allclose(means.values, values.reshape(250, 40).mean(1))
    np.testing.assert_equal(means.steps, np.arange(250) * 40 + 20)
    assert thin(series, 10_000) == (series, None)


def test_read_only_run_logs_nothing(tmp_path: Path) -> None:
    onlooker = ReadOnlyRun(tmp_path)
    onlooker.log(1, {"loss": 1.0}, phase="sft")
    assert "no metrics yet" in Page(write_report([tmp_path], tmp_path / "out.html")).text

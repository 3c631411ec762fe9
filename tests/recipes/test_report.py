"""The report is one file with everything that a run logged; logged text is escaped."""

from __future__ import annotations

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
from postlude.recipes.report.charts import Ruler
from postlude.recipes.report.data import Series, downsample, smooth
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
    for words in ("Reward", "More", "Where the time went", "rollout", "Distributions", "lengths", "optimizer.lr"):
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
    figures = dict(re.findall(r'data-heat="(.*?)"(.*?)</figure>', text, re.DOTALL))
    assert list(figures) == ["moe/load_max_over_mean", "moe/layer_00/load", "moe/mtp_1_layer_00/load"]
    even, idle = figures["moe/layer_00/load"], figures["moe/mtp_1_layer_00/load"]
    rows = "".join(f"M0 {row}h4" for row in range(4))
    assert re.findall(r'<path( class="idle")?[^>]* d="(.*?)"', even) == [("", rows)], "one shade, four steps each"
    assert re.findall(r'<path( class="idle")?[^>]* d="(.*?)"', idle) == [
        (' class="idle"', "M0 1h4M0 2h4M0 3h4"),
        ("", "M0 0h4"),
    ]
    assert "most: 0, 4 times the mean\n3 of 4 without any" in idle
    assert re.findall(r' d="(.*?)"', figures["moe/load_max_over_mean"]) == ["M0 0h4", "M0 1h4"], (
        "two layers, two shades"
    )
    assert "Load of the busiest expert" in figures["moe/load_max_over_mean"]


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
    assert target.read_text().count('viewBox="0 0 6 256"') == 60, "fewer columns, all experts"


def test_runs_without_experts_or_without_the_file_have_no_heat_maps(tmp_path: Path) -> None:
    dense = example_run(tmp_path / "dense", steps=3)
    assert not (dense / "layers.jsonl").exists()
    assert "data-heat" not in write_report([dense], tmp_path / "dense.html").read_text()
    old = expert_run(tmp_path / "old")
    (old / "layers.jsonl").unlink()
    assert re.findall('data-heat="(.*?)"', write_report([old], tmp_path).read_text()) == ["moe/load_max_over_mean"]


def test_report_is_one_file_without_external_resources(tmp_path: Path) -> None:
    target = write_report([example_run(tmp_path / "run", steps=20)], tmp_path / "report.html")
    page = Page(target)
    assert page.links == []
    assert not {"link", "iframe", "object", "embed", "img", "base"} & set(page.tags)
    assert not re.search(r"url\(|@import|\bfetch\(|XMLHttpRequest|https?://", target.read_text())
    assert "default-src 'none'" in target.read_text()


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to read the script")
def test_report_script_is_valid_javascript() -> None:
    script = Path(report.__file__).with_suffix(".js")
    subprocess.run(["node", "--check", str(script)], check=True, capture_output=True, timeout=300)


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


def test_samples_of_an_earlier_version_show_their_reward_components(tmp_path: Path) -> None:
    """Its samples.jsonl has them under "parts"."""
    with open_run(tmp_path / "run", {}) as run:
        run.log(1, {"loss": 1.0}, phase="grpo")
        run.log_samples(1, [Sample("a prompt", "a completion", 1.0, {"component": 0.25})])
    samples = tmp_path / "run" / "samples.jsonl"
    samples.write_text(samples.read_text().replace('"components"', '"parts"'))
    assert '"parts"' in samples.read_text()
    assert "component 0.25" in Page(write_report([tmp_path / "run"], tmp_path / "report.html")).text


def test_two_runs_are_drawn_in_the_same_charts(tmp_path: Path) -> None:
    first = example_run(tmp_path / "a" / "grpo", steps=30)
    second = example_run(tmp_path / "b" / "grpo", steps=50, seed=1, gain=3.0)
    target = write_report([first, second], tmp_path)
    page = Page(target)
    assert target == tmp_path / "report.html"
    assert page.curves.count("reward_mean") == 1
    (plot,) = plots(target.read_text(), "reward_mean")
    runs = plot["runs"]
    assert [run["run"] for run in runs] == [0, 1]
    assert [run["steps"][-1] for run in runs] == [30, 50]
    assert str(first) in page.text
    assert str(second) in page.text
    assert target.read_text().count('type="checkbox"') == 2
    different = re.search("How the configs differ</h2>(.*?)<h2>", target.read_text())
    assert different is not None
    assert re.findall(r"<code>(.*?)</code>", different[1]) == ["seed", "steps", "optimizer.lr"]


def test_hover_shows_the_values_that_were_logged(tmp_path: Path) -> None:
    run = example_run(tmp_path / "run", steps=30)
    text = write_report([run], tmp_path / "report.html").read_text()
    ((run_data,),) = (plot["runs"] for plot in plots(text, "entropy"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert run_data["steps"] == [line["step"] for line in lines]
    assert run_data["values"] == [format_number(line["entropy"]) for line in lines]
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


def plots(page: str, key: str) -> list[Any]:
    data = re.search(rf'data-curve="{key}".*?<script type="application/json">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    plot_data: list[Any] = json.loads(data[1])
    return plot_data


def test_losses_of_two_phases_are_not_joined_by_a_line(tmp_path: Path) -> None:
    page = write_report([two_phases(tmp_path / "run")], tmp_path).read_text()
    warm, main = plots(page, "loss")
    assert warm["runs"][0]["steps"] == [1, 2, 3, 4]
    assert main["runs"][0]["steps"] == [5, 6, 7, 8, 9, 10]
    assert main["x"][0] > warm["x"][1], "side by side"
    places = main["runs"][0]["places"]
    assert max(places) - min(places) > 100, "small losses have an axis of their own"
    assert [len(plots(page, key)) for key in ("eval/reward_mean", "reward_mean", "lr")] == [1, 1, 2]


def test_phases_are_bands_behind_curves_that_span_them(tmp_path: Path) -> None:
    page = write_report([two_phases(tmp_path / "run")], tmp_path).read_text()
    figure = page[page.index('data-curve="eval/reward_mean"') :].split("</figure>")[0]
    assert figure.count('class="band') == 2
    assert figure.count("<path") == 1, "one line through both"
    other_run = two_phases(tmp_path / "other", warm=2)
    comparison = write_report([tmp_path / "run", other_run], tmp_path).read_text()
    figure = comparison[comparison.index('data-curve="eval/reward_mean"') :].split("</figure>")[0]
    assert 'class="band' not in figure, "these two have other phases at the same step"


def test_tick_labels_are_distinct(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        for step in range(1, 6):
            close = {"a": 1000 + 1e-4 * step, "b": 1e-9 * step, "c": 123456.0 + step, "d": 0.99999 + 1e-7 * step}
            run.log(step, close | {"e": 1e7 * step, "f": 3.0}, phase="sft")
    page = write_report([tmp_path], tmp_path).read_text()
    axes = re.findall(r"<g>(.*?)<svg", page)
    assert len(axes) == 6
    for axis in axes:
        for anchor in ("end", "middle"):
            labels = re.findall(rf'text-anchor="{anchor}">(.*?)<', axis)
            assert len(labels) == len(set(labels)), labels


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
    assert not re.search(r'[dxy12]="[^"]*(nan|inf)', target.read_text())


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


def test_thinning_keeps_every_extreme() -> None:
    values = np.random.default_rng(0).normal(size=9_999)
    values[[17, 5000, 9_998]] = [50.0, -50.0, 70.0]
    series = Series(np.arange(9_999, dtype=float), values)
    thinned = downsample(series, 500)
    assert len(thinned.values) <= 500
    assert {50.0, -50.0, 70.0} <= set(thinned.values.tolist())
    assert (np.diff(thinned.steps) > 0).all()
    assert downsample(series, 9_999) is series


def test_smoothing_removes_noise_and_keeps_other_values() -> None:
    steps = np.arange(1000, dtype=float)
    noisy = steps / 1000 + np.where(steps % 2, 0.5, -0.5)
    actual = smooth(Series(steps, noisy), 150)
    assert actual is not None
    assert len(actual.steps) <= 150
    inner = slice(10, -10)
    np.testing.assert_allclose(actual.values[inner], actual.steps[inner] / 1000, atol=0.02)
    assert smooth(Series(steps, steps), 150) is None
    assert smooth(Series(steps[:39], noisy[:39]), 150) is None


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3.7, 12.2), (1e-9, 4e-9), (5, 5), (0, 1e300)])
def test_ticks_are_few_and_within_the_range(low: float, high: float) -> None:
    ticks = Ruler(low, high, 0, 100).ticks(4)
    assert 1 <= len(ticks) <= 9
    assert all(low - 1e-9 * abs(high) <= tick <= high + 1e-9 * abs(high) for tick in ticks)


def test_read_only_run_logs_nothing(tmp_path: Path) -> None:
    onlooker = ReadOnlyRun(tmp_path)
    onlooker.log(1, {"loss": 1.0}, phase="sft")
    assert "no metrics yet" in Page(write_report([tmp_path], tmp_path / "out.html")).text

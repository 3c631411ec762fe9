"""Metrics as Prometheus's text: what is written is what a scraper reads."""

from __future__ import annotations

import math
import re
from concurrent.futures import ThreadPoolExecutor

from postlude.prometheus import Gauge, Histogram, MetricCounter, MetricFamily, MetricSample, metric_name, render

LABEL = re.compile(r'(\w+)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')
ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}
LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")


def read(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Returns the values of a text by name and labels, as its format says. Every line must be of that format."""
    values = {}
    for line in text.decode().split("\n")[:-1]:
        if line.startswith(("# HELP ", "# TYPE ")):
            continue
        match = LINE.fullmatch(line)
        assert match is not None, line
        name, labels, value = match.groups()
        assert LABEL.sub("", labels or "") == "", line
        pairs = tuple(
            (key, re.sub(r"\\.", lambda found: ESCAPES[found[0]], text)) for key, text in LABEL.findall(labels or "")
        )
        assert (name, pairs) not in values, line
        values[name, pairs] = float(value)
    return values


def test_label_values_and_numbers_come_back_as_they_were() -> None:
    for text in ("", "a", 'a "b"\\', "two\nlines\\n", 'end\\"', "ä ¥ 大", "\r\t{},="):
        samples = [MetricSample(1.5, {"first": text, "second": text})]
        written = render([MetricFamily("postlude_a", "gauge", f"what {text}", samples)])
        assert read(written) == {("postlude_a", (("first", text), ("second", text))): 1.5}
        assert len(written.decode().split("\n")) == 4
    for value in (0, 3, -1.5, 1e-9, 1e300, 10**20, math.inf, -math.inf):
        assert read(render([MetricFamily("a", "gauge", "", [MetricSample(value)])])) == {("a", ()): value}
    assert math.isnan(read(render([MetricFamily("a", "gauge", "", [MetricSample(math.nan)])]))["a", ()])
    read(render([MetricFamily("a", "gauge", "\udc80", [MetricSample(1, {"half": "\udc80"})])]))


def test_one_rule_makes_every_name() -> None:
    names = {
        "loss": "postlude_loss",
        "eval/pass@4": "postlude_eval_pass_4",
        "moe/layer_03/x-ä": "postlude_moe_layer_03_x__",
    }
    assert {name: metric_name(name) for name in names} == names


def test_a_histogram_counts_each_value_below_its_bounds() -> None:
    histogram = Histogram("a", "what", ["route"], bounds=(1.0, 2.0))
    values = (0.5, 1.0, 1.5, 2.0, 7.0)
    for value in values:
        histogram.observe(value, "/x")
    buckets = {"1.0": 2, "2.0": 4, "+Inf": 5}
    expected = {("a_bucket", (("route", "/x"), ("le", bound))): count for bound, count in buckets.items()}
    expected |= {("a_sum", (("route", "/x"),)): sum(values), ("a_count", (("route", "/x"),)): 5}
    assert read(render([histogram.family()])) == expected


def test_threads_lose_no_count() -> None:
    counter, histogram = MetricCounter("a", "what", ["kind"]), Histogram("b", "what")

    def count(_: int) -> None:
        counter.add(1, "x")
        counter.add(0.5, "y")
        histogram.observe(0.01)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(count, range(4000)))
    gauge = Gauge("c", "what", lambda: {("m",): 2}, ["model"])
    values = read(render([counter.family(), histogram.family(), gauge.family()]))
    assert values["a", (("kind", "x"),)] == 4000
    assert values["a", (("kind", "y"),)] == 2000
    assert values["b_count", ()] == 4000
    assert values["c", (("model", "m"),)] == 2

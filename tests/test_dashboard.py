"""The dashboard of examples/observe asks for metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

from postlude.generate.protocol import SamplingUsage
from postlude.prometheus import MetricFamily, metric_name
from postlude.recipes.report.metrics import known_metrics
from postlude.recipes.run.monitor import RunMetrics
from postlude.recipes.run.progress import RunProgress, WarningCount
from postlude.tinker.metrics import TinkerMetrics

DASHBOARD = Path(__file__).parents[1] / "examples" / "observe" / "grafana.json"
GAUGES_OF_THE_SERVICE = {f"postlude_tinker_{name}" for name in ("sessions", "models", "samplers", "training_waiting")}


def series(families: list[MetricFamily]) -> set[str]:
    names = {family.name for family in families if family.kind != "histogram"}
    histograms = [family.name for family in families if family.kind == "histogram"]
    return names | {f"{name}{suffix}" for name in histograms for suffix in ("_bucket", "_sum", "_count")}


def test_every_metric_of_the_dashboard_is_served() -> None:
    run = RunMetrics("run", RunProgress(), WarningCount())
    run.log(1, dict.fromkeys(known_metrics(), 1.0))
    served = series(list(run.families()))
    assert {metric_name(name) for name in known_metrics()} <= served
    served |= series(list(TinkerMetrics(SamplingUsage).families())) | GAUGES_OF_THE_SERVICE
    panels = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"postlude_\w+", query)}
    assert len(asked) > 40
    assert asked <= served
    assert asked >= GAUGES_OF_THE_SERVICE  # tests/serving/test_server_metrics.py has their values

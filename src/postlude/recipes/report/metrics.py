"""The names of a run's metrics, and what each means. `metrics.txt` has the texts.

`python -m postlude.recipes.report.metrics` writes docs/metrics.md.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

REWARD, LOSS, LENGTH = "reward_mean", "loss", "length_mean"
SKIPPED, MEMORY, SPEED = "skipped_steps", "gpu_memory_gib", "tokens_per_second"
TOKENS, SHARED, REUSED = "tokens", "shared_tokens", "reused_prompt_tokens"
DRAFTS, DRAFT_LENGTH = "draft_acceptance", "draft_length"
MASK_SIZE = "sampling_mask_size"
REWARD_KL = "reward_kl"
WORKERS_LOST = "workers/lost"
REWARDS, LENGTHS = "rewards", "lengths"  # lists: one number a completion
EVAL = "eval/"  # on held-out data
PASS = f"{EVAL}pass@"
TIME = "time/"  # seconds of each part of a step (`StepTimer`)
COMPONENTS = "reward/"  # components of rewards
ROWS = "rows/"  # rows of each dataset so far
FAILED = f"{COMPONENTS}failed"
SCORES = (f"{EVAL}{REWARD}", f"{EVAL}accuracy", f"{EVAL}{LOSS}")
"""The score of a run is the first of these that it has."""
FALLING = (LOSS, f"{EVAL}{LOSS}")  # smaller is better
SHOWN = {  # by its label in the terminal, a metric
    "reward": REWARD,
    "accuracy": "accuracy",
    "length": LENGTH,
    "kl": "kl",
    "kl to teacher": "kl_forward",
    "kl to old": "kl_old",
    "entropy": "entropy",
    "loss": LOSS,
    "grad norm": "grad_norm",
    "lr": "lr",
    "tokens/s": SPEED,
}

LAYER = re.compile(r"(?P<block>\w+)/(?P<layer>(?:mtp_\d+_)?layer_\d+)/(?P<name>\w+)")  # metrics of one layer
WORST = "_worst"  # of all layers
HELD_OUT, OTHER = "Held out", "Other"  # topics


@dataclass(frozen=True)
class MetricInfo:
    """The meaning of a metric, its range, and what to watch for. The topic is its group."""

    topic: str
    title: str
    meaning: str
    range: str
    watch: str

    def replaced(self, old: str, new: str) -> MetricInfo:
        texts = (text.replace(old, new) for text in (self.title, self.meaning, self.range, self.watch))
        return MetricInfo(self.topic, *texts)


@functools.cache
def metric_groups() -> Mapping[str, Mapping[str, MetricInfo]]:
    groups: dict[str, dict[str, MetricInfo]] = {}
    for line in Path(__file__).with_suffix(".txt").read_text("utf-8").splitlines():
        if line.startswith("# "):
            topic = line[2:]
        elif line:
            name, *texts = line.split(" | ")
            groups.setdefault(topic, {})[name] = MetricInfo(topic, *texts)
    return groups


@functools.cache
def known_metrics() -> Mapping[str, MetricInfo]:
    return {name: info for metrics in metric_groups().values() for name, info in metrics.items()}


def explain(name: str) -> MetricInfo | None:  # noqa: PLR0911 - one for each form of a name
    """Returns what a metric means, or None for a metric of a user's objective."""
    metrics = known_metrics()
    if name in metrics:
        return metrics[name]
    if name.startswith(PASS):
        k = name.removeprefix(PASS)
        return metrics[f"{PASS}k"].replaced("pass@k", f"pass@{k}").replaced("of k completions", f"of {k} completions")
    if depth := re.fullmatch(r"mtp_(\d+)/(\w+)", name):
        info = metrics.get(f"mtp_D/{depth[2]}")
        if info is None:
            return None
        info = info.replaced("depth D", f"depth {depth[1]}").replaced("token D", f"token {depth[1]}")
        return replace(info, title=f"{info.title} ({depth[1]})")
    if layer := LAYER.fullmatch(name):
        info = metrics.get(f"{layer['block']}/{layer['name']}")
        return info and replace(info, title=f"{info.title} ({layer['layer'].replace('_', ' ')})")
    if name.removesuffix(WORST) in metrics:
        info = metrics[name.removesuffix(WORST)]
        return replace(info, title=f"{info.title}, worst layer", meaning=f"{info.meaning}; of the worst layer")
    if name.startswith(COMPONENTS):
        return metrics[f"{COMPONENTS}NAME"].replaced("NAME", name.removeprefix(COMPONENTS))
    if name.startswith(ROWS):
        return metrics[f"{ROWS}NAME"].replaced("NAME", name.removeprefix(ROWS))
    if name.startswith(TIME):
        return metrics[f"{TIME}PHASE"]
    info = explain(name.removeprefix(EVAL)) if name.startswith(EVAL) else None
    if info is None:
        return _explain_set(name)
    title = f"Held-out {info.title[0].lower()}{info.title[1:]}"
    return replace(info, topic=HELD_OUT, title=title, meaning=f"{info.meaning}; on held-out data")


def _explain_set(name: str) -> MetricInfo | None:
    prefix, _, metric = name.removeprefix(EVAL).partition("/")
    if not (name.startswith(EVAL) and metric):
        return None
    info = explain(f"{EVAL}{metric}")
    return info and replace(info, title=f"{prefix}: {info.title}", meaning=f"{info.meaning}; of the set {prefix}")


def labelled_values(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """Returns the metrics of a step that the terminal shows, each with its label."""
    return [(label, metrics[name]) for label, name in SHOWN.items() if name in metrics]


def topic(name: str) -> str:
    info = explain(name)
    return info.topic if info else HELD_OUT if name.startswith(EVAL) else OTHER


def title(name: str) -> str:
    info = explain(name)
    return info.title if info else name.replace("_", " ").replace("/", ", ")


def glossary() -> str:
    lines = [
        "# Metrics: what a run measures",
        "",
        "Every number of `metrics.jsonl`, TensorBoard and the report, by its name. An objective of yours adds its own",
        "metrics. This page is written by `python -m postlude.recipes.report.metrics > docs/metrics.md`.",
    ]
    for group, metrics in metric_groups().items():
        lines += ["", f"## {group}", "", "| name | what it is | range | what to look for |", "|---|---|---|---|"]
        lines += [f"| `{name}` | {info.meaning} | {info.range} | {info.watch} |" for name, info in metrics.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(glossary(), end="")

"""The benchmarks of steps: they count FLOPs right, compare like with like, and run on any machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from postlude import Batch, Engine, export_hf, load_model, ranks
from postlude.objectives import SFT, PolicyGradient
from tests.equality import assert_equal

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import one as the script that it is: with its own folder on the path, and gone again afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = (
        "workloads",
        "peers",
        "train_step",
        "rl_iteration",
        "growth",
        "weight_sync",
        "asynchrony",
        "report",
        "layer_metrics",
        "lora",
    )

    def imported(name: str) -> ModuleType:
        return __import__(name)

    yield imported
    for name in names:
        sys.modules.pop(name, None)


def test_mixes_are_those_of_the_tables(load: Any) -> None:
    mixes = load("workloads").MIXES
    lengths, long_tail = mixes["log-normal"](), mixes["long-tail"]()
    assert (len(lengths), sum(lengths), max(lengths)) == (64, 55_399, 4096)
    assert (len(long_tail), sum(long_tail), max(long_tail)) == (64, 101_947, 16_384)


@pytest.mark.parametrize("shape", ["smoke", "smoke-moe"])
def test_flops_are_those_that_torch_counts(load: Any, shape: str) -> None:
    """In transformers' model, whose attention sees all pairs, where half of them are causal."""
    workloads, length = load("workloads"), 12
    config = workloads.SHAPES[shape]()
    config._experts_implementation = "eager"  # the counter knows no grouped product
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.long))
    unseen = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * length**2
    # Some versions of transformers make the angles of positions as a product: a table, no product with a weight.
    angles = sum(sum(count.values()) for name, count in counter.get_flop_counts().items() if "rotary_emb" in name)
    assert workloads.forward_flops(config, [length]) + unseen == counter.get_total_flops() - angles


def test_what_is_compared_computes_the_same(load: Any, tmp_path: Path) -> None:
    """The same weights and sequences: our losses, packed and padded, are the padded peers'."""
    workloads, peers, train_step = load("workloads"), load("peers"), load("train_step")
    config = workloads.SHAPES["smoke"]()
    sample = workloads.Sample.of(workloads.MIXES["smoke"](), config.vocab_size)
    theirs = AutoModelForCausalLM.from_pretrained(export_hf(load_model(config), tmp_path), dtype=torch.float32)
    rows = list(peers.padded(sample, 2, "cpu"))
    expected = {
        objective: sum(loss(sample)(theirs, each).item() for each in rows)
        for objective, loss in ((PolicyGradient(), peers.grpo), (SFT(over="response_mask"), peers.sft))
    }
    packed: Batch = train_step.batch(sample)
    padded, most = train_step.padded_batch(sample, 2)
    with ranks(device="cpu"):
        engine = Engine(tmp_path, budget=most, device="cpu")
        for objective, loss in expected.items():
            for given in (packed, padded):
                assert_equal(torch.tensor(engine.evaluate_loss(given, objective).loss), torch.tensor(loss))


def test_growth_is_told_by_the_upper_half_of_an_axis(load: Any) -> None:
    """Below it a constant part hides the power; what attention takes is no part of the rest."""
    growth = load("growth")
    sizes = [2**power for power in range(10, 18)]
    assert growth.exponent(sizes, [3.0 * size**2 for size in sizes]) == 2.0
    axis = growth.Axis("", ("update",), lambda _: iter(()), attention=True)
    points = [
        {"size": size, "seconds": 2e-6 * size + 1e-9 * size**2, "attention_s": 1e-9 * size**2, "extra_gib": size**1.5}
        for size in sizes
    ]
    found = growth.fitted(axis, [*points, {"size": 2**18, "failed": "out of memory"}])
    assert found["exponents"]["time without attention"] == 1.0
    assert found["superlinear"] == ["time", "memory"]


def test_an_axis_changes_what_it_names(load: Any) -> None:
    """Whatever name transformers keeps it by."""
    config = load("growth").changed("smoke-moe", num_experts=8, num_hidden_layers=1)
    routers = [each for name, each in load_model(config).named_parameters() if name.endswith("router.weight")]
    assert [each.shape for each in routers] == [(8, 32)]


def test_the_page_shows_the_results_that_are_kept(load: Any) -> None:
    """`benchmarks/report.py benchmarks/results/*.json --page docs/benchmarks.md` leaves the page as it is."""
    report = load("report")
    page = (BENCHMARKS.parent / "docs" / "benchmarks.md").read_text()
    found = report.read(sorted((BENCHMARKS / "results").glob("*_h200.json")))
    assert "train_step" in found
    for kind, cases in found.items():
        assert report.placed(page, kind, "\n".join(report.TABLES[kind](cases))) == page


def test_the_cost_of_layer_metrics_is_measured(load: Any) -> None:
    benchmark = load("layer_metrics")
    assert benchmark.measure(benchmark.SMALL, "cpu", repeats=1).keys() == {"with_ms", "without_ms", "share"}


SMOKES = {
    "lora": ["--cases", "lora", "lora-recompute", "full", "peft-padded", "peft-sdpa", "peft-sdpa-checkpointing"],
    "train_step": ["--cases", "update", "sft", "logprobs", "padded", "trl", "trl-logprobs"],
    "rl_iteration": [],
    "growth": ["--axes", "length", "experts"],
    "weight_sync": [],
    "asynchrony": [],
    "batch_invariant": [],
}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", SMOKES)
def test_a_benchmark_runs_and_writes_what_it_found(load: Any, tmp_path: Path, name: str) -> None:
    path = tmp_path / "found.json"
    found = load(name).main(["--smoke", "--device", "cpu", "--json", str(path), *SMOKES[name]])
    assert found
    assert not [case for case in found if "failed" in json.dumps(case)]
    assert json.loads(path.read_text())["cases"] == json.loads(json.dumps(found))
    if name == "growth":
        load(name).main(["--draw", str(path), str(tmp_path / "drawn.svg")])
        assert (tmp_path / "drawn.svg").read_text().count("<polyline") > 4

"""The planner's arithmetic in cases that can be computed by hand, and its command."""

import json
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV3Config

from postlude.cli import main
from postlude.hf.read_model import read_model
from postlude.layout import Layout
from postlude.model.block_config import NOMINAL_LENGTH
from postlude.pipeline.schedule import Action
from postlude.plan.cost import ActionCost, CostModel
from postlude.plan.forecast import entry_seconds, forecast, memory_of, simulate_step
from postlude.plan.hardware import HARDWARE, Hardware, load_hardware
from postlude.plan.search import layouts, search
from postlude.training_options import TrainingOptions

ROUND = Hardware(
    flops=1e12, memory=1e9, memory_bandwidth=1e12, intra_node=100.0, inter_node=10.0, latency=0, link_efficiency=1.0
)


def model_of(name: str, layout: str = "", **change: Any) -> CostModel:
    names = {field.name for field in fields(TrainingOptions)}
    options = {name: value for name, value in {"budget": 1024, **change}.items() if name in names}
    others = {name: value for name, value in change.items() if name not in names}
    return CostModel(
        config=read_model(name)[1],
        options=TrainingOptions(layout=Layout.parse(layout), **options),
        **{"hardware": HARDWARE["h100"], "length": 512, "microbatches": 8, **others},
    )


def test_an_overlapped_entry_hides_communication_behind_compute() -> None:
    forward, backward = ActionCost(compute=2.0, exchange=1.0), ActionCost(compute=4.0, exchange=1.5, waited=0.5)
    assert entry_seconds([forward]) == 3.0
    assert entry_seconds([forward, backward]) == 2.0 + 4.5  # both exchanges behind the other's compute
    assert (
        entry_seconds([ActionCost(1.0, 9.0), ActionCost(2.0, 1.0)]) == 10.0
    )  # its own compute and exchange take turns
    assert entry_seconds([ActionCost(1.0, 9.0), ActionCost(2.0, 9.0)]) == 18.0  # one link
    assert entry_seconds([ActionCost(1.0), ActionCost(2.0)]) == 3.0


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (4, 1), (4, 2)])
def test_equal_stages_take_the_theoretical_time(pp: int, vpp: int) -> None:
    layout, microbatches = Layout(pp=pp, vpp=vpp), 8
    cost = {"F": ActionCost(1.0), "B": ActionCost(2.0)}
    step = simulate_step(layout, lambda action: cost[action.kind], microbatches=microbatches, after=0.5)
    assert step.seconds == 3 * (vpp * microbatches + pp - 1) + 0.5
    assert step.bubble == pytest.approx((pp - 1) / (vpp * microbatches + pp - 1))
    assert step.exposed == step.exchange == step.waited == 0


def test_overlap_exposes_only_first_and_last_exchange() -> None:
    def cost(action: Action) -> ActionCost:
        return ActionCost(2.0, exchange=1.0) if action.kind == "F" else ActionCost(4.0, exchange=1.0)

    plain = simulate_step(Layout(), cost, microbatches=10)
    hidden = simulate_step(Layout(), cost, microbatches=10, overlap=True)
    assert (plain.seconds, plain.exposed) == (80, 20)
    assert (hidden.seconds, hidden.exposed) == (62, 2)  # the first forward and the last backward are alone
    assert (plain.timeline.peak_in_flight, hidden.timeline.peak_in_flight) == ((1,), (2,))


def test_zero_bubble_leaves_a_third_of_the_bubble() -> None:
    """Where all three take equally long: (pp - 1)(F + B - W) of (pp - 1)(F + B + W), with the same in-flight count."""
    layout, cost = Layout(pp=4), {"F": ActionCost(1.0), "B": ActionCost(1.0), "W": ActionCost(1.0)}
    plain = simulate_step(layout, lambda a: ActionCost(2.0) if a.kind == "B" else cost[a.kind], microbatches=8)
    filled = simulate_step(layout, lambda a: cost[a.kind], microbatches=8, overlap="zero_bubble")
    assert (plain.seconds, filled.seconds) == (24 + 9, 24 + 3)
    assert (plain.bubble, filled.bubble) == (pytest.approx(9 / 33), pytest.approx(3 / 27))
    assert filled.timeline.peak_in_flight == plain.timeline.peak_in_flight == (4, 3, 2, 1)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_backward_plus_deferred_wgrads_takes_as_long_as_one_backward(recompute: str) -> None:
    model = model_of("tiny-moe", "pp=2,dp_shard=2,ep=2", recompute=recompute)
    for stage in range(2):
        full, part, remainder = (
            model(Action("B", stage, 0)),
            *(model.with_deferred_wgrads(Action(kind, stage, 0)) for kind in "BW"),
        )
        assert part.compute + remainder.compute == pytest.approx(full.compute)
        assert (part.exchange + remainder.exchange, part.waited + remainder.waited) == (full.exchange, full.waited)
        assert 0 < remainder.compute < model(Action("F", stage, 0)).compute < part.compute
    assert model.with_deferred_wgrads(Action("F", 0, 0)) == model(Action("F", 0, 0))
    slow = Hardware(flops=1e12, memory=1e9, memory_bandwidth=1e12, intra_node=1e6, inter_node=1e6)
    last = model_of("tiny-dense", "pp=2,dp_shard=2", hardware=slow)
    assert [last.with_deferred_wgrads(Action(kind, 1, 7)).waited > 0 for kind in "BW"] == [
        False,
        True,
    ]  # sums come after all


def test_a_zero_bubble_forecast_is_faster_and_counts_deferred_wgrads() -> None:
    plain, filled = (forecast(model_of("tiny-dense", "pp=4", overlap=overlap)) for overlap in (False, "zero_bubble"))
    assert filled.step.bubble < plain.step.bubble
    assert filled.step.seconds < plain.step.seconds
    assert filled.step.timeline.peak_in_flight == plain.step.timeline.peak_in_flight
    activations = [[rank_memory.activations for rank_memory in prediction.memory] for prediction in (plain, filled)]
    # The first rank runs each W right after its B, so it defers one microbatch's weight gradients at most.
    assert activations[0][0] <= activations[1][0] < activations[0][0] * (1 + 1 / plain.step.timeline.peak_in_flight[0])
    assert all(
        filled_bytes > plain_bytes
        for plain_bytes, filled_bytes in zip(activations[0][1:], activations[1][1:], strict=True)
    )
    result = search(model_of("tiny-dense", budget=4096, length=4096), 4, 64 * 4096, overlap="zero_bubble")
    assert {(candidate.model.layout.pp > 1, candidate.model.layout.vpp) for candidate in result.best} == {(True, 1)}


def test_link_bandwidth_within_and_between_nodes() -> None:
    assert ROUND.ring_rate(8, 1) == 100
    assert ROUND.ring_rate(16, 1) == 80  # eight links to the other node
    assert ROUND.ring_rate(2, 8) == 10
    assert ROUND.exchange_seconds(800, 8, 1) == pytest.approx(7.0)  # 7 of 8 parts to others
    assert ROUND.exchange_seconds(1600, 16, 1) == pytest.approx(80.0)  # 8 of 16 to the other node
    assert ROUND.exchange_seconds(1600, 1, 1) == 0


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-moe", "tiny-hybrid"])
def test_total_flops_do_not_depend_on_the_layout(name: str) -> None:
    full_compute = sum(work.compute for work in model_of(name).costs.values())
    for layout in ("tp=2", "cp=2", "pp=2,vpp=2"):
        parts = model_of(name, layout)
        ranks = parts.layout.tp * parts.layout.cp
        assert sum(work.compute for work in parts.costs.values()) * ranks == pytest.approx(full_compute)
    plain = model_of(name)
    assert full_compute == pytest.approx(
        plain.model_flops * plain.options.budget / (plain.hardware.flops * plain.hardware.efficiency)
    )
    recomputed = model_of(name, recompute="full")
    assert sum(work.compute for work in recomputed.costs.values()) == pytest.approx(full_compute * 4 / 3)


def test_longer_sequences_add_only_the_cost_of_attention() -> None:
    config = read_model("tiny-dense")[1]
    block = config.blocks["*"]
    short, long = (model_of("tiny-dense", length=length).model_flops for length in (512, 1024))
    assert long - short == pytest.approx(3 * 4 * block.attention_flops(512))
    assert block.attention_flops(512) == 4 * 256 * block.heads * block.head_dim
    assert block.flops(64) - block.attention_flops(NOMINAL_LENGTH) < block.flops(64)
    window = read_model("tiny-hybrid")[1].blocks["S"]
    assert window.attention_flops(1e6) == window.attention_flops(1e5)


def test_only_tokens_for_remote_experts_are_exchanged() -> None:
    assert all(work.exchange == 0 for work in model_of("tiny-moe", "dp_shard=2").costs.values())
    works = model_of("tiny-moe", "dp_shard=2,ep=2").costs
    assert works["F", 0].exchange == works["B", 0].exchange > 0


def test_weight_gathers_are_exposed_where_compute_does_not_hide_them() -> None:
    slow = Hardware(flops=1e12, memory=1e9, memory_bandwidth=1e12, intra_node=1e6, inter_node=1e6)
    assert model_of("tiny-dense", "dp_shard=2", hardware=slow).costs["F", 0].waited > 0
    pipeline = model_of("tiny-dense", "pp=2,dp_shard=2", hardware=slow)
    assert pipeline(Action("F", 0, 0)).waited > 0  # gathered once
    assert pipeline(Action("F", 0, 1)).waited == 0
    assert pipeline(Action("B", 1, 7)).waited > 0  # summed once
    assert pipeline(Action("B", 1, 6)).waited == 0


def test_layout_found_by_search_has_its_forecast_and_fits() -> None:
    start = model_of("tiny-moe", budget=4096, length=4096)
    result = search(start, 8, 64 * 4096)
    assert result.best
    speeds = [candidate.tokens_per_second for candidate in result.best]
    assert speeds == sorted(speeds, reverse=True)
    for candidate in result.best:
        assert candidate.model.layout.world_size == 8
        repeated = forecast(candidate.model)
        assert (repeated.step.seconds, repeated.peak) == (candidate.step.seconds, candidate.peak)


def test_search_names_the_least_memory_if_nothing_fits() -> None:
    tiny = replace(HARDWARE["h100"], memory=1e6)
    start = model_of("tiny-moe", budget=4096, length=4096, hardware=tiny)
    result = search(start, 8, 64 * 4096)
    models = [
        replace(start, options=replace(start.options, layout=layout), microbatches=64 // layout.dp)
        for layout in layouts(start, 8)
        if layout.pp <= 64 // layout.dp and divides(start, layout)
    ]
    peaks = [max(rank.total for rank in memory_of(model)) for model in models]
    assert result.best == []
    assert (result.min_bytes, result.fitting) == (min(peaks), len(peaks))


def divides(start: CostModel, layout: Layout) -> bool:
    with suppress(ValueError):
        start.config.check_layout(layout)
        return True
    return False


def test_search_takes_lengths_that_no_layout_divides() -> None:
    """Sequences are padded to what a layout divides."""
    even, odd = (search(model_of("tiny-dense", budget=size, length=size), 4, 64 * size) for size in (4096, 4097))
    assert odd.fitting == even.fitting
    assert odd.best[0].model.layout == even.best[0].model.layout


@pytest.fixture
def deepseek_v3(tmp_path: Path) -> Path:
    """DeepSeek-V3's config.json, without weights."""
    DeepseekV3Config().save_pretrained(tmp_path)
    return tmp_path / "config.json"


def test_search_shows_each_layout_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    words = ["plan", "tiny-dense", "--seq", "4096", "--gpus", "4", "--batch-tokens", "65536", "--search"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    heading = ["layout", "step", "tok/s", "MFU", "memory", "bubble", "exchange", "waiting"]
    table = lines[[line.split() for line in lines].index(heading) + 1 :]
    layouts = [line.split()[0] for line in table if line.rstrip().endswith("%")]
    assert layouts
    assert all(Layout.parse(layout).world_size == 4 for layout in layouts)


def test_671b_model_is_planned_from_its_config_only(deepseek_v3: Path, capsys) -> None:
    layout = "pp=16,vpp=2,ep=64"
    arguments = ["plan", str(deepseek_v3), "--seq", "4096", "--recompute", "full", "--overlap"]
    assert main([*arguments, "--layout", layout, "--gpus", "2048"]) == 0
    output = capsys.readouterr().out
    assert "671.03B parameters" in output
    assert "dp_shard=128" in output
    assert "MFU" in output
    assert main([*arguments, "--layout", "pp=2", "--gpus", "2"]) == 1
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--layout pp=2 --gpus 3", "runs on 2 GPU(s), but --gpus is 3"),
        ("--layout tp=3", "tp=3"),
        ("--layout dp_shard=2,ep=2", "has no experts to spread"),
        ("--search", "--search needs --gpus"),
        ("--recipe sft a.yaml --layout pp=2", "--layout is in the config of --recipe or follows from it"),
        (
            "--recipe eval a.yaml",
            "--recipe is 'eval'; give one of sft, dpo, kto, rm, grpo, ppo, distill, and its config",
        ),
        ("--recipe sft missing.yaml", 'there is no config file "missing.yaml"'),
        ("--overlap zero_bubble", "fills the bubble of a pipeline, but pp is 1"),
        ("--gpu h1000", "GPU 'h1000' is unknown; use a100, h100"),
        ("--gpu numbers.json", "numbers.json does not exist"),
        ("--budget 64", "--budget is 64, but a sequence has 128 tokens"),
    ],
)
def test_invalid_arguments_give_clear_error(arguments: str, sentence: str, capsys) -> None:
    assert main(["plan", "tiny-dense", "--seq", "128", *arguments.split()]) == 2
    assert sentence in capsys.readouterr().err


def test_custom_machine(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"like": "h100", "inter_node": 25e9}))
    assert load_hardware(str(path)).inter_node == 25e9
    assert load_hardware(str(path)).flops == HARDWARE["h100"].flops
    for options, sentence in (
        ('{"like": "h100", "speed": 1}', "'speed' in it is unknown"),
        ('{"flops": 1}', "lacks memory, memory_bandwidth"),
        ('{"like": "h100", "efficiency": 2}', "efficiency is 2, but it is a fraction"),
        ('{"like": "h100", "gpus_per_node": 0}', "gpus_per_node of a GPU is 0"),
        ("[", "is not JSON"),
    ):
        path.write_text(options)
        with pytest.raises(ValueError, match=sentence):
            load_hardware(str(path))


def test_products_in_fp8_save_time_in_chosen_layers() -> None:
    """Of forwards and gradients of inputs, not of weights: so as much in each direction, and twice with recompute."""

    def saved(**change: Any) -> tuple[float, float]:
        plain, in_fp8 = (model_of("tiny-dense", **change, fp8=fp8).costs for fp8 in (False, "1:-1"))
        return tuple(plain[action].compute - in_fp8[action].compute for action in (("F", 0), ("B", 0)))  # type: ignore[return-value]

    forward, backward = saved()
    assert forward == pytest.approx(backward)
    assert saved(recompute="full") == pytest.approx((forward, 2 * forward))
    plain, whole = (model_of("tiny-dense", fp8=fp8).costs["F", 0].compute for fp8 in (False, True))
    count = len(read_model("tiny-dense")[1].pattern)
    assert forward == pytest.approx((plain - whole) * (count - 2) / count)
    assert 0 < plain - whole < 0.35 * plain


def test_copies_of_activations_are_waited_for_where_compute_does_not_hide_them() -> None:
    options: dict[str, Any] = {"offload_activations": True}
    plain, slow, fast = (
        model_of("tiny-dense", hardware=replace(HARDWARE["h100"], host=rate), **change)
        for change, rate in (({}, 1e9), (options, 1e9), (options, 1e15))
    )
    assert all(fast.costs[action].waited == plain.costs[action].waited for action in plain.costs)
    added = [slow.costs[action].waited - plain.costs[action].waited for action in (("F", 0), ("B", 0))]
    assert min(added) > 0
    assert added[0] > added[1]  # a backward computes longer, and copies as much

"""The step benchmarks count FLOPs correctly, compare equal work, and run on any machine."""

import json
import multiprocessing
import sys
import time
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
    """Imports one as a script: with its folder on the path, which is removed afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = [path.stem for path in BENCHMARKS.glob("*.py")]

    def imported(name: str) -> ModuleType:
        return __import__(name)

    yield imported
    for name in names:
        sys.modules.pop(name, None)


def test_length_mixes_equal_the_published_tables(load: Any) -> None:
    mixes = load("workloads").MIXES
    lengths, long_tail = mixes["log-normal"](), mixes["long-tail"]()
    assert (len(lengths), sum(lengths), max(lengths)) == (64, 55_399, 4096)
    assert (len(long_tail), sum(long_tail), max(long_tail)) == (64, 101_947, 16_384)


@pytest.mark.parametrize("shape", ["smoke", "smoke-moe"])
def test_flops_equal_torchs_counter(load: Any, shape: str) -> None:
    """For transformers' model, whose attention computes all pairs instead of the causal half."""
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


def test_compared_implementations_compute_the_same(load: Any, tmp_path: Path) -> None:
    """With equal weights and sequences, packed and padded losses equal those of the padded peers."""
    workloads, peers, train_step = load("workloads"), load("peers"), load("train_step")
    config = workloads.SHAPES["smoke"]()
    sample = workloads.Sample.of(workloads.MIXES["smoke"](), config.vocab_size)
    hf_model = AutoModelForCausalLM.from_pretrained(export_hf(load_model(config), tmp_path), dtype=torch.float32)
    rows = list(peers.padded(sample, 2, "cpu"))
    expected = {
        objective: sum(loss(sample)(hf_model, row).item() for row in rows)
        for objective, loss in ((PolicyGradient(), peers.grpo), (SFT(over="response_mask"), peers.sft))
    }
    packed_rows = peers.packed(sample, 32, "cpu")
    packed_loss = sum(peers.packed_sft(sample)(hf_model, row).item() for row in packed_rows)
    assert_equal(torch.tensor(packed_loss), torch.tensor(expected[SFT(over="response_mask")]))
    packed: Batch = train_step.batch(sample)
    padded, longest = train_step.padded_batch(sample, 2)
    with ranks(device="cpu"):
        engine = Engine(tmp_path, budget=longest, device="cpu")
        for objective, loss in expected.items():
            for microbatches in (packed, padded):
                assert_equal(torch.tensor(engine.evaluate_loss(microbatches, objective).loss), torch.tensor(loss))


def test_growth_is_fitted_on_the_upper_half_of_an_axis(load: Any) -> None:
    """A constant term hides the power below it; attention is fitted separately."""
    growth = load("growth")
    sizes = [2**power for power in range(10, 18)]
    assert growth.exponent(sizes, [3.0 * size**2 for size in sizes]) == 2.0
    axis = growth.Axis("", ("update",), lambda _: iter(()), attention=True)
    points = [
        {"size": size, "seconds": 2e-6 * size + 1e-9 * size**2, "attention_s": 1e-9 * size**2, "extra_gib": size**1.5}
        for size in sizes
    ]
    fit = growth.fitted(axis, [*points, {"size": 2**18, "failed": "out of memory"}])
    assert fit["exponents"]["time without attention"] == 1.0
    assert fit["superlinear"] == ["time", "memory"]


def test_benchmarks_page_equals_the_stored_results(load: Any) -> None:
    """`benchmarks/report.py benchmarks/results/*.json --page docs/benchmarks.md` leaves the page unchanged."""
    report = load("report")
    page = (BENCHMARKS.parent / "docs" / "benchmarks.md").read_text()
    results = report.read(sorted((BENCHMARKS / "results").glob("*_h200.json")))
    assert "train_step" in results
    for kind, cases in results.items():
        assert report.placed(page, kind, "\n".join(report.TABLES[kind](cases))) == page


HEADLINE = BENCHMARKS / "results" / "headline_h200.json"


@pytest.mark.parametrize("page", ["docs/benchmarks.md", "README.md"])
def test_headline_tables_equal_the_stored_results(load: Any, page: str) -> None:
    """`benchmarks/headline.py --draw benchmarks/results/headline_h200.json PAGE` leaves the page unchanged."""
    table = load("headline_table")
    text = (BENCHMARKS.parent / page).read_text()
    measured = table.read(json.loads(HEADLINE.read_text()))
    assert "<!-- headline" in text
    assert table.drawn(measured, text) == text


def headline_run(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Returns the JSON of a run: by round and by "group/case", the results."""
    cases = [
        {"group": key.split("/")[0], "case": key.split("/")[1], "round": number} | measured
        for number, found_in_round in enumerate(rounds)
        for key, measured in found_in_round.items()
    ]
    return {"cases": cases}


def test_headline_figure_is_the_median_over_rounds_with_its_peers(load: Any) -> None:
    table = load("headline_table")
    speeds = [1, 90, 110, 100]  # the first is of the warm-up
    run = headline_run(
        [{"ours/a": {"tokens_per_second": speed}, "peer/b": {"tokens_per_second": 50}} for speed in speeds]
        + [{"ours/all": {"failed": "its process ended"}}]
    )
    measured = table.read(run)
    target = table.Target(2.5, "2.50×")
    cells = table.Line("case", ("ours", "a"), ("peer", "b"), "theirs", target=target).cells(measured)
    assert cells == ["case", "**100 tokens/s**", "90 to 110 (20.0%)", "theirs, 50 tokens/s", "2.00×", "2.50×: missed"]
    assert table.Line("case", ("ours", "c")).cells(measured)[1] == "its process ended"
    assert table.Line("case", ("nobody", "c")).cells(measured)[1] == "not measured"
    slow = table.Target(3.0, "3 s", at_most=True)
    assert (slow.verdict(2.9), slow.verdict(3.1)) == ("3 s: met", "3 s: missed")


class Process:
    """A process that has ended."""

    ended = 0

    def kill(self) -> None:
        self.ended += 1

    def join(self) -> None:
        pass


def test_headline_process_that_times_out_or_dies_is_recorded(load: Any) -> None:
    headline = load("headline")
    for closed, reason in ((False, "not finished in time"), (True, "its process ended")):
        connection, child_connection = multiprocessing.Pipe()
        worker = headline.Worker("group", "cpu", Process(), connection)
        child_connection.send(("case", {"seconds": 1.0}))
        if closed:
            child_connection.close()
        assert list(worker.results(time.monotonic() + (300.0 if closed else 0.0))) == [("case", {"seconds": 1.0})]
        assert (worker.end_reason, worker.process.ended) == (reason, 1)


def test_a_headline_turn_leaves_time_for_more_important_groups(load: Any) -> None:
    reserved = load("headline").reserved
    assert [reserved([10.0, 5.0], number, 3) for number in (1, 2, 3)] == [0.0, 15.0, 0.0]


def test_headline_tables_name_measured_cases(load: Any) -> None:
    """A row without a case would always read "not measured"."""
    cases, table = load("headline_cases"), load("headline_table")
    lines = [*table.TRAINING, *table.generation()]
    keys = {key for line in lines for key in (line.key, line.peer) if key is not None}
    assert {group for group, _ in keys} == set(cases.BY_NAME) - {"head"}
    missing = keys - {(group.name, case) for group in cases.GROUPS for case in group.cases.names()}
    assert not missing


@pytest.mark.thorough
@pytest.mark.slow
def test_every_headline_group_that_needs_no_gpu_measures_its_cases(load: Any) -> None:
    """Each with a tiny model. Slow, since every benchmark runs once."""
    cases = load("headline_cases")
    with ranks(device="cpu"):
        for group in cases.GROUPS:
            if "flex" in group.name or "liger" in group.name:
                continue  # compiled attention and Liger's kernels need a GPU
            results = dict(group.cases.run(cases.Scale("cpu", tiny=True)))
            assert results, group.name
            failed = {name: case["failed"] for name, case in results.items() if "failed" in case}
            assert not failed or set(failed) == {"64x32x512 Liger fused linear CE"}, group.name


def test_the_cost_of_layer_metrics_is_measured(load: Any) -> None:
    benchmark = load("layer_metrics")
    assert benchmark.measure(benchmark.SMALL, "cpu", repeats=1).keys() == {"with_ms", "without_ms", "share"}


def test_shapes_have_as_many_weights_as_transformers_models(load: Any) -> None:
    """And what a step of very many rows reads of them is all but an embedding that is only looked up."""
    workloads, decode_bytes = load("workloads"), load("decode_bytes")
    for name, shape in workloads.SHAPES.items():
        config = shape()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        embedding = 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
        expected = 2 * (sum(parameter.numel() for parameter in model.parameters()) - embedding)
        assert decode_bytes.DecodeBytes.of(config).weights(10**6) == expected, name


def test_roofline_counts_every_key_once_and_the_newest_of_a_window(load: Any) -> None:
    """Against a sum over steps, rows and blocks, with a prompt that a group shares."""
    needed = load("decode_bytes").DecodeBytes(
        dense_weights=0, expert_weights={}, token_bytes={None: 3, 4: 5}, state_bytes=7
    )
    prompt, group = 6, 2

    def step(tokens: int) -> int:
        window_starts = max(0, prompt + tokens - 4)
        windowed = max(0, prompt - window_starts) + group * min(tokens, 4)
        return 3 * (prompt + group * tokens) + 5 * windowed + 2 * 7 * group

    assert needed.completion(torch.arange(1, 9), prompt, group).tolist() == [step(tokens) for tokens in range(1, 9)]


FAKE_VLLM = """
import json
from types import SimpleNamespace as Namespace

__version__ = "0.0"
SamplingParams = Namespace


class LLM:
    def __init__(self, folder, **options):
        print("a log line", options)
        with open(folder + "/config.json") as config:
            if json.load(config)["architectures"] != ["Qwen3ForCausalLM"]:
                raise NotImplementedError("Errors name what is wrong")

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, sampling, use_tqdm):
        assert all(prompt["prompt_token_ids"] for prompt in prompts)
        return [Namespace(outputs=[Namespace(token_ids=[0] * one.max_tokens)] * one.n) for one in sampling]
"""


def test_generate_compares_with_a_vllm_of_another_interpreter(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vLLM that cannot start, here because of the shape, becomes rows that say why; the native ones stay."""
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o700)
    words = ["--completions", "2", "--length", "2", "--prompt", "4", "--workloads", "even", "--repeat", "1"]
    path = tmp_path / "found.json"
    shapes = ["--shape", "smoke", "smoke-moe"]
    monkeypatch.setattr(sys, "argv", ["generate.py", "--vllm", str(python), *shapes, *words, "--json", str(path)])
    load("generate").main()
    found = json.loads(path.read_text())
    assert found["versions"]["vllm"] == "0.0"
    by_shape = {name: [case for case in found["cases"] if case["shape"] == name] for name in ("smoke", "smoke-moe")}
    assert [(case["engine"], case["tokens"], len(case["seconds"])) for case in by_shape["smoke"]] == [
        (engine, 4, 1) for engine in ("postlude", "vllm", "vllm, log-probs")
    ]
    assert all("times_vllm" in case for case in by_shape["smoke"])
    failed = [case.get("failed", "") for case in by_shape["smoke-moe"]]
    reason = "vLLM ended with status 1: NotImplementedError: Errors name what is wrong"
    assert failed == ["", reason, reason]


SMOKES = {
    "lora": ["--cases", "lora", "lora-recompute", "full", "peft-padded", "peft-sdpa", "peft-sdpa-checkpointing"],
    "train_step": ["--cases", "update", "sft", "logprobs", "padded", "trl", "trl-logprobs"],
    "rl_iteration": [],
    "growth": ["--axes", "length", "experts"],
    "weight_sync": [],
    "asynchrony": [],
    "batch_invariant": [],
    "small_kernels": [],
    "headline": ["--rounds", "2", "--groups", "head", "first call, compiled"],
}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", SMOKES)
def test_benchmark_runs_and_writes_its_results(load: Any, tmp_path: Path, name: str) -> None:
    path = tmp_path / "found.json"
    results = load(name).main(["--smoke", "--device", "cpu", "--json", str(path), *SMOKES[name]])
    assert results
    assert not [case for case in results if "failed" in json.dumps(case)]
    assert json.loads(path.read_text())["cases"] == json.loads(json.dumps(results))
    if name == "growth":
        load(name).main(["--draw", str(path), str(tmp_path / "drawn.svg")])
        assert (tmp_path / "drawn.svg").read_text().count("<polyline") > 4

"""The host does not wait for the device between a step's first kernel and the metrics at its end."""

import collections
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from postlude import Layout
from postlude import ranks as started
from postlude.data import Batch
from postlude.engine import Engine
from postlude.objectives import SFT, Distill, Objective, PolicyGradient, Preference
from tests.engine.training import BUDGET, batch, build, config, policy, train
from tests.model.small import small_config
from tests.ops.watch import Waits

LAYERS = 4  # of both models
LENGTHS = (12, 17, 3, 25, 6, 11, 9, 14, 2, 12)  # pairs fit the budget
HOST = {
    "language_model.py:_stage_input",
    "normalizer.py:count",
    "transfers.py:send",
}  # on the CPU, or through it, as gloo sends
OBJECTIVES: dict[str, Objective] = {
    "own": policy,
    "sft": SFT(over="mask"),
    "z loss": SFT(over="mask", z_loss=0.1),
    "grpo": PolicyGradient(over="mask", ratio="on_policy"),
    "gspo": PolicyGradient(over="mask", ratio="sequence"),
    "dpo": Preference(mask="mask"),
    "distill": Distill(over="mask"),
}


def columns(input_batch: Batch) -> Batch:
    """Columns that the objectives read; the first completions are not trained on."""
    lengths = [len(sequence) for sequence in input_batch.sequences]
    input_batch.columns["mask"][:2] = [torch.zeros(length) for length in lengths[:2]]
    extra: dict[str, Any] = {
        name: [torch.full((length,), -1.0) for length in lengths] for name in ("old_logprobs", "reference_logprobs")
    }
    extra["teacher_ids"] = [torch.arange(3).expand(length, 3) for length in lengths]
    extra["teacher_logprobs"] = [torch.full((length, 3), -2.0) for length in lengths]
    return Batch(
        input_batch.sequences, {**input_batch.columns, **extra}, groups=[place // 2 for place in range(len(lengths))]
    )


def source(model: str) -> Any:
    """Returns a built-in model, or one with the blocks of a pattern."""
    return config(model) if model.startswith("tiny") else small_config(model, vocab_size=256)


def waits(
    group: Any, layout: str, model: str, recompute: str, names: Sequence[str] = tuple(OBJECTIVES)
) -> dict[str, list[str]]:
    """Returns the places where the host would wait in the forwards and backwards of each objective."""
    engine, results = build(layout, source(model), recompute=recompute), {}
    run, input_columns = engine.stages.executor.run, columns(batch(0, LENGTHS))
    passes = {name: (objective, input_columns) for name, objective in OBJECTIVES.items() if name in names}
    if routers := engine.config.routers:
        replayed = [torch.arange(2).expand(length, len(routers), 2) for length in LENGTHS]
        passes["replayed"] = policy, replace(input_columns, columns={**input_columns.columns, "routing": replayed})
    for name, (objective, learned) in passes.items():
        watch = Waits()

        def watched(*arguments: Any, watch: Waits = watch, **options: Any) -> Any:
            with watch:
                return run(*arguments, **options)

        with mock.patch.object(engine.stages.executor, "run", watched):
            engine.forward_backward(learned, objective)
        results[name] = [site for site in watch.sites if site not in HOST]
    return results


@pytest.mark.parametrize(
    ("layout", "model", "recompute"),
    [
        ("", "tiny-moe", "none"),
        pytest.param("tp=2", "tiny-moe", "none", marks=pytest.mark.thorough),
        ("", "[M-]*", "none"),
        pytest.param("cp=2", "[M-]*", "selective", marks=pytest.mark.thorough),
        pytest.param("", "tiny-dense", "none", marks=pytest.mark.thorough),
        pytest.param("", "tiny-moe", "selective", marks=pytest.mark.thorough),
        pytest.param("cp=2", "tiny-moe", "none", marks=pytest.mark.thorough),
        pytest.param("pp=2", "tiny-moe", "none", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.slow
def test_forward_and_backward_do_not_synchronise(ranks: Any, layout: str, model: str, recompute: str) -> None:
    for actual in ranks(Layout.parse(layout).world_size, waits, layout, model, recompute):
        assert actual.keys() - {"replayed"} == OBJECTIVES.keys()
        assert not any(actual.values()), actual


@pytest.mark.slow
def test_with_ep_a_layer_synchronises_once_for_the_exchange_sizes(ranks: Any) -> None:
    for actual in ranks(2, waits, "dp_shard=2,ep=2", "tiny-moe", "none", ("grpo", "dpo")):
        for sites in actual.values():
            assert set(sites) == {"all_to_all.py:wait"}
            assert len(sites) % LAYERS == 0  # once a layer and microbatch


def synchronizing_files(action: Callable[[], Any]) -> collections.Counter[str]:
    """Counts the files in which CUDA reports that the host waited."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            action()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return collections.Counter(
        Path(warning.filename).name for warning in caught if "called a synchronizing" in str(warning.message)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["tiny-dense", "tiny-moe", "[M-]*"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_only_metrics_and_the_norm_synchronise_on_a_gpu(model: str, name: str) -> None:
    """Forwards and backwards never do, and a batch with twice the microbatches does not more often."""
    with started(device="cuda"):
        engine = Engine(source(model), budget=BUDGET, device="cuda")
        short, long = (columns(batch(0, lengths)) for lengths in (LENGTHS, LENGTHS + LENGTHS))
        train(engine, [0, 1])  # whatever is made once is made here
        results = []
        for step_batch in (short, long):
            engine.forward_backward(step_batch, OBJECTIVES[name])
            engine.optimizer_step()
            with mock.patch.object(engine.stages.executor, "run", strict(engine.stages.executor.run)):
                step = synchronizing_files(
                    lambda step_batch=step_batch: engine.forward_backward(step_batch, OBJECTIVES[name])
                )
            results.append((step, synchronizing_files(engine.optimizer_step)))
        assert results[0] == results[1]
        assert [sum(update.values()) for _, update in results] == [1, 1]  # the gradient's norm


def strict(run: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a wait raise in every forward and backward of a step."""

    def watched(*arguments: Any, **options: Any) -> Any:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(*arguments, **options)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    return watched

"""A pipeline equals one rank: losses, per-token results and gradients, in every schedule and length."""

import time
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import postlude.world.mesh
from postlude import LanguageModel, Layout, Microbatch, OutputInputs, Stage, load_model, pack
from postlude.pipeline import Executor
from postlude.pipeline.executor import MAX_PENDING_SENDS
from postlude.world.mesh import Mesh
from tests.equality import assert_equal
from tests.meshes import mesh
from tests.model.small import sequences, small_config

LENGTHS = (5, 1, 8, 3, 12, 2, 7, 9, 4, 11)
Gradients = dict[str, Tensor]


def objective(inputs: OutputInputs, bonus: float) -> dict[str, Any]:
    """Combines token, entropy and sequence terms; the result is a tree, not a tensor."""
    microbatch = inputs.microbatch
    stats = inputs.head.logprobs(inputs.hidden, microbatch.targets, entropy=True)
    total = microbatch.sequence_sum(stats.logprob).exp().sum()
    loss = (-stats.logprob - bonus * stats.entropy).sum() + 0.1 * total
    return {"loss": loss / microbatch.batch_targets, "parts": (stats.logprob.detach(), microbatch.index)}


def batch(count: int, seed: int = 0, multiple_of: int = 1) -> list[Microbatch]:
    return pack(sequences(*LENGTHS[:count], seed=seed), budget=12, multiple_of=multiple_of)


def build(pattern: str, tied: bool, stage: Stage) -> LanguageModel:
    if pattern in ("tiny-moe", "tiny-dense"):
        return LanguageModel(load_model(pattern).config, stage=stage)
    return LanguageModel(small_config(pattern, tied_head=tied), stage=stage)


def step(executor: Executor, microbatches: list[Microbatch]) -> list[Any]:
    return executor.run(
        microbatches, output_processor=objective, output_processor_context=0.03, loss=lambda result: result["loss"]
    )


def collect(models: dict[int, LanguageModel]) -> Gradients:
    """Gradients by name; stages that share a tied embedding add up."""
    gradients: Gradients = defaultdict(lambda: torch.zeros(()))
    for model in models.values():
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients[name] + parameter.grad
    return dict(gradients)


def one_rank(pattern: str, tied: bool, *steps: list[Microbatch]) -> tuple[list[Any], Gradients]:
    models = {0: build(pattern, tied, Stage())}
    executor = Executor(models)
    results = [result for microbatches in steps for result in step(executor, microbatches)]
    return results, collect(models)


def pipeline(
    group: dist.ProcessGroup, vpp: int, pattern: str, tied: bool, plan: list[Any]
) -> tuple[list[Any], Gradients]:
    """Runs one pipeline rank. `plan` holds microbatches to train on, or ("look", microbatches) to run forward only."""
    pp, rank = dist.get_world_size(group), dist.get_rank(group)
    models = {s: build(pattern, tied, Stage(s, pp * vpp)) for s in range(rank, pp * vpp, pp)}
    executor = Executor(models, mesh(Layout(pp=pp, vpp=vpp)))
    results = []
    for entry in plan:
        if isinstance(entry, tuple):
            looked = executor.run(entry[1], output_processor=objective, output_processor_context=0.03)
            assert all(not result["loss"].requires_grad for result in looked)
        else:
            results += step(executor, entry)
    return [(result["loss"].detach(), *result["parts"]) for result in results], collect(models)


def assert_same(outputs: list[tuple[list[Any], Gradients]], results: list[Any], gradients: Gradients) -> None:
    assert all(not actual for actual, _ in outputs[:-1]), "only the rank with the last stage has results"
    actual = outputs[-1][0]
    assert len(actual) == len(results)
    for (loss, logprobs, index), expected in zip(actual, results, strict=True):
        assert_equal(loss, expected["loss"], "loss")
        assert_equal(logprobs, expected["parts"][0], "log-probs")
        assert index == expected["parts"][1]
    gathered: Gradients = {}
    for _, part in outputs:
        for name, gradient in part.items():
            gathered[name] = gathered[name] + gradient if name in gathered else gradient
    assert gathered.keys() == gradients.keys()
    for name, gradient in gathered.items():
        assert_equal(gradient, gradients[name], f"gradient of {name}")


@pytest.mark.parametrize(
    ("pp", "vpp", "pattern", "count", "tied"),
    [
        (1, 1, "[*-]{4}", 10, False),
        (2, 1, "[*-]{4}", 10, True),
        (2, 1, "[*-]{4}", 1, False),
        (4, 1, "*-*E", 6, True),
        (2, 2, "[*-][S-][*E]*", 10, False),
        (2, 4, "[*-]{8}", 6, False),
        (4, 2, "[*-]{8}", 10, True),
        (4, 2, "[*-]{8}", 1, True),
    ],
)
@pytest.mark.slow
def test_a_pipeline_equals_one_rank(ranks, pp: int, vpp: int, pattern: str, count: int, tied: bool) -> None:
    microbatches = batch(count)
    outputs = ranks(pp, pipeline, vpp, pattern, tied, [microbatches])
    assert_same(outputs, *one_rank(pattern, tied, microbatches))


def test_lengths_may_change_and_forward_only_runs_change_nothing(ranks) -> None:
    first, second = batch(10), batch(5, seed=3)
    outputs = ranks(2, pipeline, 2, "[*-]{4}", True, [first, ("look", second), second, ("look", first)])
    assert_same(outputs, *one_rank("[*-]{4}", True, first, second))


def test_empty_microbatches_have_zero_weight(ranks) -> None:
    microbatches = batch(2, multiple_of=4)
    assert any(len(microbatch) == 0 for microbatch in microbatches)
    outputs = ranks(2, pipeline, 1, "[*-]{4}", False, [microbatches])
    full = [microbatch for microbatch in microbatches if len(microbatch)]
    expected, gradients = one_rank("[*-]{4}", False, full)
    outputs[-1] = ([actual for actual in outputs[-1][0] if len(actual[1])], outputs[-1][1])
    assert_same(outputs, expected, gradients)


def test_auxiliary_losses_of_every_stage_are_added(ranks) -> None:
    """The router's balance loss bypasses the objective, and is the same for any split into stages."""
    microbatches = pack([torch.arange(n) * 3 % 256 for n in LENGTHS], budget=20)
    outputs = ranks(4, pipeline, 1, "tiny-moe", False, [microbatches])
    assert_same(outputs, *one_rank("tiny-moe", False, microbatches))


def test_empty_list_of_microbatches(ranks) -> None:
    outputs = ranks(2, pipeline, 1, "[*-]{2}", False, [[]])
    assert outputs == [([], {}), ([], {})]


def run_forward_only(
    group: dist.ProcessGroup, vpp: int, microbatches: list[Microbatch], seconds: float
) -> tuple[list[str], int]:
    """Runs one rank forward only, with a slow last stage. Returns its events and the most unsent activations."""
    pp, rank = dist.get_world_size(group), dist.get_rank(group)
    models = {s: build("[*-]{4}", False, Stage(s, pp * vpp)) for s in range(rank, pp * vpp, pp)}
    executor = Executor(models, mesh(Layout(pp=pp, vpp=vpp)))
    events: list[str] = []
    unsent = [0]

    def received(*arguments: Any) -> Any:
        events.append("receive")
        return receive(*arguments)

    def ran(*_: Any) -> None:
        events.append("run")
        unsent.append(max((len(pending) for pending in executor.channels.pending.values()), default=0))

    for model in models.values():
        model.register_forward_hook(ran)
    receive = executor.channels.receive
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor.channels, "receive", received)
        executor.run(microbatches, output_processor=lambda inputs, _: time.sleep(seconds))
    return events, max(unsent)


@pytest.mark.parametrize("vpp", [1, 2])
def test_slow_last_stage_limits_activations_in_flight(ranks, vpp: int) -> None:
    """Forward only, no backward would keep the first stage from queueing 24 activations."""
    microbatches = pack([torch.arange(4)] * 24, budget=4)
    (_, unsent), _ = ranks(2, run_forward_only, vpp, microbatches, 0.02)
    assert unsent <= MAX_PENDING_SENDS


def test_a_receive_is_launched_one_entry_before_it_is_needed(ranks) -> None:
    microbatches = pack([torch.arange(4)] * 3, budget=4)
    (first, _), (last, _) = ranks(2, run_forward_only, 1, microbatches, 0.0)
    assert first == ["run"] * 3
    assert last == ["receive", "receive", "run", "receive", "run", "run"]


def used_channels(group: dist.ProcessGroup, layout: Layout) -> list[tuple[str, int]]:
    """Returns the channels that were used while they were created."""
    used: list[tuple[Any, dist.ProcessGroup]] = []
    launch = postlude.world.mesh.point_to_point

    def launched(operation: Any, tensor: Tensor, group: dist.ProcessGroup) -> Any:
        used.append((operation, group))
        return launch(operation, tensor, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(postlude.world.mesh, "point_to_point", launched)
        channels = Mesh(layout).channels
    names = {channel: name for name, channel in channels.items()}
    return [names[channel] for operation, channel in used if operation is dist.isend]


@pytest.mark.parametrize(
    ("layout", "sent"),
    [(Layout(pp=2), [[("F", 0)], [("B", 1)]]), (Layout(pp=2, vpp=2), [[("F", 0), ("B", 0)], [("B", 1), ("F", 1)]])],
)
def test_every_channel_is_used_at_creation(ranks, layout: Layout, sent: list[list[tuple[str, int]]]) -> None:
    assert ranks(2, used_channels, layout) == sent


def test_the_executor_returns_the_processors_result_unchanged() -> None:
    executor = Executor({0: build("[*-]", False, Stage())})
    marker = object()
    (result,) = executor.run(batch(1), output_processor=lambda inputs, context: (context, marker))
    assert result == (None, marker)
    assert result[1] is marker


def test_wrong_stages_are_refused() -> None:
    with pytest.raises(ValueError, match=r"runs stages \[0\], but was given \[1\]"):
        Executor({1: build("[*-]{2}", False, Stage(1, 2))})
    with pytest.raises(ValueError, match="stage 0 of 1 was given a model built as Stage"):
        Executor({0: build("[*-]{2}", False, Stage(0, 2))})

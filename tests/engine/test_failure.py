"""After a failed call an engine is usable or refuses calls; if a rank dies, the other ranks name it."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from postlude import Batch, Engine, Layout, Loss, OutputInputs, launch
from postlude.engine.stages import StageBuilder
from postlude.objectives import SFT
from postlude.optimizer import SGD
from tests.engine.training import batch, bitwise_equal, build, config, error_text, policy, train, weights
from tests.plain_ranks import PlainRanks

TIMEOUT = 30.0
FAULT = "LookupError: no such column"


def fault() -> Any:
    raise LookupError("no such column")


class FaultyBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        fault()


def fails_forward(inputs: OutputInputs) -> Loss:
    """Raises in the second microbatch before its loss."""
    return policy(inputs) if inputs.microbatch.index < 2 else fault()


def fails_backward(inputs: OutputInputs) -> Loss:
    """Raises in the second microbatch's backward, after the first gave gradients."""
    loss = policy(inputs)
    if inputs.microbatch.index < 2:
        return loss
    return loss + Loss(FaultyBackward.apply(inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets).logprob))


FAILURES: dict[str, Callable[[Engine], Any]] = {
    "measure": lambda engine: engine.evaluate_loss(batch(7), fails_forward),
    "tensor": lambda engine: engine.evaluate_loss(batch(7), lambda inputs: inputs.hidden.sum()),
    "logprobs": lambda engine: engine.evaluate_tokens(batch(7), lambda inputs: fault()),
    "shape": lambda engine: engine.evaluate_tokens(batch(7), lambda inputs: {"x": inputs.hidden @ inputs.hidden}),
    "forward": lambda engine: engine.forward_backward(batch(7), fails_forward),
    "backward": lambda engine: engine.forward_backward(batch(7), fails_backward),
    "reference": lambda engine: engine.reference().engine.evaluate_loss(batch(7), fails_forward),
}


def run_with_and_without_failure(group: dist.ProcessGroup, model: str, failure: str, overlap: bool = False) -> None:
    """Two engines take the same steps, and one of them fails in between."""
    first_engine, second_engine = (build("", config(model), overlap=overlap) for _ in range(2))
    for engine in (first_engine, second_engine):
        train(engine, [1])
        engine.forward_backward(batch(2), policy)
    sentence = error_text(lambda: FAILURES[failure](first_engine))
    assert sentence.startswith((FAULT, "RuntimeError: mat1 and", "TypeError: an objective returns a Loss")), sentence
    if failure in ("forward", "backward"):  # half of a gradient is none
        for call in (
            first_engine.optimizer_step,
            first_engine.grad_norm,
            lambda: first_engine.forward_backward(batch(3), policy),
        ):
            assert error_text(call) == (
                f"RuntimeError: the gradients of this step were lost when forward_backward failed ({FAULT}): "
                "call zero_grad, and run all batches of the step again."
            )
        first_engine.zero_grad()
        first_engine.forward_backward(batch(2), policy)
    for engine in (first_engine, second_engine):
        engine.optimizer_step()
    assert bitwise_equal(weights(first_engine), weights(second_engine))
    for actual, expected in zip(
        first_engine.logprobs(batch(4)).logprob, second_engine.logprobs(batch(4)).logprob, strict=True
    ):
        assert torch.equal(actual, expected)
    assert train(first_engine, [5]) == train(second_engine, [5])
    assert bitwise_equal(weights(first_engine), weights(second_engine))


def detached_or_zero(group: dist.ProcessGroup, layout: str) -> None:
    """A loss without a gradient fails on all ranks, unless it is zero or another microbatch has one."""

    def constant(inputs: OutputInputs) -> Loss:
        return Loss(torch.full(inputs.microbatch.targets.shape, 3.0))

    def zero(inputs: OutputInputs) -> Loss:
        return Loss(torch.zeros(inputs.microbatch.targets.shape))

    def constant_in_the_first(inputs: OutputInputs) -> Loss:
        return constant(inputs) if inputs.microbatch.index == 0 else policy(inputs)

    engine = build(layout, config("tiny-dense"))
    sentence = error_text(lambda: engine.forward_backward(batch(1), constant))
    assert "the loss has no gradient: the values that the objective returns do not depend on the model" in sentence
    engine.zero_grad()
    assert engine.evaluate_loss(batch(1), constant).loss == pytest.approx(3.0)
    assert engine.forward_backward(batch(1), zero).loss == 0.0
    assert engine.grad_norm() == 0.0
    engine.forward_backward(batch(1), constant_in_the_first)
    assert engine.grad_norm() > 0.0


@pytest.mark.parametrize("layout", ["", "pp=2", "dp_shard=2"])
def test_a_loss_without_a_gradient_is_an_error_unless_it_is_zero(ranks, layout: str) -> None:
    ranks(Layout.parse(layout).world_size, detached_or_zero, layout)


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.slow
def test_one_rank_stays_usable_after_a_failure(ranks, failure: str) -> None:
    ranks(1, run_with_and_without_failure, "tiny-dense", failure)


@pytest.mark.slow
@pytest.mark.parametrize(("failure", "overlap"), [("measure", False), ("backward", True)])
def test_experts_and_router_counters_survive_a_failure(ranks, failure: str, overlap: bool) -> None:
    """Also while two microbatches are interleaved."""
    ranks(1, run_with_and_without_failure, "tiny-moe", failure, overlap)


def failing_reference(group: dist.ProcessGroup) -> None:
    engine = build("", config("tiny-dense", num_hidden_layers=2))
    reference = engine.reference()
    old_logprobs = engine.logprobs(batch(4)).logprob
    train(engine, [1, 2])
    new_logprobs = engine.logprobs(batch(4)).logprob
    with pytest.raises(LookupError), reference.swapped_in():
        engine.evaluate_loss(batch(7), fails_forward)
    *_, last = reference.weights
    spare = reference.weights.pop(last)
    assert error_text(lambda: reference.logprobs(batch(4))).startswith("KeyError")
    reference.weights[last] = spare
    assert all(map(torch.equal, engine.logprobs(batch(4)).logprob, new_logprobs))
    assert all(map(torch.equal, reference.logprobs(batch(4)).logprob, old_logprobs))
    assert all(map(torch.equal, engine.logprobs(batch(4)).logprob, new_logprobs))


def test_failing_reference_restores_the_weights(ranks) -> None:
    ranks(1, failing_reference)


def refused(group: dist.ProcessGroup, layout: str, failure: str) -> list[str]:
    engine = build(layout, config("tiny-dense", num_hidden_layers=2))
    assert FAULT in error_text(lambda: FAILURES[failure](engine))
    calls: list[Callable[[], Any]] = [
        lambda: engine.forward_backward(batch(1), policy),
        lambda: engine.evaluate_loss(batch(1), policy),
        lambda: engine.logprobs(batch(1)),
        lambda: list(engine.stream_weights()),
        lambda: engine.save("/nowhere"),
        lambda: engine.load("/nowhere"),
        engine.optimizer_step,
        engine.zero_grad,
        engine.reference,
    ]
    return [error_text(call) for call in calls]


@pytest.mark.parametrize(
    ("layout", "failure", "call"),
    [("dp_shard=2", "measure", "evaluate_loss"), ("tp=2", "backward", "forward_backward")],
)
def test_one_of_several_ranks_refuses_further_calls_after_a_failure(
    ranks, layout: str, failure: str, call: str
) -> None:
    for sentences in ranks(2, refused, layout, failure):
        assert set(sentences) == {
            f"RuntimeError: this engine's {call} failed ({FAULT}), and other ranks may still be in the middle of it: "
            "make a new engine on every rank, and load its last checkpoint."
        }


def fail_beyond_repair(group: dist.ProcessGroup) -> str:
    engine = build("", config("tiny-dense", num_hidden_layers=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageBuilder, "_build_on_meta", lambda *_: torch.zeros(-1))
        assert error_text(lambda: engine.evaluate_loss(batch(7), fails_forward)) == FAULT
    return error_text(lambda: engine.evaluate_loss(batch(7), policy))


def test_an_engine_that_cannot_be_rebuilt_raises(ranks) -> None:
    (sentence,) = ranks(1, fail_beyond_repair)
    assert sentence.startswith(
        f"RuntimeError: this engine's evaluate_loss failed ({FAULT}), and its stages could not be rebuilt"
    )
    assert sentence.endswith("make a new engine, and load its last checkpoint.")


def fail_in_between(device: str) -> list[Tensor]:
    """Returns log-probs before a step, after it, and after it with a failed evaluation in between."""
    results = []
    for fails in (False, True):
        source, options = config("tiny-moe", num_hidden_layers=2), {"compute_dtype": torch.float32, "device": device}
        engine = Engine(source, budget=32, optimizer=SGD(lr=1.0), **options)
        results.append(torch.cat(engine.logprobs(batch(4)).logprob))
        engine.forward_backward(batch(2), policy)
        if fails:
            assert error_text(lambda: engine.evaluate_loss(batch(7), fails_forward)) == FAULT  # noqa: B023
        engine.optimizer_step()
        results.append(torch.cat(engine.logprobs(batch(4)).logprob))
    return [results[0], results[1], results[3]]


@pytest.mark.gpu
def test_an_engine_on_a_gpu_stays_usable_after_a_failure() -> None:
    """Full weights gathered on other streams are freed, and the step's weights are used."""
    ((before, expected, actual),) = launch(fail_in_between, "cuda", nproc=1, timeout=TIMEOUT, device="cuda")
    moved = (expected - before).abs().max()
    assert (actual - expected).abs().max() < 0.01 * moved


def fail_in_optimizer_step(group: dist.ProcessGroup, directory: str) -> None:
    first_engine, second_engine = (build("", config("tiny-dense", num_hidden_layers=2)) for _ in range(2))
    first_engine.save(directory)
    first_engine.forward_backward(batch(1), policy)
    hook = first_engine.optimizer.register_step_post_hook(lambda *_: fault())
    assert error_text(first_engine.optimizer_step) == FAULT
    hook.remove()
    assert "optimizer_step failed" in error_text(lambda: first_engine.logprobs(batch(1)))
    assert "with its weights half written: load a checkpoint." in error_text(lambda: first_engine.logprobs(batch(1)))
    first_engine.load(directory)
    assert train(first_engine, [1, 2]) == train(second_engine, [1, 2])
    assert bitwise_equal(weights(first_engine), weights(second_engine))


def test_failed_optimizer_step_is_repaired_by_loading_a_checkpoint(ranks, tmp_path) -> None:
    ranks(1, fail_in_optimizer_step, str(tmp_path / "checkpoint"))


def fail_on_last_stage(layout: str) -> None:
    """The last stage fails, and the calls continue."""
    engine = Engine("tiny-dense", layout=Layout.parse(layout), budget=16)
    error_text(lambda: engine.evaluate_loss(Batch([[1, 2, 3, 4, 5, 6, 7, 8]] * 4), lambda inputs: fault()))
    engine.optimizer_step()


@pytest.mark.slow
def test_a_pipeline_stage_refuses_further_calls_after_a_failure() -> None:
    with PlainRanks(2, TIMEOUT, fail_on_last_stage, "pp=2") as processes:
        assert processes.error_of(0).startswith("rank 1 of 2 failed: RuntimeError: this engine's evaluate_loss failed")


def train_until_rank_exits(layout: str, end: str) -> None:
    """Trains until the last rank exits in the middle of its second step."""
    engine = Engine("tiny-dense", layout=Layout.parse(layout), budget=16)
    calls = 0

    def objective(inputs: OutputInputs) -> Loss:
        nonlocal calls
        calls += 1
        if calls == 4 and dist.get_rank() == dist.get_world_size() - 1:
            if end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise LookupError("no such column")
        return SFT()(inputs)

    while True:
        engine.forward_backward(Batch([[1, 2, 3, 4, 5, 6, 7, 8]] * 4), objective)
        engine.optimizer_step()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp=2", pytest.param("dp_shard=2", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        ("killed", "rank 1 of 2 does not answer any more: it was killed or lost."),
        ("fails", "rank 1 of 2 failed: LookupError: no such column"),
    ],
)
def test_rank_that_dies_in_a_step_ends_all_ranks(layout: str, end: str, sentence: str) -> None:
    with PlainRanks(2, TIMEOUT, train_until_rank_exits, layout, end) as processes:
        assert processes.error_of(0) == sentence

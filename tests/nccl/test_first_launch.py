"""A pipeline does not hang when kernels are launched for the first time while receives are posted.

CUDA loads a kernel at its first launch and waits for the kernels that run. A receive that was launched runs until the
other rank sends, so this is where ranks could wait for each other for ever. Each test runs in new processes, which have
loaded nothing, with CUDA's default settings.
"""

import os
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from postlude import AdamW, Engine, Layout, Loss, OutputInputs
from postlude.world.launcher import launch, ranks
from tests.engine.training import batch, config

TIMEOUT = 100.0  # seconds; a step takes less than one
RARE = (
    torch.special.bessel_j0, torch.special.bessel_j1, torch.special.bessel_y0, torch.special.i0e, torch.special.i1e,
    torch.special.log_ndtr, torch.special.ndtri, torch.special.erfcx, torch.special.spherical_bessel_j0,
    torch.special.modified_bessel_i0, torch.special.modified_bessel_k1, torch.special.airy_ai, torch.asinh,
    torch.digamma, torch.lgamma, torch.erfinv,
)  # fmt: skip


class LaunchNewKernel(torch.autograd.Function):
    """Returns its input. Launches a kernel that this process has not launched yet, in forward and backward."""

    unused: ClassVar = list(RARE)

    @staticmethod
    def forward(context: Any, hidden: Tensor) -> Tensor:  # type: ignore[override]
        if LaunchNewKernel.unused:
            LaunchNewKernel.unused.pop()(hidden.detach().float())
        return hidden.view_as(hidden)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if LaunchNewKernel.unused:
            LaunchNewKernel.unused.pop()(gradient.float())
        return gradient


def policy(inputs: OutputInputs) -> Loss:
    stats = inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets, entropy=True)
    return Loss(-stats.logprob - 0.01 * stats.entropy, over="mask")


def policy_with_new_kernels(inputs: OutputInputs) -> Loss:
    return policy(replace(inputs, hidden=LaunchNewKernel.apply(inputs.hidden)))


def train(layout: str, options: dict[str, Any], steps: int, late: int | None) -> list[float]:
    """Returns the losses of some steps. In step `late` every stage launches new kernels, for each new length."""
    assert "CUDA_MODULE_LOADING" not in os.environ
    engine = Engine(config("tiny-moe"), layout=Layout.parse(layout), optimizer=AdamW(lr=1e-3), budget=64, **options)
    earlier = [stage for stage in engine.stages.executor.stages.values() if not stage.stage.last]
    losses = []
    for step in range(steps):
        hooks, objective, lengths = [], policy, (20, 17, 3, 25, 6, 11, 9, 14, 2, 12)
        if step == late:
            hooks = [
                stage.register_forward_hook(lambda *arguments: LaunchNewKernel.apply(arguments[2])) for stage in earlier
            ]
            objective, lengths = policy_with_new_kernels, (61, 47, 33, 64, 5, 59, 21, 37)
        losses.append(engine.forward_backward(batch(step, lengths), objective).loss)
        engine.optimizer_step()
        for hook in hooks:
            hook.remove()
    return losses


def on_one_rank(steps: int, late: int | None) -> list[float]:
    with ranks(device="cuda"):
        return train("", {}, steps, late)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param("pp=2", {}, id="1F1B"),
        pytest.param("pp=2,vpp=2", {}, id="interleaved"),
        pytest.param("pp=2", {"overlap": "zero_bubble"}, id="zero bubble"),
    ],
)
def test_new_kernels_in_first_step_do_not_hang(layout: str, options: dict[str, Any]) -> None:
    expected = on_one_rank(2, None)
    actual = launch(train, layout, options, 2, None, nproc=2, backend="nccl", device="cuda", timeout=TIMEOUT)[0]
    assert actual == pytest.approx(expected, rel=1e-4)


def test_new_kernels_in_step_40_do_not_hang() -> None:
    expected = on_one_rank(42, 40)
    actual = launch(train, "pp=2", {}, 42, 40, nproc=2, backend="nccl", device="cuda", timeout=TIMEOUT)[0]
    assert actual == pytest.approx(expected, rel=1e-3)

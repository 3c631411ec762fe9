"""AdamW with narrow state equals fp32 AdamW: exactly where that is promised, otherwise on average."""

from typing import Any

import pytest
import torch
from torch import Tensor

from postlude.ops import adamw_storage
from postlude.ops.adamw import adamw_step, bias_corrections, random_bits
from postlude.ops.adamw_storage import (
    BLOCK,
    AdamWHyperparameters,
    QuantizedMoment,
    TensorSlice,
    join_halves,
    split_halves,
)

RATES = AdamWHyperparameters(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, decay=0.1)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def initial_state(weight: Tensor, *, weights: str = "fp32", moments: str = "fp32") -> dict[str, Any]:
    """Returns a tensor's state before its first step."""
    eight = moments == "8bit"
    return {
        "weight": weight.clone() if weights == "fp32" else weight.bfloat16(),
        "first": QuantizedMoment.zeros_like(weight) if eight else torch.zeros_like(weight),
        "second": QuantizedMoment.zeros_like(weight) if eight else torch.zeros_like(weight),
        "low": torch.zeros_like(weight, dtype=torch.int16) if weights == "split" else None,
    }


def run(state: dict[str, Any], gradients: list[Tensor], **options: Any) -> dict[str, Any]:
    for number, gradient in enumerate(gradients, start=1):
        correction = bias_corrections(torch.tensor([float(number)], device=DEVICE), RATES)[0]
        arguments = [state["weight"], gradient, state["first"], state["second"]]
        adamw_step(*arguments, correction, RATES, low=state["low"], **options)
    return state


def tensors(state: dict[str, Any]) -> list[Tensor]:
    state_tensors = []
    for value in state.values():
        state_tensors += (
            [value.codes, value.scales] if isinstance(value, QuantizedMoment) else [] if value is None else [value]
        )
    return state_tensors


def test_fp32_step_equals_torch_adamw() -> None:
    parameter = torch.nn.Parameter(normal(7, 65))
    state = initial_state(parameter.detach())
    optimizer = torch.optim.AdamW([parameter], lr=RATES.lr, betas=RATES.betas, eps=RATES.eps, weight_decay=RATES.decay)
    gradients = [normal(7, 65, seed=seed) for seed in range(1, 6)]
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    run(state, gradients)
    torch.testing.assert_close(state["weight"], parameter.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(state["second"], optimizer.state[parameter]["exp_avg_sq"], rtol=1e-6, atol=0.0)


def test_split_weights_store_fp32_bit_exactly() -> None:
    weight = normal(5, 130).bfloat16().float()  # as both start
    gradients = [normal(5, 130, seed=seed) for seed in range(1, 9)]
    wide, split = run(initial_state(weight), gradients), run(initial_state(weight, weights="split"), gradients)
    assert torch.equal(join_halves(split["weight"], split["low"]), wide["weight"])
    values = torch.cat([normal(1000), torch.tensor([0.0, -0.0, 1.0, 1e-40, -3e38], device=DEVICE)])
    high, low = split_halves(values)
    assert torch.equal(join_halves(high, low).view(torch.int32), values.view(torch.int32))
    assert torch.equal(high, values.bfloat16())


def mean_of(function: Any, values: Tensor, count: int = 400) -> Tensor:
    """Returns the mean of many results of a stochastically rounding function."""
    index = torch.arange(values.numel(), device=DEVICE).view(values.shape)
    total = torch.zeros_like(values, dtype=torch.float64)
    for step in range(count):
        total += function(values, random_bits(index, 3, torch.tensor([float(step)], device=DEVICE)))
    return total / count


def test_stochastic_rounding_is_unbiased() -> None:
    values = normal(40, 70)
    mean = mean_of(lambda values, drawn: adamw_storage.round_randomly(values, drawn[0]).double(), values)
    rounding = (adamw_storage.split_halves(values)[0].double() - values).abs().mean()
    assert (mean - values).abs().mean() < 0.15 * rounding  # 400 draws of a spread as wide as what is rounded away
    assert (mean - values).mean().abs() < 0.005 * rounding


def test_steps_below_half_a_bit_move_weights_on_average() -> None:
    state = initial_state(torch.ones(64, 64, device=DEVICE), weights="rounded")
    rates = AdamWHyperparameters(lr=2.0**-12, betas=(0.0, 0.0), eps=1e-30, decay=0.0)  # bf16 below 1 has steps of 2^-8
    for number in range(1, 65):
        correction = bias_corrections(torch.tensor([float(number)], device=DEVICE), rates)[0]
        gradient = torch.ones(64, 64, device=DEVICE)
        adamw_step(
            state["weight"].to(DEVICE),
            gradient,
            *(state[name].to(DEVICE) for name in ("first", "second")),
            correction,
            rates,
        )
    assert float(state["weight"].float().mean()) == pytest.approx(1 - 64 * 2.0**-12, abs=2e-4)


@pytest.mark.parametrize("signed", [True, False])
def test_8_bit_state_error_is_bounded_and_unbiased(signed: bool) -> None:
    values = normal(20, 150) * torch.exp2(2 * normal(20, 150, seed=1))
    values = values if signed else values.square()
    narrow = adamw_storage.quantize_first if signed else adamw_storage.quantize_second
    wide = adamw_storage.dequantize_first if signed else adamw_storage.dequantize_second

    def once(values: Tensor, drawn: Any) -> Tensor:
        return wide(*narrow(values, drawn[1 if signed else 2])).double()

    largest = torch.nn.functional.pad(values.abs(), (0, 42)).view(20, 3, BLOCK).amax(-1).repeat_interleave(BLOCK, 1)
    within = values.abs() > largest[:, :150] * 2.0 ** (-15.75 if signed else -31.75)
    assert within.float().mean() > 0.95
    error = mean_of(lambda values, drawn: (once(values, drawn) / values - 1).abs(), values, 20)
    assert error[within].max() < 2 ** (1 / 8) - 1
    off = (mean_of(once, values) / values - 1)[within]
    assert off.abs().mean() < 0.003
    assert off.mean().abs() < 2e-4


def test_second_moment_is_never_rounded_to_zero() -> None:
    values = torch.full((1, 70), 1e-30, device=DEVICE)
    values[0, 0] = 1.0
    values[0, 1] = 0.0
    codes, scales = adamw_storage.quantize_second(values, torch.zeros(1, 70, dtype=torch.int64, device=DEVICE) + 65535)
    decoded = adamw_storage.dequantize_second(codes, scales)
    assert decoded[0, 1] == 0.0
    assert decoded[0, 2] > 0.0
    assert decoded[0, 0] == 1.0
    assert float(decoded[0, 69]) == pytest.approx(1e-30, rel=0.1)  # in a block of its own


CUTS: dict[str, tuple[tuple[int, ...], tuple[slice, ...]]] = {
    "rows": ((6, 100), (slice(2, 5), slice(0, 100))),
    "columns": ((6, 200), (slice(0, 6), slice(64, 128))),
    "last columns": ((6, 200), (slice(3, 6), slice(128, 200))),
    "experts": ((4, 6, 100), (slice(1, 3), slice(0, 6), slice(0, 100))),
    "rows of experts": ((4, 6, 100), (slice(0, 4), slice(3, 6), slice(0, 100))),
}


@pytest.mark.parametrize("weights", ["rounded", "split"])
@pytest.mark.parametrize("cut", CUTS)
def test_shard_update_equals_full_tensor_update(cut: str, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: blocks and random numbers are those of the full tensor, in any number of pieces."""
    shape, region = CUTS[cut]
    weight, gradients = normal(*shape), [normal(*shape, seed=seed) for seed in (1, 2, 3)]
    options = {"weights": weights, "moments": "8bit"}
    full_state = run(initial_state(weight, **options), gradients, seed=5)
    monkeypatch.setattr("postlude.ops.adamw.ROWS_AT_ONCE", 250)
    part = initial_state(weight[region].contiguous(), **options)
    run(part, [gradient[region].contiguous() for gradient in gradients], seed=5, bounds=TensorSlice.of(region, shape))
    blocks = (*region[:-1], slice(region[-1].start // BLOCK, -(-region[-1].stop // BLOCK)))
    for part_tensor, full_tensor in zip(tensors(part), tensors(full_state), strict=True):
        assert torch.equal(part_tensor, full_tensor[region if full_tensor.shape == shape else blocks])


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
@pytest.mark.parametrize("weights", ["fp32", "split", "rounded"])
def test_gradients_are_scaled_and_non_finite_step_changes_nothing(weights: str, moments: str) -> None:
    weight, gradient = normal(3, 70), normal(3, 70, seed=1)
    options = {"weights": weights, "moments": moments}
    scaled = run(initial_state(weight, **options), [4 * gradient], scale=torch.tensor([0.25, 1.0], device=DEVICE))
    plain = run(initial_state(weight, **options), [gradient])
    assert all(map(torch.equal, tensors(scaled), tensors(plain)))
    before = [tensor.clone() for tensor in tensors(plain)]
    run(plain, [gradient * torch.nan], scale=torch.tensor([torch.nan, 0.0], device=DEVICE))
    assert all(map(torch.equal, tensors(plain), before))


@pytest.mark.thorough  # thousands of steps
def test_8_bit_second_moment_follows_slow_changes() -> None:
    """Each change of the second moment is far below one level, and it still converges."""
    state = initial_state(torch.zeros(16, 64).to(DEVICE), moments="8bit")
    rates = AdamWHyperparameters(lr=0.0, betas=(0.9, 0.999), eps=1e-8, decay=0.0)
    gradient = torch.full((16, 64), 3.0, device=DEVICE)
    gradient[:, 0] = 30.0  # the scale of each block
    gradient_later = gradient.clone()
    gradient_later[:, 1:] = 1.0
    for number in range(1, 1501):
        correction = bias_corrections(torch.tensor([float(number)], device=DEVICE), rates)[0]
        moved = gradient if number <= 500 else gradient_later
        adamw_step(state["weight"], moved, state["first"], state["second"], correction, rates)
    second = adamw_storage.dequantize_second(state["second"].codes, state["second"].scales)[:, 1:]
    expected = (1 - 0.999**500) * 9 * 0.999**1000 + (1 - 0.999**1000)
    assert float(second.mean()) == pytest.approx(expected, rel=0.05)

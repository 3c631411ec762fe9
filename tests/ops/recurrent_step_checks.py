"""Tests of the kernels for one token of each row. `test_kernels.py` runs this file: on a GPU, or through Triton's
interpreter, which must be chosen before triton is first imported."""

import pytest
import torch
from torch import Tensor

from postlude.ops.convolution import convolve_step
from postlude.ops.gated_delta import gated_delta_step
from postlude.ops.ssd import ssd_step
from tests.equality import assert_equal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 5
RUNNING = [None, [True, False, True, True, False]]
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-7}  # a rounded output may be the next number


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def mask(running: list[bool] | None) -> Tensor | None:
    return None if running is None else torch.tensor(running, device=DEVICE)


def assert_rows(actual: Tensor, expected: Tensor, running: list[bool] | None, dtype: torch.dtype) -> None:
    """Outputs of idle rows may be anything."""
    chosen = slice(None) if running is None else mask(running)
    assert actual.dtype == expected.dtype == dtype
    assert_equal(actual[chosen].float(), expected[chosen].float(), "outputs", TOLERANCES[dtype])


def assert_states(actual: Tensor, expected: Tensor, before: Tensor, running: list[bool] | None) -> None:
    """Those of idle rows stay."""
    assert_equal(actual.float(), expected.float(), "states", TOLERANCES[torch.float32])
    for row, runs in enumerate(running or []):
        assert torch.equal(actual[row], before[row]) != runs


@pytest.mark.parametrize("running", RUNNING)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("channels", "width", "bias"), [(1030, 4, True), (7, 1, False), (33, 2, True)])
def test_convolution(channels: int, width: int, bias: bool, dtype: torch.dtype, running: list[bool] | None) -> None:
    """A transposed kernel and a slice of wider inputs, as in a model."""
    inputs = normal(ROWS, channels + 3, seed=0, dtype=dtype)[:, :channels]
    kernel = normal(width, channels, seed=1, dtype=dtype).T
    offset = normal(channels, seed=2, dtype=dtype) if bias else None
    before = normal(ROWS, width - 1, channels, seed=3, dtype=dtype)
    states = [before.clone() for _ in range(2)]
    actual, expected = (
        convolve_step(inputs, state, kernel, offset, mask(running), silu=bias, backend=backend)
        for state, backend in zip(states, ("triton", "torch"), strict=True)
    )
    assert_rows(actual, expected, running, dtype)
    if width > 1:
        assert_states(*states, before, running)


@pytest.mark.parametrize("running", RUNNING)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(4, 64, 2, 128), (6, 5, 3, 33), (1, 130, 1, 128)])
def test_mamba(shape: tuple[int, int, int, int], dtype: torch.dtype, running: list[bool] | None) -> None:
    """With several tiles of a head, sizes that fill none, and slices of one tensor."""
    heads, width, groups, size = shape
    channels = normal(ROWS, heads * width + 2 * groups * size, seed=0, dtype=dtype)
    x, b, c = channels.split((heads * width, groups * size, groups * size), 1)
    x, b, c = x.unflatten(1, (heads, width)), b.unflatten(1, (groups, size)), c.unflatten(1, (groups, size))
    dt, decay, skip = normal(ROWS, heads, seed=1).exp(), -normal(heads, seed=2).exp(), normal(heads, seed=3)
    before = normal(ROWS, heads, width, size, seed=4)
    states = [before.clone() for _ in range(2)]
    actual, expected = (
        ssd_step(x, dt, decay, b, c, skip if heads > 1 else None, state, mask(running), backend=backend)
        for state, backend in zip(states, ("triton", "torch"), strict=True)
    )
    assert_rows(actual, expected, running, dtype)
    assert_states(*states, before, running)


@pytest.mark.parametrize("running", RUNNING)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(2, 2, 128, 128), (3, 1, 20, 7), (1, 3, 64, 200)])
def test_delta_rule(shape: tuple[int, int, int, int], dtype: torch.dtype, running: list[bool] | None) -> None:
    """With several tiles of a head, sizes that fill none, and slices of one tensor."""
    key_heads, group, keys, values = shape
    channels = normal(ROWS, key_heads, 2 * keys + group * values, seed=0, dtype=dtype)
    query, key, value = channels.split((keys, keys, group * values), -1)
    value = value.reshape(ROWS, key_heads * group, values)
    log_decay = -normal(ROWS, key_heads * group, seed=1).exp()
    beta = normal(ROWS, key_heads * group, seed=2).sigmoid()
    before = normal(ROWS, key_heads * group, keys, values, seed=3)
    states = [before.clone() for _ in range(2)]
    actual, expected = (
        gated_delta_step(
            query, key, value, log_decay, beta, state, mask(running), normalise=keys != 20, backend=backend
        )
        for state, backend in zip(states, ("triton", "torch"), strict=True)
    )
    assert_rows(actual, expected, running, dtype)
    assert_states(*states, before, running)

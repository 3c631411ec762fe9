"""The common tolerance: two tensors are equal when they differ by at most 1e-5 of the larger one's scale."""

from torch import Tensor

TOLERANCE = 1e-5


def difference(actual: Tensor, expected: Tensor) -> float:
    """Returns the largest difference, relative to the largest expected magnitude."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} is not {tuple(expected.shape)}"
    if expected.numel() == 0:
        return 0.0
    scale = expected.detach().double().abs().max().clamp_min(1e-12)
    return float((actual.detach().double() - expected.detach().double()).abs().max() / scale)


def assert_equal(actual: Tensor, expected: Tensor, name: str = "tensor", tolerance: float = TOLERANCE) -> None:
    off = difference(actual, expected)
    assert off <= tolerance, f"{name} is off by {off:.2e} relative, more than {tolerance:.0e}"

"""Digests of weights depend on every number and its position, and sums over parts add up to that of the whole."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from postlude.hf.tensor_sources import LINE, checksum, position_sum, word_sum

OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "reversed": lambda weight: weight.flip(0, 1),
    "transposed": lambda weight: weight.t(),
    "columns in another order": lambda weight: weight.roll(4, 1),
    "rows in another order": lambda weight: weight.roll(1, 0),
    "two values in another order": lambda weight: torch.cat((weight[:, [1, 0]], weight[:, 2:]), 1),
    "two negated": lambda weight: torch.cat((weight[:, :2], -weight[:, 2:4], weight[:, 4:]), 1),
    "all negated": lambda weight: -weight,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("other", OTHERS)
def test_the_same_numbers_in_another_order_have_another_checksum(
    tmp_path: Path, other: str, dtype: torch.dtype
) -> None:
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert weight.numel() * weight.element_size() > LINE * 4
    changed = OTHERS[other](weight).contiguous()
    assert int(word_sum(weight)) != int(word_sum(changed))
    assert int(position_sum(weight.view(torch.int16), weight.shape, (0, 0))) != int(
        position_sum(changed.view(torch.int16), weight.shape, (0, 0))
    )
    for name, tensor in {"first": weight, "again": weight.clone(), "other": changed}.items():
        (tmp_path / name).mkdir()
        save_file({"weight": tensor}, tmp_path / name / "model.safetensors")
    assert checksum(tmp_path / "first") == checksum(tmp_path / "again") != checksum(tmp_path / "other")


@pytest.mark.parametrize("shape", [(), (7,), (6, 5), (3, 4, 5)])
def test_sums_of_parts_add_up_to_that_of_the_whole(shape: tuple[int, ...]) -> None:
    values = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=torch.Generator().manual_seed(1))
    whole = position_sum(values, shape, (0,) * len(shape))
    assert int(whole)
    for dim, size in enumerate(shape):
        for cut in range(size + 1):
            starts = [tuple(first if d == dim else 0 for d in range(len(shape))) for first in (0, cut)]
            parts = (values.narrow(dim, 0, cut), values.narrow(dim, cut, size - cut))
            total = sum(position_sum(part, shape, start) for part, start in zip(parts, starts, strict=True))
            assert torch.equal(total, whole)

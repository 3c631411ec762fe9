"""Paged attention: checks in Triton's interpreter without a GPU, and bf16 on a GPU."""

import pytest
import torch

from postlude.ops.attention import ScoreConfig
from postlude.ops.paged_attention import PAGE_SIZE, attend_pages, new_page_store
from tests.equality import assert_equal


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 200])
@pytest.mark.parametrize(("heads", "width"), [((16, 8), 128), ((32, 2), 64), ((6, 1), 256), ((9, 3), 80)])
def test_bf16_stays_near_fp32(heads: tuple[int, int], width: int, rows: int) -> None:
    """bf16 keeps 8 bits: 2e-2 of the scale."""
    generator = torch.Generator("cuda").manual_seed(0)
    stores = [new_page_store(12 * rows, heads[1], width, torch.float32, torch.device("cuda")) for _ in range(2)]
    for store in stores:
        store.copy_(torch.randn(store.shape, generator=generator, device="cuda"))
    query, key, value = (
        torch.randn(rows, count, width, generator=generator, device="cuda") for count in (heads[0], heads[1], heads[1])
    )
    table = torch.randperm(12 * rows, generator=generator, device="cuda").int().view(rows, 12)
    lengths = torch.randint(1, 12 * PAGE_SIZE, (rows,), generator=generator, device="cuda")
    for scores in (ScoreConfig(scale=0.1), ScoreConfig(scale=0.1, window=100)):
        expected = attend_pages(query, key, value, *stores, table, lengths, scores, backend="torch")
        half = (tensor.bfloat16() for tensor in (query, key, value, *stores))
        actual = attend_pages(*half, table, lengths, scores)
        assert_equal(actual.float(), expected, "bf16", tolerance=2e-2)

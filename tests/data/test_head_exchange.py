"""HeadExchange: results and gradients equal those of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from postlude.data import pack, shard_context
from postlude.layout import Layout
from postlude.world.mesh import Mesh

HEADS, LENGTHS = 4, (7, 1, 12, 3)


def sequences() -> list[Tensor]:
    return [torch.arange(length) + 1 for length in LENGTHS]


def features(tokens: Tensor, positions: Tensor) -> Tensor:
    """Returns [T, HEADS, 2], different for each token, position, head and channel."""
    heads = torch.arange(HEADS * 2).view(HEADS, 2)
    return (100.0 * tokens + positions)[:, None, None] + 0.1 * heads


def cumulative_scan(packing: Any, tensor: Tensor) -> Tensor:
    """A computation along each sequence."""
    return torch.cat([part.cumsum(0) for part in tensor.split(packing.lengths)])


def swapped(group: Any, size: int) -> list[Any]:
    mesh = Mesh(Layout(cp=size))
    (full,) = pack(sequences(), budget=64)
    microbatch = shard_context(full, mesh.cp)
    head_exchange = microbatch.head_exchange
    local_features = features(microbatch.tokens, microbatch.positions).requires_grad_()
    entered = head_exchange.to_heads(local_features)
    heads = head_exchange.local_heads(torch.arange(HEADS))
    back = head_exchange.to_sequences(cumulative_scan(head_exchange.packing, entered))
    weights = microbatch.tokens.float() + 1
    (back * weights[:, None, None]).sum().backward()
    return [microbatch.batch_indices, heads, entered.detach(), back.detach(), local_features.grad]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.thorough
def test_scans_over_full_sequences_equal_one_rank(ranks: Any, size: int) -> None:
    (full,) = pack(sequences(), budget=64)
    expected_features = features(full.tokens, full.positions).requires_grad_()
    expected = cumulative_scan(full.head_exchange.packing, full.head_exchange.to_heads(expected_features))
    (full.head_exchange.to_sequences(expected) * (full.tokens.float() + 1)[:, None, None]).sum().backward()
    covered = torch.zeros(len(full), dtype=torch.bool)
    for rank, (places, heads, entered, back, gradient) in enumerate(ranks(size, swapped, size)):
        assert heads.tolist() == list(range(rank * HEADS // size, (rank + 1) * HEADS // size))
        assert entered.shape[1] == HEADS // size
        real = places >= 0
        torch.testing.assert_close(back[real], expected[places[real]])
        # Padding weighs 1 and comes after what is real: each padded position of a sequence adds 1 to all before it.
        padding = _padding(size)
        extra = padding[_sequence(full)[places[real]]][:, None, None]
        torch.testing.assert_close(gradient[real], expected_features.grad[places[real]] + extra)
        covered[places[real]] = True
    assert covered.all()


def _padding(size: int) -> Tensor:
    return torch.tensor([float(-length % (2 * size)) for length in LENGTHS])


def _sequence(packed: Any) -> Tensor:
    return packed.packing.sequence_index()

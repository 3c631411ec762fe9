"""Gradient norm, clipping and counters: summed in float64 in chunks; counters are reduced together."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from postlude.engine import gradients
from postlude.engine.gradients import all_reduce_counters, clip, total_norm
from postlude.layout import Layout
from tests.conftest import Ranks
from tests.meshes import mesh


def norm_piece_sizes(group: dist.ProcessGroup) -> list[int]:
    """Returns the sizes of the pieces whose norms were computed."""
    foreach_norm, sizes = torch._foreach_norm, list[int]()

    def watched(chunks: list[torch.Tensor], *arguments: Any) -> list[torch.Tensor]:
        sizes.extend(chunk.numel() for chunk in chunks)
        return list(foreach_norm(chunks, *arguments))

    drawn = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "CHUNK", 7)
        patch.setattr(torch, "_foreach_norm", watched)
        for scale in (1.0, 1e25, 1e-25):  # squares that fp32 has no room for
            values = drawn * scale
            wide = values.double().square().sum()
            for copies, expected in (((1, 1), 2 * wide), ((1, 2), 1.5 * wide), ((2, 2), wide)):
                actual = total_norm([(values, copies[0]), (values.T, copies[1])], values.device)
                torch.testing.assert_close(actual, expected.sqrt(), rtol=1e-12, atol=0.0)
    assert float(total_norm([], drawn.device)) == 0.0
    return sizes


def test_gradient_norm_is_summed_in_float64_by_pieces(ranks: Ranks) -> None:
    (sizes,) = ranks(1, norm_piece_sizes)
    assert sum(sizes) == 3 * 3 * 2 * 45
    assert max(sizes) <= 7


def test_clipping_scales_all_gradients_and_skips_parameters_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clip_grads, sizes = gradients.clip_grads_with_norm_, list[int]()
    monkeypatch.setattr(
        gradients,
        "clip_grads_with_norm_",
        lambda parts, *arguments: (sizes.append(len(parts)), clip_grads(parts, *arguments)),
    )
    parameters = [nn.Parameter(torch.zeros(size)) for size in (3, 4, 2)]
    for parameter in parameters[:2]:
        parameter.grad = torch.full_like(parameter, 3.0)
    clip(parameters, 1.5, 30.0)
    for parameter in parameters[:2]:
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 0.15), rtol=1e-6, atol=0.0)
    assert parameters[2].grad is None
    assert sizes == [2]


def summed_counters(group: dist.ProcessGroup) -> tuple[list[list[float]], list[int]]:
    """Returns the counters of two blocks summed over ranks, and the size of each all-reduce."""
    rank, sums, all_reduce = dist.get_rank(), list[int](), dist.all_reduce
    counters = [torch.full((3,), 1.0 + rank), torch.full((2, 2), 10.0 * rank)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dist, "all_reduce", lambda tensor, **options: (sums.append(tensor.numel()), all_reduce(tensor, **options))
        )
        all_reduce_counters(counters, mesh(Layout(dp_shard=2)))
    return [counter.flatten().tolist() for counter in counters], sums


def test_counters_of_blocks_are_summed_in_one_all_reduce(ranks: Ranks) -> None:
    for actual, sums in ranks(2, summed_counters):
        assert actual == [[3.0] * 3, [10.0] * 4]
        assert sums == [7]

"""Tests of the sampling kernels. `tests/ops/test_kernels.py` runs this file: on a GPU, or in the interpreter."""

from __future__ import annotations

import pytest
import torch

from postlude.generate.decode_rows import COUNT, KEY, LENGTH, LIMIT, TOKEN, TOP_K, DecodeRows, sample_next

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("vocab", [264, 5000, 20000])  # 20,000 have enough blocks for a shortlist
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("filtered", [False, True])
def test_kernels_sample_the_same_tokens_as_torch(vocab: int, dtype: torch.dtype, filtered: bool) -> None:
    """Rows in any order, greedy and sampled, some idle, some at their last token, from all tokens or fewer."""
    generator = torch.Generator().manual_seed(vocab)
    size, count = 40, 24
    states = []
    rows = torch.randperm(size, generator=generator)[:count].to(DEVICE)
    logits = (3 * torch.randn(count, vocab, generator=generator)).to(DEVICE, dtype)
    numbers = torch.zeros(8, size, dtype=torch.int64)
    numbers[LENGTH] = torch.randint(5, (size,), generator=generator)
    numbers[COUNT] = torch.randint(9, (size,), generator=generator)
    numbers[LIMIT] = 9
    numbers[KEY] = torch.randint(-(2**63), 2**63 - 1, (size,), generator=generator)

    def chosen(*values: float) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (size,), generator=generator)]

    numbers[TOP_K] = chosen(vocab, 1, 7, 100).long()
    settings = torch.stack((chosen(0.0, 1.0, 0.7), chosen(1.0, 0.9, 0.3), chosen(0.0, 0.1).log()))
    for backend in ("torch", "triton"):
        state = DecodeRows(size, 8, torch.device(DEVICE))
        state.numbers.copy_(numbers)
        state.settings.copy_(settings)
        state.stops[3] = torch.arange(vocab, device=DEVICE)[:size] * (vocab // size)
        sample_next(logits, rows, state, filtered=filtered, backend=backend)
        states.append(state)
    expected, actual = states
    assert torch.equal(actual.numbers, expected.numbers)
    token_rows = rows[expected.numbers[TOKEN, rows] > 0]
    assert len(token_rows) > 10
    actual_results, expected_results = actual.results[0], expected.results[0]
    assert torch.equal(actual_results[:, 0], expected_results[:, 0])
    torch.testing.assert_close(actual_results[token_rows], expected_results[token_rows], rtol=0, atol=1e-5)


def test_equal_logits_that_no_shortlist_has_room_for_are_all_kept() -> None:
    states = []
    logits = torch.zeros(2, 20000, device=DEVICE)
    for backend in ("torch", "triton"):
        state = DecodeRows(2, 8, torch.device(DEVICE))
        state.numbers[LENGTH], state.numbers[LIMIT], state.settings[0] = 3, 9, 1.0
        state.numbers[KEY], state.numbers[TOP_K], state.settings[1] = 7, torch.tensor([5, 20000]), 0.5
        sample_next(logits, state.all, state, backend=backend)
        states.append(state)
    assert torch.equal(states[0].numbers, states[1].numbers)
    torch.testing.assert_close(states[0].results, states[1].results, rtol=0, atol=1e-5)


def test_nan_logits_are_reported_and_give_a_valid_token() -> None:
    for heat in (0.0, 1.0):
        state = DecodeRows(2, 8, torch.device(DEVICE))
        state.numbers[LENGTH], state.numbers[LIMIT], state.settings[0] = 3, 9, heat
        sample_next(
            torch.full((2, 300), float("nan"), device=DEVICE), state.all, state, filtered=False, backend="triton"
        )
        assert state.results[0, :, 1].isnan().all()
        assert (state.numbers[TOKEN] < 300).all()

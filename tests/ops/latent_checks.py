"""Tests of the kernels of latent attention. `test_kernels.py` runs this file: on a GPU, or through Triton's
interpreter, which must be chosen before triton is first imported."""

import pytest
import torch
from torch import Tensor

from postlude.ops.attention import ScoreConfig, reference_attention
from postlude.ops.kernels.latent_attention import Tiles, attend
from postlude.ops.latent_attention import attend_latent_pages, rotate_latents
from postlude.ops.norm import Norm
from postlude.ops.packing import Packing
from postlude.ops.paged_attention import PAGE_SIZE, new_page_store
from postlude.ops.rotary import RotaryConfig, rotary_table
from tests.equality import assert_equal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (5, 0, PAGE_SIZE + 2, 2 * PAGE_SIZE, 3, 3 * PAGE_SIZE)
SCALE = 0.3
SHAPES = [(3, 14, 6), (16, 40, 8), (40, 16, 16)]  # heads; features of values, and more of keys
TILES = [None, Tiles(32, warps=4, stages=1, splits=1), Tiles(16, warps=4, stages=1, splits=5)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


class Case:
    """Rows of `LENGTHS` in random pages, of which the `tokens` newest are not yet written."""

    def __init__(self, heads: int, size: int, rope: int, tokens: int = 1) -> None:
        pages, self.width, self.tokens = 4 * len(LENGTHS), size + rope, tokens
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(3)).int().to(DEVICE)
        self.table = order[: 3 * len(LENGTHS)].view(len(LENGTHS), 3)
        self.store = new_page_store(pages, 1, self.width, torch.float32, torch.device(DEVICE))
        self.store.copy_(normal(*self.store.shape, seed=9))
        self.lengths = torch.tensor(LENGTHS, device=DEVICE)
        self.query = normal(len(LENGTHS) * tokens, heads, size, seed=1)
        self.rotated = normal(len(LENGTHS) * tokens, heads, rope, seed=2)
        self.new = normal(len(LENGTHS) * tokens, self.width, seed=4)
        self.running = (self.lengths > 0).repeat_interleave(tokens)

    def expected(self) -> tuple[Tensor, Tensor]:
        """The output of running rows, of attention over each row in float64, and the store afterwards."""
        store, outputs = self.store.clone(), []
        for row, length in enumerate(LENGTHS):
            if not length:
                continue
            tokens = slice(row * self.tokens, (row + 1) * self.tokens)
            for place, latent in enumerate(self.new[tokens], start=length - self.tokens):
                store[self.table[row, place // PAGE_SIZE], place % PAGE_SIZE, 0] = latent
            latents = store[self.table[row].long()].flatten(0, 1)[:length].double()
            query = torch.cat((self.query[tokens], self.rotated[tokens]), -1).double()
            packings = (Packing.from_lengths([count], DEVICE) for count in (self.tokens, length))
            values = latents[..., : self.query.shape[-1]]
            outputs.append(reference_attention(query, latents, values, *packings, ScoreConfig(scale=SCALE)))
        return torch.cat(outputs), store

    def arguments(self, store: Tensor) -> tuple[Tensor, ...]:
        return self.query, self.rotated, self.new, store, self.table, self.lengths


@pytest.mark.parametrize("tiles", TILES, ids=["chosen", "one split", "five splits"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_equals_float64_attention_of_each_row(shape: tuple[int, int, int], tokens: int, tiles: Tiles) -> None:
    case = Case(*shape, tokens)
    expected, expected_store = case.expected()
    outputs = []
    for _ in range(2):
        store = case.store.clone()
        outputs.append(attend(*case.arguments(store), SCALE, None, tiles))
        assert torch.equal(store, expected_store)
    assert_equal(outputs[0][case.running].double(), expected, "latents")
    assert torch.equal(*(output[case.running] for output in outputs))
    assert outputs[0].isfinite().all()


@pytest.mark.parametrize("tokens", [1, 3])
def test_torch_equals_float64_attention_of_each_row(tokens: int) -> None:
    case = Case(*SHAPES[0], tokens)
    expected, expected_store = case.expected()
    store = case.store.clone()
    actual = attend_latent_pages(*case.arguments(store), SCALE, backend="torch")
    assert torch.equal(store, expected_store)
    assert_equal(actual[case.running].double(), expected, "latents")


def test_counters_are_zero_afterwards() -> None:
    case, counters = Case(*SHAPES[0]), torch.zeros(256, dtype=torch.int32, device=DEVICE)
    attend(*case.arguments(case.store), SCALE, counters, TILES[-1])
    assert not counters.any()


def test_a_draft_of_nan_changes_no_token_before_it() -> None:
    case = Case(*SHAPES[0], 2)
    finite = attend(*case.arguments(case.store.clone()), SCALE)
    case.new[1::2] = torch.nan
    actual = attend(*case.arguments(case.store.clone()), SCALE)
    assert torch.equal(actual[case.running][0::2], finite[case.running][0::2])
    assert actual[case.running][1::2].isnan().all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotated_latents_equal_torch(shape: tuple[int, int, int], interleaved: bool) -> None:
    heads, size, rope = shape
    rows = normal(5, heads * (size + rope) + size + rope)
    query, latent = rows.split((heads * (size + rope), size + rope), -1)
    query = query.unflatten(-1, (heads, -1))[..., size:]
    table = rotary_table(RotaryConfig(), torch.tensor([0, 3, 9, 1, 77], device=DEVICE), rope)
    norm = Norm(normal(size, seed=5), 1e-5, 0.5)
    results = [
        rotate_latents(query, latent, norm, table, interleaved=interleaved, backend=backend)
        for backend in ("torch", "triton")
    ]
    for expected, actual in zip(*results, strict=True):
        assert_equal(actual, expected, "rotated")


def test_latents_too_large_for_a_tile_are_refused() -> None:
    case = Case(1, 129, 6)
    with pytest.raises(
        RuntimeError, match=r"values of 128 features in torch\.float32 and 128 more of a key, and .* 129"
    ):
        attend_latent_pages(*case.arguments(case.store), SCALE, backend="triton")

"""RowCache: attention equals that over full sequences, in any row and after moves."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from postlude.generate.completion_state import CompletionState, PromptState
from postlude.generate.decode_cache import PrefillSequence
from postlude.generate.eager_scheduler import EagerScheduler
from postlude.generate.model_step import ModelStep
from postlude.generate.pages import RowAllocator, RunningCompletion, SavedPage
from postlude.generate.prefix_cache import PrefixCache
from postlude.generate.row_cache import RowCache
from postlude.generate.sampling_params import SamplingParams
from postlude.ops.attention import ScoreConfig, reference_attention
from postlude.ops.decode_attention import DecodeAttention
from postlude.ops.packing import Packing
from tests.equality import assert_equal

WIDTH = 16
NOTHING = torch.empty(0, dtype=torch.int64)
SCORES = {
    "plain": ScoreConfig(scale=0.3),
    "window": ScoreConfig(scale=0.3, window=4),
    "window of one": ScoreConfig(scale=0.3, window=1),
    "wide window": ScoreConfig(scale=0.3, window=100),
    "softcap": ScoreConfig(scale=0.3, softcap=1.5),
    "softcap and window": ScoreConfig(scale=0.3, window=3, softcap=1.5),
}
SINKS = torch.tensor([0.7, -1.0, 2.0, 0.1, 0.4, -0.3])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("query_length", [1, 3])
@pytest.mark.parametrize("value_width", [WIDTH, 10])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("name", SCORES)
def test_decoding_from_a_store_equals_packed_attention(
    name: str, heads: tuple[int, int], sinks: bool, value_width: int, query_length: int
) -> None:
    lengths = [5, query_length, 9, 3]
    query = normal(4 * query_length, heads[0], WIDTH)
    keys, values = normal(6, 12, heads[1], WIDTH, seed=1), normal(6, 12, heads[1], value_width, seed=2)
    scores = replace(SCORES[name], sinks=SINKS[: heads[0]] if sinks else None)
    actual = DecodeAttention(torch.tensor(lengths), 9, query_length)(query, keys, values, scores)
    packed = (torch.cat([store[row, :length] for row, length in enumerate(lengths)]) for store in (keys, values))
    queries, key_packing = Packing.from_lengths([query_length] * 4), Packing.from_lengths(lengths)
    assert_equal(actual, reference_attention(query, *packed, queries, key_packing, scores), name)


def test_key_borders_of_decode_attention() -> None:
    """Checks the arguments of the flash kernel without running it."""
    decode = DecodeAttention(torch.tensor([5, 1, 9]), 9)
    assert decode._key_borders(None, 10).tolist() == [0, 0, 5, 10, 11, 20, 29]
    assert decode._key_borders(4, 10).tolist() == [0, 1, 5, 10, 11, 25, 29]
    two = DecodeAttention(torch.tensor([6, 2, 10]), 10, 2)
    assert two._key_borders(4, 10, 0).tolist() == [0, 1, 5, 10, 11, 25, 29]
    assert two._key_borders(4, 10, 1).tolist() == [0, 2, 6, 10, 12, 26, 30]


@pytest.mark.gpu
@pytest.mark.parametrize("query_length", [1, 2])
@pytest.mark.parametrize("widths", [(64, 64), (192, 128), (576, 512)])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (6, 1)])
@pytest.mark.parametrize("name", ["plain", "window", "wide window"])
def test_bf16_store_is_near_fp32(name: str, heads: tuple[int, int], sinks: bool, widths, query_length: int) -> None:
    """bf16 keeps 8 bits: 2e-2 of the scale."""
    lengths = torch.tensor([5, query_length, 9, 3], device="cuda")
    query = normal(4 * query_length, heads[0], widths[0]).cuda()
    keys, values = (normal(6, 12, heads[1], widths[seed - 1], seed=seed).cuda() for seed in (1, 2))
    scores = replace(SCORES[name], scale=0.1, sinks=SINKS[: heads[0]].cuda() if sinks else None)
    expected = DecodeAttention(lengths, 9, query_length)(query, keys, values, scores)
    half = (tensor.bfloat16() for tensor in (query, keys, values))
    assert_equal(DecodeAttention(lengths, 9, query_length)(*half, scores).float(), expected, name, tolerance=2e-2)


def whole(length: int, row: int) -> PrefillSequence:
    return PrefillSequence([0] * length, [row])


@pytest.mark.parametrize("name", ["plain", "window"])
def test_steps_moves_and_resizes_equal_full_sequences(name: str) -> None:
    scores = SCORES[name]
    wholes = {letter: normal(3, length, 2, WIDTH, seed=length) for letter, length in (("a", 9), ("b", 12), ("c", 7))}
    cache = RowCache(torch.device("cpu"))
    cache.resize(2, 6)

    def decode(places: dict[str, int]) -> None:
        """The place of each row's new token."""
        lengths = torch.tensor([place + 1 for place in places.values()])
        cache.longest = int(lengths.max())
        cache.begin_forward(lengths)
        parts = [wholes[letter][:, place : place + 1] for letter, place in places.items()]
        check(cache.attend("block", *torch.cat(parts, dim=1), scores), places)

    def prefill(row: int, letter: str, length: int) -> None:
        cache.begin_forward(NOTHING, sequences=[whole(length, row)])
        check(cache.attend("block", *wholes[letter][:, :length], scores)[-1:], {letter: length - 1})

    def check(outputs: Tensor, places: dict[str, int]) -> None:
        for output, (letter, place) in zip(outputs, places.items(), strict=True):
            packing = Packing.from_lengths([place + 1])
            full_output = reference_attention(*wholes[letter][:, : place + 1], packing, packing, scores)
            assert_equal(output, full_output[-1], f"{letter} at {place}")

    prefill(0, "a", 4)
    decode({"a": 4})
    prefill(1, "b", 5)
    cache.resize(4, 11)
    decode({"a": 5, "b": 5})
    prefill(2, "c", 3)
    cache.copy([(2, 0, 3)])  # a is done and c takes its row
    decode({"c": 3, "b": 6})
    cache.copy([(1, 2, 7), (0, 1, 4)])  # read before anything is written
    cache.resize(3, 8)
    cache.copy([(2, 0, 7)])
    decode({"b": 7, "c": 4})
    saved = cache.save([0], 8)
    cache.clear(0)
    cache.restore([0], [saved])
    decode({"b": 7, "c": 4})


def test_step_mixes_decode_prefill_and_padding() -> None:
    """One sequence continues while another starts; padding, as with tensor parallelism, is not stored."""
    wholes, scores, packing = normal(3, 2, 6, 2, WIDTH), SCORES["plain"], Packing.from_lengths([6])
    expected = [reference_attention(*sequence, packing, packing, scores) for sequence in wholes.unbind(1)]
    padding = torch.full((3, 3, 2, WIDTH), 7.0)
    cache = RowCache(torch.device("cpu"))
    cache.resize(2, 6)
    cache.begin_forward(NOTHING, sequences=[whole(4, 0)], padding=3)
    cache.attend("block", *torch.cat((wholes[:, 0, :4], padding), 1), scores)
    cache.longest = 5
    cache.begin_forward(torch.tensor([5]), sequences=[whole(5, 1)], padding=3)
    output = cache.attend("block", *torch.cat((wholes[:, 0, 4:5], wholes[:, 1, :5], padding), 1), scores)
    assert_equal(output[0], expected[0][4], "the next token")
    assert_equal(output[1:6], expected[1][:5], "the sequence that starts")
    cache.longest = 6
    cache.begin_forward(torch.tensor([6, 6]))
    output = cache.attend("block", *wholes[:, :, 5], scores)
    assert_equal(output, torch.stack([full_output[5] for full_output in expected]), "both go on")


def test_rejected_tokens_change_no_state() -> None:
    """Two tokens per row, of which some rows keep only the first: keys and states continue as if it ran alone."""
    wholes = normal(3, 3, 9, 2, WIDTH)  # query, key and value of three sequences
    cache, scores = RowCache(torch.device("cpu")), SCORES["window"]
    cache.resize(3, 9)

    def step(inputs: tuple[Tensor, ...], states: tuple[Tensor, ...], running: Tensor | None) -> Tensor:
        assert running is None
        return states[0].mul_(0.5).add_(inputs[0]).clone()

    def scan(inputs: tuple[Tensor, ...], packing: Packing) -> tuple[Tensor, tuple[Tensor, ...]]:
        outputs, last = [], []
        for start, stop in packing.slices():
            state = torch.zeros_like(inputs[0][0])
            for token in inputs[0][start:stop]:
                state = 0.5 * state + token
                outputs.append(state)
            last.append(state)
        return torch.stack(outputs), (torch.stack(last),)

    def forward(tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Query, key and value [3, T, 2, WIDTH] of all tokens."""
        return cache.attend("attention", *tokens, scores), cache.recur("scan", (tokens[0],), step, scan)

    def attended_and_scanned(length: int) -> tuple[list[Tensor], list[Tensor]]:
        """By definition, after the first tokens of each sequence."""
        packing = Packing.from_lengths([length])
        firsts = [wholes[:, row, :length] for row in range(3)]
        attended = [reference_attention(*tensors, packing, packing, scores) for tensors in firsts]
        return attended, [scan((tensors[0],), packing)[0] for tensors in firsts]

    cache.begin_forward(NOTHING, sequences=[whole(2, row) for row in range(3)])
    forward(wholes[:, :, :2].flatten(1, 2))
    cache.start_rows(torch.arange(3), torch.arange(3), [])
    lengths = torch.tensor([2, 2, 2])
    for stays in ([2, 1, 1], [1, 1, 2], [1, 2, 2], [1, 1, 1]):
        kept_rows = torch.tensor(stays)
        tokens = torch.stack([wholes[:, row, length : length + 2] for row, length in enumerate(lengths)], 1).clone()
        tokens[:, kept_rows == 1, 1] = 7.0  # nothing that belongs there
        cache.longest = int(lengths.max()) + 1
        cache.begin_forward(lengths + 2, tokens_per_row=2)
        actual = [output.unflatten(0, (3, 2)) for output in forward(tokens.flatten(1, 2))]
        cache.accept(kept_rows)
        lengths = lengths + kept_rows
        for row, (length, count) in enumerate(zip(lengths.tolist(), stays, strict=True)):
            for output, full_output in zip(actual, attended_and_scanned(length), strict=True):
                assert_equal(output[row, :count], full_output[row][-count:], f"row {row} at {length}")


class Uniform(torch.nn.Module):
    """A model with equal logits for 7 tokens and no state."""

    config, mesh = SimpleNamespace(vocab_size=7), SimpleNamespace(tp=SimpleNamespace(size=1))

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(0))

    def forward(self, microbatch, output_processor, decode_state, output_processor_context=None):
        rows = len(microbatch) if output_processor_context is None else len(output_processor_context)
        return torch.zeros(rows, self.config.vocab_size), torch.empty(len(microbatch), 0)


@pytest.mark.parametrize("budget", [70, 150, 400, 5000])
@pytest.mark.parametrize("seed", range(2))
def test_scheduler_stays_within_its_budget_and_finishes_every_request(budget: int, seed: int, monkeypatch) -> None:
    source = random.Random(seed)
    completions = []
    for _ in range(20):
        sampling = SamplingParams(max_new_tokens=source.randrange(1, 40))
        prompt = PromptState([0] * source.randrange(1, 30), sampling, unstarted=2)
        completions += [CompletionState(prompt, 0, frozenset(), None) for _ in range(2)]
    prefixes: PrefixCache[SavedPage] = PrefixCache(4)
    limits = {"max_batch_tokens": budget, "max_sequences": 8, "max_prefill_tokens": 40}
    scheduler = EagerScheduler(Uniform(), completions, **limits, prefixes=prefixes)
    evictions, evict, run_step, cache = [], scheduler._preempt, ModelStep.__call__, scheduler.row_cache

    def checked(model_step, count, sequences, **sampling):
        lengths = [len(sequence.new_tokens) for sequence in sequences]
        assert sum(lengths) <= 40 or len(lengths) == 1
        assert len(scheduler.running) <= cache.rows <= 8
        assert cache.rows * cache.capacity + len(prefixes) * prefixes.page_size <= budget
        assert all(sequence.scheduled_length - 1 <= cache.capacity for sequence in scheduler.running)
        assert cache.longest <= cache.capacity
        assert sorted(sequence.row for sequence in scheduler.running) == list(range(len(scheduler.running)))
        return run_step(model_step, count, sequences, **sampling)

    monkeypatch.setattr(scheduler, "_preempt", lambda sequence: (evictions.append(sequence), evict(sequence)))
    monkeypatch.setattr(ModelStep, "__call__", checked)
    steps = 0
    while scheduler.busy:
        steps += 1
        assert steps < 5000
        scheduler.step()
    assert all(len(completion.tokens) == completion.prompt.sampling.max_new_tokens for completion in completions)
    assert evictions or budget > 70
    assert prefixes or budget <= 150  # which the rows fill


@pytest.mark.parametrize("drafted", [0, 1])
def test_a_row_has_room_for_its_drafts(drafted: int) -> None:
    cache = RowCache(torch.device("cpu"))
    pages = RowAllocator(cache, 200, 8, drafts_per_row=drafted)
    prompt = PromptState([0] * 10, SamplingParams(max_new_tokens=60), unstarted=9)
    state = CompletionState(prompt, 0, frozenset(), None)
    pages.add([state], 9)
    running = [RunningCompletion(state, row, [row], 11) for row in range(2)]
    for reach in range(11, 71):
        for sequence in running:
            sequence.scheduled_length = reach
        assert pages.extend(running) == []
        pages.resize_cache(running)
        assert cache.capacity >= min(reach + drafted, 70)
        assert cache.rows >= 2
    assert cache.capacity == 70
    assert pages.extend([*running, running[0]]) is None, "three rows of 70 are more than 200"

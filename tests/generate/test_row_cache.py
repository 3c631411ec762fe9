"""The cache attends like whole sequences do, wherever their rows are and however they were moved."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from postlude.generate.completion_state import CompletionState, PromptState, Schedule
from postlude.generate.row_cache import RowCache
from postlude.generate.sampling_params import SamplingParams
from postlude.ops.attention import Scores, reference_attention
from postlude.ops.decode_attention import DecodeAttention
from postlude.ops.packing import Packing
from tests.equality import assert_equal

WIDTH = 16
SCORES = {
    "plain": Scores(scale=0.3),
    "window": Scores(scale=0.3, window=4),
    "window of one": Scores(scale=0.3, window=1),
    "wide window": Scores(scale=0.3, window=100),
    "softcap": Scores(scale=0.3, softcap=1.5),
    "softcap and window": Scores(scale=0.3, window=3, softcap=1.5),
}
SINKS = torch.tensor([0.7, -1.0, 2.0, 0.1, 0.4, -0.3])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("value_width", [WIDTH, 10])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("name", SCORES)
def test_decoding_from_a_store_equals_packed_attention(
    name: str, heads: tuple[int, int], sinks: bool, value_width: int, each: int
) -> None:
    lengths = [5, each, 9, 3]
    query = normal(4 * each, heads[0], WIDTH)
    keys, values = normal(6, 12, heads[1], WIDTH, seed=1), normal(6, 12, heads[1], value_width, seed=2)
    scores = replace(SCORES[name], sinks=SINKS[: heads[0]] if sinks else None)
    actual = DecodeAttention(torch.tensor(lengths), 9, each)(query, keys, values, scores)
    packed = (torch.cat([store[row, :length] for row, length in enumerate(lengths)]) for store in (keys, values))
    queries, asked = Packing.from_lengths([each] * 4), Packing.from_lengths(lengths)
    assert_equal(actual, reference_attention(query, *packed, queries, asked, scores), name)


def test_stretches_that_nobody_asks_about_lie_between_the_seen_keys() -> None:
    """What the flash kernel is told about the store, checked where there is none."""
    decode = DecodeAttention(torch.tensor([5, 1, 9]), 9)
    assert decode._key_borders(None, 10).tolist() == [0, 0, 5, 10, 11, 20, 29]
    assert decode._key_borders(4, 10).tolist() == [0, 1, 5, 10, 11, 25, 29]
    two = DecodeAttention(torch.tensor([6, 2, 10]), 10, 2)
    assert two._key_borders(4, 10, 0).tolist() == [0, 1, 5, 10, 11, 25, 29]
    assert two._key_borders(4, 10, 1).tolist() == [0, 2, 6, 10, 12, 26, 30]


@pytest.mark.gpu
@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("widths", [(64, 64), (192, 128), (576, 512)])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (6, 1)])
@pytest.mark.parametrize("name", ["plain", "window", "wide window"])
def test_bf16_on_the_store_stays_near_fp32(name: str, heads: tuple[int, int], sinks: bool, widths, each: int) -> None:
    """bf16 keeps 8 bits: 2e-2 of the scale."""
    lengths = torch.tensor([5, each, 9, 3], device="cuda")
    query = normal(4 * each, heads[0], widths[0]).cuda()
    keys, values = (normal(6, 12, heads[1], widths[seed - 1], seed=seed).cuda() for seed in (1, 2))
    scores = replace(SCORES[name], scale=0.1, sinks=SINKS[: heads[0]].cuda() if sinks else None)
    expected = DecodeAttention(lengths, 9, each)(query, keys, values, scores)
    half = (tensor.bfloat16() for tensor in (query, keys, values))
    assert_equal(DecodeAttention(lengths, 9, each)(*half, scores).float(), expected, name, tolerance=2e-2)


@pytest.mark.parametrize("name", ["plain", "window"])
def test_steps_moves_and_resizes_equal_whole_sequences(name: str) -> None:
    scores = SCORES[name]
    wholes = {letter: normal(3, length, 2, WIDTH, seed=length) for letter, length in (("a", 9), ("b", 12), ("c", 7))}
    cache = RowCache(torch.device("cpu"))
    cache.resize(2, 6)

    def forward(decoded: dict[str, int], prefilled: dict[str, int]) -> dict[str, Tensor]:
        """`decoded`: the place of each row's new token; `prefilled`: how many tokens of each come at once."""
        parts = [wholes[letter][:, place : place + 1] for letter, place in decoded.items()]
        parts += [wholes[letter][:, :length] for letter, length in prefilled.items()]
        lengths = torch.tensor([place + 1 for place in decoded.values()], dtype=torch.int64)
        prefill = Packing.from_lengths(list(prefilled.values())) if prefilled else None
        cache.expect(lengths, max(lengths.tolist(), default=0), prefill)
        output = cache.attend("block", *torch.cat(parts, dim=1), scores)
        ends = Packing.from_lengths([part.shape[1] for part in parts]).slices()
        return {letter: output[stop - 1] for letter, (_, stop) in zip([*decoded, *prefilled], ends, strict=True)}

    def check(outputs: dict[str, Tensor], places: dict[str, int]) -> None:
        for letter, place in places.items():
            packing = Packing.from_lengths([place + 1])
            whole = reference_attention(*wholes[letter][:, : place + 1], packing, packing, scores)
            assert_equal(outputs[letter], whole[-1], f"{letter} at {place}")

    check(forward({}, {"a": 4}), {"a": 3})
    check(forward({"a": 4}, {"b": 5}), {"a": 4, "b": 4})
    cache.resize(4, 11)
    check(forward({"a": 5, "b": 5}, {"c": 3}), {"a": 5, "b": 5, "c": 2})
    cache.copy([(2, 0, 3)])  # a is done and c takes its row
    check(forward({"c": 3, "b": 6}, {}), {"c": 3, "b": 6})
    cache.copy([(1, 2, 7), (0, 1, 4)])  # read before anything is written
    cache.resize(3, 8)
    cache.copy([(2, 0, 7)])
    check(forward({"b": 7, "c": 4}, {}), {"b": 7, "c": 4})


def test_tokens_that_do_not_stay_leave_no_trace() -> None:
    """Two tokens a row, of which the second stays in some rows: keys and states go on as if it had never been."""
    wholes = normal(3, 3, 9, 2, WIDTH)  # query, key and value of three sequences
    cache, scores = RowCache(torch.device("cpu")), SCORES["window"]
    cache.resize(3, 9)

    def step(inputs: tuple[Tensor, ...], states: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        state = 0.5 * states[0] + inputs[0]
        return state, (state,)

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

    def both(length: int) -> tuple[list[Tensor], list[Tensor]]:
        """By definition, after the first tokens of each sequence."""
        packing = Packing.from_lengths([length])
        firsts = [wholes[:, row, :length] for row in range(3)]
        attended = [reference_attention(*each, packing, packing, scores) for each in firsts]
        return attended, [scan((each[0],), packing)[0] for each in firsts]

    begun = Packing.from_lengths([2, 2, 2])
    cache.expect(torch.empty(0, dtype=torch.int64), 0, begun)
    forward(wholes[:, :, :2].flatten(1, 2))
    lengths = torch.tensor([2, 2, 2])
    for stays in ([2, 1, 1], [1, 1, 2], [1, 2, 2], [1, 1, 1]):
        kept = torch.tensor(stays)
        tokens = torch.stack([wholes[:, row, length : length + 2] for row, length in enumerate(lengths)], 1).clone()
        tokens[:, kept == 1, 1] = 7.0  # nothing that belongs there
        cache.expect(lengths + 2, int(lengths.max()) + 2, each=2)
        found = [output.unflatten(0, (3, 2)) for output in forward(tokens.flatten(1, 2))]
        cache.settle(kept)
        lengths = lengths + kept
        for row, (length, count) in enumerate(zip(lengths.tolist(), stays, strict=True)):
            for output, whole in zip(found, both(length), strict=True):
                assert_equal(output[row, :count], whole[row][-count:], f"row {row} at {length}")


@pytest.mark.parametrize("budget", [70, 150, 400, 5000])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("drafted", [0, 1])
def test_a_schedule_keeps_its_budget_and_finishes_everything(budget: int, seed: int, drafted: int) -> None:
    source = random.Random(seed)
    answers = []
    for _ in range(20):
        sampling = SamplingParams(max_new_tokens=source.randrange(1, 40))
        prompt = PromptState([0] * source.randrange(1, 30), sampling, not_begun=2)
        answers += [CompletionState(prompt, 0, frozenset(), None) for _ in range(2)]
    schedule = Schedule(answers, budget, max_sequences=8, prefill_budget=40, drafted=drafted)
    evictions = steps = 0
    cached: list[CompletionState] = []  # what each row of the cache belongs to
    while schedule.waiting or schedule.running:
        steps += 1
        assert steps < 5000
        before = len(schedule.running)
        for move in schedule.evict():
            cached[move[1]] = cached[move[0]]
        evictions += before - len(schedule.running)
        decoded = len(schedule.running)
        assert cached[:decoded] == schedule.running
        admission = schedule.admit()
        assert len(schedule.running) <= schedule.rows <= 8
        assert schedule.rows * schedule.capacity <= budget
        assert all(answer.length <= schedule.capacity for answer in schedule.running)
        assert all(answer.length + drafted <= schedule.capacity for answer in schedule.running[:decoded])
        prefilled = [answer.length for answer in admission.prefilled]
        assert sum(prefilled) <= 40 or len(prefilled) == 1
        cached = list(schedule.running)
        for answer, row in admission.copied:
            assert cached[row].prompt is answer.prompt
            assert row < decoded + len(prefilled)
        finished = [row for row, answer in enumerate(schedule.running) if answer.add(1, 0.0, 0.0)]
        for source_row, target, length in schedule.retire(finished):
            cached[target] = cached[source_row]
            assert length == cached[target].length - 1
    assert all(len(answer.tokens) == answer.prompt.sampling.max_new_tokens for answer in answers)
    assert evictions or budget > 70 or drafted

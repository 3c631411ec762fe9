"""Drafting is turned off where it samples fewer tokens a second, is tried again rarely, and changes no result."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from postlude import LanguageModel
from postlude.generate import distributed
from postlude.generate.distributed import ReplicatedGenerator
from postlude.generate.draft_switch import RETRY_ROUNDS, DraftSwitch
from postlude.generate.model_step import ModelStep
from postlude.generate.protocol import Request
from tests.conftest import Ranks
from tests.generate.test_draft import SAMPLINGS, TRANSFORMER, agreeing, prompts
from tests.model.small import small_config

DRAFTED_COST = 1.6  # of a step with drafts, by that of one without


def play(switch: DraftSwitch, accepted: float, rounds: int) -> list[bool]:
    """Returns whether to draft in each round, of steps with 100 completions and then with the last one."""
    drafted = []
    for _ in range(rounds):
        drafted.append(switch.next_round())
        for completions, steps in ((100, 40), (1, 200)):
            gain, cost = (1.0 + accepted, DRAFTED_COST) if switch.drafting else (1.0, 1.0)
            switch.add(completions, round(completions * steps * gain), steps * cost)
    return drafted


TRIAL = [True, True, False, False]


def test_drafts_that_are_never_right_are_turned_off_and_tried_again_rarely() -> None:
    switch = DraftSwitch()
    assert play(switch, 0.0, RETRY_ROUNDS + 8) == [
        *TRIAL[:2],
        *[False] * RETRY_ROUNDS,
        *TRIAL[:2],
        *[False] * 4,
    ]
    assert switch.speedup == pytest.approx(1.0 / DRAFTED_COST)


def test_drafts_stay_while_they_pay() -> None:
    switch = DraftSwitch()
    assert play(switch, 0.9, 20) == [*TRIAL, *[True] * 16]
    assert switch.speedup == pytest.approx(1.9 / DRAFTED_COST, rel=1e-3)
    drafted = play(switch, 0.3, 8)
    assert drafted == sorted(drafted, reverse=True), "they are turned off once"
    assert 1 <= sum(drafted) <= 4
    assert switch.speedup is not None
    assert switch.speedup < 1.0


def test_the_first_round_of_a_way_and_other_numbers_of_completions_do_not_count() -> None:
    switch = DraftSwitch()
    for drafting, rates in ((True, (1, 10, 10)), (False, (1, 5, 1000))):
        for warm in (True, False):
            assert switch.next_round() == drafting
            switch.add(4, rates[0] if warm else rates[1], 1.0)
            if not warm:  # of few completions with drafts, of many without
                switch.add(2 if drafting else 64, rates[2], 1.0)
    assert switch.speedup == 2.0


def completions_by_round(group: Any, draft: bool) -> tuple[list[Any], list[int], dict[str, float]]:
    """Returns tokens and log-probs of 5 rounds, the number of drafts in each, and the metrics.

    The clock counts forwards.
    """
    disagreeing = agreeing(TRANSFORMER, -1.0)
    model = LanguageModel(small_config(TRANSFORMER), batch_invariant=True)
    model.load_state_dict(disagreeing.state_dict())
    now, results, drafts = [0.0], [], []
    call = ModelStep.__call__

    def timed(step: ModelStep, *arguments: Any, **options: Any) -> Any:
        now[0] += DRAFTED_COST if step.drafter is not None else 1.0
        return call(step, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "time", SimpleNamespace(monotonic=lambda: now[0]))
        patch.setattr(ModelStep, "__call__", timed)
        with closing(ReplicatedGenerator(model, None, draft="mtp" if draft else None, eos_tokens=())) as generator:
            for _ in range(5):
                generator.sync_weights()
                for prompt in prompts(model):
                    generator.submit(Request(tuple(prompt), SAMPLINGS["greedy"], n=2))
                finished: list[Any] = []
                while len(finished) < 2 * len(prompts(model)):
                    finished += generator.poll()
                done = sorted(finished, key=lambda result: (result.request_id, result.index))
                results.append([(result.completion.tokens, result.completion.logprobs) for result in done])
                drafts.append(sum(result.completion.drafted for result in done))
            return results, drafts, generator.take_metrics()


def test_a_depth_that_never_agrees_is_turned_off_without_changing_a_bit(ranks: Ranks) -> None:
    ((plain, no_drafts, no_metrics),) = ranks(1, completions_by_round, False)
    ((switched, drafts, metrics),) = ranks(1, completions_by_round, True)
    assert switched == plain
    assert (no_drafts, no_metrics) == ([0] * 5, {})
    assert drafts[0] == drafts[1] > 0
    assert drafts[2:] == [0] * 3
    assert metrics["draft_speedup"] == pytest.approx(1.0 / DRAFTED_COST)


def test_a_run_that_is_repeatable_to_the_bit_always_drafts(ranks: Ranks) -> None:
    """On a CPU, where completions begin in a fixed order: the rule reads the clock, and drafts change rounding."""
    assert ranks(1, switch_of) == [None]


def switch_of(group: Any) -> DraftSwitch | None:
    with closing(ReplicatedGenerator(agreeing(TRANSFORMER, 1.0), None, draft="mtp")) as generator:
        return generator.draft_switch

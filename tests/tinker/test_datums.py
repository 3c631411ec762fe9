"""Client data becomes a batch with one more token per sequence; invalid data gives one clear error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from postlude.engine.result import PassResult
from postlude.objectives.summed import PPO
from postlude.tinker.backend import Datum, PassRequest
from postlude.tinker.datums import read_pass, to_result


def datum(length: int = 3, **changes: Any) -> Datum:
    inputs = {"target_tokens": np.arange(1, length + 1), "weights": np.ones(length, np.float32)} | changes
    return Datum(
        np.arange(length, dtype=np.int32), {name: value for name, value in inputs.items() if value is not None}
    )


def read(data: list[Datum], loss_fn: str = "cross_entropy", config: Any = None) -> Any:
    request = PassRequest(data, loss_fn, config or {}, forward_only=False)
    return read_pass(request, vocab_size=50, max_context_length=8)


def test_targets_are_shifted_to_the_position_that_predicts_them() -> None:
    request = read([datum(), datum(2)])
    assert [sequence.tolist() for sequence in request.batch.sequences] == [[0, 1, 2, 3], [0, 1, 2]]
    assert request.batch.columns["target_tokens"][0].tolist() == [0, 1, 2, 3]
    assert request.counts == {"tokens": 1.0, "all_tokens": 7.0}


def test_positions_with_several_targets_are_padded_and_results_keep_their_shape() -> None:
    wide = datum(2, target_tokens=np.array([[4, 5, 6], [7, 8, 9]]), weights=np.full((2, 3), 0.5, np.float32))
    narrow = datum(2, target_tokens=np.array([[3], [2]]), weights=np.ones((2, 1), np.float32))
    data = [wide, datum(2), narrow]
    request = read(data)
    assert [tuple(column.shape) for column in request.batch.columns["target_tokens"]] == [(3, 3)] * 3
    assert request.batch.columns["weights"][1].tolist() == [[0, 0, 0], [1, 0, 0], [1, 0, 0]]
    values = [torch.arange(9.0).view(3, 3)] * 3
    result = to_result(request, PassResult(1.5, {}, 1, 9, outputs={"logprobs": values}))
    assert [output["logprobs"].tolist() for output in result.loss_fn_outputs] == [
        [[3, 4, 5], [6, 7, 8]],
        [3, 6],
        [[3], [6]],
    ]
    assert result.metrics == {"loss:sum": 1.5}


def test_loss_settings_are_passed_to_the_loss() -> None:
    policy = {"weights": None, "logprobs": np.zeros(3, np.float32), "advantages": np.ones(3, np.float32)}
    request = read([datum(**policy)], "ppo", {"clip_low_threshold": 0.5})
    assert request.objective == PPO(clip_low_threshold=0.5)
    bounds = np.full(3, 0.9, np.float32)
    assert "clip_low_threshold" in read([datum(**policy, clip_low_threshold=bounds)], "ppo").batch.columns


@pytest.mark.parametrize(
    ("data", "loss_fn", "config", "sentence"),
    [
        ([datum()], "stable_reinforce", {}, "loss_fn is 'stable_reinforce', but the losses here are cross_entropy, "),
        ([datum()], "cross_entropy", {"beta": 1.0}, "'beta', which cross_entropy does not know: it has no settings."),
        ([datum()], "ppo", {"beta": 1.0}, "its settings are clip_high_threshold, clip_low_threshold."),
        ([datum()], "dro", {"beta": "much"}, "loss_fn_config['beta'] is the text 'much', but dro takes a number."),
        ([datum()], "dro", {"beta": -1.0}, "beta is -1, but it must be a number of at least 0."),
        ([], "cross_entropy", {}, "data is empty"),
        ([datum(0)], "cross_entropy", {}, "datum 0 is empty"),
        ([datum(), datum(9)], "cross_entropy", {}, "datum 1 has 9 tokens, but the longest sequence here is 8."),
        ([Datum(np.array([-1]), {})], "cross_entropy", {}, "datum 0 has token -1, but the vocabulary is 0 to 49."),
        ([datum(target_tokens=np.array([0, 1, 50]))], "cross_entropy", {}, "has token 50, but the vocabulary is 0 to"),
        ([datum(weights=None)], "cross_entropy", {}, "datum 0 has no 'weights', which cross_entropy needs"),
        ([datum()], "ppo", {}, "datum 0 has no 'logprobs', which ppo needs: its inputs are target_tokens, logprobs, "),
        ([datum(mask=np.ones(3, np.float32))], "cross_entropy", {}, "the input 'mask', which cross_entropy does not"),
        ([datum(weights=np.ones(2, np.float32))], "cross_entropy", {}, "'weights' of datum 0 has shape [2], but"),
        ([datum(target_tokens=np.arange(2))], "cross_entropy", {}, "'target_tokens' of datum 0 has shape [2], but"),
        ([datum(target_tokens=np.ones(3))], "cross_entropy", {}, "holds float64, but token ids are integers."),
        ([datum(weights=np.ones(3, np.int64))], "cross_entropy", {}, "holds int64, but cross_entropy takes float32."),
        ([datum(weights=np.array([1, np.nan, 1], np.float32))], "cross_entropy", {}, "a value that is not finite"),
    ],
)
def test_invalid_data_is_refused_with_clear_error(data: list[Datum], loss_fn: str, config: Any, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError)) as refusal:
        read(data, loss_fn, config)
    assert sentence in str(refusal.value)


def test_several_targets_are_refused_for_single_target_loss() -> None:
    pair = np.ones((3, 2), np.float32)
    data = [datum(target_tokens=pair.astype(np.int64), weights=None, logprobs=pair, advantages=pair)]
    with pytest.raises(ValueError, match=r"has shape \[3, 2\], but ppo takes \[N\] for N = 3 input tokens"):
        read(data, "ppo")


def test_loss_input_missing_in_some_data_is_refused() -> None:
    policy = {"weights": None, "logprobs": np.zeros(3, np.float32), "advantages": np.ones(3, np.float32)}
    bounds = np.full(3, 0.9, np.float32)
    with pytest.raises(ValueError, match="datum 1 has 'clip_low_threshold', but datum 0 has not"):
        read([datum(**policy), datum(**policy, clip_low_threshold=bounds)], "ppo")

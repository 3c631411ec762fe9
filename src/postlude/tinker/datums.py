"""A client's data as a batch and an objective. Everything that a client can get wrong is refused here, before a pass.

A client gives N input tokens and N targets: position i predicts target i. A batch shifts its columns by one, so the
inputs become a sequence of N + 1 tokens, and the values of target i those of token i + 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from postlude.data import Batch
from postlude.engine.result import PassResult
from postlude.objectives.summed import LOGPROBS, SUM, SUMMED_LOSSES, TARGETS, SummedLoss
from postlude.tinker.backend import Datum, ForwardBackwardResult, PassRequest
from postlude.tinker.limits import check_tokens, check_vocabulary

EXTRA_TOKENS = 1
"""How many tokens a sequence of a batch has beyond the inputs of its datum."""


@dataclass(frozen=True)
class Pass:
    """What every rank runs for one request."""

    batch: Batch
    objective: SummedLoss
    counts: Mapping[str, float]
    forward_only: bool
    widths: Sequence[int | None]
    """The number of targets at each position, by sequence; None for one target that is not in a list."""


def read_objective(loss_fn: str, config: Mapping[str, float | str]) -> SummedLoss:
    """Returns the objective of a loss by its name and settings."""
    if loss_fn not in SUMMED_LOSSES:
        raise ValueError(f"loss_fn is {loss_fn!r}, but the losses here are {', '.join(SUMMED_LOSSES)}.")
    loss = SUMMED_LOSSES[loss_fn]
    settings = {field.name for field in fields(loss)}
    for name, value in config.items():
        if name not in settings:
            known = f"its settings are {', '.join(sorted(settings))}" if settings else "it has no settings"
            raise ValueError(f"loss_fn_config has {name!r}, which {loss_fn} does not know: {known}.")
        if isinstance(value, str):
            raise TypeError(f"loss_fn_config[{name!r}] is the text {value!r}, but {loss_fn} takes a number.")
    return loss(**{name: float(value) for name, value in config.items()})


def read_pass(
    request: PassRequest,
    *,
    vocab_size: int,
    max_context_length: int,
) -> Pass:
    """Returns the pass of a request. Raises ValueError or TypeError with one sentence for the client."""
    data, loss_fn, config = request.data, request.loss_fn, request.config
    objective = read_objective(loss_fn, config)
    if not data:
        raise ValueError("data is empty: give at least one datum.")
    for index, datum in enumerate(data):
        check_tokens(datum.tokens, f"datum {index}", max_context_length, vocab_size)
        _check_inputs(f"datum {index}", datum, loss_fn, objective, vocab_size)
    names = [TARGETS, *objective.columns, *objective.optional_columns]
    names_by_datum = [[name for name in names if name in datum.loss_fn_inputs] for datum in data]
    for index, input_names in enumerate(names_by_datum):
        if input_names != names_by_datum[0]:
            unshared = min(set(input_names) ^ set(names_by_datum[0]))
            has, lacks = (index, 0) if unshared in input_names else (0, index)
            raise ValueError(f"datum {has} has {unshared!r}, but datum {lacks} has not: give it to all or to none.")
    widths = [_width(datum) for datum in data]
    width = None if all(size is None for size in widths) else max(size or 1 for size in widths)
    columns = {name: [_column(datum.loss_fn_inputs[name], width) for datum in data] for name in names_by_datum[0]}
    sequences = [_sequence(datum) for datum in data]
    counts = {**SUM, "all_tokens": float(sum(map(len, sequences)))}
    return Pass(Batch(sequences, columns), objective, counts, request.forward_only, widths)


def to_result(request: Pass, result: PassResult) -> ForwardBackwardResult:
    """Returns the log-probs of each datum in the shape of its targets, and the loss."""
    outputs = []
    for width, values in zip(request.widths, result.outputs[LOGPROBS], strict=True):
        rows = values[EXTRA_TOKENS:].numpy()
        if width is None and rows.ndim == 2:
            rows = rows[:, 0]
        elif width is not None:
            rows = rows[:, :width]
        outputs.append({LOGPROBS: np.ascontiguousarray(rows)})
    return ForwardBackwardResult(outputs, {"loss:sum": result.loss})


def _width(datum: Datum) -> int | None:
    """Returns the number of targets of a position; None if it has one target that is not in a list."""
    targets = datum.loss_fn_inputs[TARGETS]
    return None if targets.ndim == 1 else targets.shape[1]


def _sequence(datum: Datum) -> torch.Tensor:
    """Returns the inputs and one more token, at which nothing is predicted: the last target, as in a text."""
    last = datum.loss_fn_inputs[TARGETS].reshape(-1)[-1:]
    return torch.from_numpy(np.concatenate([datum.tokens.astype(np.int64), last.astype(np.int64)]))


def _column(values: NDArray[Any], width: int | None) -> torch.Tensor:
    """Returns values per token, shifted by one. Missing targets of a position are token 0, and weigh nothing."""
    rows = values if width is None or values.ndim == 2 else values[:, None]
    column = np.zeros(
        (EXTRA_TOKENS + len(rows), *(() if width is None else (width,))),
        np.float32 if rows.dtype.kind == "f" else np.int64,
    )
    column[(slice(EXTRA_TOKENS, None), *(slice(size) for size in rows.shape[1:]))] = rows
    return torch.from_numpy(column)


def _check_inputs(name: str, datum: Datum, loss_fn: str, objective: SummedLoss, vocab_size: int) -> None:
    inputs, needed = datum.loss_fn_inputs, (TARGETS, *objective.columns)
    for missing in (key for key in needed if key not in inputs):
        raise ValueError(f"{name} has no {missing!r}, which {loss_fn} needs: its inputs are {', '.join(needed)}.")
    for unknown in (key for key in inputs if key not in (*needed, *objective.optional_columns)):
        known = ", ".join((*needed, *objective.optional_columns))
        raise ValueError(f"{name} has the input {unknown!r}, which {loss_fn} does not use: its inputs are {known}.")
    targets = inputs[TARGETS]
    if targets.dtype.kind not in "iu":
        raise TypeError(f"{TARGETS!r} of {name} holds {targets.dtype}, but token ids are integers.")
    allowed = "[N] or [N, K]" if objective.several_targets else "[N]"
    if targets.ndim not in ((1, 2) if objective.several_targets else (1,)) or targets.shape[0] != len(datum.tokens):
        raise ValueError(
            f"{TARGETS!r} of {name} has shape {list(targets.shape)}, but {loss_fn} takes {allowed} for "
            f"N = {len(datum.tokens)} input tokens."
        )
    if not targets.size:
        raise ValueError(f"{TARGETS!r} of {name} has shape {list(targets.shape)}: give each position a target.")
    check_vocabulary(targets, f"{TARGETS!r} of {name}", vocab_size)
    for key, values in inputs.items():
        if key != TARGETS and values.shape != targets.shape:
            raise ValueError(
                f"{key!r} of {name} has shape {list(values.shape)}, but {TARGETS!r} has {list(targets.shape)}: give "
                "one value per target."
            )
        if not np.isfinite(values).all():
            raise ValueError(f"{key!r} of {name} has a value that is not finite.")
        if key != TARGETS and values.dtype.kind != "f":
            raise TypeError(f"{key!r} of {name} holds {values.dtype}, but {loss_fn} takes float32.")

"""Preflight checks of datasets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from postlude.recipes.checks.preflight import Check, PreflightInputs, check_vocabulary
from postlude.recipes.config.data import Examples, Mixture, Pairs, datasets_of
from postlude.recipes.dataset import EncodedRows, StreamEncoder, cache_folder
from postlude.recipes.row_sources import hold_out_rows


def dataset_checks(inputs: PreflightInputs, data: Examples | Pairs | Mixture) -> Iterator[Check]:
    """Check of datasets: every row can be encoded within the budget; of a stream, the first rows."""
    yield Check(
        "data",
        lambda: "; ".join(_check_dataset(inputs, data, dataset) for dataset in datasets_of(data)),
        after=("tokenizer",),
    )


def _check_dataset(inputs: PreflightInputs, section: Any, data: Examples | Pairs) -> str:
    config = inputs.config
    if data.streaming:
        line, largest = StreamEncoder(data, inputs.tokenizer, inputs.limit, lambda encoded, *_: encoded).check()
        check_vocabulary(largest, inputs)
        return line
    cache = cache_folder(config.run, section, data)
    rows: EncodedRows[Any] = EncodedRows(data, inputs.tokenizer, inputs.limit, cache)
    check_vocabulary(rows.largest, inputs)
    inputs.on_success.append(rows.store)
    if config.held_out.rows:
        hold_out_rows(rows, config.held_out.rows)
    return str(rows)

"""Pairs with margins: each pair keeps its row's margin, and invalid margins are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from postlude.hf.load import byte_tokenizer
from postlude.objectives import BradleyTerry, Preference
from postlude.recipes.config.data import Pairs
from postlude.recipes.config.load import ConfigError, load
from postlude.recipes.config.recipe_configs import DPOConfig, RMConfig
from postlude.recipes.dataset import EncodedRows, LabelledRows
from postlude.recipes.pairs import PairRow, pair_batch, read_margins, trial_pairs, with_margins
from postlude.recipes.sequence_limit import SequenceLimit


def pairs(place: Path, *margins: Any) -> Pairs:
    rows = [
        {"prompt": "p", "chosen": "c" * (60 if number == 1 else 2), "rejected": "r", "gap": margin}
        for number, margin in enumerate(margins)
    ]
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Pairs(path=place / "pairs.jsonl", margin="gap", overlong="drop")


def test_pairs_keep_their_margins_when_rows_are_dropped(tmp_path: Path) -> None:
    data = pairs(tmp_path, 0.5, 2, -1.5)
    rows = LabelledRows(EncodedRows(data, byte_tokenizer(), SequenceLimit(64)), read_margins(data), PairRow)
    assert [rows[index].margin for index in range(len(rows))] == [0.5, -1.5], "the second is too long"
    batch = pair_batch([rows[0], rows[1]])
    assert batch.columns["margins"] == [0.5, 0.5, -1.5, -1.5]
    assert with_margins(Preference(), data) == Preference(margins=True)
    assert with_margins(BradleyTerry(margin=1.0), data) == BradleyTerry(margin=1.0, margins=True)
    assert "margins" in trial_pairs(data).columns


def test_without_a_margin_column_there_are_no_margins(tmp_path: Path) -> None:
    data = pairs(tmp_path, 0.5).model_copy(update={"margin": None})
    rows = LabelledRows(EncodedRows(data, byte_tokenizer(), SequenceLimit(64)), read_margins(data), PairRow)
    assert "margins" not in pair_batch([rows[0]]).columns
    assert with_margins(Preference(), data) == Preference()


@pytest.mark.parametrize("margin", ["big", True, float("nan")])
def test_an_invalid_margin_names_its_row(tmp_path: Path, margin: Any) -> None:
    with pytest.raises(ValueError, match=r"line 2 of pairs\.jsonl has .* as its gap, but a margin is a finite number"):
        read_margins(pairs(tmp_path, 1.0, margin))
    with pytest.raises(ValueError, match="gup"):
        read_margins(pairs(tmp_path, 1.0).model_copy(update={"margin": "gup"}))


@pytest.mark.parametrize("words", [["--objective=orpo"], ["--objective.loss_type=ipo"]])
def test_a_loss_without_a_margin_refuses_the_column(words: list[str]) -> None:
    overrides = ["--data.path=x", "--data.margin=gap"]
    with pytest.raises(ConfigError, match=r"data\.margin is gap, but only the sigmoid loss of pairs has a margin"):
        load(DPOConfig, None, [*overrides, *words])
    load(DPOConfig, None, overrides)
    load(RMConfig, None, overrides)

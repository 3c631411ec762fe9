"""Multi-token prediction in recipes: a model without depths gets fresh ones, and the rest may be left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from postlude import load_model
from postlude.recipes.ahead import source_of
from postlude.recipes.commands import RECIPES
from postlude.recipes.config.reading import load
from postlude.recipes.config.settings import Ahead
from tests.conftest import Ranks

SETTINGS = ("--budget=256", "--steps=2", "--save_every=0", "--optimizer.lr=1e-3", "--optimizer.max_grad_norm=null")


def write_rows(directory: Path) -> None:
    rows = [{"prompt": f"{one}+{other}=", "completion": str(one + other)} for one in range(5) for other in range(4)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def metrics(group: Any, command: str, *settings: str) -> list[dict[str, Any]]:
    config: Any = load(RECIPES[command].config, None, list(settings))
    RECIPES[command].run(config, "cpu")
    return [json.loads(line) for line in (config.run / "metrics.jsonl").read_text().splitlines()]


def test_depths_learn_and_leave_the_rest_alone(ranks: Ranks, tmp_path: Path) -> None:
    write_rows(tmp_path)
    plain = (*SETTINGS, f"--data.path={tmp_path}/rows.jsonl", "--batch=4", "--held_out.rows=3", "--held_out.every=1")
    alone = ("--mtp.weight=0.5", "--mtp.depths=2", "--mtp.stop_trunk=true", "--mtp.stop_head=true")
    (without,) = ranks(1, metrics, "sft", *plain, f"--run={tmp_path}/without")
    (ahead,) = ranks(1, metrics, "sft", *plain, f"--run={tmp_path}/ahead", *alone)
    for one, other in zip(without, ahead, strict=True):
        for name in ("nll", "eval/nll", "eval/loss"):
            if name in one:
                assert other[name] == pytest.approx(one[name], rel=1e-6)
    last = ahead[-1]
    assert last["loss"] > last["nll"]
    assert last["eval/loss"] == pytest.approx(last["eval/nll"])  # what is compared has no part of it
    assert last["eval/mtp_1/nll"] < ahead[0]["eval/mtp_1/nll"]
    assert 0.0 <= last["mtp_2/accepted"] <= 1.0
    model = load_model(tmp_path / "ahead" / "model")
    assert len(model.config.pattern.mtp) == 2
    assert "mtp" not in str(load_model(tmp_path / "without" / "model").state_dict().keys())


@pytest.mark.slow
def test_a_policy_learns_to_predict_further_ahead_beside_its_rewards(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="the tasks are reasoning-gym's")
    settings = (
        "--environment.task=chain_sum",
        "--environment.settings={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}",
        "--environment.template={metadata[expression]}=",
        "--prompts=4",
        "--samples=2",
        "--answers.max_new_tokens=4",
        "--evaluation.every=0",
        "--export=false",
    )
    for found in ranks(
        2, metrics, "grpo", *SETTINGS, *settings, f"--run={tmp_path}/run", "--layout=pp=2", "--mtp.weight=0.1"
    ):
        assert [row["step"] for row in found] == [1, 2]
        assert all(row["mtp_1/nll"] > 0 for row in found)


def test_depths_that_a_model_has_are_not_asked_for_otherwise() -> None:
    assert source_of("tiny-hybrid", Ahead()) == "tiny-hybrid"
    with pytest.raises(
        ValueError, match=r"tiny-hybrid predicts 1 tokens further ahead by layers of its own, but mtp asks for 2\."
    ):
        source_of("tiny-hybrid", Ahead(depths=2))

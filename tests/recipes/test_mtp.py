"""Multi-token prediction in recipes: models without depths get new ones, and training them alone is possible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from postlude import Recast, load_model
from postlude.cli import main
from postlude.hf.load import byte_tokenizer
from postlude.hf.read_model import read_model_with_mtp
from postlude.recipes.config.load import load
from postlude.recipes.config.settings import MTPSettings
from postlude.recipes.mtp import describe_mtp, model_source
from postlude.recipes.registry import RECIPES
from postlude.recipes.run.outcome import RunOutcome
from tests.conftest import Ranks
from tests.hf.families import CONFIGS, saved_model
from tests.hf.published import FILE, publish

SETTINGS = ("--budget=256", "--steps=2", "--save_every=0", "--optimizer.lr=1e-3", "--optimizer.max_grad_norm=null")

TASKS = (
    "--environment.task=chain_sum",
    "--environment.settings={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}",
    "--environment.template={metadata[expression]}=",
    "--sampling.max_new_tokens=4",
)


def write_rows(directory: Path) -> None:
    rows = [
        {"prompt": f"{first}+{second}=", "completion": str(first + second)} for first in range(5) for second in range(4)
    ]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def metrics(group: Any, command: str, *settings: str) -> list[dict[str, Any]]:
    config: Any = load(RECIPES[command].config, None, list(settings))
    RECIPES[command].run(config, "cpu")
    return [json.loads(line) for line in (config.run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_training_mtp_depths_does_not_change_the_trunk(ranks: Ranks, tmp_path: Path) -> None:
    write_rows(tmp_path)
    plain = (
        *SETTINGS,
        f"--data.path={tmp_path}/rows.jsonl",
        "--batch_size=4",
        "--held_out.rows=3",
        "--held_out.every=1",
    )
    alone = ("--mtp.weight=0.5", "--mtp.depths=2", "--mtp.stop_trunk=true", "--mtp.stop_head=true")
    (without,) = ranks(1, metrics, "sft", *plain, f"--run={tmp_path}/without")
    (ahead,) = ranks(1, metrics, "sft", *plain, f"--run={tmp_path}/ahead", *alone)
    for plain_row, mtp_row in zip(without, ahead, strict=True):
        for name in ("nll", "eval/nll", "eval/loss"):
            if name in plain_row:
                assert mtp_row[name] == pytest.approx(plain_row[name], rel=1e-6)
    last = ahead[-1]
    assert last["loss"] > last["nll"]
    assert last["eval/loss"] == pytest.approx(last["eval/nll"])  # what is compared has no part of it
    assert last["eval/mtp_1/nll"] < ahead[0]["eval/mtp_1/nll"]
    assert 0.0 <= last["mtp_2/accepted"] <= 1.0
    model = load_model(tmp_path / "ahead" / "model")
    assert len(model.config.pattern.mtp) == 2
    assert "mtp" not in str(load_model(tmp_path / "without" / "model").state_dict().keys())


PROCESSORS = """
def nll(depth, inputs, context):
    logprob = inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets).logprob
    return -context.get("scale", 1.0) * logprob

def unfinished(depth, inputs):
    return None

def summed(depth, inputs, context):
    return nll(depth, inputs, context).sum()
"""


@pytest.mark.slow
def test_custom_mtp_processor_is_set_in_a_config(ranks: Ranks, tmp_path: Path) -> None:
    write_rows(tmp_path)
    (tmp_path / "mine.py").write_text(PROCESSORS)
    plain = (*SETTINGS, f"--data.path={tmp_path}/rows.jsonl", "--batch_size=4", "--held_out.rows=3", "--export=false")
    custom_options = (*plain, "--mtp.weight=0.5", f"--mtp.processor={tmp_path}/mine.py:nll")
    (default,) = ranks(1, metrics, "sft", *plain, "--mtp.weight=0.5", f"--run={tmp_path}/default")
    (custom,) = ranks(1, metrics, "sft", *custom_options, f"--run={tmp_path}/mine")
    (half,) = ranks(1, metrics, "sft", *custom_options, f"--run={tmp_path}/half", "--mtp.context.scale=0.5")
    for default_row, custom_row in zip(default, custom, strict=True):
        for name, named in (("loss", "loss"), ("mtp_1/nll", "mtp_1/loss"), ("eval/mtp_1/nll", "eval/mtp_1/loss")):
            if name in default_row:
                assert custom_row[named] == pytest.approx(default_row[name], rel=1e-5)
    first = next(row for row in custom if "mtp_1/loss" in row)
    scaled = next(row for row in half if "mtp_1/loss" in row)
    assert scaled["mtp_1/loss"] == pytest.approx(0.5 * first["mtp_1/loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nil", "mine.py has no nil; did you mean nll?"),
        ("unfinished", "An MTP processor is called as processor(depth, inputs, context) and returns a loss for each"),
        (
            "summed",
            "mine.py:summed failed in its trial call: ValueError: the MTP processor returned a tensor of shape ()",
        ),
    ],
)
def test_uncallable_mtp_processor_gives_clear_error(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path)
    (tmp_path / "mine.py").write_text(PROCESSORS)
    named = f"--mtp.processor={tmp_path}/mine.py:{name}"
    assert main(["sft", f"--data.path={tmp_path}/rows.jsonl", f"--run={tmp_path}/run", "--device=cpu", named]) == 2
    sentence = capsys.readouterr().err
    assert message in sentence
    assert len(sentence.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.thorough
def test_training_on_drafted_completions_is_unchanged(ranks: Ranks, tmp_path: Path) -> None:
    """Drafts use the engine's current weights."""
    pytest.importorskip("reasoning_gym", reason="the tasks are reasoning-gym's")
    settings = (
        *SETTINGS,
        *TASKS,
        "--prompts_per_step=4",
        "--samples_per_prompt=2",
        "--mtp.weight=0.1",
        "--evaluation.every=0",
    )
    (plain,) = ranks(1, metrics, "grpo", *settings, f"--run={tmp_path}/plain")
    (drafted,) = ranks(1, metrics, "grpo", *settings, f"--run={tmp_path}/drafted", "--sampling.draft=mtp")
    for plain_row, drafted_row in zip(plain, drafted, strict=True):
        assert drafted_row["rewards"] == plain_row["rewards"]
        assert drafted_row["lengths"] == plain_row["lengths"]
        assert drafted_row["loss"] == pytest.approx(plain_row["loss"], rel=1e-4)
        assert (
            drafted_row["draft_acceptance"] > 0.3
        )  # of 264 tokens: fresh models are unsure, and the noise is the same
        assert "draft_acceptance" not in plain_row
    drafted_settings = (
        *TASKS,
        "--sampling.draft=mtp",
        "--sampling.temperature=1",
        "--tasks=4",
        f"--run={tmp_path}/eval",
    )
    (actual,) = ranks(1, metrics, "eval", f"--model={tmp_path}/drafted/model", "--budget=256", *drafted_settings)
    assert actual[-1]["draft_acceptance"] > 0.3


@pytest.mark.slow
def test_grpo_trains_mtp_depths_and_the_policy(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="the tasks are reasoning-gym's")
    settings = (*TASKS, "--prompts_per_step=4", "--samples_per_prompt=2", "--evaluation.every=0", "--export=false")
    for actual in ranks(
        2, metrics, "grpo", *SETTINGS, *settings, f"--run={tmp_path}/run", "--layout=pp=2", "--mtp.weight=0.1"
    ):
        assert [row["step"] for row in actual] == [1, 2]
        assert all(row["mtp_1/nll"] > 0 for row in actual)


def test_published_depths_continue_training_and_keep_their_names(ranks: Ranks, tmp_path: Path) -> None:
    published = publish("glm4_moe", tmp_path / "published", vocab_size=264)
    byte_tokenizer().save_pretrained(published.directory)
    write_rows(tmp_path)
    plain = (*SETTINGS, f"--data.path={tmp_path}/rows.jsonl", "--batch_size=4", f"--model={published.directory}")
    ranks(1, metrics, "sft", *plain, f"--run={tmp_path}/run", "--mtp.weight=1", "--mtp.stop_trunk=true")
    before, after = (load_file(path / FILE) for path in (published.directory, tmp_path / "run" / "model"))
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert "model.layers.3.eh_proj.weight" in moved
    assert torch.equal(after["model.layers.3.shared_head.head.weight"], after["lm_head.weight"])


def test_depths_are_loaded_from_files_or_initialised(tmp_path: Path) -> None:
    with_mtp, none = str(publish("qwen3_next", tmp_path / "held").directory), str(tmp_path / "none")
    assert model_source(with_mtp, None) == with_mtp
    assert model_source(with_mtp, MTPSettings()) == Recast(with_mtp, read_model_with_mtp(with_mtp)[1].pattern)
    assert describe_mtp(with_mtp, MTPSettings()) == "1 depth(s) of [*E], the model's own"
    with pytest.raises(
        ValueError, match="predicts 1 tokens further ahead with its own MTP layers, but the config has 2"
    ):
        model_source(with_mtp, MTPSettings(depths=2))
    saved_model(CONFIGS["nemotron_h"](), Path(none))
    assert describe_mtp(none, MTPSettings(depths=2)) == "2 depth(s) of *E, new: the model has none"
    assert describe_mtp(none, MTPSettings(layers="[M-]")) == "1 depth(s) of [M-], new: the model has none"
    assert describe_mtp("tiny-dense", MTPSettings()) == "1 depth(s) of [*-], new: the model has none"


def test_run_logs_its_mtp_depths_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path)
    monkeypatch.setattr("postlude.world.launcher.run_on_ranks", lambda *_, **__: RunOutcome("finished", 1))
    plain = ["sft", "--data.path", f"{tmp_path}/rows.jsonl", "--run", f"{tmp_path}/run", "--held_out.rows=3"]
    for settings, line in (["--mtp.depths=2"], "mtp: 2 depth(s) of [*-], new: the model has none\n"), ([], ""):
        assert main([*plain, *settings]) == 0
        assert capsys.readouterr().out == line


def test_other_number_of_depths_than_the_models_is_refused() -> None:
    assert model_source("tiny-hybrid", MTPSettings()) == "tiny-hybrid"
    with pytest.raises(
        ValueError,
        match=r"tiny-hybrid predicts 1 tokens further ahead with its own MTP layers, but the config has 2",
    ):
        model_source("tiny-hybrid", MTPSettings(depths=2))

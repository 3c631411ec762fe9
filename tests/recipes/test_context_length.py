"""Sequences longer than the model's context are refused in every recipe and command, unless it is set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from postlude.cli import main
from postlude.generate.generator import Generator
from postlude.generate.sampling_params import SamplingParams
from postlude.hf.load import load_model
from postlude.recipes.checks.preflight import LaunchInfo, PreflightError, PreflightInputs, preflight
from postlude.recipes.registry import RECIPES
from postlude.serving.server.generation_server import GenerationServer

LONG = "a" * 2100  # a token is a byte, and tiny-dense reads 2048
SFT = {"prompt": LONG, "completion": "b"}
PAIR = {"prompt": LONG, "chosen": "b", "rejected": "c"}
STATED = "the context length 2048 of tiny-dense"


def findings(tmp_path: Path, recipe: str, rows: list[dict[str, Any]], **settings: Any) -> dict[str, str]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(path)}
    if recipe == "grpo":
        settings["environment"] = {"kind": "dataset", **data, "reward": "exact"}
        settings["evaluation"] = {"every": 0}
    else:
        settings["data"] = {**data, **settings.get("data", {})}
    settings = {"run": str(tmp_path / "run"), "loggers": [], "budget": 16384, "model": "tiny-dense", **settings}
    chosen = RECIPES[recipe]
    return preflight(chosen.checks(PreflightInputs(chosen.read(None, settings=[settings]), LaunchInfo())))


@pytest.mark.parametrize(
    ("recipe", "row", "value"),
    [
        ("sft", SFT, 'line 1 of rows.jsonl has 2102 tokens in "prompt" and "completion", too many for'),
        ("dpo", PAIR, "has 2102 tokens in"),
        ("rm", PAIR, "has 2102 tokens in"),
        ("kto", {**SFT, "label": True}, "has 2102 tokens in"),
        ("grpo", {"prompt": LONG, "answer": "b"}, "the prompt of line 1 of rows.jsonl has 2100 tokens, but"),
    ],
)
def test_rows_longer_than_the_context_are_refused(tmp_path: Path, recipe: str, row: dict[str, Any], value: str) -> None:
    short = {name: text[:5] if isinstance(text, str) else not text for name, text in row.items()}
    with pytest.raises(PreflightError) as refused:
        findings(tmp_path, recipe, [row, short])
    for part in (value, STATED, "Set context_length if the model can read more"):
        assert part in str(refused.value), part
    assert "a context of 3,000 tokens" in findings(tmp_path, recipe, [row, short], context_length=3000)["model"]
    with pytest.raises(PreflightError, match=r"context_length=1000.*Raise context_length"):
        findings(tmp_path, recipe, [row, short], context_length=1000)


def test_overlong_rows_are_dropped_or_cut_at_the_context(tmp_path: Path) -> None:
    rows = [{"text": LONG}, {"text": "b"}]
    assert "1 more are too long" in findings(tmp_path, "sft", rows, data={"overlong": "drop"})["data"]
    assert findings(tmp_path, "sft", rows, data={"overlong": "cut"})["data"] == "2 rows"


def test_completions_and_turns_end_at_the_context(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}+1=", "answer": "2"} for number in range(4)]
    with pytest.raises(PreflightError, match=r"max_new_tokens is 2047, which leaves no room for a prompt in the conte"):
        findings(tmp_path, "grpo", rows, sampling={"max_new_tokens": 2047})
    findings(tmp_path, "grpo", rows, sampling={"max_new_tokens": 2047}, context_length=4096)
    findings(tmp_path, "grpo", rows, sampling={"max_new_tokens": 2047}, model="tiny-hybrid")  # has no limit


def test_generator_and_server_have_the_context_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    model = load_model("tiny-dense", dtype=torch.float32, device="cpu").eval()
    with pytest.raises(ValueError, match=r"has 2000 tokens and may get 49 more, but context_length is 2048\. Shorten"):
        Generator(model).generate([[1] * 2000], SamplingParams(max_new_tokens=49))
    assert Generator(model).max_length == 2048
    assert Generator(model, context_length=3000).max_length == 3000
    assert Generator(model, context_length=3000, max_batch_tokens=100).max_length == 100
    server = GenerationServer(Generator(model), "tiny", "default")
    (described,) = server._models()
    assert described["max_model_len"] == 2048
    assert main(["generate", "tiny-dense", "--plain", "--prompt", LONG, "--max-new-tokens", "1"]) != 0
    assert "context_length is 2048" in capsys.readouterr().err
    assert main(["logprobs", "tiny-dense", "--text", LONG]) != 0
    assert "the context length is 2048" in capsys.readouterr().err

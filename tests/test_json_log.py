"""`--log-format json`: every line that a command prints or logs is one object, in every process."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from postlude.cli import main
from postlude.json_log import LOG_FORMAT, JSONFormatter, json_line
from postlude.recipes.run.files import read_metrics
from postlude.recipes.run.progress import RunProgress, StepFilter
from tests.commands import StartedCommand
from tests.conftest import PATIENCE
from tests.plain_ranks import fork_launched_ranks

KEYS = ["time", "level", "rank", "step", "message", "fields"]


def entries(output: str) -> list[dict[str, Any]]:
    """Returns the objects of the lines. Every line must be one."""
    lines = [json.loads(line) for line in output.splitlines()]
    for line in lines:
        assert list(line) == KEYS
        assert abs(datetime.now(UTC) - datetime.fromisoformat(line["time"])) < timedelta(minutes=10)
    return lines


def test_a_record_has_its_step_fields_and_traceback(caplog: pytest.LogCaptureFixture) -> None:
    log, step = logging.getLogger("postlude"), StepFilter(RunProgress(step=7))
    log.addFilter(step)
    try:
        try:
            raise ValueError("two\nlines")
        except ValueError:
            log.exception("it %s", "broke", extra={"server": "a", "seconds": math.inf})
    finally:
        log.removeFilter(step)
    (entry,) = entries(JSONFormatter().format(caplog.records[-1]))
    assert (entry["level"], entry["step"], entry["message"], entry["rank"]) == ("error", 7, "it broke", 0)
    assert (entry["fields"]["server"], entry["fields"]["seconds"]) == ("a", "inf")
    assert entry["fields"]["traceback"].endswith("ValueError: two\nlines\n")
    (odd,) = entries(json_line("info", "\udc80\x1b[0m\n", value={"path": Path("x")}))
    assert (odd["message"], odd["fields"]) == ("\udc80\x1b[0m\n", {"value": {"path": "x"}})


def test_a_mistake_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "--steps", "many", "--log-format", "json"]) == 2
    (entry,) = entries(capsys.readouterr().err)
    assert (entry["level"], entry["message"].startswith("postlude sft: ")) == ("error", True)
    assert LOG_FORMAT not in os.environ
    assert main(["sft", "--steps", "many"]) == 2
    assert capsys.readouterr().err.startswith("postlude sft: ")


@pytest.mark.slow  # two ranks start
def test_all_lines_of_a_run_that_fails_are_objects(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fork_launched_ranks(monkeypatch)
    rows = "".join(json.dumps({"prompt": f"{n}+1=", "completion": str(n + 1)}) + "\n" for n in range(8))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "objective.py").write_text(
        "import torch.distributed as dist\nfrom postlude.objectives.loss import Loss\ncalls = []\n"
        "def objective(inputs):\n    calls.append(1)\n"
        "    if len(calls) > 3 and dist.is_initialized() and dist.get_rank() == 1: raise RuntimeError('it broke')\n"
        "    return Loss(-inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets).logprob, over='loss_mask')\n"
    )
    words = ["sft", "--data.path=rows.jsonl", "--steps=9", "--batch_size=4", "--layout=dp_shard=2", "--run=run",
             "--objective=objective.py:objective", "--loggers=[]", "--export=false", "--observe.metrics_port=0",
             "--device=cpu", "--log-format=json"]  # fmt: skip
    assert main(words) == 1
    output, errors = (entries(text) for text in capfd.readouterr())
    steps = [line for line in output if line["message"].startswith("step ")]
    metrics = read_metrics(tmp_path / "run")
    assert [line["step"] for line in steps] == [line["step"] for line in metrics]
    assert [line["fields"]["metrics"]["loss"] for line in steps] == [line["loss"] for line in metrics]
    assert any(line["message"].startswith("metrics at http://127.0.0.1:") for line in output)
    assert errors[-1]["level"] == "error"
    assert "rank 1 of 2 failed: RuntimeError: it broke" in errors[-1]["message"]


@pytest.mark.slow  # a server starts
def test_all_lines_of_a_server_are_objects(tmp_path: Path) -> None:
    command = StartedCommand(["serve", "tiny-dense", "--device", "cpu", "--log-format", "json"], tmp_path)
    (ready,) = entries(command.first_line())
    url = ready["message"].partition(" at ")[2]
    with urllib.request.urlopen(f"{url}/health", timeout=PATIENCE) as reply:
        assert reply.status == 200
    os.kill(command.process.pid or 0, signal.SIGTERM)
    done = command.complete()
    assert done.returncode == 0
    entries(done.stdout)
    entries(done.stderr)

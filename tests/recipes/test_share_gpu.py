"""rollout.share_gpu: the trainer's state is in host memory during rollouts, and results do not change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from postlude import Engine
from postlude.cli import main
from postlude.recipes.config.load import load
from postlude.recipes.registry import RECIPES
from postlude.rollout.conversations import Conversations
from tests.conftest import Ranks

SETTINGS = (
    "--model=tiny-dense",
    "--environment=dataset",
    "--environment.workers=0",
    "--sampling.max_new_tokens=3",
    "--budget=128",
    "--prompts_per_step=4",
    "--samples_per_prompt=2",
    "--steps=2",
    "--save_every=0",
    "--export=false",
    "--loggers=[]",
    "--evaluation.every=1",
    "--evaluation.tasks=2",
    "--objective.kl.coefficient=0.1",
    "--optimizer.lr=1e-2",
)
JUDGE = """
def judge(prompt, completion, example):
    return float(len(set(completion)) % 2)
"""


def trained(group: Any, run: str, *settings: str) -> tuple[list[dict[str, Any]], int]:
    """Returns metrics, and how many polls found the trainer's weights offloaded, or -1 if some did not."""
    config: Any = load(RECIPES["grpo"].config, None, [*SETTINGS, f"--run={run}", *settings])
    engines: list[Engine] = []
    offloaded: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        build, poll = Engine.__init__, Conversations.poll

        def built(engine: Engine, *arguments: Any, **options: Any) -> None:
            build(engine, *arguments, **options)
            engines.append(engine)

        def polled(conversations: Conversations, *arguments: Any) -> Any:
            offloaded.append(all(not weight.untyped_storage().nbytes() for weight in _weights(engines[0])))
            return poll(conversations, *arguments)

        patch.setattr(Engine, "__init__", built)
        patch.setattr(Conversations, "poll", polled)
        RECIPES["grpo"].run(config, "cpu")
    rows = [json.loads(line) for line in (config.run / "metrics.jsonl").read_text().splitlines()]
    return rows, len(offloaded) if all(offloaded) else -1


def _weights(engine: Engine) -> list[Any]:
    shards = [
        getattr(parameter, "to_local", lambda parameter=parameter: parameter)()
        for parameter in engine.parameters.values()
    ]
    return [shard for shard in shards if shard.numel()]


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if not name.startswith("time/") and "second" not in name}
        for row in rows
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "size"), [("", 1), ("dp_shard=2", 2)])
def test_run_that_shares_its_gpu_equals_one_that_does_not(ranks: Ranks, layout: str, size: int, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{first}+{second}=", "answer": str(first + second)} for first in range(4) for second in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "judge.py").write_text(JUDGE)
    data = (f"--environment.path={tmp_path}/rows.jsonl", f"--environment.reward={tmp_path}/judge.py:judge")
    layout_option = (f"--layout={layout}",) if layout else ()
    plain, shared = (
        ranks(size, trained, f"{tmp_path}/{name}", *data, *layout_option, *options)[0]
        for name, options in (("plain", ()), ("shared", ("--rollout.share_gpu=true",)))
    )
    assert plain[1] == -1
    assert shared[1] > 0
    assert timeless(shared[0]) == timeless(plain[0])
    phases = [{name for name in run[0][-1] if name.startswith("time/")} for run in (shared, plain)]
    assert phases[0] - phases[1] == {f"time/{phase}" for phase in ("offload", "wake", "sleep", "onload")}


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (
            "grpo",
            ("--asynchrony.max_staleness=1", "--rollout=generators"),
            "so servers generate while the trainer",
        ),
        ("grpo", ("--rollout=http://localhost:1", "--rollout.sync=network"), "Leave rollout.sync out."),
        ("grpo", ("--rollout=http://localhost:1", "--rollout.sync=ipc"), "only vLLM that the run starts"),
        ("eval", (), "an evaluation trains nothing to move"),
    ],
)
def test_settings_that_cannot_share_a_gpu_are_refused(
    command: str, options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *options, "--rollout.share_gpu=true", f"--run={tmp_path}/run"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()

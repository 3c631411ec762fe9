"""`postlude trace`: writes an SVG and a Chrome trace of every rank; user errors exit before any rank starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from postlude.cli import main
from postlude.commands import trace
from postlude.trace.spans import Span


def run_on_pool(group: Any, chosen: list[trace.Traced]) -> list[list[Span]]:
    return trace.record_all(chosen)


@pytest.mark.slow
def test_trace_contains_plain_and_overlapped_step_of_each_rank(
    ranks: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    def run_on_ranks(function: Any, *arguments: Any, nproc: int, **options: Any) -> Any:
        first, second = ranks(nproc, run_on_pool, *arguments)
        assert second == []
        return first

    monkeypatch.setattr(trace, "run_on_ranks", run_on_ranks)
    words = "trace tiny-moe --layout dp_shard=2,ep=2 --overlap --plain --microbatches 2 --tokens 12 --device cpu"
    assert main([*words.split(), "--to", str(tmp_path / "new" / "trace")]) == 0
    output = capsys.readouterr().out
    assert "plain: " in output
    assert f"wrote {tmp_path}/new/trace/timeline.svg and {tmp_path}/new/trace/trace.json" in output
    events = json.loads((tmp_path / "new/trace/trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["plain rank 0", "plain rank 1", "overlapped rank 0", "overlapped rank 1"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1, 2, 3}
    # Dispatch and combine of four layers, for two microbatches, on two ranks, twice.
    assert sum(event["cat"] == "exchange" for event in spans) == 2 * 4 * 2 * 2 * 2
    assert min(event["ts"] for event in spans) == 0
    picture = (tmp_path / "new/trace/timeline.svg").read_text()
    assert "hidden</text>" in picture
    assert all(line in picture for line in output.splitlines()[:2])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--layout tp=3", "8 heads"),
        ("--layout pp=2,vpp=2 --overlap zero_bubble", "has a schedule for one stage per rank, but vpp is 2"),
        ("--layout pp=2 --nproc 4", "--nproc 4: Layout(pp=2) runs on 2 rank(s)"),
        ("--tokens 1", "--tokens 1: a microbatch has at least 2"),
        ("--to FILE", "FILE is a file. Give it another directory."),
        ("--to FILE/below", "FILE is a file. Give it another directory."),
    ],
)
def test_invalid_arguments_give_clear_error(
    words: str, sentence: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(trace, "run_on_ranks", lambda *args, **options: pytest.fail("ranks were started"))
    (tmp_path / "FILE").touch()
    arguments = [*words.replace("FILE", str(tmp_path / "FILE")).split()]
    target = [] if "--to" in arguments else ["--to", str(tmp_path / "to")]
    assert main(["trace", "tiny-moe", *arguments, *target]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "to").exists()

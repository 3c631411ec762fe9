"""One identity of a task, whatever is rendered around it, by which every command splits trained from held-out rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from postlude.data.datasets import read_rows
from postlude.data.task_identity import TaskSet, first_different, prompt_identity, row_identity
from postlude.hf.load import byte_tokenizer
from postlude.recipes.config.data import Examples
from postlude.recipes.dataset import EncodedRows, StreamEncoder
from postlude.recipes.rollouts.evaluation_sets import EvaluatedTasks
from postlude.recipes.row_sources import MixedRows, ShuffledRows
from postlude.recipes.sequence_limit import SequenceLimit
from postlude.rollout.tasks import DatasetTasks, Task, Tasks


def say(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


QUESTION, ANSWER, SYSTEM = say("user", "2+2="), say("assistant", "4"), say("system", "Be brief.")
SAME: Sequence[bytes] = (
    prompt_identity("2+2="),
    prompt_identity([QUESTION]),
    prompt_identity([say("user", [{"type": "text", "text": "2+2="}], name=None)]),
    row_identity("conversation", ([QUESTION, ANSWER], None)),
    row_identity("conversation", ([QUESTION, ANSWER, say("user", "sure?"), ANSWER], None)),
    row_identity("completion", ("2+2=", "4", None)),
    row_identity("completion", ([QUESTION], [ANSWER], None)),
    row_identity("preference", ("2+2=", "4", "5", None)),
    row_identity("preference", (None, [QUESTION, ANSWER], [QUESTION, say("assistant", "5")], None)),
)


def test_a_prompt_is_one_task_in_every_format() -> None:
    assert len(set(SAME)) == 1
    assert prompt_identity("2+3=") != SAME[0]
    talk = [QUESTION, ANSWER, say("user", "3+3="), say("assistant", "6")]
    assert row_identity("conversation", (talk, None), "last") == prompt_identity(talk[:-1])


def test_system_messages_of_rows_count_and_those_of_configs_do_not() -> None:
    plain, brief, long = (
        prompt_identity([*before, QUESTION]) for before in ([], [SYSTEM], [say("developer", "Be long.")])
    )
    assert brief in TaskSet([brief])
    assert brief not in TaskSet([long]), "personas that are asked the same"
    assert plain in TaskSet([brief]), "a config may add the message"
    assert brief in TaskSet([plain])
    assert first_different(enumerate([brief, long, plain, brief]), 9)[0] == [0, 1]


@pytest.mark.parametrize("before", [[], [SYSTEM]])
def test_conversations_that_the_assistant_begins_are_different_tasks(before: list[Any]) -> None:
    talks = [[*before, say("assistant", "Hi!"), say("user", f"{n}?"), say("assistant", str(n))] for n in range(9)]
    assert len({row_identity("conversation", (talk, None)) for talk in talks}) == 9
    assert len({row_identity("completion", ("", f"text {n}", None)) for n in range(9)}) == 9
    assert len({row_identity("preference", ([], f"{n}", "no", None)) for n in range(9)}) == 9


def write(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_holding_out_a_greeting_keeps_the_other_conversations(tmp_path: Path) -> None:
    greeting = say("assistant", "Hello!")
    talks = [[*([greeting] if n % 2 else []), say("user", f"q{n}"), say("assistant", f"a{n}")] for n in range(20)]
    path = write(tmp_path / "a.jsonl", [{"messages": talk} for talk in talks])
    rows: EncodedRows[Any] = EncodedRows(Examples(path=path), byte_tokenizer(), SequenceLimit(400))
    assert ShuffledRows(rows, held_out=1, seed=0).size == 19


@pytest.mark.parametrize("streaming", [False, True])
def test_a_mixture_holds_out_prompts_whatever_system_message_a_dataset_adds(tmp_path: Path, streaming: bool) -> None:
    tokenizer = byte_tokenizer()
    numbers = (range(20), [*range(16, 20), *range(20, 36)])
    sources: dict[str, Any] = {}
    for name, rows, system in zip("ab", numbers, ("Be brief.", None), strict=True):
        path = write(tmp_path / f"{name}.jsonl", [{"messages": [say("user", f"q{n}"), ANSWER]} for n in rows])
        data = Examples(path=path, system=system)
        if streaming and name == "b":
            encoder: StreamEncoder[Any] = StreamEncoder(
                data, tokenizer, SequenceLimit(400), lambda encoded, *_: encoded
            )
            sources[name] = stream_of(encoder)
        else:
            sources[name] = ShuffledRows(EncodedRows(data, tokenizer, SequenceLimit(400)), held_out=4, seed=0)
    mixture = MixedRows(sources, [1.0, 1.0])
    held_out, trained = (
        {tokenizer.decode(row.tokens).partition("q")[2][:2] for row in rows}
        for rows in (mixture.held_out, mixture.take(100))
    )
    assert {"16", "19"} <= held_out
    assert not held_out & trained


def stream_of(encoder: StreamEncoder[Any]) -> Any:
    from postlude.data.streamed_rows import StreamedRows

    return StreamedRows(encoder.files, encoder, encoder.identity, held_out=4)


GAMES = [{"prompt": "play" if n > 9 else f"play game {n}", "answer": str(n)} for n in range(16)]


@pytest.mark.parametrize(
    ("options", "set_options"), [({}, {"chat": True}), ({"chat": True, "system": "S"}, {}), ({}, {"messages": True})]
)
@pytest.mark.parametrize("by", ["prompt", "row"])
def test_tasks_of_a_set_are_not_trained_on_in_another_form(
    tmp_path: Path, options: dict[str, Any], set_options: dict[str, Any], by: Any
) -> None:
    if set_options.pop("messages", False):
        set_rows = [row | {"prompt": [SYSTEM, say("user", row["prompt"])]} for row in GAMES[:4]]
    else:
        set_rows = [dict(row) for row in GAMES[:4]]
    tasks: Tasks = DatasetTasks(read_rows(write(tmp_path / "p.jsonl", GAMES)), **options)
    of_set = DatasetTasks(
        read_rows(write(tmp_path / "s.jsonl", [row | {"source": "x"} for row in set_rows])), **set_options
    )
    evaluated = EvaluatedTasks(tasks, 1, by, {"s": [of_set[index] for index in range(4)]})
    held_out = [index for index in range(16) if index in evaluated]
    assert held_out == [0, 1, 2, 3, *(range(10, 16) if by == "prompt" else [15])]


def test_generated_questions_are_one_task_with_any_template(tmp_path: Path) -> None:
    entry = {"question": "2+2=", "answer": "4"}
    tasks = [Task(prompt, entry, "", "2+2=") for prompt in ("2+2=\nAnswer in <a>.", [SYSTEM, QUESTION])]
    with pytest.raises(ValueError, match="every one of the 2 tasks"):
        EvaluatedTasks([*tasks[:1], Task("3+3=")], 1, "prompt", {"s": tasks[1:]})

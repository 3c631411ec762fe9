"""The warm start: supervised steps on the answers that tasks come with, before the first rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from postlude.data.chat import EncodedSequence, Encoder, TooLongError
from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.recipes.sequence_limit import SequenceLimit
from postlude.rollout.tasks import Task


def warm_start_example(
    task: Task, tokenizer: ChatTokenizer, limit: SequenceLimit, options: Mapping[str, Any] | None = None
) -> EncodedSequence:
    """Returns a task with its answer as tokens. `options` are the environment's chat-template options."""
    answer = task.answer
    if answer is None:
        raise ValueError(
            f"the warm start trains on the answers that tasks come with, but {task.name} has no "
            f'"{task.answer_column}"; it has: {", ".join(task.example)}. Add the column, name another as '
            "environment.answer, or set warm_start.steps to 0."
        )
    try:
        turns = answer if isinstance(answer, list) else str(answer)
        encoder = Encoder(tokenizer=tokenizer, max_length=limit.tokens(), options=options or {})
        return encoder.completion(task.prompt, turns, task.name)
    except TooLongError as error:
        raise ValueError(
            f"{task.name} with its answer has {error.length} tokens, too many for the warm start with "
            f"{limit.reason()}. {limit.fix()}, or leave the row out."
        ) from error

"""Separates what a model thinks from what it answers: the one place, for rewards, judges and tools.

It needs the standard library alone, since worker processes import it.
"""

from __future__ import annotations

import re

OPEN, CLOSE = "<think>", "</think>"
THOUGHT = re.compile(rf"{OPEN}.*?(?:{CLOSE}|\Z)", re.DOTALL)  # its end may be missing
FINAL_CHANNEL = re.compile(
    r"<\|channel\|>final[^<]*<\|message\|>(.*?)(?=<\|(?:return|end|start|channel)\|>|\Z)", re.DOTALL
)
CHANNEL = "<|channel|>"


def answer_text(completion: str, *, in_thought: bool = False) -> str:
    """Returns a completion without its thoughts: <think>...</think>, or of GPT-OSS all but its last final channel.

    `in_thought` says that the prompt ended inside a thought, so that nothing is an answer before </think>. A thought
    that is closed was open, whatever the prompt.
    """
    if CHANNEL in completion:
        finals: list[str] = FINAL_CHANNEL.findall(completion)
        return finals[-1] if finals else ""
    opened = in_thought or CLOSE in completion.partition(OPEN)[0]
    return THOUGHT.sub("", OPEN + completion if opened else completion).rpartition(CLOSE)[2]

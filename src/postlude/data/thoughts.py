"""Separates what a model thinks from what it answers: the one place, for templates, rewards, judges and tools.

It needs the standard library alone, since worker processes import it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CHANNEL = "<|channel|>"
FINAL_CHANNEL = re.compile(
    r"<\|channel\|>final[^<]*<\|message\|>(.*?)(?=<\|(?:return|end|start|channel)\|>|\Z)", re.DOTALL
)


@dataclass(frozen=True)
class ThoughtMarkers:
    """What begins a thought, and what ends it. `ChatTemplate.thoughts` are those of a model."""

    open: str
    close: str

    def answer(self, completion: str, *, in_thought: bool = False) -> str:
        """Returns a completion without its thoughts; of GPT-OSS its last final channel.

        `in_thought` says that the prompt ended inside a thought, so that nothing is an answer before its end. A thought
        that is closed was open, whatever the prompt.
        """
        if CHANNEL in completion:
            finals: list[str] = FINAL_CHANNEL.findall(completion)
            return finals[-1] if finals else ""
        opened = in_thought or self.close in completion.partition(self.open)[0]
        thought = rf"{re.escape(self.open)}.*?(?:{re.escape(self.close)}|\Z)"  # its end may be missing
        rest = re.sub(thought, "", self.open + completion if opened else completion, flags=re.DOTALL)
        return rest.rpartition(self.close)[2]

    def opened(self, context: str) -> re.Match[str] | None:
        """Returns the marker that begins a thought at the end of a context, and the space after it as group 1."""
        return re.search(rf"{re.escape(self.open)}(\s*)\Z", context)

    def is_in(self, text: str) -> bool:
        return self.open in text or self.close in text


KNOWN_MARKERS = tuple(
    ThoughtMarkers(*pair)
    for pair in (
        ("<think>", "</think>"),  # first, since it is by far the most common
        ("[THINK]", "[/THINK]"),  # Magistral
        ("<seed:think>", "</seed:think>"),  # Seed-OSS
        ("<mm:think>", "</mm:think>"),  # MiniMax-M3
        ("<longcat_think>", "</longcat_think>"),
        ("<think:opensource>", "</think:opensource>"),  # Hunyuan 3
        ("◁think▷", "◁/think▷"),  # Kimi-VL
        ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
        ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
        ("<|channel>thought", "<channel|>"),  # Gemma 4
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),  # Kimi K3
        ("<thought>", "</thought>"),  # EXAONE Deep
    )
)
DEFAULT_MARKERS = KNOWN_MARKERS[0]


def answer_text(completion: str) -> str:
    """Returns a completion of a model that is not known without its thoughts, by the markers in it."""
    markers = next((known for known in KNOWN_MARKERS if known.is_in(completion)), DEFAULT_MARKERS)
    return markers.answer(completion)

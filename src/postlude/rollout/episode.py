"""Episode: one attempt at a task, with the completions of the model as an environment or a reward sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from postlude.data.chat_template import Message
from postlude.data.thoughts import CHANNEL, answer_text
from postlude.rollout.rewards import Score
from postlude.rollout.tasks import Task


@dataclass(frozen=True)
class AssistantTurn:
    """One completion, as an environment sees it."""

    text: str
    tokens: Sequence[int] = ()
    """As they were sampled."""
    truncated: bool = False
    """Whether it reached max_new_tokens before it ended."""
    raw_text: str | None = None
    """The text with special tokens, such as those of channels; None where it is not known."""
    in_thought: bool = False
    """Whether the prompt ended inside a thought."""

    @property
    def answer_text(self) -> str:
        """The text without thoughts: what is scored."""
        has_channels = self.raw_text is not None and CHANNEL in self.raw_text
        return answer_text(self.raw_text if has_channels and self.raw_text else self.text, in_thought=self.in_thought)


@dataclass(eq=False)
class Episode:
    """One attempt at a task: the turns of the model and the observations so far."""

    task: Task
    turns: list[AssistantTurn] = field(default_factory=list)
    observations: list[str | list[Message]] = field(default_factory=list)
    score_so_far: Score | None = None
    """The sum of its turns' scores, if they have any."""
    score: Score | None = None
    """Set when it is over."""
    state: Any = None
    """Whatever an environment keeps for it."""
    group: list[Episode] = field(default_factory=list, repr=False)
    """All attempts at the task that are compared with each other, this one included."""

    def __post_init__(self) -> None:
        self.group = self.group or [self]

    @property
    def completions(self) -> list[str]:
        """The texts of the model's turns."""
        return [turn.text for turn in self.turns]

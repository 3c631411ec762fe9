"""Episode: one attempt at a task, with the completions of the model as an environment or a reward sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from postlude.data.chat_template import Message
from postlude.data.thoughts import answer_text
from postlude.rollout.reward_call import NOT_TRAINING, TrainerState
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
    answer: str | None = None
    """The text without thoughts, by the model's markers; None takes the known markers in the text."""

    @property
    def answer_text(self) -> str:
        """The text without thoughts: what is scored."""
        return answer_text(self.text) if self.answer is None else self.answer


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
    messages: list[Message] | None = None
    """The last chat of an agent, which asks for completions itself; None for other episodes."""
    workdir: Path | None = None
    """The work directory of an agent's episode, until it is scored."""
    trainer_state: TrainerState = NOT_TRAINING
    """How far the run was when it started."""
    group: list[Episode] = field(default_factory=list, repr=False)
    """All attempts at the task that are compared with each other, this one included."""

    def __post_init__(self) -> None:
        self.group = self.group or [self]

    def transcript(self, *, thoughts: bool = True) -> list[Message]:
        """Returns what followed the prompt, as messages: the model's turns and the observations between them.

        Of an agent it is its last chat, as a whole.
        """
        if self.messages is not None:
            return self.messages
        messages: list[Message] = []
        for turn, observation in zip_longest(self.turns, self.observations):
            messages.append({"role": "assistant", "content": turn.text if thoughts else turn.answer_text})
            if isinstance(observation, str):
                messages.append({"role": "user", "content": observation})
            elif observation is not None:
                messages += observation
        return messages

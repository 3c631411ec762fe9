"""What the routes exchange with the code around them: a chat call, who records calls, and who samples completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from postlude.generate.protocol import Completion, Progress, Request
from postlude.generate.sampling_params import SamplingParams


@dataclass(frozen=True)
class ChatCall:
    """A request for completions of a chat: the same for all APIs."""

    messages: tuple[dict[str, Any], ...]
    """As a chat template takes them: role, content, reasoning_content, tool_calls (whose arguments are objects),
    tool_call_id, name. A message of the assistant is what `assistant_message` makes of its parts."""
    sampling: SamplingParams
    """Until there is a prompt, `max_new_tokens` may be more than fits behind it, and `grammar` is missing."""
    tools: tuple[dict[str, Any], ...] = ()
    """As a chat template takes them: {"type": "function", "function": {"name", "description", "parameters"}}."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the chat template, such as enable_thinking."""
    n: int = 1
    client: tuple[str, ...] = ()
    """As in `Request`."""


def assistant_message(content: str | None, reasoning: str | None, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns a message of the assistant. Equal parts give equal messages, in whichever form a client sends them."""
    message: dict[str, Any] = {"role": "assistant", "content": (content or None) if calls else content or ""}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


class ChatRecorder(Protocol):
    """Makes the prompts of chats, and gets what was sampled."""

    async def prompt(self, call: ChatCall) -> list[int]:
        """Returns the tokens that the model continues for these messages and tools."""

    def completed(self, call: ChatCall, prompt: Sequence[int], completion: Completion, message: dict[str, Any]) -> None:
        """Gets each completion of a chat, and the message that the client is sent for it, before the reply ends.

        The sampling parameters of the call are those of the completion.
        """

    def text_completed(self, prompt: Sequence[int], completion: Completion) -> None:
        """Gets each completion of a prompt that is no chat."""


class CompletionBackend(Protocol):
    """Generates completions for the routes."""

    def adapter_of(self, name: str | None) -> str | None:
        """Returns the adapter that a request with this model uses. An unknown name is status 404."""

    async def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Returns the completions of each request. Generating them ends when this is cancelled."""

    async def score_prompts(self, requests: Sequence[Request], top: int) -> list[ScoredTokens]:
        """Returns the tokens of each prompt with their log-probs, at temperature 1, and `top` likeliest ones."""

    def stream(self, requests: Sequence[Request]) -> AsyncGenerator[Progress, None]:
        """Yields their tokens as they come. Generating them ends with the generator."""


@dataclass(frozen=True)
class ScoredTokens:
    """Tokens, their log-probs, and the likeliest ones at their places, if they are asked for.

    The first token of a prompt has no log-prob.
    """

    ids: Sequence[int] = ()
    logprobs: Sequence[float | None] = ()
    top: Sequence[Sequence[tuple[int, float]] | None] = ()

    def __add__(self, other: ScoredTokens) -> ScoredTokens:
        return ScoredTokens([*self.ids, *other.ids], [*self.logprobs, *other.logprobs], [*self.top, *other.top])

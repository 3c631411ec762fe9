"""Encoder: from messages, answers and preference pairs to tokens, and which of them are learned.

**Learned tokens.** Those that the assistant wrote, with the token that ends its turn, and nothing that the template
puts around them. A template with `{% generation %}` marks says itself which they are. Any other is asked: the tokens of
a conversation up to a turn, with the assistant's header, must begin the tokens of the conversation with the turn, and
what follows them is the turn. A template for which that does not hold is refused.

**No template.** A tokenizer without one gets `PLAIN_TEMPLATE`: "User: ...", a blank line, "Assistant: ...", the end
token, a blank line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from postlude.data.batch import Batch

Message: TypeAlias = Mapping[str, Any]
"""{"role": "user", "content": "..."}"""
Prompt: TypeAlias = str | Sequence[Message]
"""Text to go on from, or messages to answer."""

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\b")


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer that an encoder uses."""

    chat_template: Any
    eos_token_id: int | None

    def __call__(self, text: str, *, add_special_tokens: bool = ...) -> Any:
        """The tokens of text, under "input_ids"."""
        ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """The tokens of messages."""
        ...

    def decode(self, token_ids: Any, **options: Any) -> str:
        """The text of tokens."""
        ...

    def get_added_vocab(self) -> dict[str, int]:
        """The tokens that stand outside the ordinary vocabulary, special ones among them."""
        ...


class TooLong(ValueError):
    """A row that does not fit. A recipe may leave it out, or say it in the words of its own settings."""

    def __init__(self, message: str, row: str, length: int) -> None:
        super().__init__(message)
        self.row, self.length = row, length


@dataclass(frozen=True)
class Encoded:
    """A sequence, and 1 for each token that is learned, 0 for the others."""

    tokens: list[int]
    mask: list[int]

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.tokens)


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Turns what a dataset holds into tokens. `row` in its methods names the row in errors.

    A sequence of more than `max_length` tokens is refused with `TooLong`; with `truncate` its end is cut off instead
    (of a prompt to be answered, its start), and only one that has nothing left to learn is refused. `turns="last"`
    learns the last turn of a conversation alone. `options` are handed to the chat template, such as `enable_thinking`.
    """

    tokenizer: ChatTokenizer
    max_length: int | None = None
    truncate: bool = False
    turns: Literal["all", "last"] = "all"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length is {self.max_length}, but the least is 2: the first is never learned.")
        if self.turns not in ("all", "last"):
            raise ValueError(f'turns is {self.turns!r}, but the choices are "all" and "last".')

    def prompt(self, prompt: Prompt, row: str = "the prompt") -> list[int]:
        """The tokens that a model is to go on from: text as it is, messages with the assistant's header after them."""
        tokens = self._text(prompt) if isinstance(prompt, str) else self._render(_checked(prompt, row), header=True)
        if self.max_length is None or len(tokens) <= self.max_length:
            return tokens
        if not self.truncate:
            raise self._too_long(row, len(tokens))
        return tokens[-self.max_length :]

    def conversation(self, messages: Sequence[Message], row: str = "the conversation") -> Encoded:
        """A whole conversation, its assistant turns learned."""
        return self._fitted(self._learned(_checked(messages, row), 0, row), row)

    def answer(self, prompt: Prompt, completion: Prompt, row: str = "the pair") -> Encoded:
        """A prompt and the completion to learn.

        After text, the completion is text, and ends with the end token. After messages it is the assistant's message,
        as text or as messages.
        """
        if isinstance(prompt, str):
            if not isinstance(completion, str):
                raise ValueError(
                    f"the prompt of {row} is text but its answer is messages. Give both as text or both as messages."
                )
            before, after = self._text(prompt), self._ids(completion) + self._end()
            return self._fitted(Encoded(before + after, [0] * len(before) + [1] * len(after)), row)
        before_messages = _checked(prompt, row)
        return self._fitted(self._learned([*before_messages, *_reply(completion, row)], len(before_messages), row), row)

    def preference(
        self, prompt: Prompt | None, chosen: Prompt, rejected: Prompt, row: str = "the pair"
    ) -> tuple[Encoded, Encoded]:
        """The answers chosen and rejected, each after the prompt.

        Where they are whole conversations, beginning with something else than the assistant, what both begin with is
        the prompt and `prompt` is not read.
        """
        if not isinstance(chosen, str) and not isinstance(rejected, str):
            sides = _checked(chosen, row), _checked(rejected, row)
            if all(side[0]["role"] != "assistant" for side in sides):
                shared = _shared(*sides)
                if shared == 0 or any(len(side) == shared for side in sides):
                    fault = "is the beginning of the other" if shared else "begins unlike the other"
                    raise ValueError(f"one answer of {row} {fault}. Give two answers to one prompt.")
                prompt, chosen, rejected = sides[0][:shared], sides[0][shared:], sides[1][shared:]
        if prompt is None:
            raise ValueError(f"{row} has no prompt. Give one, or answers that are whole conversations.")
        return self.answer(prompt, chosen, f"{row} (chosen)"), self.answer(prompt, rejected, f"{row} (rejected)")

    def observation(self, observation: Prompt, after: Sequence[int], *, chat: bool) -> list[int]:
        """The tokens between a sampled turn and the next: the observation with all that the template puts around it.

        `after` are the tokens sampled last; if they lack the token that ends a turn, it comes first. They are never
        encoded again. Without `chat` the observation is text as it is.
        """
        if not chat:
            if not isinstance(observation, str):
                raise ValueError("the observation is messages but the prompt was text. Give the observation as text.")
            return self._ids(observation)
        row = "the observation"
        heard = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "."}]
        turn = self._render(said, header=False)
        _, end = self._span(turn, said, 1, row)
        whole = self._render([*said, *_checked(heard, row)], header=True)
        if whole[:end] != turn[:end]:
            raise ValueError(self._refusal(1, row))
        closing = turn[end - 1 : end] if turn[end - 1] in self._special() else []
        return ([] if list(after[-1:]) == closing else closing) + whole[end:]

    def _learned(self, messages: list[Message], first: int, row: str) -> Encoded:
        """Learn the assistant's turns from message `first` on."""
        said = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
        if not said:
            raise ValueError(f"{row} has no message of the assistant to learn from. Leave it out.")
        if self.turns == "last":
            said = said[-1:]
        tokens = self._render(messages, header=False)
        mask = [0] * len(tokens)
        if GENERATION_MARK.search(self._template()):
            marked = self.tokenizer.apply_chat_template(
                messages, **self._settings(), return_dict=True, return_assistant_tokens_mask=True
            )["assistant_masks"]
            # Marks cover every turn. Where some are not to be learned, the prompt of the first that is tells their end.
            earlier = any(message["role"] == "assistant" for message in messages[: said[0]])
            start = self._start(tokens, messages, said[0], row) if earlier else 0
            mask[start:] = [int(mark) for mark in marked[start:]]
        else:
            for index in said:
                start, end = self._span(tokens, messages, index, row)
                mask[start:end] = [1] * (end - start)
        return Encoded(tokens, mask)

    def _span(self, tokens: list[int], messages: Sequence[Message], index: int, row: str) -> tuple[int, int]:
        """Where in `tokens`, those of all messages, the assistant's message `index` begins and ends."""
        start = self._start(tokens, messages, index, row)
        through = tokens if index + 1 == len(messages) else self._render(messages[: index + 1], header=False)
        # A template may write a line break after the token that ends the turn. Nobody samples it, so it is not learned.
        special, end = self._special(), len(through)
        while end > start and through[end - 1] not in special and self.tokenizer.decode([through[end - 1]]).isspace():
            end -= 1
        if end == start or through[end - 1] not in special:
            end = len(through)
        if end <= start or tokens[:end] != through[:end]:
            raise ValueError(self._refusal(index, row))
        return start, end

    def _start(self, tokens: list[int], messages: Sequence[Message], index: int, row: str) -> int:
        before = self._render(messages[:index], header=True) if index else self._opening(row)
        if tokens[: len(before)] != before:
            raise ValueError(self._refusal(index, row))
        return len(before)

    def _opening(self, row: str) -> list[int]:
        """The assistant's header where it speaks first."""
        said = self._render([{"role": "user", "content": "?"}], header=False)
        whole = self._render([{"role": "user", "content": "?"}], header=True)
        if whole[: len(said)] != said:
            raise ValueError(self._refusal(0, row))
        return whole[len(said) :]

    def _refusal(self, index: int, row: str) -> str:
        return (
            f"the chat template writes what comes before message {index} (assistant) of {row}, or the message itself, "
            f"differently once more messages follow, so the tokens to learn cannot be told apart. Use a template with "
            f'{{% generation %}} marks, or turns="last" if only earlier turns are rewritten.'
        )

    def _render(self, messages: Sequence[Message], *, header: bool) -> list[int]:
        return list(
            self.tokenizer.apply_chat_template(
                list(messages), **self._settings(), return_dict=False, add_generation_prompt=header
            )
        )

    def _settings(self) -> dict[str, Any]:
        return {**self.options, "tokenize": True, "chat_template": self._template()}

    def _template(self) -> str:
        template = self.tokenizer.chat_template
        if isinstance(template, Mapping):
            template = template.get("default")
        return template or PLAIN_TEMPLATE

    def _special(self) -> set[int]:
        ends = set() if self.tokenizer.eos_token_id is None else {self.tokenizer.eos_token_id}
        return ends | set(self.tokenizer.get_added_vocab().values())

    def _text(self, text: str) -> list[int]:
        """The tokens that begin a sequence with `text`: after the tokenizer's own opening token, before no end."""
        tokens = list(self.tokenizer(text, add_special_tokens=True)["input_ids"])
        plain = self._ids(text)
        ended = len(tokens) > len(plain) and self._end() == tokens[-1:]
        return tokens[:-1] if ended and plain[-1:] != tokens[-1:] else tokens

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _end(self) -> list[int]:
        return [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]

    def _fitted(self, encoded: Encoded, row: str) -> Encoded:
        if self.max_length is not None and len(encoded) > self.max_length:
            if not self.truncate:
                raise self._too_long(row, len(encoded))
            length, encoded = len(encoded), Encoded(encoded.tokens[: self.max_length], encoded.mask[: self.max_length])
            if 1 not in encoded.mask:
                raise TooLong(
                    f"what {row} has to learn lies past token {self.max_length}, where it is cut. "
                    f"Raise max_length, or leave the row out.",
                    row,
                    length,
                )
        if 1 not in encoded.mask[1:]:
            raise ValueError(f"{row} has no token to learn. Leave it out.")
        return encoded

    def _too_long(self, row: str, length: int) -> TooLong:
        limit = f"max_length is {self.max_length}. Raise it, drop the row, or set truncate."
        return TooLong(f"{row} has {length} tokens, but {limit}", row, length)


def sft_batch(examples: Sequence[Encoded]) -> Batch:
    """A batch for `SFT(over="loss_mask")`."""
    from postlude.data.batch import Batch

    return Batch([each.tokens for each in examples], {"loss_mask": [each.mask for each in examples]})


def preference_batch(pairs: Sequence[tuple[Encoded, Encoded]]) -> Batch:
    """A batch for `Preference`: the two of a pair side by side, kept together, their answers in "response_mask"."""
    from postlude.data.batch import Batch

    sides = [side for pair in pairs for side in pair]
    groups = [index // 2 for index in range(len(sides))]
    return Batch([side.tokens for side in sides], {"response_mask": [side.mask for side in sides]}, groups)


def _checked(messages: Any, row: str) -> list[Message]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"{row} holds {_shown(messages)}, but messages are a list of at least one.")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(
                f"message {index} of {row} is {_shown(message)}, but a message has a role and a content. "
                f'Write it as {{"role": "user", "content": "..."}}.'
            )
    return list(messages)


def _reply(completion: Prompt, row: str) -> list[Message]:
    if isinstance(completion, str):
        return [{"role": "assistant", "content": completion}]
    return _checked(completion, row)


def _shared(one: Sequence[Message], other: Sequence[Message]) -> int:
    """How many messages both begin with."""
    both = min(len(one), len(other))
    return next((i for i in range(both) if dict(one[i]) != dict(other[i])), both)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

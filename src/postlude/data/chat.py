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
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

from postlude.data.messages import ASKED, Message, Template
from postlude.data.pieces import Pieces

if TYPE_CHECKING:
    from postlude.data.batch import Batch

Result = TypeVar("Result")
Work: TypeAlias = Generator[list[str], list[list[int]], Result]
"""The encoding of one row: it asks for the tokens of texts, is told them, and in the end returns what it made."""
Form: TypeAlias = Literal["conversation", "answer", "preference"]
"""What a dataset's rows are, by the method of `Encoder` that takes them."""
Prompt: TypeAlias = str | Sequence[Message]
"""Text to go on from, or messages to answer."""

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
SAID = "what was said."  # stands for a sampled turn where a template is asked what it writes after one
GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\b")


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer that an encoder uses."""

    chat_template: Any
    eos_token_id: int | None

    def __call__(self, text: Any, *, add_special_tokens: bool = ...) -> Any:
        """The tokens of text, or of each of several, under "input_ids"."""
        ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """The tokens of messages."""
        ...

    def decode(self, token_ids: Any, **options: Any) -> str:
        """The text of tokens."""
        ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Those tokens by their number, with how they are found in text."""
        ...

    def get_added_vocab(self) -> dict[str, int]:
        """The tokens that stand outside the ordinary vocabulary, special ones among them."""
        ...


class Opening(str):
    """Text that begins a sequence, so that the tokenizer's own opening token comes before it."""


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
        if isinstance(prompt, str):
            text: str = Opening(prompt)
        else:
            text = self._render(self._template.checked(prompt, row), header=True)
        (tokens,) = self._tokens([text])
        if self.max_length is None or len(tokens) <= self.max_length:
            return tokens
        if not self.truncate:
            raise self._too_long(row, len(tokens))
        return tokens[-self.max_length :]

    def conversation(self, messages: Sequence[Message], row: str = "the conversation") -> Encoded:
        """A whole conversation, its assistant turns learned."""
        return self._alone(self._conversation(messages, row))

    def answer(self, prompt: Prompt, completion: Prompt | Sequence[str], row: str = "the pair") -> Encoded:
        """A prompt and the completion to learn.

        After text, the completion is text, and ends with the end token; of several turns it is a list of what is said
        and what is heard in turn, where only what is said is learned. After messages it is the assistant's message, as
        text or as messages.
        """
        return self._alone(self._answer(prompt, completion, row))

    def preference(
        self, prompt: Prompt | None, chosen: Prompt, rejected: Prompt, row: str = "the pair"
    ) -> tuple[Encoded, Encoded]:
        """The answers chosen and rejected, each after the prompt.

        Where they are whole conversations, beginning with something else than the assistant, what both begin with is
        the prompt and `prompt` is not read.
        """
        return self._alone(self._preference(prompt, chosen, rejected, row))

    def all(self, form: Form, rows: Sequence[Sequence[Any]], names: Sequence[str]) -> list[Any]:
        """Encode rows of one form by its method, given the arguments of each, all but `row`, which is in `names`.

        The same as one by one, but the tokenizer is called once for all of them. A row that is too long has its
        `TooLong` in its place; any other mistake is raised.
        """
        works = [getattr(self, f"_{form}")(*row, name) for row, name in zip(rows, names, strict=True)]
        return self._together(works)

    def _conversation(self, messages: Sequence[Message], row: str) -> Work[Encoded]:
        learned = yield from self._learned(self._template.checked(messages, row), 0, row)
        return self._fitted(learned, row)

    def _answer(self, prompt: Prompt, completion: Prompt | Sequence[str], row: str) -> Work[Encoded]:
        if isinstance(prompt, str):
            turns = [completion] if isinstance(completion, str) else list(completion)
            if not all(isinstance(turn, str) for turn in turns):
                raise ValueError(
                    f"the prompt of {row} is text but its answer is messages. Give both as text or both as messages."
                )
            if len(turns) % 2 == 0:
                raise ValueError(
                    f"the answer of {row} has {len(turns)} turns, but it begins and ends with what is said: give an "
                    "odd number of texts."
                )
            tokens, *pieces = yield [Opening(prompt), *turns]
            mask = [0] * len(tokens)
            for place, piece in enumerate(pieces):
                spoken = place % 2 == 0
                added = piece + self._end if spoken else piece
                tokens, mask = tokens + added, mask + [int(spoken)] * len(added)
            return self._fitted(Encoded(tokens, mask), row)
        messages = self._template.checked(prompt, row)
        said: Any = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        whole = [*messages, *self._template.checked(said, row)]
        learned = yield from self._learned(whole, len(messages), row)
        return self._fitted(learned, row)

    def _preference(
        self, prompt: Prompt | None, chosen: Prompt, rejected: Prompt, row: str
    ) -> Work[tuple[Encoded, Encoded]]:
        if not isinstance(chosen, str) and not isinstance(rejected, str):
            sides = self._template.checked(chosen, row), self._template.checked(rejected, row)
            if all(side[0]["role"] != "assistant" for side in sides):
                shared = _shared(*sides)
                if shared == 0 or any(len(side) == shared for side in sides):
                    fault = "is the beginning of the other" if shared else "begins unlike the other"
                    raise ValueError(f"one answer of {row} {fault}. Give two answers to one prompt.")
                prompt, chosen, rejected = sides[0][:shared], sides[0][shared:], sides[1][shared:]
        if prompt is None:
            raise ValueError(f"{row} has no prompt. Give one, or answers that are whole conversations.")
        better = yield from self._answer(prompt, chosen, f"{row} (chosen)")
        worse = yield from self._answer(prompt, rejected, f"{row} (rejected)")
        return better, worse

    def observation(
        self, observation: Prompt, after: Sequence[int], *, chat: bool, keep_reasoning: bool = False
    ) -> list[int]:
        """The tokens between a sampled turn and the next: the observation with all that the template puts around it.

        `after` are the tokens sampled last; if they lack the token that ends a turn, it comes first. They are never
        encoded again. Without `chat` the observation is text as it is. A template that leaves earlier reasoning out
        is refused, since here it stays, unless `keep_reasoning`.
        """
        if not chat:
            if not isinstance(observation, str):
                raise ValueError("the observation is messages but the prompt was text. Give the observation as text.")
            return self._tokens([observation])[0]
        row = "the observation"
        heard = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        roles = tuple(str(message.get("role")) for message in self._template.checked(heard, row))
        if not keep_reasoning and self._drops_reasoning(roles):
            raise ValueError(
                f"the chat template leaves out what the assistant thought in earlier turns once a message of "
                f"{roles[-1]} follows, but tokens that were sampled stay as they are: the model would learn to go on "
                f"from what it is not shown elsewhere. Set the environment's keep_reasoning if it shall, or answer in "
                f"another role: templates that know tools keep reasoning before a tool's message."
            )
        text = self._render([ASKED, {"role": "assistant", "content": SAID}, *heard], header=True)
        opening = self._render([ASKED], header=False)
        cut = text.find(SAID, len(opening)) + len(SAID)
        if not text.startswith(opening) or cut < len(SAID):
            raise ValueError(self._refusal(1, row))
        until, whole = self._tokens([text[:cut], text])
        between = whole[len(until) :] if whole[: len(until)] == until else self._tokens([text[cut:]])[0]
        ended = between[:1] == list(after[-1:]) and between[0] in self._special
        return between[1:] if ended else between

    def _drops_reasoning(self, roles: tuple[str, ...]) -> bool:
        known = self._dropped
        if roles not in known:
            known[roles] = self._template.drops_reasoning([{"role": role, "content": "."} for role in roles])
        return known[roles]

    def _learned(self, messages: list[Message], first: int, row: str) -> Work[Encoded]:
        """Learn the assistant's turns from message `first` on."""
        said = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
        if not said:
            raise ValueError(f"{row} has no message of the assistant to learn from. Leave it out.")
        if self.turns == "last":
            said = said[-1:]
        if self._marked:
            made = self.tokenizer.apply_chat_template(
                messages, **self._settings, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            tokens, marks = list(made["input_ids"]), [int(mark) for mark in made["assistant_masks"]]
            # Marks cover every turn. Where some are not to be learned, the prompt of the first that is tells their end.
            earlier = any(message["role"] == "assistant" for message in messages[: said[0]])
            if earlier:
                (before,) = yield [self._render(messages[: said[0]], header=True)]
                start = self._start(tokens, before, said[0], row)
                marks[:start] = [0] * start
            return Encoded(tokens, marks)
        tokens, spans = yield from self._spans(messages, said, row)
        mask = [0] * len(tokens)
        for start, end in spans:
            mask[start:end] = [1] * (end - start)
        return Encoded(tokens, mask)

    def _spans(
        self, messages: Sequence[Message], said: Sequence[int], row: str
    ) -> Work[tuple[list[int], list[tuple[int, int]]]]:
        """The tokens of all messages, and where among them each of the assistant's messages `said` begins and ends."""
        inner = [index for index in said if index + 1 < len(messages)]
        asked = [index for index in said if index]
        tokens, *found = yield [
            self._render(messages, header=False),
            *(self._render(messages[:index], header=True) for index in asked),
            *(self._render(messages[: index + 1], header=False) for index in inner),
        ]
        before = dict(zip(asked, found, strict=False))
        through = dict(zip(inner, found[len(asked) :], strict=True))
        spans = []
        for index in said:
            start = self._start(tokens, before[index] if index else self._opening(row), index, row)
            end = self._stop(tokens, through.get(index, tokens), start)
            if end is None:
                raise ValueError(self._refusal(index, row))
            spans.append((start, end))
        return tokens, spans

    def _stop(self, tokens: list[int], through: list[int], start: int) -> int | None:
        """The end of a turn that begins at `start`, by the tokens of all up to it; None if it is not in `tokens`."""
        # A template may write a line break after the token that ends the turn. Nobody samples it, so it is not learned.
        special, end = self._special, len(through)
        while end > start and through[end - 1] not in special and self._is_space(through[end - 1]):
            end -= 1
        if end == start or through[end - 1] not in special:
            end = len(through)
        return None if end <= start or tokens[:end] != through[:end] else end

    def _start(self, tokens: list[int], before: list[int], index: int, row: str) -> int:
        if tokens[: len(before)] != before:
            raise ValueError(self._refusal(index, row))
        return len(before)

    def _opening(self, row: str) -> list[int]:
        """The assistant's header where it speaks first."""
        said, whole = self._tokens([self._render([ASKED], header=header) for header in (False, True)])
        if whole[: len(said)] != said:
            raise ValueError(self._refusal(0, row))
        return whole[len(said) :]

    def _refusal(self, index: int, row: str) -> str:
        return (
            f"the chat template writes what comes before message {index} (assistant) of {row}, or the message itself, "
            f"differently once more messages follow, so the tokens to learn cannot be told apart. Use a template with "
            f'{{% generation %}} marks, or turns="last" if only earlier turns are rewritten.'
        )

    def _alone(self, work: Work[Result]) -> Result:
        """Do one row's work."""
        (made,) = self._together([work])
        if isinstance(made, TooLong):
            raise made
        result: Result = made
        return result

    def _together(self, works: Sequence[Work[Any]]) -> list[Any]:
        """Do the work of several rows, calling the tokenizer for all of them at once, in as many rounds as it takes."""
        made: list[Any] = [None] * len(works)
        told: dict[int, Any] = dict.fromkeys(range(len(works)))  # None begins it
        while told:
            asked = dict[int, list[str]]()
            for place, tokens in told.items():
                try:
                    asked[place] = works[place].send(tokens)
                except StopIteration as stop:
                    made[place] = stop.value
                except TooLong as error:
                    made[place] = error
            found = iter(self._tokens([text for texts in asked.values() for text in texts]))
            told = {place: [next(found) for _ in texts] for place, texts in asked.items()}
        return made

    def _tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text. One that begins a sequence has the tokenizer's opening token, but no end."""
        found = self._pieces([str(text) for text in texts])
        opening = [str(text) for text in texts if isinstance(text, Opening)]
        begun = iter(self.tokenizer(opening, add_special_tokens=True)["input_ids"] if opening else ())
        return [
            self._unended(list(next(begun)), tokens) if isinstance(text, Opening) else tokens
            for text, tokens in zip(texts, found, strict=True)
        ]

    def _unended(self, tokens: list[int], plain: list[int]) -> list[int]:
        ended = len(tokens) > len(plain) and self._end == tokens[-1:]
        return tokens[:-1] if ended and plain[-1:] != tokens[-1:] else tokens

    def _render(self, messages: Sequence[Message], *, header: bool) -> str:
        """What the template writes."""
        text: str = self.tokenizer.apply_chat_template(
            list(messages), **self._settings, tokenize=False, add_generation_prompt=header
        )
        return text

    # What is the same for every row is asked of the tokenizer once: each of these is slow there.

    @cached_property
    def _template(self) -> Template:
        return Template(lambda messages: self._render(messages, header=False))

    @cached_property
    def _settings(self) -> dict[str, Any]:
        template = self.tokenizer.chat_template
        if isinstance(template, Mapping):
            template = template.get("default")
        return {**self.options, "chat_template": template or PLAIN_TEMPLATE}

    @cached_property
    def _pieces(self) -> Pieces:
        def encode(texts: list[str]) -> list[list[int]]:
            tokens: list[list[int]] = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
            return tokens

        fast = getattr(self.tokenizer, "is_fast", False)  # others take special tokens out in ways of their own
        return Pieces(encode, list(self.tokenizer.added_tokens_decoder.values()) if fast else ())

    @cached_property
    def _marked(self) -> bool:
        return GENERATION_MARK.search(self._settings["chat_template"]) is not None

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self._end) | frozenset(self.tokenizer.get_added_vocab().values())

    @cached_property
    def _end(self) -> list[int]:
        end = self.tokenizer.eos_token_id
        return [] if end is None else [end]

    def _is_space(self, token: int) -> bool:
        known = self._spaces
        if token not in known:
            known[token] = self.tokenizer.decode([token]).isspace()
        return known[token]

    @cached_property
    def _spaces(self) -> dict[int, bool]:
        return {}

    @cached_property
    def _dropped(self) -> dict[tuple[str, ...], bool]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}  # what was asked is asked again

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


def _shared(one: Sequence[Message], other: Sequence[Message]) -> int:
    """How many messages both begin with."""
    both = min(len(one), len(other))
    return next((i for i in range(both) if dict(one[i]) != dict(other[i])), both)

"""Encoder: from messages, answers and preference pairs to tokens, and which of them are learned.

**Learned tokens.** Those that the assistant wrote, with the token that ends its turn, and nothing that the template
puts around them. A template with `{% generation %}` marks says itself which they are. Any other is asked: the tokens of
a conversation up to a turn, with the assistant's header, begin the tokens of the conversation with the turn, and
what follows them is the turn.

**Templates that rewrite earlier turns.** Some write a turn otherwise once more messages follow: Qwen3's has an empty
thought in the last turn alone, DeepSeek-R1's leaves out what was thought. Such a conversation becomes one sequence a
turn: what the model reads before the turn, and the turn as it is written when it is the last.

**No template.** A tokenizer without one gets `PLAIN_TEMPLATE`: "User: ...", a blank line, "Assistant: ...", the end
token, a blank line.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from postlude.data.chat_template import (
    ASKED,
    ChatTemplate,
    EncodingError,
    Message,
    Tools,
    as_encoding_error,
    reasoning_of,
    shared_prompt,
    shorten,
)
from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.data.text_tokens import BosText, ContinuationText, TextTokens, mask_of_spans

if TYPE_CHECKING:
    from postlude.data.batch import Batch

Result = TypeVar("Result")
Work: TypeAlias = Generator[list[str], list[list[int]], Result]
"""The encoding of one row: it asks for the tokens of texts, is told them, and in the end returns what it made."""
RowFormat: TypeAlias = Literal["conversation", "completion", "preference"]
"""What a dataset's rows are, by the method of `Encoder` that takes them."""
Prompt: TypeAlias = str | Sequence[Message]
"""Text to go on from, or messages to answer."""

SAID = "what was said."  # stands for a sampled turn where a template is asked what it writes after one


class TooLongError(ValueError):
    """A row that does not fit. A recipe may leave it out, or say it in the words of its own settings."""

    def __init__(self, message: str, row: str, length: int) -> None:
        super().__init__(message)
        self.row, self.length = row, length


@dataclass(frozen=True)
class EncodedSequence:
    """A sequence, and 1 for each token that is learned, 0 for the others."""

    tokens: list[int]
    mask: list[int]

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.tokens)


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Turns what a dataset holds into tokens. `row` in its methods names the row in errors.

    A sequence of more than `max_length` tokens is refused with `TooLongError`; with `truncate` its end is cut off
    instead (of a prompt to be answered, its start), and only one that has nothing left to learn is refused.
    `turns="last"` learns the last turn of a conversation alone. `options` are handed to the chat template, such
    as `enable_thinking`.
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
        try:
            if isinstance(prompt, str):
                text: str = BosText(prompt)
            else:
                text = self._template.render(self._template.checked(prompt, row), header=True)
            (tokens,) = self._tokens([text])
        except EncodingError as error:
            raise ValueError(_cannot(row, error)) from error
        if self.max_length is None or len(tokens) <= self.max_length:
            return tokens
        if not self.truncate:
            raise self._too_long(row, len(tokens))
        return tokens[-self.max_length :]

    def conversation(
        self, messages: Sequence[Message], row: str = "the conversation", *, tools: Tools = None
    ) -> list[EncodedSequence]:
        """A conversation, its assistant turns learned: one sequence, or one a turn where the template rewrites turns.

        `tools` are the functions that the assistant may call, for the template to write.
        """
        return _all_fit(self._alone(self._conversation(messages, tools, row=row), row))

    def completion(
        self, prompt: Prompt, completion: Prompt | Sequence[str], row: str = "the pair", *, tools: Tools = None
    ) -> EncodedSequence:
        """A prompt and the completion to learn.

        After text, the completion is text, and ends with the end token; of several turns it is a list of what is said
        and what is heard in turn, where only what is said is learned. After messages it is the assistant's message, as
        text or as messages.
        """
        made = _all_fit(self._alone(self._completion(prompt, completion, tools, row=row), row))
        return _one(made, row)

    def preference(
        self, prompt: Prompt | None, chosen: Prompt, rejected: Prompt, row: str = "the pair", *, tools: Tools = None
    ) -> tuple[EncodedSequence, EncodedSequence]:
        """The answers chosen and rejected, each after the prompt.

        Where they are whole conversations, beginning with something else than the assistant, what both begin with is
        the prompt. A `prompt` of text is not read then, and one of messages must be what they begin with.
        """
        return self._alone(self._preference(prompt, chosen, rejected, tools, row=row), row)

    def encode_rows(self, form: RowFormat, rows: Sequence[Sequence[Any]], names: Sequence[str]) -> list[Any]:
        """Encode rows of one form by its method, given the arguments of each, and its tools last where it has some.

        The same as one by one, but the tokenizer is called once for all of them. A row, or a sequence of a row, that is
        too long has its `TooLongError` in its place; any other mistake is raised. A preference has two sequences, other
        forms a list.
        """
        works = [getattr(self, f"_{form}")(*row, row=name) for row, name in zip(rows, names, strict=True)]
        return self._together(works, names)

    def _conversation(self, messages: Sequence[Message], tools: Any = None, *, row: str) -> Work[list[EncodedSequence]]:
        tools = self._template.checked_tools(tools, row)
        return (yield from self._learned(self._template.checked(messages, row, tools), 0, tools, row))

    def _completion(
        self, prompt: Prompt, completion: Prompt | Sequence[str], tools: Any = None, *, row: str
    ) -> Work[list[EncodedSequence]]:
        if not isinstance(completion, str | list | tuple):
            raise ValueError(f"the answer of {row} is {shorten(completion)}, but an answer is text or messages.")
        if isinstance(prompt, str):
            return (yield from self._text_answer(prompt, completion, row))
        tools = self._template.checked_tools(tools, row)
        messages = self._template.checked(prompt, row, tools)
        said: Any = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        answer = self._template.checked(said, row, tools)
        if answer[0]["role"] != "assistant":
            raise ValueError(
                f"the answer of {row} begins with a message of {answer[0]['role']}, but what comes before the "
                f"assistant's is the prompt. Leave it out of the answer."
            )
        return (yield from self._learned([*messages, *answer], len(messages), tools, row))

    def _text_answer(self, prompt: str, completion: str | Sequence[Any], row: str) -> Work[list[EncodedSequence]]:
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
        tokens, *pieces = yield [BosText(prompt), *map(ContinuationText, turns)]
        if not prompt:  # then the first turn itself begins the sequence
            (begun,) = yield [BosText(turns[0])]
            pieces[0] = begun[len(tokens) :]
        mask = [0] * len(tokens)
        for place, piece in enumerate(pieces):
            spoken = place % 2 == 0
            added = piece + self._end if spoken else piece
            tokens, mask = tokens + added, mask + [int(spoken)] * len(added)
        return [self._fitted(EncodedSequence(tokens, mask), row)]

    def _preference(
        self, prompt: Prompt | None, chosen: Prompt, rejected: Prompt, tools: Any = None, *, row: str
    ) -> Work[tuple[EncodedSequence, EncodedSequence]]:
        if isinstance(chosen, list | tuple) and isinstance(rejected, list | tuple):
            known = self._template.checked_tools(tools, row)
            sides = self._template.checked(chosen, row, known), self._template.checked(rejected, row, known)
            if all(side[0]["role"] != "assistant" for side in sides):
                shared = shared_prompt(*sides, row)
                if prompt is not None and not isinstance(prompt, str):
                    begun = self._template.checked(prompt, row, known)
                    if sides[0][: len(begun)] != begun or len(begun) > shared:
                        raise ValueError(
                            f"the answers of {row} are conversations that do not begin with its prompt. Give the "
                            f"prompt once, or conversations that begin with it."
                        )
                prompt, chosen, rejected = sides[0][:shared], sides[0][shared:], sides[1][shared:]
        if prompt is None:
            raise ValueError(f"{row} has no prompt. Give one, or answers that are whole conversations.")
        better = yield from self._completion(prompt, chosen, tools, row=f"{row} (chosen)")
        worse = yield from self._completion(prompt, rejected, tools, row=f"{row} (rejected)")
        return _one(better, f"{row} (chosen)"), _one(worse, f"{row} (rejected)")

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
            return self._tokens([ContinuationText(observation)])[0]
        row = "the observation"
        said = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        heard = self._template.checked(said, row)
        roles = tuple(str(message["role"]) for message in heard)
        if not keep_reasoning and self._drops_reasoning(roles):
            raise ValueError(
                f"the chat template leaves out what the assistant thought in earlier turns once a message of "
                f"{roles[-1]} follows, but tokens that were sampled stay as they are: the model would learn to go on "
                f"from what it is not shown elsewhere. Set the environment's keep_reasoning if it shall, or answer in "
                f"another role: templates that know tools keep reasoning before a tool's message."
            )
        text = self._template.render([ASKED, {"role": "assistant", "content": SAID}, *heard], header=True)
        opening = self._template.render([ASKED])
        cut = text.find(SAID, len(opening)) + len(SAID)
        if not text.startswith(opening) or cut < len(SAID):
            raise ValueError(self._refusal(1, row))
        until, whole = self._tokens([text[:cut], text])
        between = (
            whole[len(until) :] if whole[: len(until)] == until else self._tokens([ContinuationText(text[cut:])])[0]
        )
        ended = between[:1] == list(after[-1:]) and between[0] in self._special
        return between[1:] if ended else between

    def _drops_reasoning(self, roles: tuple[str, ...]) -> bool:
        known = self._dropped
        if roles not in known:
            known[roles] = self._template.drops_reasoning([{"role": role, "content": "."} for role in roles])
        return known[roles]

    def _learned(self, messages: list[Message], first: int, tools: Tools, row: str) -> Work[list[EncodedSequence]]:
        """Learn the assistant's turns from message `first` on."""
        said = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
        if not said:
            raise ValueError(f"{row} has no message of the assistant to learn from. Leave it out.")
        if self.turns == "last":
            said = said[-1:]
        if self._template.is_marked(tools):
            marked = yield from self._marked(messages, said, tools, row)
            return [self._fitted(marked, row)]
        whole = yield from self._whole(messages, said, tools)
        if whole is not None:
            return [self._fitted(whole, row)]
        made = yield from self._each_turn(messages, said, tools, row)
        if len(made) == 1:
            return [self._fitted(made[0], row)]
        fitted: list[Any] = []
        for index, encoded in zip(said, made, strict=True):
            try:
                fitted.append(self._fitted(encoded, f"{row} (up to message {index})"))
            except TooLongError as error:
                fitted.append(error)
        return fitted

    def _marked(self, messages: list[Message], said: list[int], tools: Tools, row: str) -> Work[EncodedSequence]:
        """Learn what the template marks."""
        text, spans = self._template.render_marked(messages, tools)
        with as_encoding_error("the tokenizer fails"):
            made = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens = self._texts.single_bos(list(made["input_ids"]))
        mask = mask_of_spans(made["offset_mapping"], spans)[-len(tokens) :]
        # Marks cover every turn. Where some are not to be learned, the prompt of the first that is tells their end.
        if any(message["role"] == "assistant" for message in messages[: said[0]]):
            (before,) = yield [self._template.before_turn(messages, said[0], tools)]
            if tokens[: len(before)] != before:
                raise ValueError(self._refusal(said[0], row))
            mask[: len(before)] = [0] * len(before)
        return EncodedSequence(tokens, mask)

    def _whole(self, messages: list[Message], said: list[int], tools: Tools) -> Work[EncodedSequence | None]:
        """All messages as one sequence; None where the template writes a turn of `said` otherwise than as the last."""
        text = self._template.render(messages, tools)
        if not all(reasoning_of(messages[index]) in text for index in said):
            return None
        inner = [index for index in said if index + 1 < len(messages)]
        tokens, *found = yield [
            text,
            *(self._template.before_turn(messages, index, tools) for index in said),
            *(self._template.render(messages[: index + 1], tools) for index in inner),
        ]
        through = dict(zip(inner, found[len(said) :], strict=True))
        mask = [0] * len(tokens)
        for index, before in zip(said, found, strict=False):
            end = self._turn_end(tokens, through.get(index, tokens), len(before))
            if end is None or tokens[: len(before)] != before:
                return None
            mask[len(before) : end] = [1] * (end - len(before))
        return EncodedSequence(tokens, mask)

    def _each_turn(
        self, messages: list[Message], said: list[int], tools: Tools, row: str
    ) -> Work[list[EncodedSequence]]:
        """A sequence for each turn of `said`: what the model reads before it, and the turn as the last."""
        texts: list[str] = []
        for index in said:
            turn = self._template.turn(messages, index, tools)
            if turn is None:
                raise ValueError(self._refusal(index, row))
            before, written = turn
            texts += [before, before + written, ContinuationText(written)]
        found = iter((yield texts))
        made = []
        for prompt, whole, rest in zip(found, found, found, strict=True):
            # A model goes on from the tokens of its prompt, even where other tokens would join the two texts.
            tokens = whole if whole[: len(prompt)] == prompt else prompt + rest
            end = self._turn_end(tokens, tokens, len(prompt)) or len(tokens)
            made.append(
                EncodedSequence(tokens, [0] * len(prompt) + [1] * (end - len(prompt)) + [0] * (len(tokens) - end))
            )
        return made

    def _turn_end(self, tokens: list[int], through: list[int], start: int) -> int | None:
        """The end of a turn that begins at `start`, by the tokens of all up to it; None if it is not in `tokens`."""
        special, end = self._special, len(through)
        is_whole = tokens[:end] == through
        if not is_whole:
            pairs = zip(tokens, through, strict=False)
            end = next((place for place, (one, other) in enumerate(pairs) if one != other), len(tokens))
            # What a template writes after the last turn alone, such as an end token, is no part of the turn.
            if not all(token in special or self._is_space(token) for token in through[end:]):
                return None
        # A template may write a line break after the token that ends the turn. Nobody samples it, so it is not learned.
        last = end
        while last > start and tokens[last - 1] not in special and self._is_space(tokens[last - 1]):
            last -= 1
        if last > start and tokens[last - 1] in special:
            return last
        return end if is_whole and end > start else None

    def _refusal(self, index: int, row: str) -> str:
        return (
            f"the chat template writes what comes before message {index} (assistant) of {row} differently once that "
            f"message is there, so the tokens to learn cannot be told apart. Use a template with {{% generation %}} "
            f"marks."
        )

    def _alone(self, work: Work[Result], row: str) -> Result:
        """Do one row's work."""
        (made,) = self._together([work], [row])
        if isinstance(made, TooLongError):
            raise made
        result: Result = made
        return result

    def _together(self, works: Sequence[Work[Any]], names: Sequence[str]) -> list[Any]:
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
                except TooLongError as error:
                    made[place] = error
                except EncodingError as error:
                    raise ValueError(_cannot(names[place], error)) from error
            try:
                found = iter(self._tokens([text for texts in asked.values() for text in texts]))
            except EncodingError as error:
                raise ValueError(_cannot(self._faulty(asked, names), error)) from error
            told = {place: [next(found) for _ in texts] for place, texts in asked.items()}
        return made

    def _faulty(self, asked: Mapping[int, Sequence[str]], names: Sequence[str]) -> str:
        """The name of the first row with a text that the tokenizer cannot read."""
        for place, texts in asked.items():
            try:
                self._tokens(texts)
            except EncodingError:
                return names[place]
        return f"a row from {names[0]} on"

    def _tokens(self, texts: Sequence[str]) -> list[list[int]]:
        with as_encoding_error("the tokenizer fails"):
            return self._texts(texts)

    # What is the same for every row is asked of the tokenizer once: each of these is slow there.

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.options)

    @cached_property
    def _texts(self) -> TextTokens:
        return TextTokens(self.tokenizer)

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

    def _fitted(self, encoded: EncodedSequence, row: str) -> EncodedSequence:
        encoded = self._single_end(encoded)
        if self.max_length is not None and len(encoded) > self.max_length:
            if not self.truncate:
                raise self._too_long(row, len(encoded))
            length, encoded = (
                len(encoded),
                EncodedSequence(encoded.tokens[: self.max_length], encoded.mask[: self.max_length]),
            )
            if 1 not in encoded.mask:
                raise TooLongError(
                    f"what {row} has to learn lies past token {self.max_length}, where it is cut. "
                    f"Raise max_length, or leave the row out.",
                    row,
                    length,
                )
        if 1 not in encoded.mask[1:]:
            raise ValueError(f"{row} has no token to learn. Leave it out.")
        return encoded

    def _single_end(self, encoded: EncodedSequence) -> EncodedSequence:
        """The sequence without an end token that is learned twice: one in the answer, one by the template."""
        tokens, mask = encoded.tokens, encoded.mask
        twice = [self._end[0]] * 2 if self._end and tokens.count(self._end[0]) > 1 else None
        doubled = {i for i in range(1, len(tokens)) if mask[i] and tokens[i - 1 : i + 1] == twice} if twice else ()
        if not doubled:
            return encoded
        kept = [i for i in range(len(tokens)) if i not in doubled]
        return EncodedSequence([tokens[i] for i in kept], [max(mask[i], int(i + 1 in doubled)) for i in kept])

    def _too_long(self, row: str, length: int) -> TooLongError:
        limit = f"max_length is {self.max_length}. Raise it, drop the row, or set truncate."
        return TooLongError(f"{row} has {length} tokens, but {limit}", row, length)


def sft_batch(examples: Sequence[EncodedSequence]) -> Batch:
    """A batch for `SFT(over="loss_mask")`."""
    from postlude.data.batch import Batch

    return Batch([each.tokens for each in examples], {"loss_mask": [each.mask for each in examples]})


def preference_batch(pairs: Sequence[tuple[EncodedSequence, EncodedSequence]]) -> Batch:
    """A batch for `Preference`: the two of a pair side by side, kept together, their answers in "response_mask"."""
    from postlude.data.batch import Batch

    sides = [side for pair in pairs for side in pair]
    groups = [index // 2 for index in range(len(sides))]
    return Batch([side.tokens for side in sides], {"response_mask": [side.mask for side in sides]}, groups)


def _all_fit(made: Sequence[Any]) -> list[EncodedSequence]:
    """Sequences of one row, or the `TooLongError` of the first that does not fit."""
    for each in made:
        if isinstance(each, TooLongError):
            raise each
    return list(made)


def _one(made: Sequence[Any], row: str) -> EncodedSequence:
    if len(made) > 1:
        raise ValueError(
            f"the answer of {row} has {len(made)} turns, and the chat template writes earlier turns differently once "
            f"later ones follow, so they are {len(made)} sequences where one is needed. Keep the last turn alone."
        )
    encoded: EncodedSequence = made[0]
    return encoded


def _cannot(row: str, error: EncodingError) -> str:
    reason = str(error) if str(error).endswith(".") else f"{error}."
    return f"{row} cannot be encoded: {reason} Mend the row, or leave it out."

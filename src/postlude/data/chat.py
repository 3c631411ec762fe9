"""Encoder: turns conversations, completions and preference pairs into tokens, and marks the tokens to train on.

**Trained tokens.** Those that the assistant wrote, with the token that ends its turn, and nothing that the template
puts around them. A template with `{% generation %}` marks says which they are. With any other, the tokens of a
conversation up to a turn, with the assistant's header, are a prefix of the tokens with the turn; the rest is the turn.

**Templates that rewrite earlier turns.** Some format a turn differently once more messages follow: Qwen3's writes an
empty thought in the last turn alone, DeepSeek-R1's removes the reasoning. Such a conversation becomes one sequence per
turn: what the model reads before the turn, and the turn as it is written when it is the last.

**No template.** A tokenizer without one gets `PLAIN_TEMPLATE`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args

from postlude.checks import check_choice
from postlude.data.chat_template import (
    PLACEHOLDER,
    QUESTION,
    ChatTemplate,
    EncodingError,
    Message,
    Tools,
    as_encoding_error,
    shared_prompt,
    shorten,
    with_system,
)
from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.data.text_tokens import BosText, ContinuationText, TextTokens
from postlude.data.thoughts import ThoughtMarkers
from postlude.data.turn_encoding import EncodingSteps, TurnEncoder, ambiguous_turn
from postlude.options import TrainedTurns

if TYPE_CHECKING:
    from postlude.data.batch import Batch

Result = TypeVar("Result")
RowFormat: TypeAlias = Literal["conversation", "completion", "preference"]
"""The format of a dataset's rows, named after the method of `Encoder` that takes them."""
Prompt: TypeAlias = str | Sequence[Message]
"""Text to continue, or messages to answer."""


class TooLongError(ValueError):
    """A row has more than max_length tokens. A recipe may leave it out, or name its own setting."""

    def __init__(self, message: str, row: str, length: int) -> None:
        super().__init__(message)
        self.row, self.length = row, length


@dataclass(frozen=True)
class EncodedSequence:
    """A sequence, and a mask that is 1 for each token to train on."""

    tokens: list[int]
    mask: list[int]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Turns the rows of a dataset into tokens. `row` in its methods is the row's name in error messages.

    A sequence of more than `max_length` tokens raises `TooLongError`. With `truncate` its end is cut off instead (of a
    prompt to answer, its start), and it raises only if nothing is left to train on. `turns="last"` trains on the last
    turn of a conversation alone. `options` go to the chat template, such as `enable_thinking`. `system` is put before
    messages that have no system message.
    """

    tokenizer: ChatTokenizer
    max_length: int | None = None
    truncate: bool = False
    turns: TrainedTurns = "all"
    options: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length is {self.max_length}, but the minimum is 2: the first is never trained on.")
        check_choice("turns", self.turns, get_args(TrainedTurns))

    def prompt(self, prompt: Prompt, row: str = "the prompt", *, tools: Tools = None) -> list[int]:
        """Returns the tokens that a model continues: text as it is, messages with the assistant's header.

        `tools` are the functions that it may call, for the template.
        """
        try:
            if isinstance(prompt, str):
                text: str = BosText(prompt)
            else:
                tools = self._template.checked_tools(tools, row)
                messages = with_system(self._template.checked(prompt, row, tools), self.system)
                text = self._template.render(messages, tools, header=True)
            (tokens,) = self._tokens([text])
        except EncodingError as error:
            raise ValueError(_encoding_failure(row, error)) from error
        if self.max_length is None or len(tokens) <= self.max_length:
            return tokens
        if not self.truncate:
            raise self._too_long(row, len(tokens))
        return tokens[-self.max_length :]

    @property
    def thoughts(self) -> ThoughtMarkers:
        """What marks the thoughts of a model with this tokenizer and template."""
        return self._template.thoughts

    def conversation(
        self, messages: Sequence[Message], row: str = "the conversation", *, tools: Tools = None
    ) -> list[EncodedSequence]:
        """Encodes a conversation: one sequence, or one per turn where the template rewrites earlier turns.

        The assistant's turns are trained on. `tools` are the functions that it may call, for the template.
        """
        return _all_fit(self._run(self._conversation(messages, tools, row=row), row))

    def completion(
        self, prompt: Prompt, completion: Prompt | Sequence[str], row: str = "the pair", *, tools: Tools = None
    ) -> EncodedSequence:
        """Encodes a prompt and the completion to train on.

        After a prompt of text, the completion is text and ends with the end token. With several turns it is a list of
        completions and observations in turn, where only completions are trained on. After messages it is the
        assistant's message, as text or as messages.
        """
        return _single(_all_fit(self._run(self._completion(prompt, completion, tools, row=row), row)), row)

    def preference(
        self, prompt: Prompt | None, chosen: Prompt, rejected: Prompt, row: str = "the pair", *, tools: Tools = None
    ) -> tuple[EncodedSequence, EncodedSequence]:
        """Encodes the chosen and the rejected completion, each after the prompt.

        If they are whole conversations, which do not start with the assistant, the messages they share are the prompt.
        A `prompt` of text is then ignored, and one of messages must be how they start.
        """
        return self._run(self._preference(prompt, chosen, rejected, tools, row=row), row)

    def encode_rows(self, form: RowFormat, rows: Sequence[Sequence[Any]], names: Sequence[str]) -> list[Any]:
        """Encodes rows of one format, given the arguments of its method for each row.

        The result equals that of single calls, but the tokenizer is called once for all rows. A row, or a sequence of a
        row, that is too long is a `TooLongError` in the result; any other error is raised. A preference is a pair of
        sequences, a row of another format is a list.
        """
        steps = [getattr(self, f"_{form}")(*row, row=name) for row, name in zip(rows, names, strict=True)]
        return self._run_all(steps, names)

    def _conversation(
        self, messages: Sequence[Message], tools: Any = None, *, row: str
    ) -> EncodingSteps[list[EncodedSequence]]:
        tools = self._template.checked_tools(tools, row)
        messages = with_system(self._template.checked(messages, row, tools), self.system)
        return (yield from self._turns(messages, 0, tools, row))

    def _completion(
        self, prompt: Prompt, completion: Prompt | Sequence[str], tools: Any = None, *, row: str
    ) -> EncodingSteps[list[EncodedSequence]]:
        if not isinstance(completion, str | list | tuple):
            raise ValueError(f"the completion of {row} is {shorten(completion)}, but a completion is text or messages.")
        if isinstance(prompt, str):
            self._check_no_messages(tools, row)
            return (yield from self._text_completion(prompt, completion, row))
        tools = self._template.checked_tools(tools, row)
        before = with_system(self._template.checked(prompt, row, tools), self.system)
        turns: Any = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        turns = self._template.checked(turns, row, tools)
        if turns[0]["role"] != "assistant":
            raise ValueError(
                f"the completion of {row} begins with a message of {turns[0]['role']}, but what comes before the "
                f"assistant's is the prompt. Leave it out of the completion."
            )
        return (yield from self._turns([*before, *turns], len(before), tools, row))

    def _check_no_messages(self, tools: Any, row: str) -> None:
        """Refuses tools and a system message for a row of text, which no template formats."""
        has_tools = tools.strip() not in ("", "[]", "null") if isinstance(tools, str) else bool(tools)
        extra = "tools" if has_tools else "a system message to add" if self.system is not None else ""
        if extra:
            raise ValueError(
                f"{row} has {extra}, but its prompt is text, which no chat template formats. Give the prompt as "
                'messages, such as [{"role": "user", "content": "..."}], or leave that out.'
            )

    def _text_completion(
        self, prompt: str, completion: str | Sequence[Any], row: str
    ) -> EncodingSteps[list[EncodedSequence]]:
        turns = [completion] if isinstance(completion, str) else list(completion)
        if not all(isinstance(turn, str) for turn in turns):
            raise ValueError(
                f"the prompt of {row} is text but its completion is messages. Give both as text or both as messages."
            )
        if len(turns) % 2 == 0:
            raise ValueError(
                f"the completion of {row} has {len(turns)} turns, but it begins and ends with the model's: give an "
                "odd number of texts."
            )
        tokens, *parts = yield [BosText(prompt), *map(ContinuationText, turns)]
        if not prompt:  # then the first turn itself begins the sequence
            (first,) = yield [BosText(turns[0])]
            parts[0] = first[len(tokens) :]
        mask = [0] * len(tokens)
        for number, part in enumerate(parts):
            trained = number % 2 == 0
            added = part + self._end if trained else part
            tokens, mask = tokens + added, mask + [int(trained)] * len(added)
        return [self._fitted(EncodedSequence(tokens, mask), row)]

    def _preference(
        self, prompt: Prompt | None, chosen: Prompt, rejected: Prompt, tools: Any = None, *, row: str
    ) -> EncodingSteps[tuple[EncodedSequence, EncodedSequence]]:
        if isinstance(chosen, list | tuple) and isinstance(rejected, list | tuple):
            known = self._template.checked_tools(tools, row)
            sides = self._template.checked(chosen, row, known), self._template.checked(rejected, row, known)
            if all(side[0]["role"] != "assistant" for side in sides):
                shared = shared_prompt(*sides, row)
                if prompt is not None and not isinstance(prompt, str):
                    start = self._template.checked(prompt, row, known)
                    if sides[0][: len(start)] != start or len(start) > shared:
                        raise ValueError(
                            f"the completions of {row} are conversations that do not begin with its prompt. Give the "
                            f"prompt once, or conversations that begin with it."
                        )
                prompt, chosen, rejected = sides[0][:shared], sides[0][shared:], sides[1][shared:]
        if prompt is None:
            raise ValueError(
                f"{row} has no prompt. Give one (data.prompt names its column), or completions that are whole "
                "conversations."
            )
        better = yield from self._completion(prompt, chosen, tools, row=f"{row} (chosen)")
        worse = yield from self._completion(prompt, rejected, tools, row=f"{row} (rejected)")
        return _single(better, f"{row} (chosen)"), _single(worse, f"{row} (rejected)")

    def observation(
        self, observation: Prompt, after: Sequence[int], *, chat: bool, keep_reasoning: bool = False
    ) -> list[int]:
        """Returns the tokens between a sampled turn and the next: the observation, formatted by the template.

        `after` are the last sampled tokens; if they lack the token that ends a turn, it comes first. They are never
        encoded again. Without `chat` the observation is text as it is. A template that removes earlier reasoning is
        refused, since sampled tokens stay, unless `keep_reasoning`.
        """
        if not chat:
            if not isinstance(observation, str):
                raise ValueError("the observation is messages but the prompt was text. Give the observation as text.")
            return self._tokens([ContinuationText(observation)])[0]
        row = "the observation"
        messages = self._template.checked(
            [{"role": "user", "content": observation}] if isinstance(observation, str) else observation, row
        )
        roles = [str(message["role"]) for message in messages]
        if not keep_reasoning and self._template.drops_reasoning(roles):
            raise ValueError(
                f"the chat template removes the assistant's reasoning of earlier turns once a message of {roles[-1]} "
                f"follows, but sampled tokens stay as they are: the model would be trained on a context that it is not "
                f"shown elsewhere. Set the environment's keep_reasoning to allow that, or answer in another role: "
                f"templates that know tools keep reasoning before a tool's message."
            )
        text = self._template.render([QUESTION, {"role": "assistant", "content": PLACEHOLDER}, *messages], header=True)
        start = self._template.render([QUESTION])
        cut = text.find(PLACEHOLDER, len(start)) + len(PLACEHOLDER)
        if not text.startswith(start) or cut < len(PLACEHOLDER):
            raise ValueError(ambiguous_turn(1, row))
        turn, full = self._tokens([text[:cut], text])
        between = full[len(turn) :] if full[: len(turn)] == turn else self._tokens([ContinuationText(text[cut:])])[0]
        ended = between[:1] == list(after[-1:]) and between[0] in self._turn_encoder.special
        return between[1:] if ended else between

    def _turns(
        self, messages: list[Message], first: int, tools: Tools, row: str
    ) -> EncodingSteps[list[EncodedSequence]]:
        """Encodes messages, training on the assistant's turns from message `first` on."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
        if self.turns == "last":
            turns = turns[-1:]
        turns = [i for i in turns if _is_trained(messages[i], f"message {i} of {row}")]
        if not turns:
            raise ValueError(f"{row} has no message of the assistant to train on. Leave it out.")
        masked = yield from self._turn_encoder.encode(messages, turns, tools, row)
        sequences = [EncodedSequence(tokens, mask) for tokens, mask in masked]
        if len(sequences) == 1:
            return [self._fitted(sequences[0], row)]
        fitted: list[Any] = []
        for index, sequence in zip(turns, sequences, strict=True):
            try:
                fitted.append(self._fitted(sequence, f"{row} (up to message {index})"))
            except TooLongError as error:
                fitted.append(error)
        return fitted

    def _run(self, steps: EncodingSteps[Result], row: str) -> Result:
        (result,) = self._run_all([steps], [row])
        if isinstance(result, TooLongError):
            raise result
        encoded: Result = result
        return encoded

    def _run_all(self, steps: Sequence[EncodingSteps[Any]], names: Sequence[str]) -> list[Any]:
        """Encodes several rows in rounds, each with one call of the tokenizer for all of them."""
        results: list[Any] = [None] * len(steps)
        tokens_of: dict[int, Any] = dict.fromkeys(range(len(steps)))  # None starts a generator
        while tokens_of:
            texts_of = dict[int, list[str]]()
            for place, tokens in tokens_of.items():
                try:
                    texts_of[place] = steps[place].send(tokens)
                except StopIteration as stop:
                    results[place] = stop.value
                except TooLongError as error:
                    results[place] = error
                except EncodingError as error:
                    raise ValueError(_encoding_failure(names[place], error)) from error
            try:
                tokenized = iter(self._tokens([text for texts in texts_of.values() for text in texts]))
            except EncodingError as error:
                raise ValueError(_encoding_failure(self._faulty_row(texts_of, names), error)) from error
            tokens_of = {place: [next(tokenized) for _ in texts] for place, texts in texts_of.items()}
        return results

    def _faulty_row(self, texts_of: Mapping[int, Sequence[str]], names: Sequence[str]) -> str:
        """Returns the name of the first row with a text that the tokenizer cannot read."""
        for place, texts in texts_of.items():
            try:
                self._tokens(texts)
            except EncodingError:
                return names[place]
        return f"a row from {names[0]} on"

    def _tokens(self, texts: Sequence[str]) -> list[list[int]]:
        with as_encoding_error("the tokenizer fails"):
            return self._texts(texts)

    # What is equal for all rows is asked of the tokenizer once: each of these is slow there.

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.options)

    @cached_property
    def _texts(self) -> TextTokens:
        return TextTokens(self.tokenizer)

    @cached_property
    def _turn_encoder(self) -> TurnEncoder:
        return TurnEncoder(self.tokenizer, self._template, self._texts)

    @cached_property
    def _end(self) -> list[int]:
        end = self.tokenizer.eos_token_id
        return [] if end is None else [end]

    def __getstate__(self) -> dict[str, Any]:
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}  # without the cached properties

    def _fitted(self, encoded: EncodedSequence, row: str) -> EncodedSequence:
        encoded = self._single_end(encoded)
        if self.max_length is not None and len(encoded) > self.max_length:
            if not self.truncate:
                raise self._too_long(row, len(encoded))
            length = len(encoded)
            encoded = EncodedSequence(encoded.tokens[: self.max_length], encoded.mask[: self.max_length])
            if 1 not in encoded.mask:
                raise TooLongError(
                    f"what {row} has to train on lies past token {self.max_length}, where it is cut. "
                    f"Raise max_length, or leave the row out.",
                    row,
                    length,
                )
        if 1 not in encoded.mask[1:]:
            raise ValueError(f"{row} has no token to train on. Leave it out.")
        return encoded

    def _single_end(self, encoded: EncodedSequence) -> EncodedSequence:
        """Removes an end token that would be trained on twice: one in the completion, one by the template."""
        tokens, mask = encoded.tokens, encoded.mask
        twice = [self._end[0]] * 2 if self._end and tokens.count(self._end[0]) > 1 else None
        doubled = {i for i in range(1, len(tokens)) if mask[i] and tokens[i - 1 : i + 1] == twice} if twice else ()
        if not doubled:
            return encoded
        kept_indices = [i for i in range(len(tokens)) if i not in doubled]
        return EncodedSequence(
            [tokens[i] for i in kept_indices], [max(mask[i], int(i + 1 in doubled)) for i in kept_indices]
        )

    def _too_long(self, row: str, length: int) -> TooLongError:
        limit = f"max_length is {self.max_length}. Raise it, drop the row, or set truncate."
        return TooLongError(f"{row} has {length} tokens, but {limit}", row, length)


def sft_batch(examples: Sequence[EncodedSequence]) -> Batch:
    """Returns a batch for `SFT(over="loss_mask")`."""
    from postlude.data.batch import Batch

    return Batch([example.tokens for example in examples], {"loss_mask": [example.mask for example in examples]})


def preference_batch(pairs: Sequence[tuple[EncodedSequence, EncodedSequence]]) -> Batch:
    """Returns a batch for `Preference`: a pair is adjacent and one group, and "response_mask" marks its completions."""
    from postlude.data.batch import Batch

    sides = [side for pair in pairs for side in pair]
    groups = [index // 2 for index in range(len(sides))]
    return Batch([side.tokens for side in sides], {"response_mask": [side.mask for side in sides]}, groups)


def _all_fit(sequences: Sequence[Any]) -> list[EncodedSequence]:
    """Raises the first `TooLongError` among the sequences of a row."""
    for sequence in sequences:
        if isinstance(sequence, TooLongError):
            raise sequence
    return list(sequences)


def _is_trained(message: Message, location: str) -> bool:
    """Whether a message of the assistant is trained on. As OpenAI writes it, one of weight 0 is only read."""
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise ValueError(f"{location} has the weight {weight!r}, but a weight is 1, or 0 to read it only.")
    return bool(weight)


def _single(sequences: Sequence[Any], row: str) -> EncodedSequence:
    if len(sequences) > 1:
        raise ValueError(
            f"the completion of {row} has {len(sequences)} turns, and the chat template writes earlier turns "
            f"differently once later ones follow, so they are {len(sequences)} sequences where one is needed. Keep the "
            f"last turn alone."
        )
    sequence: EncodedSequence = sequences[0]
    return sequence


def _encoding_failure(row: str, error: EncodingError) -> str:
    reason = str(error) if str(error).endswith(".") else f"{error}."
    return f"{row} cannot be encoded: {reason} Fix the row, or leave it out."

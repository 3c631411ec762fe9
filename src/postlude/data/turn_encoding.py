"""TurnEncoder: the tokens of a conversation, and which of them the assistant wrote. `chat.py` states the rules."""

from __future__ import annotations

from collections.abc import Generator
from functools import cached_property
from typing import TypeAlias, TypeVar

from postlude.data.chat_template import ChatTemplate, Message, Tools, as_encoding_error
from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.data.text_tokens import ContinuationText, TextTokens, mask_of_spans
from postlude.data.turn_ends import special_tokens, turn_ends

Result = TypeVar("Result")
EncodingSteps: TypeAlias = Generator[list[str], list[list[int]], Result]
"""The encoding of one row: yields texts, is sent their tokens, and returns the result. Rows share tokenizer calls."""
MaskedTokens: TypeAlias = tuple[list[int], list[int]]
"""Tokens, and 1 for each token to train on."""


class TurnEncoder:
    """Encodes messages and marks the tokens of the assistant's turns."""

    def __init__(self, tokenizer: ChatTokenizer, template: ChatTemplate, texts: TextTokens) -> None:
        self.tokenizer, self.template, self.texts = tokenizer, template, texts
        self._spaces: dict[int, bool] = {}

    @cached_property
    def special(self) -> frozenset[int]:
        """The tokens that no text of a message is made of."""
        return special_tokens(self.tokenizer)

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end a turn."""
        return frozenset(turn_ends(self.tokenizer, self.template.options))

    def encode(
        self, messages: list[Message], turns: list[int], tools: Tools, row: str
    ) -> EncodingSteps[list[MaskedTokens]]:
        """Returns one sequence, or one per turn where the template rewrites earlier turns.

        `turns` are the indices of the messages to train on.
        """
        if self.template.is_marked(tools):
            return [(yield from self._by_marks(messages, turns, tools, row))]
        sequence = yield from self._as_one_sequence(messages, turns, tools)
        if sequence is not None:
            return [sequence]
        return (yield from self._one_per_turn(messages, turns, tools, row))

    def _by_marks(
        self, messages: list[Message], turns: list[int], tools: Tools, row: str
    ) -> EncodingSteps[MaskedTokens]:
        text, spans = self.template.render_marked(messages, tools)
        with as_encoding_error("the tokenizer fails"):
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens = self.texts.single_bos(list(encoded["input_ids"]))
        mask = mask_of_spans(encoded["offset_mapping"], spans)[-len(tokens) :]
        # Marks cover every turn. Turns before the first one to train on are masked by the length of its prompt.
        if any(message["role"] == "assistant" for message in messages[: turns[0]]):
            (before,) = yield [self.template.before_turn(messages, turns[0], tools)]
            if tokens[: len(before)] != before:
                raise ValueError(ambiguous_turn(turns[0], row))
            mask[: len(before)] = [0] * len(before)
        return tokens, mask

    def _as_one_sequence(
        self, messages: list[Message], turns: list[int], tools: Tools
    ) -> EncodingSteps[MaskedTokens | None]:
        """Returns one sequence; None if the template writes one of `turns` differently than as the last message."""
        text = self.template.render(messages, tools)
        if not all(self.template.reasoning_of(messages[index]) in text for index in turns):
            return None
        inner = [index for index in turns if index + 1 < len(messages)]
        tokens, *prefixes = yield [
            text,
            *(self.template.before_turn(messages, index, tools) for index in turns),
            *(self.template.render(messages[: index + 1], tools) for index in inner),
        ]
        through = dict(zip(inner, prefixes[len(turns) :], strict=True))
        mask = [0] * len(tokens)
        for index, before in zip(turns, prefixes, strict=False):
            end = self._turn_end(tokens, through.get(index, tokens), len(before))
            if end is None or tokens[: len(before)] != before:
                return None
            mask[len(before) : end] = [1] * (end - len(before))
        return tokens, mask

    def _one_per_turn(
        self, messages: list[Message], turns: list[int], tools: Tools, row: str
    ) -> EncodingSteps[list[MaskedTokens]]:
        """Returns a sequence for each turn: what the model reads before it, and the turn as the last."""
        texts: list[str] = []
        for index in turns:
            rendered = self.template.turn(messages, index, tools)
            if rendered is None:
                raise ValueError(ambiguous_turn(index, row))
            before, written = rendered
            texts += [before, before + written, ContinuationText(written)]
        tokenized = iter((yield texts))
        sequences = []
        for prompt, full, continuation in zip(tokenized, tokenized, tokenized, strict=True):
            # A model continues the tokens of its prompt, even where other tokens would join the two texts.
            tokens = full if full[: len(prompt)] == prompt else prompt + continuation
            end = self._turn_end(tokens, tokens, len(prompt)) or len(tokens)
            mask = [0] * len(prompt) + [1] * (end - len(prompt)) + [0] * (len(tokens) - end)
            sequences.append((tokens, mask))
        return sequences

    def _turn_end(self, tokens: list[int], through: list[int], start: int) -> int | None:
        """Returns the end of a turn that begins at `start`, or None if it is not found.

        `through` are the tokens of all messages up to the turn and with it.
        """
        end = len(through)
        is_prefix = tokens[:end] == through
        if not is_prefix:
            pairs = zip(tokens, through, strict=False)
            end = next(
                (index for index, (token_id, through_id) in enumerate(pairs) if token_id != through_id),
                len(tokens),
            )
            # What a template writes after the last turn alone, such as an end token, is no part of the turn.
            if not all(token in self.special or self._is_space(token) for token in through[end:]):
                return None
        # What a template writes after the token that ends the turn, such as a line break, is never sampled, nor trained
        # on. Without that token, the turn ends with the last special one.
        ending = end
        while ending > start and (tokens[ending - 1] in self.special or self._is_space(tokens[ending - 1])):
            ending -= 1
        special = [index for index in range(ending, end) if tokens[index] in self.special]
        if special:
            return 1 + ([index for index in special if tokens[index] in self.ends] or special)[-1]
        return end if is_prefix and end > start else None

    def _is_space(self, token: int) -> bool:
        if token not in self._spaces:
            self._spaces[token] = self.tokenizer.decode([token]).isspace()
        return self._spaces[token]


def ambiguous_turn(index: int, row: str) -> str:
    """Returns the message about a template that changes what comes before message `index`."""
    return (
        f"the chat template writes what comes before message {index} (assistant) of {row} differently once that "
        f"message is there, so the tokens to train on cannot be told apart. Use a template with {{% generation %}} "
        f"marks."
    )

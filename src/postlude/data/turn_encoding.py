"""TurnEncoder: the tokens of a conversation, and which of them the assistant wrote. `chat.py` states the rules.

The tokens that end an assistant's turn, as its chat template writes them, are not always the end-of-sequence token: a
base model's may be <|endoftext|> where its template ends turns with <|im_end|>. Masks, generation, requests to servers
and exports all ask `turn_ends`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from functools import cached_property
from itertools import takewhile
from typing import Any, TypeAlias, TypeVar

from postlude.data.chat_template import (
    CALL,
    NAME,
    PLACEHOLDER,
    QUESTION,
    TOOL,
    ChatTemplate,
    Message,
    Tools,
    as_encoding_error,
)
from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.data.text_tokens import ContinuationText, TextTokens, mask_of_spans

Result = TypeVar("Result")
EncodingSteps: TypeAlias = Generator[list[str], list[list[int]], Result]
"""The encoding of one row: yields texts, is sent their tokens, and returns the result. Rows share tokenizer calls."""
MaskedTokens: TypeAlias = tuple[list[int], list[int]]
"""Tokens, and 1 for each token to train on."""


def turn_ends(tokenizer: ChatTokenizer, options: Mapping[str, Any] | None = None) -> tuple[int, ...]:
    """Returns the tokens that end a turn: that of an answer, and that of tool calls if it is another.

    A template ends a turn with a special token, or with none: then the result is empty, and a model that is trained on
    such turns does not end them. `options` are those of the template. A tokenizer without a template has the plain one.
    """
    template = ChatTemplate(tokenizer, options or {})
    special = special_tokens(tokenizer)

    def tokens_after(content: str, *messages: Message, tools: Tools = None) -> list[int]:
        """The tokens that the template writes after the last `content`; none if it does not write that."""
        _, found, text = template.try_render([QUESTION, *messages], tools).rpartition(content)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if found and text else []

    answer: Message = {"role": "assistant", "content": PLACEHOLDER}
    last = tokens_after(PLACEHOLDER, answer)
    # Some templates write more after the last turn of all (Phi-3's <|endoftext|>), or another token (gpt-oss's
    # <|return|>). What they write before a next message too ends a turn.
    both = zip(last, tokens_after(PLACEHOLDER, answer, QUESTION), strict=False)
    shared = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], both) if token in special]
    ends = shared[-1:] or [token for token in last if token in special][:1]
    if not ends:
        return ()
    for content in ("", None):
        call: Message = {"role": "assistant", "content": content, "tool_calls": [CALL]}
        after_call = [token for token in tokens_after(NAME, call, tools=[TOOL]) if token in special]
        if not set(ends).intersection(after_call):
            ends += after_call[-1:]
    return tuple(ends)


def special_tokens(tokenizer: ChatTokenizer) -> frozenset[int]:
    """Returns the end-of-sequence token and every token outside the ordinary vocabulary."""
    end = tokenizer.eos_token_id
    return frozenset([] if end is None else [end]) | frozenset(tokenizer.get_added_vocab().values())


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

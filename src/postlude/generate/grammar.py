"""Grammars: JSON schemas and grammars in Lark as sets of allowed tokens, by llguidance."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.data.tool_grammar import SPACE
from postlude.generate.sampling_params import SamplingParams


class Grammar:
    """The state of one completion. `stop_tokens` may end it where the grammar does."""

    def __init__(self, matcher: Any, stop_tokens: Collection[int], words: int) -> None:
        self._matcher, self._stop_tokens, self._words = matcher, stop_tokens, words

    def copy(self) -> Grammar:
        """Returns one in the same state, for another completion."""
        return Grammar(self._matcher.deep_copy(), self._stop_tokens, self._words)

    def accept(self, token: int) -> None:
        """Adds a sampled token. Raises ValueError if the grammar does not allow it."""
        if token not in self._stop_tokens and not self._matcher.consume_token(token):
            raise ValueError(f"the grammar does not allow the token {token} here: {self._matcher.get_error()}")

    def allowed(self) -> bytes:
        """Returns a bit for each token, in integers of 32: 1 if it may come next."""
        size = 4 * self._words
        mask = bytearray(b"" if self._matcher.is_stopped() else self._matcher.compute_bitmask())
        mask = bytearray(mask[:size].ljust(size, b"\0"))
        ends = self._matcher.is_accepting() or not any(mask)
        for token in self._stop_tokens:
            mask[token // 8] = mask[token // 8] | 1 << token % 8 if ends else mask[token // 8] & ~(1 << token % 8)
        return bytes(mask)


class Grammars:
    """Makes grammars for the tokens of a tokenizer. Reading its vocabulary takes about a second."""

    def __init__(self, tokenizer: ChatTokenizer | None, vocab_size: int) -> None:
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise ValueError(
                "JSON and calls are enforced by llguidance, which is not installed: pip install 'postlude[grammar]'."
            ) from None
        if tokenizer is None or not getattr(tokenizer, "is_fast", False):
            raise ValueError("JSON and calls are enforced on the tokens of a fast tokenizer; this model has none.")
        self._matcher, self._words = LLMatcher, -(-vocab_size // 32)
        self._tokenizer = from_tokenizer(tokenizer, n_vocab=max(vocab_size, len(tokenizer.get_vocab())))

    def of(self, sampling: SamplingParams, stop_tokens: Collection[int]) -> Grammar:
        """Returns the grammar of a completion. Raises ValueError if it cannot be followed."""
        name, kind = ("json_schema", "JSON schema") if sampling.json_schema is not None else ("grammar", "grammar")
        if not stop_tokens:
            raise ValueError(f"{name} needs an end-of-sequence token or a stop token, which ends the completion.")
        try:
            grammar = sampling.grammar or ""
            if sampling.json_schema is not None:
                options = {"whitespace_pattern": SPACE}
                grammar = self._matcher.grammar_from_json_schema(sampling.json_schema, options)
            problem = self._matcher.validate_grammar(grammar, self._tokenizer)
        except ValueError as error:
            problem = str(error)
        if problem:
            raise ValueError(f"the {kind} cannot be enforced: {' '.join(problem.split())[:400]}")
        return Grammar(self._matcher(self._tokenizer, grammar, log_level=0), stop_tokens, self._words)

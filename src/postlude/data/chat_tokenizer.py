"""ChatTokenizer: what this package asks of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer that an encoder uses."""

    chat_template: Any
    eos_token_id: int | None

    @property
    def special_tokens_map(self) -> Mapping[str, Any]:
        """The special tokens by their names, as templates see them."""
        ...

    def __call__(self, text: Any, *, add_special_tokens: bool = ..., return_offsets_mapping: bool = ...) -> Any:
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

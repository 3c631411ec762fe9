"""ChatTokenizer: the part of a tokenizer's interface that this package uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer that `Encoder` uses."""

    chat_template: Any
    eos_token_id: int | None

    @property
    def special_tokens_map(self) -> Mapping[str, Any]:
        """The special tokens by name, as templates see them."""

    def __call__(self, text: Any, *, add_special_tokens: bool = ..., return_offsets_mapping: bool = ...) -> Any:
        """Returns the tokens of one or several texts under "input_ids"."""

    def decode(self, token_ids: Any, **options: Any) -> str:
        """Returns the text of tokens."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """The tokens outside the ordinary vocabulary by id, with how they are matched in text."""

    def get_vocab(self) -> dict[str, int]:
        """All tokens, as the vocabulary writes them, by id."""

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """Returns how the vocabulary writes a token."""

    def get_added_vocab(self) -> dict[str, int]:
        """The tokens outside the ordinary vocabulary, special ones included."""


AnyTokenizer: TypeAlias = "ChatTokenizer | PreTrainedTokenizerBase"
"""What public functions accept. transformers' class has what `ChatTokenizer` needs, but declares only a part of it."""

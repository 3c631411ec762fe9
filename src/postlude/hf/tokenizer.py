"""The byte tokenizer of the built-in models, and the first difference of two tokenizers."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from postlude.hf.builtin import SPECIAL

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Returns a transformers tokenizer with one token per byte, then the special tokens."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(_byte_letters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[1])
    fast.chat_template = CHAT_TEMPLATE
    return fast


def first_difference(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> tuple[int, str, str] | None:
    """Returns the smallest id with different tokens in two tokenizers, and both tokens; None if there is none."""
    tokens, other_tokens = (
        {number: token for token, number in source.get_vocab().items()} for source in (tokenizer, other)
    )
    differing = [
        number for number in tokens.keys() | other_tokens.keys() if tokens.get(number) != other_tokens.get(number)
    ]
    if not differing:
        return None
    first = min(differing)
    return first, *(repr(vocab[first]) if first in vocab else "no token" for vocab in (tokens, other_tokens))


def _byte_letters() -> list[str]:
    """Returns the letter for each byte: its own if that is printable, else the next one past Latin-1."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    beyond = iter(sorted(letter for letter in alphabet if ord(letter) > 255))
    return [chr(byte) if chr(byte) in alphabet else next(beyond) for byte in range(256)]

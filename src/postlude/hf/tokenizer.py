"""Tokenizers: the model's own where it has one, bytes for the built-in models."""

from __future__ import annotations

import os
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL = ("<|pad|>", "<|end|>", "<|im_start|>", "<|im_end|>", *(f"<|reserved_{i}|>" for i in range(4)))
PAD, END = 256, 257
BYTE_VOCABULARY = 256 + len(SPECIAL)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """One token a byte, then the special tokens; a transformers tokenizer, so it is saved and exported like any."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(_byte_letters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[1])
    fast.chat_template = CHAT_TEMPLATE
    return fast


def load_tokenizer(source: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory, a GGUF file or a built-in model."""
    path = Path(source).expanduser()
    if path.is_dir():
        try:
            return AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise FileNotFoundError(f"{path} has no tokenizer; copy its tokenizer files beside config.json.") from error
    if path.is_file():
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return byte_tokenizer()


def _byte_letters() -> list[str]:
    """The letter that stands for each byte: its own where that is printable, else the next one past Latin-1."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    beyond = iter(sorted(letter for letter in alphabet if ord(letter) > 255))
    return [chr(byte) if chr(byte) in alphabet else next(beyond) for byte in range(256)]

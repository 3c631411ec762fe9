"""The bytes of tokens joined are the text, with byte-level and SentencePiece vocabularies."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from postlude import load_tokenizer
from postlude.data.text_tokens import SPACE, TokenBytes

TEXT = "a caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{SNOWMAN}\n"


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of characters that writes others as bytes, such as Llama 2's."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + [SPACE, *"acf"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_byte_level_vocabulary_may_lack_bytes() -> None:
    """Such as SmolLM2's, which has no character for 21 of them. A token that is written otherwise is its own text."""
    written = [
        "a",
        "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}",
        "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}a",
        "\N{SNOWMAN}",
    ]
    tokenizer = Tokenizer(models.BPE({token: place for place, token in enumerate(written)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    token_bytes = TokenBytes(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert [token_bytes.text(token) for token in range(4)] == ["a", " ", " a", "\N{SNOWMAN}"]


@pytest.mark.parametrize("make", [lambda: load_tokenizer("tiny-dense"), sentencepiece_tokenizer])
def test_bytes_of_tokens_are_the_text(make) -> None:
    tokenizer = make()
    tokens = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    token_bytes = TokenBytes(tokenizer)
    assert b"".join(map(token_bytes.of, tokens)).decode().removeprefix(" ") == TEXT
    snowman = [token_bytes.text(token) for token in tokens][-4:-1]
    assert snowman == ["bytes:\\xe2", "bytes:\\x98", "bytes:\\x83"]


def test_bytes_of_special_tokens_and_of_ids_without_a_token() -> None:
    token_bytes = TokenBytes(load_tokenizer("tiny-dense"))
    assert (token_bytes.of(257), token_bytes.of(10**6)) == (b"<|end|>", b"")

"""PiecewiseTokenizer: texts cut at special tokens give the tokens of the full text, each piece encoded once."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from postlude.data.chat import Encoder
from postlude.data.text_tokens import PiecewiseTokenizer

SPECIAL = ("<s>", "<sep>", "<sep>>", " <lean>", "<wide>")
WORDS = ("a", "ab", " ", "  ", "\n", "the cat", "Ünder", "<", ">", "s>", "<se", "bab", *SPECIAL)


def build_tokenizer(prefix: bool) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.BPE(unk_token="?"))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = (
        pre_tokenizers.Metaspace(prepend_scheme="first") if prefix else pre_tokenizers.ByteLevel(add_prefix_space=True)
    )
    words.decoder = decoders.Metaspace() if prefix else decoders.ByteLevel()
    trainer = trainers.BpeTrainer(special_tokens=["?"], vocab_size=300, show_progress=False)
    words.train_from_iterator(["a ab bab the cat under", "<sep <s > ü\n"] * 4, trainer)
    flags: dict[str, Any] = {" <lean>": {"lstrip": True}, "<wide>": {"rstrip": True}}
    words.add_special_tokens([AddedToken(token, normalized=False, **flags.get(token, {})) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=words)


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_give_the_tokens_of_the_full_text(prefix: bool) -> None:
    tokenizer, drawn = build_tokenizer(prefix), random.Random(0)
    texts_encoded: list[str] = []

    def encode(texts: list[str]) -> list[list[int]]:
        texts_encoded.extend(texts)
        return [list(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]

    pieces = PiecewiseTokenizer(encode, list(tokenizer.added_tokens_decoder.values()))
    texts = ["".join(drawn.choices(WORDS, k=drawn.randrange(12))) for _ in range(400)]
    assert pieces(texts) == [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert len(texts_encoded) < 3 * len(texts)
    texts_encoded.clear()
    pieces(["<s>one<sep>two", "<s>one", "<s>one<sep>two<s>one"])
    assert texts_encoded == ["<s>one", "<sep>two"]


def test_tokenizer_that_depends_on_context_gets_full_texts() -> None:
    class Added:
        content, normalized, lstrip, single_word = "|", False, False, False

    pieces = PiecewiseTokenizer(lambda texts: [[len(text)] for text in texts], [Added()])
    assert pieces(["a|b", "a|b|c"]) == [[3], [5]]
    assert pieces(["a|bc"]) == [[4]]


def space_prefix_tokenizer(scheme: str) -> PreTrainedTokenizerFast:
    """Like Llama 2's and Mistral's: adds a space before every text, which is part of its first word."""
    words = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    words.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=True)
        if scheme == "bytes"
        else pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    )
    space = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    words.decoder = decoders.ByteLevel() if scheme == "bytes" else decoders.Sequence(space)
    known = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        special_tokens=known, vocab_size=700, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    words.train_from_iterator(["what is two: four", "the = b four\n\n"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("scheme", ["first", "always", "never", "bytes"])
@pytest.mark.parametrize(
    "turns",
    [("what is two:", "four"), ("a = ", "b"), ("hi", " four"), ("two\n", "\nfour"), ("a", "b", " c", "4")],
)
def test_prompt_and_completion_tokens_decode_to_their_text(scheme: str, turns: tuple[str, ...]) -> None:
    tokenizer = space_prefix_tokenizer(scheme)
    encoder = Encoder(tokenizer=tokenizer)  # type: ignore[arg-type]
    prompt, *results = turns
    encoded, prompt_tokens = encoder.completion(prompt, results), encoder.prompt(prompt)
    text = tokenizer.decode(encoded.tokens).replace("</s>", "")
    assert text.removeprefix("" if scheme == "never" else " ") == "".join(turns)
    assert encoded.tokens[: len(prompt_tokens)] == prompt_tokens
    expected = tokenizer("".join(turns))["input_ids"]
    if expected[: len(prompt_tokens)] == prompt_tokens and len(results) == 1:
        assert encoded.tokens[:-1] == expected
    heard = encoder.observation(" c", [], chat=False)
    assert tokenizer.decode([*prompt_tokens, *heard]) == tokenizer.decode(prompt_tokens) + " c"
    assert encoder.completion("", "four").tokens[:-1] == tokenizer("four")["input_ids"]

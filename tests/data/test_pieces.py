"""Pieces: texts cut at special tokens are the tokens of whole texts, each piece encoded once."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from postlude.data.pieces import Pieces

SPECIAL = ("<s>", "<sep>", "<sep>>", " <lean>", "<wide>")
WORDS = ("a", "ab", " ", "  ", "\n", "the cat", "Ünder", "<", ">", "s>", "<se", "bab", *SPECIAL)


def made(prefix: bool) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.BPE(unk_token="?"))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = (
        pre_tokenizers.Metaspace(prepend_scheme="first") if prefix else pre_tokenizers.ByteLevel(add_prefix_space=True)
    )
    words.decoder = decoders.Metaspace() if prefix else decoders.ByteLevel()
    trainer = trainers.BpeTrainer(special_tokens=["?"], vocab_size=300, show_progress=False)
    words.train_from_iterator(["a ab bab the cat under", "<sep <s > ü\n"] * 4, trainer)
    flags: dict[str, Any] = {" <lean>": {"lstrip": True}, "<wide>": {"rstrip": True}}
    words.add_special_tokens([AddedToken(each, normalized=False, **flags.get(each, {})) for each in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=words)


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_join_to_the_tokens_of_the_whole(prefix: bool) -> None:
    tokenizer, drawn = made(prefix), random.Random(0)
    asked: list[str] = []

    def encode(texts: list[str]) -> list[list[int]]:
        asked.extend(texts)
        return [list(each) for each in tokenizer(texts, add_special_tokens=False)["input_ids"]]

    pieces = Pieces(encode, list(tokenizer.added_tokens_decoder.values()))
    texts = ["".join(drawn.choices(WORDS, k=drawn.randrange(12))) for _ in range(400)]
    assert pieces(texts) == [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert len(asked) < 3 * len(texts)
    asked.clear()
    pieces(["<s>one<sep>two", "<s>one", "<s>one<sep>two<s>one"])
    assert asked == ["<s>one", "<sep>two"]


def test_a_tokenizer_that_looks_across_a_cut_is_given_whole_texts() -> None:
    class Added:
        content, normalized, lstrip, single_word = "|", False, False, False

    pieces = Pieces(lambda texts: [[len(text)] for text in texts], [Added()])
    assert pieces(["a|b", "a|b|c"]) == [[3], [5]]
    assert pieces(["a|bc"]) == [[4]]

"""Stop strings are found in text that arrives token by token, wherever token borders are."""

from __future__ import annotations

import pytest

from postlude import load_tokenizer
from postlude.generate.text_stream import StopStrings, completion_text


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny-dense")


def fed(tokenizer, text: bytes | list[int], stops: tuple[str, ...]) -> tuple[int, str | None]:
    """Returns the number of tokens read, and the stop string they completed."""
    watch, tokens = StopStrings(tokenizer, stops), list(text)
    for count in range(1, len(tokens) + 1):
        actual = watch.find(tokens[:count])
        if actual is not None:
            return count, actual
    return len(tokens), None


@pytest.mark.parametrize(
    ("text", "stops", "count", "expected"),
    [
        ("one two three", ("two",), 7, "two"),
        ("one two three", ("x", "ee!", "three"), 13, "three"),
        ("one two three", ("x",), 13, None),
        ("aab", ("ab",), 3, "ab"),
        ("a\n\nb", ("\n",), 2, "\n"),
        ("caf\u00e9 noir", ("\u00e9",), 5, "\u00e9"),  # two tokens a letter
        ("\u4f60\u597d", ("\u597d",), 6, "\u597d"),
        ("\U0001f600.", (".",), 5, "."),
    ],
)
def test_a_stop_string_is_found_with_the_token_that_completes_it(tokenizer, text, stops, count, expected) -> None:
    assert fed(tokenizer, text.encode(), stops) == (count, expected)


def test_special_tokens_can_stop_but_are_not_in_the_text(tokenizer) -> None:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokens = [*b"hi", end, *b"more"]
    assert fed(tokenizer, tokens, ("<|im_end|>",)) == (3, "<|im_end|>")
    assert completion_text(tokenizer, tokens[:3], "<|im_end|>") == "hi"


def test_text_ends_before_the_stop_string(tokenizer) -> None:
    assert completion_text(tokenizer, list(b"answer: 4\n\nQ"), "\n\nQ") == "answer: 4"
    assert completion_text(tokenizer, list(b"answer"), None) == "answer"

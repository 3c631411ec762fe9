"""The tokens that end a turn follow from the template, and masks, generation and exports use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from postlude.data.chat import Encoder
from postlude.data.turn_encoding import turn_ends
from postlude.generate.generator import Generator
from postlude.hf.export import export_hf
from postlude.hf.load import load_model, load_tokenizer
from postlude.hf.read_model import end_tokens, read_generation_config

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|header|>", "<start_of_turn>", "<end_of_turn>",
    "<|start|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<tool_call>", "</tool_call>", "<|END_RESPONSE|>",
)  # fmt: skip
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}<|header|>{{ m.role }}<|header|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|header|>\n\n{% endif %}"
)
GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GPT_OSS = (
    "{% for m in messages %}<|start|>{{ m.role }}"
    "{% if m.tool_calls %} to={{ m.tool_calls[0].function.name }}<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
PHI3 = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
)
COHERE = CHATML.replace("<|im_end|>\n", "<|END_RESPONSE|><|im_end|>")
MISTRAL = (
    "{% for m in messages %}{{ '[INST] ' + m.content + '[/INST]' if m.role == 'user' else m.content + eos_token }}"
    "{% endfor %}"
)
ONLY_LAST = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ eos_token }}"
PIECES = CHATML.replace("<|im_end|>", "<|eom|>").replace("</tool_call>", "")
ENDLESS = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
FAILS = "{{ raise_exception('no') }}"


def tokenizer(template: str | None, eos_token: str | None = "<|endoftext|>") -> Any:
    """One token per byte, and the special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=eos_token)
    fast.chat_template = template
    return fast


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["<|im_end|>"]),
        (LLAMA3, ["<|eot_id|>"]),
        (GEMMA, ["<end_of_turn>"]),
        (GPT_OSS, ["<|return|>", "<|call|>"]),  # <|end|> ends a message, after which the turn may go on
        (PHI3, ["<|end|>"]),
        (COHERE, ["<|im_end|>"]),
        (MISTRAL, ["<|endoftext|>"]),
        (ONLY_LAST, ["<|endoftext|>"]),
        (None, ["<|endoftext|>"]),
        (PIECES, []),
        (ENDLESS, []),
        (FAILS, []),
        ({"default": CHATML, "tool_use": LLAMA3}, ["<|im_end|>"]),
    ],
)
def test_a_turn_ends_with_what_the_template_writes_after_it(template: Any, expected: list[str]) -> None:
    fast = tokenizer(template)
    assert fast.convert_ids_to_tokens(turn_ends(fast)) == expected


@pytest.mark.parametrize("template", [CHATML, LLAMA3, GEMMA, GPT_OSS, PHI3, COHERE, MISTRAL])
def test_the_last_trained_token_of_a_turn_ends_generation(template: str) -> None:
    fast = tokenizer(template)
    talk = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    for encoded in Encoder(tokenizer=fast).conversation(talk + talk):
        trained = [token for token, mask in zip(encoded.tokens, encoded.mask, strict=True) if mask]
        assert trained[-1] in end_tokens({}, fast)
        assert trained[-1] in turn_ends(fast)


def test_without_an_end_token_nothing_ends_a_turn() -> None:
    fast = tokenizer(None, eos_token=None)
    assert turn_ends(fast) == end_tokens({}, fast) == ()


def test_end_tokens_are_those_of_files_tokenizer_and_template() -> None:
    fast = tokenizer(CHATML)
    endoftext, im_end = fast.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert end_tokens({"eos_token_id": [7, endoftext]}, fast) == (7, endoftext, im_end)
    assert end_tokens({"eos_token_id": 7}, None) == (7,)


def test_generators_and_exports_have_the_end_of_a_turn(tmp_path: Path) -> None:
    model, fast = load_model("tiny-dense"), load_tokenizer("tiny-dense")
    ends = {fast.eos_token_id, *turn_ends(fast)}
    assert len(ends) == 2
    assert Generator(model, fast).eos_tokens == ends
    directory = export_hf(model, tmp_path / "model", tokenizer=fast)
    assert set(json.loads((directory / "generation_config.json").read_text())["eos_token_id"]) == ends
    assert set(end_tokens(read_generation_config(directory), None)) == ends

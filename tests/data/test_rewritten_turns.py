"""Templates like Qwen3's, DeepSeek-R1's and Phi-3's: each turn is trained on as rendered when it is the last.

Expected texts are written out. `«...»` stands around what is learned.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from postlude.data.chat import EncodedSequence, Encoder, TooLongError
from postlude.recipes.config.data import Examples
from postlude.recipes.dataset import EncodedRows
from postlude.recipes.row_sources import ShuffledRows
from postlude.recipes.sequence_limit import SequenceLimit

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<U>", "<A>", "<eos>", "<|user|>", "<|assistant|>", "<|end|>"]
QWEN3 = (  # thoughts are written after the last question alone, and an empty one in the last turn
    "{% set ns = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'assistant' %}{% set answer = m.content %}{% set thought = '' %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}{% elif '</think>' in m.content %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set answer = m.content.split('</think>')[-1].lstrip() %}{% endif %}"
    "{% if loop.index0 > ns.asked and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ answer }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3_THINKING = QWEN3.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
R1 = (  # the header begins a thought, and no turn has one
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<U>{{ m.content }}{% elif m.role == 'assistant' %}"
    "<A>{{ m.content.split('</think>')[-1] }}<eos>{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<A><think>\n{% endif %}"
)
R1_BARE = R1.replace("<A><think>\n", "<A>")  # the model writes the tag itself
PHI3 = (  # the end token comes once, after everything
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant_turn(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def tokenizer(template: str) -> Any:
    """Bytes, and blank lines as one token, as in most vocabularies."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    words.train_from_iterator(["\n\n"] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    assert len(fast("\n\n")["input_ids"]) == 1
    return fast


def trained_text(chat_encoder: Encoder, encoded: EncodedSequence) -> str:
    """Returns the text of a sequence, with trained text in «»."""
    text, tokens = "", []
    for place, (token, mask) in enumerate(zip(encoded.tokens, encoded.mask, strict=True)):
        tokens.append(token)
        if place + 1 == len(encoded) or encoded.mask[place + 1] != mask:
            piece = chat_encoder.tokenizer.decode(tokens)
            text, tokens = text + (f"«{piece}»" if mask else piece), []
    return text


TALK = [user("Two?"), assistant_turn("2 🙂"), user("Three?"), assistant_turn("3")]
THOUGHT = [
    user("Two?"),
    assistant_turn("<think>\nhm\n</think>\n\n2"),
    user("Three?"),
    assistant_turn("<think>\noh\n</think>\n\n3"),
]
APART = [
    user("Two?"),
    assistant_turn("2", reasoning_content="hm"),
    user("Three?"),
    assistant_turn("3", reasoning_content="oh"),
]
ASKED = "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
AGAIN = "<|im_end|>\n<|im_start|>user\nThree?<|im_end|>\n<|im_start|>assistant\n"
USES_TOOL = [user("Two?"), assistant_turn("look"), {"role": "tool", "content": "2"}, assistant_turn("2")]
CASES: dict[str, tuple[str, Any, list[str]]] = {
    "qwen3": (
        QWEN3,
        TALK,
        [
            ASKED + "«<think>\n\n</think>\n\n2 🙂<|im_end|>»\n",
            ASKED + "2 🙂" + AGAIN + "«<think>\n\n</think>\n\n3<|im_end|>»\n",
        ],
    ),
    "qwen3, thoughts": (
        QWEN3,
        THOUGHT,
        [
            ASKED + "«<think>\nhm\n</think>\n\n2<|im_end|>»\n",
            ASKED + "2" + AGAIN + "«<think>\noh\n</think>\n\n3<|im_end|>»\n",
        ],
    ),
    "qwen3, thoughts apart": (
        QWEN3,
        APART,
        [
            ASKED + "«<think>\nhm\n</think>\n\n2<|im_end|>»\n",
            ASKED + "2" + AGAIN + "«<think>\noh\n</think>\n\n3<|im_end|>»\n",
        ],
    ),
    "qwen3, a tool": (
        QWEN3,
        USES_TOOL,
        [
            ASKED + "«<think>\n\n</think>\n\nlook<|im_end|>»\n",
            ASKED
            + "look<|im_end|>\n<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n"
            + "«<think>\n\n</think>\n\n2<|im_end|>»\n",
        ],
    ),
    "qwen3, thoughts around a tool": (  # which it keeps: one sequence has both turns
        QWEN3,
        [
            user("Two?"),
            assistant_turn("look", thinking="hm"),
            {"role": "tool", "content": "2"},
            assistant_turn("2", thinking="oh"),
        ],
        [
            ASKED
            + "«<think>\nhm\n</think>\n\nlook<|im_end|>»\n<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n"
            + "«<think>\noh\n</think>\n\n2<|im_end|>»\n"
        ],
    ),
    "qwen3, one turn": (QWEN3, TALK[:2], [ASKED + "«<think>\n\n</think>\n\n2 🙂<|im_end|>»\n"]),
    "qwen3, thinking only": (
        QWEN3_THINKING,
        TALK,
        [
            ASKED + "<think>\n«\n</think>\n\n2 🙂<|im_end|>»\n",
            ASKED + "2 🙂" + AGAIN + "<think>\n«\n</think>\n\n3<|im_end|>»\n",
        ],
    ),
    "r1, thoughts": (
        R1,
        THOUGHT,
        [
            "<s><U>Two?<A><think>\n«hm\n</think>\n\n2<eos>»",
            "<s><U>Two?<A>\n\n2<eos><U>Three?<A><think>\n«oh\n</think>\n\n3<eos>»",
        ],
    ),
    "r1, thoughts apart": (
        R1,
        APART,
        [
            "<s><U>Two?<A><think>\n«hm\n</think>\n\n2<eos>»",
            "<s><U>Two?<A>2<eos><U>Three?<A><think>\n«oh\n</think>\n\n3<eos>»",
        ],
    ),
    "r1, as it was sampled": (
        R1,
        [user("Two?"), assistant_turn("hm\n</think>\n\n2")],
        ["<s><U>Two?<A><think>\n«hm\n</think>\n\n2<eos>»"],
    ),
    "r1, no thoughts": (
        R1,
        TALK,
        [
            "<s><U>Two?<A><think>\n«\n</think>\n\n2 🙂<eos>»",
            "<s><U>Two?<A>2 🙂<eos><U>Three?<A><think>\n«\n</think>\n\n3<eos>»",
        ],
    ),
    "r1, a tag of the model's": (
        R1_BARE,
        THOUGHT,
        [
            "<s><U>Two?<A>«<think>\nhm\n</think>\n\n2<eos>»",
            "<s><U>Two?<A>\n\n2<eos><U>Three?<A>«<think>\noh\n</think>\n\n3<eos>»",
        ],
    ),
    "r1, a tag of the model's, no thoughts": (
        R1_BARE,
        TALK,
        ["<s><U>Two?<A>«2 🙂<eos>»<U>Three?<A>«3<eos>»"],
    ),
    "phi3": (
        PHI3,
        TALK,
        [
            "<|user|>\nTwo?<|end|>\n<|assistant|>\n«2 🙂<|end|>»\n"
            "<|user|>\nThree?<|end|>\n<|assistant|>\n«3<|end|>»\n</s>"
        ],
    ),
    "phi3, a question at the end": (
        PHI3,
        TALK[:3],
        ["<|user|>\nTwo?<|end|>\n<|assistant|>\n«2 🙂<|end|>»\n<|user|>\nThree?<|end|>\n</s>"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_turn_is_trained_on_as_rendered_when_last(case: str) -> None:
    template, messages, expected = CASES[case]
    chat_encoder = Encoder(tokenizer=tokenizer(template))
    encoded_turns = chat_encoder.conversation(messages)
    assert [trained_text(chat_encoder, encoded) for encoded in encoded_turns] == expected
    (last,) = Encoder(tokenizer=chat_encoder.tokenizer, turns="last").conversation(messages)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    assert trained_text(chat_encoder, last).split("«")[-1] == expected[-1].split("«")[-1]
    # Each turn follows exactly what a rollout begins from.
    sequences = encoded_turns if len(encoded_turns) == len(turns) else encoded_turns * len(turns)
    for index, encoded in zip(turns, sequences, strict=True):
        prompt = chat_encoder.prompt(messages[:index])
        assert encoded.tokens[: len(prompt)] == prompt
        assert encoded.mask[len(prompt)] == 1


@pytest.mark.parametrize("template", [QWEN3, R1, PHI3])
def test_pair_of_completions_gives_two_sequences(template: str) -> None:
    chat_encoder = Encoder(tokenizer=tokenizer(template))
    pair = chat_encoder.preference(THOUGHT[:3], "3", "4")
    turns = [chat_encoder.conversation([*THOUGHT[:3], assistant_turn(answer)])[-1] for answer in ("3", "4")]
    if template == PHI3:  # earlier turns are in the same sequence there
        assert [side.tokens for side in pair] == [turn.tokens for turn in turns]
    else:
        assert list(pair) == turns


def test_multi_turn_completion_with_rewritten_turns_is_refused_in_pairs() -> None:
    chat_encoder = Encoder(tokenizer=tokenizer(QWEN3))
    refusal = r"the completion of row 3 \(chosen\) has 2 turns, and the chat template writes"
    with pytest.raises(ValueError, match=refusal):
        chat_encoder.preference(TALK[:1], TALK[1:], "2", "row 3")
    assert len(chat_encoder.encode_rows("completion", [(TALK[:1], TALK[1:])], ["row 3"])[0]) == 2


def test_turns_of_a_long_conversation_that_fit_are_kept(tmp_path: Path) -> None:
    fast = tokenizer(QWEN3)
    lengths = [len(sequence) for sequence in Encoder(tokenizer=fast).conversation(TALK)]
    chat_encoder = Encoder(tokenizer=fast, max_length=lengths[0])
    with pytest.raises(TooLongError, match=rf"row 3 \(up to message 3\) has {lengths[1]} tokens"):
        chat_encoder.conversation(TALK, "row 3")
    fits, too_long = chat_encoder.encode_rows("conversation", [(TALK,)], ["row 3"])[0]
    assert isinstance(fits, EncodedSequence)
    assert isinstance(too_long, TooLongError)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in (TALK, TALK[:2], TALK)))
    all_rows = EncodedRows(Examples(path=path), fast, SequenceLimit(1000))
    assert str(all_rows) == "5 rows of 3 conversations, one per turn"
    identities = [all_rows.identity(index) for index in range(5)]
    assert len(set(identities)) == 1, "rows of one prompt, whether or not they are split"
    short_rows = EncodedRows(Examples(path=path, overlong="drop"), fast, SequenceLimit(lengths[0]))
    assert str(short_rows) == "3 rows, 2 more are too long and dropped"


def test_no_turn_of_a_held_out_conversation_is_trained_on(tmp_path: Path) -> None:
    talks = [[user(f"{number}?"), *TALK[1:]] for number in range(4)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    rows = EncodedRows(Examples(path=path), tokenizer(QWEN3), SequenceLimit(1000))
    course: ShuffledRows[Any] = ShuffledRows(rows, held_out=2, seed=0)
    trained = course.take(course.size)
    assert sorted(sequence.tokens for sequence in trained) == sorted(rows[index].tokens for index in range(4))
    assert [sequence.tokens for sequence in course.held_out] == [rows[5].tokens, rows[7].tokens]

"""Chat encoding: the loss mask covers the tokens that the assistant samples, with every template."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from postlude.data import pack
from postlude.data.chat import EncodedSequence, Encoder, TooLongError, preference_batch, sft_batch
from postlude.hf.builtin import END
from postlude.hf.load import CHAT_TEMPLATE, byte_tokenizer

USER, HELLO = {"role": "user", "content": "Hé?"}, {"role": "assistant", "content": "Hello."}
MORE, BYE = {"role": "user", "content": "Go on\n"}, {"role": "assistant", "content": "Bye\n"}
TALK = [USER, HELLO, MORE, BYE]
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS_SINCE_ASKED = (  # as Qwen3's does, it leaves out what was thought before the last question of the user
    "{% set ns = namespace(asked=0) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.index0 < ns.asked %}{{ message.content.split('</think>')[-1] }}"
    "{% elif message.role == 'assistant' and loop.last and '</think>' not in message.content %}"
    "<think>\n\n</think>\n\n{{ message.content }}{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS = CHAT_TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content or [] %}{{ part.text }}{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function.name }}</call>{% endfor %}",
)
CALLS = [{"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}]
SILENT = {"role": "user", "content": None}
SEEN = {"role": "user", "content": [{"type": "image", "url": "x.png"}]}
CALLING = {"role": "assistant", "content": None, "tool_calls": CALLS}
SYSTEM = {"role": "system", "content": "Be."}
TEXTS = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
FIRST_PART = CHAT_TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.content is string %}{{ message.content }}{% else %}{{ message.content[0].text }}{% endif %}",
)
NULL_CALLS = CHAT_TEMPLATE.replace(  # as DeepSeek's does, it writes calls only where there is no content
    "{{ message.content }}",
    "{% if message.content is none %}{% for call in message.tool_calls %}<call>{{ call.function.name }}</call>"
    "{% endfor %}{% else %}{{ message.content }}{% endif %}",
)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
KNOWS_TOOLS = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}" + CHAT_TEMPLATE
REWRITES = "{{ messages | length }}" + CHAT_TEMPLATE


def tokenizer(template: str | None = CHAT_TEMPLATE) -> Any:
    byte_level = byte_tokenizer()
    byte_level.chat_template = template
    return byte_level


def encoder(template: str | None = CHAT_TEMPLATE, **settings: Any) -> Encoder:
    return Encoder(tokenizer=tokenizer(template), **settings)


def encode_conversation(
    chat_encoder: Encoder, messages: Any, row: str = "the conversation", **settings: Any
) -> EncodedSequence:
    """Encodes a conversation that gives one sequence."""
    (encoded,) = chat_encoder.conversation(messages, row, **settings)
    return encoded


def learned(encoded: EncodedSequence) -> str:
    trained_tokens = [token for token, mask in zip(encoded.tokens, encoded.mask, strict=True) if mask]
    return str(byte_tokenizer().decode(trained_tokens))


def text(tokens: list[int]) -> str:
    return str(byte_tokenizer().decode(tokens))


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, MARKED])
def test_assistant_turns_are_trained_on_including_end_tokens(template: str) -> None:
    encoded = encode_conversation(encoder(template), TALK)
    assert text(encoded.tokens) == (
        "<|im_start|>user\nHé?<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>user\nGo on\n<|im_end|>\n<|im_start|>assistant\nBye\n<|im_end|>\n"
    )
    assert learned(encoded) == "Hello.<|im_end|>Bye\n<|im_end|>"
    assert learned(encode_conversation(encoder(template, turns="last"), TALK)) == "Bye\n<|im_end|>"
    assert learned(encode_conversation(encoder(template), [HELLO, MORE, BYE])) == "Hello.<|im_end|>Bye\n<|im_end|>"


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, MARKED])
def test_a_message_of_weight_0_is_read_and_not_trained_on(template: str) -> None:
    weighted = [USER, {**HELLO, "weight": 0}, MORE, {**BYE, "weight": 1}]
    encoded = encode_conversation(encoder(template), weighted)
    assert encoded.tokens == encode_conversation(encoder(template), TALK).tokens
    assert learned(encoded) == "Bye\n<|im_end|>"
    with pytest.raises(ValueError, match="row 1 has no message of the assistant to train on"):
        encoder(template, turns="last").conversation([*TALK[:-1], {**BYE, "weight": 0}], "row 1")
    with pytest.raises(ValueError, match=r"message 3 of row 1 has the weight 0\.5, but a weight is 1, or 0"):
        encoder(template).conversation([*TALK[:-1], {**BYE, "weight": 0.5}], "row 1")


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, MARKED, None])
def test_trained_turn_follows_the_prompt_of_a_rollout(template: str | None) -> None:
    chat_encoder = encoder(template)
    encoded, start = chat_encoder.completion([USER, HELLO, MORE], "Bye"), chat_encoder.prompt([USER, HELLO, MORE])
    assert encoded.tokens[: len(start)] == start
    assert encoded.mask[: len(start) + 1] == [0] * len(start) + [1]
    assert chat_encoder.completion([USER, HELLO, MORE], [{"role": "assistant", "content": "Bye"}]) == encoded


def test_without_a_template_a_conversation_is_plain_text() -> None:
    encoded = encode_conversation(encoder(None), [USER, HELLO, MORE, BYE])
    assert text(encoded.tokens) == (
        "User: Hé?\n\nAssistant: Hello.<|end|>\n\nUser: Go on\n\n\nAssistant: Bye\n<|end|>\n\n"
    )
    assert learned(encoded) == " Hello.<|end|> Bye\n<|end|>"


def test_template_that_rewrites_earlier_messages_is_refused() -> None:
    for refused in (
        lambda: encoder(REWRITES).conversation(TALK[:2]),
        lambda: encoder(REWRITES).completion([USER], "Hi"),
        lambda: encoder(REWRITES).observation("Go on", [], chat=True),
    ):
        with pytest.raises(ValueError, match=r"Use a template with {% generation %} marks"):
            refused()


def test_template_that_drops_earlier_reasoning_is_refused() -> None:
    """As Qwen3's does before a user message, but not before a tool message."""
    chat_encoder = encoder(THINKS_SINCE_ASKED)
    for heard in ("Go on", [MORE], [{"role": "tool", "content": "4"}, MORE]):
        with pytest.raises(
            ValueError, match=r"removes the assistant\'s reasoning of earlier turns once a message of user follows"
        ):
            chat_encoder.observation(heard, [], chat=True)
        assert chat_encoder.observation(heard, [], chat=True, keep_reasoning=True)[-len(b"assistant\n") :] == [
            *b"assistant\n"
        ]
    assert b"tool\n4" in bytes(
        token for token in chat_encoder.observation([{"role": "tool", "content": "4"}], [], chat=True) if token < 256
    )


def test_multi_turn_completion_trains_on_model_turns_only() -> None:
    chat_encoder = encoder(None)
    encoded = chat_encoder.completion("1+1:", ["?1+1", "=2;", "2"])
    assert text(encoded.tokens) == "1+1:?1+1<|end|>=2;2<|end|>"
    assert learned(encoded) == "?1+1<|end|>2<|end|>"
    assert chat_encoder.completion("1+1:", ["2"]) == chat_encoder.completion("1+1:", "2")
    refusal = "the completion of row 3 has 2 turns, but it begins and ends with the model's"
    with pytest.raises(ValueError, match=refusal):
        chat_encoder.completion("1+1:", ["?1+1", "=2;"], "row 3")


def test_generation_marks_define_the_loss_mask() -> None:
    rewriting = encoder("{{ messages | length }}" + MARKED)
    assert learned(encode_conversation(rewriting, TALK)) == "Hello.<|im_end|>Bye\n<|im_end|>"
    assert learned(rewriting.completion([USER], "Hello.")) == "Hello.<|im_end|>"
    with pytest.raises(ValueError, match="differently once that message is there"):
        rewriting.completion([USER, HELLO, MORE], "Bye")


@pytest.mark.parametrize("ending", ["🙂", "好", "é", "e", " ", "\n", "  \n "])
@pytest.mark.parametrize("trimmed", [True, False])
def test_generation_marks_before_the_end_token_cover_full_characters(ending: str, trimmed: bool) -> None:
    """Multi-byte characters are several tokens, and token offsets may leave out spaces."""
    closed = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    bytewise = tokenizer(closed)
    bytewise.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trimmed)
    talk = [USER, {**HELLO, "content": f"Hello{ending}"}, MORE, {**BYE, "content": f" Bye{ending}"}]
    encoded = encode_conversation(Encoder(tokenizer=bytewise), talk)
    assert learned(encoded) == f"Hello{ending} Bye{ending}"
    assert encoded.tokens == encoder(CHAT_TEMPLATE).conversation(talk)[0].tokens


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, MARKED, None])
def test_tokens_that_merge_across_messages_are_handled(template: str | None) -> None:
    """The tokenizer writes a blank line as one token at the end of a text, and as two before a word."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    words.train_from_iterator(["\n\n", "Assistant: Hello.", "User: Go on", " Bye"] * 4, trainer)
    words.add_special_tokens(["<|end|>", "<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|end|>")
    assert len(fast("\n\n")["input_ids"]) == 1
    assert len(fast("\n\nUser")["input_ids"]) == 3
    fast.chat_template = template
    chat_encoder = Encoder(tokenizer=fast)
    encoded, plain = encode_conversation(chat_encoder, TALK), encode_conversation(encoder(template), TALK)
    assert fast.decode(encoded.tokens) == text(plain.tokens)
    trained_tokens = [token for token, mask in zip(encoded.tokens, encoded.mask, strict=True) if mask]
    assert fast.decode(trained_tokens) == learned(plain)
    start = chat_encoder.prompt(TALK[:3])
    assert encoded.tokens[: len(start)] == start


def test_template_options_are_passed_on() -> None:
    template = CHAT_TEMPLATE + "{% if loud %}!{% endif %}"
    assert text(encoder(template, options={"loud": True}).prompt([USER])).endswith("assistant\n!")


def test_text_prompt_and_completion_are_joined_with_an_end_token() -> None:
    encoded = encoder().completion("2 + 2 =", " 4")
    assert encoded == EncodedSequence([*b"2 + 2 = 4", END], [0] * 7 + [1] * 3)
    assert encoder().prompt("2 + 2 =") == encoded.tokens[:7]


def bos_tokenizer(template: str = CHAT_TEMPLATE) -> Any:
    """Returns a tokenizer that begins every text with "<s>"."""
    chat_tokenizer = tokenizer(template)
    chat_tokenizer.add_special_tokens({"bos_token": "<s>"})
    chat_tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", chat_tokenizer.bos_token_id)]
    )
    return chat_tokenizer


@pytest.mark.parametrize("prompt", ["q", "<s>q"])
@pytest.mark.parametrize("answer", ["a", "a<|end|>"])
def test_bos_and_eos_of_a_text_are_not_added_twice(prompt: str, answer: str) -> None:
    chat_tokenizer = bos_tokenizer()
    chat_encoder, bos = Encoder(tokenizer=chat_tokenizer), chat_tokenizer.bos_token_id
    assert chat_encoder.completion(prompt, answer) == EncodedSequence([bos, *b"qa", END], [0, 0, 1, 1])
    assert chat_encoder.prompt(prompt) == [bos, *b"q"]
    assert (
        chat_encoder.completion("", f"<s>{answer}")
        == chat_encoder.completion("", answer)
        == EncodedSequence([bos, *b"a", END], [0, 1, 1])
    )


@pytest.mark.parametrize("marks", [True, False])
def test_bos_and_eos_of_a_template_are_not_added_twice(marks: bool) -> None:
    own_template = "{{ bos_token }}" + (MARKED if marks else CHAT_TEMPLATE).replace("<|im_start|>", "")
    chat_tokenizer = bos_tokenizer(own_template.replace("<|im_end|>", "{{ eos_token }}"))
    chat_encoder = Encoder(tokenizer=chat_tokenizer)
    talk = [{"role": "<s>user", "content": "q"}, {"role": "assistant", "content": "a<|end|>"}]
    encoded = encode_conversation(chat_encoder, talk)
    assert chat_tokenizer.decode(encoded.tokens) == "<s>user\nq<|end|>\nassistant\na<|end|>\n"
    assert learned(encoded).endswith("a<|end|>")
    assert encoded.tokens[:2].count(chat_tokenizer.bos_token_id) == 1
    assert chat_encoder.prompt(talk[:1])[:2].count(chat_tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected"),
    [
        ([USER], "Hello.", "Go away"),
        ([USER], [HELLO], [{"role": "assistant", "content": "Go away"}]),
        ("not read", [USER, HELLO], [USER, {"role": "assistant", "content": "Go away"}]),
        (None, [USER, HELLO], [USER, {"role": "assistant", "content": "Go away"}]),
    ],
)
def test_all_formats_of_a_preference_pair_are_equal(prompt: Any, chosen: Any, rejected: Any) -> None:
    pair = encoder().preference(prompt, chosen, rejected)
    assert [learned(side) for side in pair] == ["Hello.<|im_end|>", "Go away<|im_end|>"]
    assert all(text(side.tokens).startswith("<|im_start|>user\nHé?<|im_end|>\n") for side in pair)


def test_batches_have_the_columns_that_objectives_read() -> None:
    chat_encoder = encoder()
    batch = sft_batch([*chat_encoder.conversation(TALK), chat_encoder.completion("a", "b")])
    assert list(batch.columns) == ["loss_mask"]
    (microbatch,) = pack(batch.sequences, columns=batch.columns, budget=1000)
    targets = microbatch.targets[microbatch.column("loss_mask") == 1]
    assert text(targets.tolist()) == "Hello.<|im_end|>Bye\n<|im_end|>b<|end|>"
    pairs = preference_batch([chat_encoder.preference("a", "b", "c"), chat_encoder.preference("d", "e", "f")])
    assert (list(pairs.columns), pairs.groups) == (["response_mask"], [0, 0, 1, 1])
    assert [bytes(sequence[:2]) for sequence in pairs.sequences] == [b"ab", b"ac", b"de", b"df"]


def test_too_long_row_is_refused_by_name_or_truncated() -> None:
    with pytest.raises(TooLongError, match=r"line 3 of x\.jsonl has 10 tokens, but max_length is 9\. "):
        encoder(max_length=9).completion("2 + 2 =", " 4", "line 3 of x.jsonl")
    with pytest.raises(TooLongError, match=r"row 7 has 9 tokens"):
        encoder(max_length=5).prompt("2 + 2 = 4", "row 7")
    cut = encoder(max_length=9, truncate=True)
    assert cut.completion("2 + 2 =", " 4") == EncodedSequence([*b"2 + 2 = 4"], [0] * 7 + [1] * 2)
    assert cut.prompt("12345678901234") == [*b"678901234"]
    with pytest.raises(TooLongError, match="what row 7 has to train on lies past token 9, where it is cut"):
        cut.completion("2 + 2 + 2 =", " 6", "row 7")
    with pytest.raises(TooLongError, match=r"row 7 \(rejected\) has 5 tokens"):
        encoder(max_length=4).preference("a", "b", "bcd", "row 7")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda e: e.conversation([], "row 1"), r"row 1 holds \[\], but messages are a list of at least one"),
        (lambda e: e.conversation("hi", "row 1"), r"row 1 holds 'hi', but messages"),
        (lambda e: e.conversation([USER, {"role": "user"}], "row 1"), "message 1 of row 1 is .* has a role and a cont"),
        (
            lambda e: e.conversation([SILENT, HELLO], "row 1"),
            r"message 0 \(user\) of row 1 is null\. Give it",
        ),
        *(
            (
                lambda e, message=message: e.conversation([USER, message], "row 1"),
                "message 1 .* of row 1 has tool calls, which the",
            )
            for message in (CALLING, {**CALLING, "content": ""}, {**CALLING, "content": "Well,"})
        ),
        (
            lambda e: e.conversation([SEEN, HELLO], "row 1"),
            "message 0 .* row 1 has the part .*'image'",
        ),
        (
            lambda e: e.prompt([{"role": "user", "content": 3}], "row 1"),
            "message 0 .* row 1 is 3, but a content is",
        ),
        *(
            (
                lambda e, role=role: e.conversation([USER, {**SEEN, "role": role}], "row 1"),
                f"{role}.* row 1 has the part",
            )
            for role in ("assistant", "tool", "system")
        ),
        (lambda e: e.completion([USER], [CALLING], "row 1"), "message 0 .* row 1 has tool calls"),
        (lambda e: e.preference(None, [USER, HELLO], [USER, CALLING], "row 1"), "row 1 has tool calls"),
        (lambda e: e.observation([SEEN], [], chat=True), "the observation has the part"),
        (lambda e: e.conversation(TALK, "row 1", tools=TOOLS), "row 1 has tools, which .* template does not write"),
        (lambda e: e.conversation(TALK, "row 1", tools="{"), "the tools of row 1 are text that is not JSON"),
        (lambda e: e.conversation(TALK, "row 1", tools=["look"]), "the tools of row 1 are .*, but tools are a list"),
        (lambda e: e.completion("q", 5, "row 1"), "the completion of row 1 is 5, but a completion is text or messages"),
        (
            lambda e: e.completion([USER], 5, "row 1"),
            "the completion of row 1 is 5, but a completion is text or messages",
        ),
        (
            lambda e: e.completion([USER], [USER, HELLO], "row 1"),
            "the completion of row 1 begins with a message of user",
        ),
        (lambda e: e.preference("q", 5, "a", "row 1"), r"the completion of row 1 \(chosen\) is 5"),
        (lambda e: e.conversation([USER], "row 1"), "row 1 has no message of the assistant"),
        (
            lambda e: e.completion("text", [HELLO], "row 1"),
            "the prompt of row 1 is text but its completion is messages",
        ),
        (lambda e: e.preference(None, "a", "b", "row 1"), "row 1 has no prompt"),
        (lambda e: e.preference(None, [USER], [USER, HELLO], "row 1"), "one completion of row 1 is the beginning of"),
        (lambda e: e.preference(None, [USER, HELLO], [MORE, BYE], "row 1"), "one completion of row 1 begins unlike"),
        (
            lambda e: e.preference(None, [SYSTEM, USER, HELLO], [SYSTEM, MORE, HELLO], "row 1"),
            r"the prompts of row 1 differ at message 1 \(user and user\)",
        ),
        (
            lambda e: e.preference(None, [SYSTEM, USER, HELLO], [SYSTEM, HELLO], "row 1"),
            r"the prompts of row 1 differ at message 1 \(user and assistant\)",
        ),
        (
            lambda e: e.preference([USER], [USER, HELLO], [BYE], "row 1"),
            r"row 1 \(chosen\) begins with a message of user",
        ),
        (lambda e: e.preference([USER], "Bye", [USER, HELLO], "row 1"), r"row 1 \(rejected\) begins with a message"),
        (
            lambda e: e.preference([SYSTEM, USER], [USER, HELLO], [USER, BYE], "row 1"),
            "the completions of row 1 are conversations that do not begin with its prompt",
        ),
        (lambda e: e.observation([USER], [], chat=False), "the observation is messages but the prompt was text"),
        (lambda e: Encoder(tokenizer=e.tokenizer, max_length=1), "max_length is 1"),
        (lambda e: Encoder(tokenizer=e.tokenizer, turns="some"), "turns is 'some'"),
    ],
)
def test_invalid_row_gives_clear_error(call: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call(encoder())


REFUSES_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('No system.') }}{% endif %}" + CHAT_TEMPLATE


@pytest.mark.parametrize("template", [REFUSES_SYSTEM, REFUSES_SYSTEM.replace(CHAT_TEMPLATE, MARKED)])
def test_errors_of_a_template_or_a_tokenizer_name_the_row(template: str) -> None:
    chat_encoder = encoder(template)
    broken = {"role": "assistant", "content": "bad \ud83d end"}
    names = [f"row {number}" for number in range(3)]
    template_fails, tokenizer_fails = (
        rf"^row 1 cannot be encoded: the {part}.*Fix the row"
        for part in ("chat template fails: No system.", "tokenizer fails: ")
    )
    for call, sentence in (
        (lambda: chat_encoder.prompt([SYSTEM, USER], "row 1"), template_fails),
        (lambda: chat_encoder.conversation([SYSTEM, *TALK], "row 1"), template_fails),
        (
            lambda: chat_encoder.encode_rows("conversation", [(TALK,), ([SYSTEM, *TALK],), (TALK,)], names),
            template_fails,
        ),
        (lambda: chat_encoder.conversation([USER, broken], "row 1"), tokenizer_fails),
        (
            lambda: chat_encoder.encode_rows("conversation", [(TALK,), ([USER, broken],), (TALK,)], names),
            tokenizer_fails,
        ),
        (
            lambda: chat_encoder.encode_rows("completion", [("q", "a"), ("q", broken["content"])], names[:2]),
            tokenizer_fails,
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PARTS, FIRST_PART])
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_content_parts_are_joined_in_every_role(template: str, role: str) -> None:
    """However the template renders a list: its Python repr, all of its texts, or the first."""
    parts, joined = ([*TALK[:2], {"role": role, "content": content}, BYE] for content in (TEXTS, "one two"))
    assert encoder(template).conversation(parts) == encoder().conversation(joined)


@pytest.mark.parametrize("template", [PARTS, NULL_CALLS])
@pytest.mark.parametrize("content", [None, "", "missing"])
def test_tool_calls_are_trained_on_with_missing_or_empty_content(template: str, content: str | None) -> None:
    message = {key: value for key, value in {**CALLING, "content": content}.items() if value != "missing"}
    called = encode_conversation(encoder(template), [USER, message])
    assert learned(called) == "<call>look</call><|im_end|>"
    assert "None" not in text(called.tokens)


def test_content_that_the_template_drops_next_to_tool_calls_is_refused() -> None:
    message = {**CALLING, "content": "Well, "}
    assert learned(encode_conversation(encoder(PARTS), [USER, message])) == "Well, <call>look</call><|im_end|>"
    with pytest.raises(ValueError, match=r"message 1 .* row 1 has tool calls, .* does not write beside a text"):
        encoder(NULL_CALLS).conversation([USER, message], "row 1")
    with pytest.raises(ValueError, match=r"message 0 \(user\) of row 3 is null\. Give it text"):
        encoder(PARTS).conversation([SILENT, HELLO], "row 3")


@pytest.mark.parametrize(
    "written",
    [
        "{{ arguments | tojson }}",  # Qwen2.5, Llama 3
        "{% if arguments is string %}{{ arguments }}{% else %}{{ arguments | tojson }}{% endif %}",  # Qwen3
        "{{ '' + arguments }}",  # DeepSeek-V3 writes text alone
        "{{ arguments }}",
    ],
)
@pytest.mark.parametrize("flat", [True, False])
def test_arguments_of_calls_are_written_once_given_as_objects_or_as_json(written: str, flat: bool) -> None:
    template = PARTS.replace("{{ call.function.name }}", "{{ (call.function or call).name }}")
    template = template.replace("</call>", f"{{% set arguments = (call.function or call).arguments %}}{written}</call>")
    arguments = {"at": 'a "b"', "é": [1]}
    for content in (None, "Well,"):
        sequences = []
        for form in (arguments, json.dumps(arguments, ensure_ascii=False)):
            call = {"name": "look", "arguments": form}
            calls = [call if flat else {"type": "function", "function": call}]
            sequences += encoder(template).conversation([USER, {**CALLING, "content": content, "tool_calls": calls}])
        assert sequences[0] == sequences[1]
        assert learned(sequences[0]) == f'{content or ""}<call>look{{"at": "a \\"b\\"", "é": [1]}}</call><|im_end|>'


@pytest.mark.parametrize(
    ("calls", "sentence"),
    [
        ([{"function": {"name": "look", "arguments": "{'at': 1}"}}], "row 2 are .* which is not JSON"),
        ([{"name": "look", "arguments": "[1]"}], "call 0 of message 1 .assistant. of row 2 are .* are an object"),
        (["look"], "tool calls are a list of objects"),
        ("look", "tool calls are a list of objects"),
    ],
)
def test_calls_that_are_no_calls_are_refused(calls: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        encoder(PARTS).conversation([USER, {**CALLING, "tool_calls": calls}], "row 2")


@pytest.mark.parametrize("template", [KNOWS_TOOLS, {"default": CHAT_TEMPLATE, "tool_use": KNOWS_TOOLS}])
@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools_are_rendered_by_the_template(template: Any, tools: Any) -> None:
    chat_encoder = encoder(template)
    assert text(encode_conversation(chat_encoder, TALK, tools=tools).tokens).startswith("[look]<|im_start|>user")
    assert text(chat_encoder.completion([USER], "Hi", tools=tools).tokens).startswith("[look]<|im_start|>user")
    pair = chat_encoder.preference([USER], "Hi", "Bye", tools=tools)
    assert all(text(side.tokens).startswith("[look]<|im_start|>user") for side in pair)
    assert chat_encoder.encode_rows("conversation", [(TALK, tools), (TALK, None)], ["a", "b"])[
        0
    ] == chat_encoder.conversation(TALK, tools=tools)
    assert chat_encoder.conversation(TALK, tools=[]) == encoder().conversation(TALK)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, MARKED, None])
@pytest.mark.parametrize("turns", ["all", "last"])
def test_rows_encoded_together_equal_each_alone(template: str | None, turns: Any) -> None:
    chat_encoder = encoder(template, turns=turns, max_length=50)
    talks = [(TALK[:2],), (TALK,), ([HELLO, MORE, BYE],), (TALK[:2],)]
    pairs = [([USER], "Hello.", "Go away"), ("a", "b", "c"), (None, [USER, HELLO], [USER, BYE])]
    for form, rows in (
        ("conversation", talks),
        ("completion", [pair[:2] for pair in pairs[:2]]),
        ("preference", pairs),
    ):
        names = [f"row {number}" for number in range(len(rows))]
        in_one_call = chat_encoder.encode_rows(form, rows, names)  # type: ignore[arg-type]
        for encoded, row, name in zip(in_one_call, rows, names, strict=True):
            if isinstance(encoded, TooLongError):
                assert encoded.row == name
                with pytest.raises(TooLongError, match=f"{name} has {encoded.length} tokens"):
                    getattr(chat_encoder, form)(*row, name)
            else:
                alone = getattr(chat_encoder, form)(*row, name)
                assert encoded == ([alone] if form == "completion" else alone)
    assert isinstance(chat_encoder.encode_rows("conversation", talks, "abcd")[1], TooLongError)
    with pytest.raises(ValueError, match="the content of message 0"):
        chat_encoder.encode_rows("conversation", [([SILENT, HELLO],)], ["row 0"])


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, MARKED, None])
def test_observation_is_the_template_text_between_two_turns(template: str | None) -> None:
    chat_encoder = encoder(template)
    first = chat_encoder.completion([USER], "Hello.")
    end = len(first) - first.mask[::-1].index(1)  # what was sampled ends with the token that ends a turn
    between = chat_encoder.observation("Go on\n", first.tokens[:end], chat=True)
    assert first.tokens[:end] + between == chat_encoder.prompt([USER, HELLO, MORE])
    unended = first.tokens[: end - 1]
    assert unended + chat_encoder.observation([MORE], unended, chat=True) == chat_encoder.prompt([USER, HELLO, MORE])
    assert chat_encoder.observation("raw", [], chat=False) == [*b"raw"]

"""Grammars of tool calls: a completion that they allow is read as calls that follow the schemas, and no other is."""

from __future__ import annotations

from typing import Any

import pytest

from postlude import load_tokenizer
from postlude.data.chat_template import ChatTemplate
from postlude.data.tool_calls import ToolCall, detect_format
from postlude.data.tool_grammar import ToolGrammar

llguidance = pytest.importorskip("llguidance")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "kind": {"enum": ["page", "file"]},
                    "place": {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "required": ["x"]},
                },
                "required": ["text", "count"],
                "$defs": {"x": {"type": "number"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
TYPES = {"find": {"text": "string", "count": "integer", "kind": "string", "place": "object"}, "now": {}}
START = "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}<{{ message.role }}>"
CONTENT = "{{ message.content or '' }}"
CALLS = "{% for call in message.tool_calls or [] %}"
END = "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
HERMES = (
    f"{START}{CONTENT}{CALLS}{{% if not loop.first %}}{{{{ '\n' }}}}{{% endif %}}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>' + END
)
LLAMA = (
    f"{START}{CONTENT}{CALLS}"
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
    + END.replace("<|end|>", "<|eot_id|>")
)
CODER = (
    f"{START}{CONTENT}{CALLS}<tool_call>\n<function={{{{ call.function.name }}}}>\n"
    "{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>" + END
)
FIND = {"text": "a <b>", "count": 2}
WRITTEN = {
    HERMES: (
        '<tool_call>\n{"name": "find", "arguments": {"text": "a <b>", "count": 2}}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    LLAMA: (
        '{"name": "find", "parameters": {"text": "a <b>", "count": 2}}',
        '{"name": "now", "parameters": {}}',
    ),
    CODER: (
        "<tool_call>\n<function=find>\n<parameter=text>\na <b>\n</parameter>\n<parameter=count>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
}
ALL = pytest.mark.parametrize("template", WRITTEN, ids=["hermes", "llama3", "qwen3_coder"])


def make(template: str, special: bool = False) -> ToolGrammar:
    """Returns the grammars of a template; with `special`, its tag is a special token."""
    tokenizer = load_tokenizer("tiny-dense")
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
    tokenizer.chat_template = template
    chat = ChatTemplate(tokenizer, {})
    return ToolGrammar(chat, detect_format(chat))


def allows(grammar: str, form: ToolGrammar, text: str) -> bool:
    """Whether a grammar allows a text, and lets it end there."""
    from llguidance.hf import from_tokenizer

    tokens = form.template.tokenizer(text, add_special_tokens=False)["input_ids"]
    tokenizer: Any = form.template.tokenizer
    matcher = llguidance.LLMatcher(from_tokenizer(tokenizer, n_vocab=300), grammar, log_level=0)
    assert not matcher.get_error()
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@ALL
def test_required_calls_follow_template_and_schema(template: str) -> None:
    form, (find, now) = make(template), WRITTEN[template]
    grammar = form.required(TOOLS, parallel=True, in_thought=False)
    for text, call in ((find, ToolCall("find", FIND)), (now, ToolCall("now", {}))):
        assert allows(grammar, form, text)
        assert form.format.parse(text, TYPES) == [call]
        assert not allows(grammar, form, f"Well. {text}")
        assert not allows(grammar, form, text[:-1])
    assert not allows(grammar, form, find.replace("count", "number"))
    assert not allows(grammar, form, find.replace("2", '"two"'))
    assert not allows(grammar, form, find.replace("find", "fine"))
    assert allows(grammar, form, f"{find}\n{now}") == (template != LLAMA), "Llama 3 writes one call"
    assert not allows(form.required(TOOLS, parallel=False, in_thought=False), form, f"{find}\n{now}")
    assert not allows(form.required(TOOLS[1:], parallel=True, in_thought=False), form, find)


@ALL
def test_a_thought_may_precede_required_calls_where_the_model_writes_thoughts(template: str) -> None:
    plain, thinks = make(template), make("{# <think> #}" + template)
    call, thought = WRITTEN[template][0], "<think>I find it.\n</think>\n\n"
    assert not allows(plain.required(TOOLS, parallel=True, in_thought=False), plain, thought + call)
    grammar = thinks.required(TOOLS, parallel=True, in_thought=False)
    assert allows(grammar, thinks, call)
    assert allows(grammar, thinks, thought + call)
    assert not allows(grammar, thinks, thought)
    opened = thinks.required(TOOLS, parallel=True, in_thought=True)
    assert allows(opened, thinks, thought.removeprefix("<think>") + call)
    assert not allows(opened, thinks, call)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("template", [HERMES, CODER], ids=["hermes", "qwen3_coder"])
def test_calls_within_text_follow_the_schema_if_they_are_strict(template: str, special: bool) -> None:
    form, (find, now) = make(template, special), WRITTEN[template]
    grammar = form.strict(TOOLS)
    for text in ("Just 4 <tool.", find, f"I look.\n{find}\n{now} Done."):
        assert allows(grammar, form, text), text
    for text in (find.replace("count", "number"), find.replace("find", "fine"), f"{find}<tool_call>"):
        assert not allows(grammar, form, text), text
    assert allows(form.required(TOOLS, parallel=True, in_thought=False), form, find)


def test_strict_calls_that_begin_as_answers_do_are_refused() -> None:
    with pytest.raises(ValueError, match='give tool_choice "required", or leave strict out'):
        make(LLAMA).strict(TOOLS)


def test_parameters_in_tags_may_be_any_of_their_schema() -> None:
    form = make(CODER)
    grammar = form.required(TOOLS, parallel=False, in_thought=False)
    find = WRITTEN[CODER][0]
    end = "</function>"
    more = "<parameter=kind>\n{}\n</parameter>\n<parameter=place>\n{}\n</parameter>\n" + end
    assert allows(grammar, form, find.replace(end, more.format("file", '{"x": 1.5}')))
    assert not allows(grammar, form, find.replace(end, more.format("film", '{"x": 1.5}')))
    assert not allows(grammar, form, find.replace(end, more.format("file", '{"y": 1}')))
    assert not allows(grammar, form, find.replace("<parameter=count>\n2\n</parameter>\n", ""))

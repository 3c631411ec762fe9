"""Tool-call formats: calls are parsed in order, and a malformed call gets an error that shows the format."""

from __future__ import annotations

from pathlib import Path

import pytest

from postlude import load_tokenizer
from postlude.data.chat_template import ChatTemplate
from postlude.data.tool_calls import (
    FORMATS,
    Hermes,
    Llama3,
    MalformedCall,
    Qwen3Coder,
    ToolCall,
    detect_format,
    load_format,
)
from postlude.rollout.tools import ToolReply, parameter_types

TYPES = {
    "add": {"a": "integer", "b": "number"},
    "say": {"text": "string", "loud": "boolean", "words": "array", "style": "object"},
}
ADD = ToolCall("add", {"a": 1, "b": 2})


def malformed(form: type) -> MalformedCall:
    return MalformedCall(f"a call is {form.form}")


@pytest.mark.parametrize(
    ("completion", "calls"),
    [
        ('Sum: <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', [ADD]),
        ('<tool_call>{"name": "say"}</tool_call><tool_call>{"name": "add", "arguments": null}', 2),
        ('<tool_call>{"name": "add", "arguments": {"a": 1', [malformed(Hermes)]),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', [malformed(Hermes)]),
        ('<tool_call>{"name": 3}</tool_call>', [malformed(Hermes)]),
        ("<tool_call>[]</tool_call>", [malformed(Hermes)]),
        ('{"name": "add", "arguments": {"a": 1, "b": 2}}', []),
        ("The answer is 3.", []),
    ],
)
def test_hermes(completion: str, calls: object) -> None:
    actual = Hermes().parse(completion, TYPES)
    assert actual == ([ToolCall("say"), ToolCall("add")] if calls == 2 else calls)


@pytest.mark.parametrize(
    ("completion", "calls"),
    [
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}<|eom_id|>', [ADD]),
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>', [ADD]),
        (' {"type": "function", "name": "add", "arguments": {"a": 1, "b": 2}}\n', [ADD]),
        ('{"name": "say", "parameters": {}}; {"name": "add", "parameters": {"a": 1, "b": 2}}', [ToolCall("say"), ADD]),
        ('{"name": "add", "parameters": {"a": 1, "b": 2}} and so', [ADD, malformed(Llama3)]),
        ('{"name": "add", "parameters": {"a": 1', [malformed(Llama3)]),
        ('{"name": "add", "parameters": "a"}', [malformed(Llama3)]),
        ("<|python_tag|>print(1)", [malformed(Llama3)]),
        ("<|python_tag|>", [malformed(Llama3)]),
        ('{"answer": 3}', []),
        ('{"total": {"a": 1', []),
        ("The answer is 3.", []),
        ("", []),
    ],
)
def test_llama3(completion: str, calls: list[object]) -> None:
    assert Llama3().parse(completion, TYPES) == calls


def coder(name: str, **parameters: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("completion", "calls"),
    [
        (f"First {coder('add', a='1', b='2.5')}", [ToolCall("add", {"a": 1, "b": 2.5})]),
        (coder("add", a="1") + coder("say"), [ToolCall("add", {"a": 1}), ToolCall("say")]),
        (coder("say", text="12\n  <b>", loud="True"), [ToolCall("say", {"text": "12\n  <b>", "loud": True})]),
        (
            coder("say", words='["a"]', style='{"b": 1}'),
            [ToolCall("say", {"words": ["a"], "style": {"b": 1}})],
        ),
        ("<function=add><parameter=a>1<parameter=b>2</function>", [ADD]),  # without outer tag and one end
        (coder("other", x="1"), [ToolCall("other", {"x": "1"})]),  # an unknown parameter is text
        ("<tool_call><function=add><parameter=a>1", [malformed(Qwen3Coder)]),
        ("<tool_call>\n{}\n</tool_call>" + coder("add"), [malformed(Qwen3Coder), ToolCall("add")]),
        ("<function=></function>", [malformed(Qwen3Coder)]),
        ("The answer is 3.", []),
    ],
)
def test_qwen3_coder(completion: str, calls: list[object]) -> None:
    assert Qwen3Coder().parse(completion, TYPES) == calls


@pytest.mark.parametrize(("key", "text"), [("a", "x"), ("a", "1.5"), ("a", "true"), ("b", '"2"')])
def test_qwen3_coder_names_a_parameter_of_another_type(key: str, text: str) -> None:
    (call,) = Qwen3Coder().parse(coder("add", **{key: text}), TYPES)
    assert call == MalformedCall(
        f"a call is {Qwen3Coder.form}, and {key} is of type {TYPES['add'][key]}, unlike {text!r}"
    )


FILE = """
from postlude.data.tool_calls import ToolCall, ToolCallFormat


def add(a: int, b: int | None = 1) -> int:
    return a + b


class Bang(ToolCallFormat):
    form = "!name"

    def parse(self, completion, types):
        return [ToolCall(completion[1:], {"a": len(types)})] if completion.startswith("!") else []


def right(prompt, completion, example):
    return 1.0
"""


def test_every_format_calls_the_tools(tmp_path: Path) -> None:
    file = tmp_path / "tools.py"
    file.write_text(FILE)
    assert set(FORMATS) == {"hermes", "llama3", "qwen3_coder"}
    for name, completion in {
        "hermes": '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>',
        "llama3": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
        "qwen3_coder": coder("add", a="1", b="2"),
        f"{file}:Bang": "!add",
    }.items():
        reply = ToolReply((f"{file}:add",), name)
        result = "2" if name.endswith("Bang") else "3"
        assert reply([], [completion], {}) == [{"role": "tool", "content": result}], name
        assert reply([], ["3"], {}) is None


def test_an_optional_parameter_has_the_type_of_its_values() -> None:
    def tool(a: int | None, b: list[str], c: int | str, d) -> None: ...  # type: ignore[no-untyped-def]

    assert parameter_types(tool) == {"a": "integer", "b": "array", "c": "string", "d": "string"}


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tool-call format 'hermess'; there are hermes, llama3, qwen3_coder"):
        load_format("hermess")
    (tmp_path / "count.py").write_text("def count():\n    return 3\n")
    with pytest.raises(ValueError, match="makes a int, but a tool-call format is a ToolCallFormat"):
        load_format(f"{tmp_path / 'count.py'}:count")


WRITTEN = {
    Hermes: '<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</tool_call>',
    Llama3: '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
    Qwen3Coder: "<function={{ f.name }}>{% for key, value in f.arguments.items() %}<parameter={{ key }}>{{ value }}"
    "</parameter>{% endfor %}</function>",
    None: "CALL {{ f.name }}",
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_format_is_that_in_which_the_template_writes_calls(kind: type | None) -> None:
    tokenizer = load_tokenizer("tiny-dense")
    tokenizer.chat_template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}[{{ message.role }}]"
        "{{ message.content or '' }}{% for call in message.tool_calls or [] %}{% set f = call.function %}"
        f"{WRITTEN[kind]}{{% endfor %}}{{% endfor %}}{{% if add_generation_prompt %}}[assistant]{{% endif %}}"
    )
    if kind is None:
        with pytest.raises(ValueError, match="not known here"):
            detect_format(ChatTemplate(tokenizer, {}))
    else:
        assert type(detect_format(ChatTemplate(tokenizer, {}))) is kind

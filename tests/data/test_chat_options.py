"""Chat-template options of data and environments: variables, template file, system message, tools."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from postlude.data.chat import Encoder
from postlude.data.datasets import read_rows
from postlude.hf.load import CHAT_TEMPLATE, byte_tokenizer, load_tokenizer
from postlude.recipes.config.data import Examples, LabelledExamples, Pairs
from postlude.recipes.config.environments import DatasetSettings
from postlude.recipes.config.load import load
from postlude.recipes.config.recipe_configs import SFTConfig
from postlude.recipes.config.settings import SamplingSettings
from postlude.recipes.dataset import EncodedRows
from postlude.recipes.rollouts.prompts import PromptEncoding, build_environment
from postlude.recipes.sequence_limit import SequenceLimit
from postlude.rollout.tasks import DatasetTasks

THINKS = "{% if enable_thinking is defined and not enable_thinking %}[no thinking]{% endif %}" + CHAT_TEMPLATE
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
WRITES_TOOLS = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}" + CHAT_TEMPLATE
USER = {"role": "user", "content": "1+1?"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "2"}
TEXT_OF_USER = "<|im_start|>user\n1+1?<|im_end|>\n"
TEXT_OF_SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n"


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tokenizer(template: str) -> Any:
    byte_level = byte_tokenizer()
    byte_level.chat_template = template
    return byte_level


def texts(data: Examples | Pairs, template: str = CHAT_TEMPLATE) -> list[str]:
    """Returns the text of every sequence of a dataset, as a recipe encodes it."""
    reader = tokenizer(template)
    rows: Any = EncodedRows(data, reader, SequenceLimit(400))
    sequences = [sequence for index in range(len(rows)) for sequence in rows.rows.row(index)]
    return [reader.decode(sequence.tokens) for sequence in sequences]


FORMATS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "conversation": (Examples, {"messages": [USER, ANSWER]}),
    "completion as text": (Examples, {"prompt": [USER], "completion": "2"}),
    "completion as messages": (Examples, {"prompt": [USER], "completion": [ANSWER]}),
    "labelled": (LabelledExamples, {"prompt": [USER], "completion": "2", "label": True}),
    "preference": (Pairs, {"prompt": [USER], "chosen": "2", "rejected": "3"}),
    "preference of conversations": (
        Pairs,
        {"chosen": [USER, ANSWER], "rejected": [USER, {"role": "assistant", "content": "3"}]},
    ),
}


@pytest.mark.parametrize("form", FORMATS)
def test_variables_system_and_tools_reach_the_template_from_every_format(tmp_path: Path, form: str) -> None:
    settings, row = FORMATS[form]
    path = written(tmp_path / "a.jsonl", row, {**row, "tools": TOOLS}, {**row, "tools": json.dumps(TOOLS)})
    plain = texts(settings(path=path, tools="none"), WRITES_TOOLS)
    sides = len(plain) // 3
    assert texts(settings(path=path), WRITES_TOOLS) == plain[:sides] + [f"[look]{text}" for text in plain[sides:]]
    assert texts(settings(path=path, system="Be brief.", tools="none")) == [TEXT_OF_SYSTEM + text for text in plain]
    off = settings(path=path, tools="none", template_variables={"enable_thinking": False})
    assert texts(off, THINKS) == [f"[no thinking]{text}" for text in plain]


def test_system_message_of_a_row_takes_precedence(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.jsonl",
        {"messages": [SYSTEM, USER, ANSWER]},
        {"messages": [{**SYSTEM, "role": "developer"}, USER, ANSWER]},
        {"messages": [USER, ANSWER]},
    )
    first, second, third = texts(Examples(path=path, system="Be long."))
    assert first.count("system") == second.count("developer") == 1
    assert "Be long." not in first + second
    assert third.startswith("<|im_start|>system\nBe long.<|im_end|>\n")


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"prompt": "1+1=", "completion": "2", "tools": TOOLS}, {}),
        ({"text": "1+1=2", "tools": json.dumps(TOOLS)}, {}),
        ({"prompt": "1+1=", "completion": "2"}, {"system": "Be brief."}),
        ({"prompt": "1+1=", "chosen": "2", "rejected": "3", "tools": TOOLS}, {}),
    ],
)
def test_tools_and_system_message_are_refused_for_text_rows(
    tmp_path: Path, row: dict[str, Any], options: dict[str, Any]
) -> None:
    settings = Pairs if "chosen" in row else Examples
    with pytest.raises(ValueError, match=r"line 1 of a\.jsonl.* has .*, but its prompt is text"):
        texts(settings(path=written(tmp_path / "a.jsonl", row), **options), WRITES_TOOLS)
    empty = {key: value for key, value in row.items() if key != "tools"} | {"tools": "[]"}
    texts(settings(path=written(tmp_path / "a.jsonl", empty)), WRITES_TOOLS)


def test_a_variable_that_the_template_does_not_read_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", {"messages": [USER, ANSWER]})
    with pytest.raises(ValueError, match=r"'enable_thinkin', which .* does not read; did you mean 'enable_thinking'\?"):
        texts(Examples(path=path, template_variables={"enable_thinkin": False}), THINKS)
    with pytest.raises(ValueError, match="template_variables has 'tools', which is not for a config to set"):
        texts(Examples(path=path, template_variables={"tools": []}), THINKS)


def test_template_file_replaces_the_tokenizers_template(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(THINKS)
    config = load(SFTConfig, None, ["--data.path", "rows.jsonl", "--chat_template", str(file)])
    assert load_tokenizer("tiny-dense", config.chat_template).chat_template == THINKS
    assert load_tokenizer("tiny-dense").chat_template == CHAT_TEMPLATE
    file.write_text("{% for message in messages %}\n{{ message.content")
    with pytest.raises(ValueError, match=r"chat\.jinja is not Jinja: .* in line 2"):
        load_tokenizer("tiny-dense", file)
    file.write_text("{{ raise_exception('only with a system message') }}")
    assert load_tokenizer("tiny-dense", file).chat_template is not None, "it may take other messages"
    (tmp_path / "latin.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"latin\.jinja is not UTF-8 text: .* at byte 3"):
        load_tokenizer("tiny-dense", tmp_path / "latin.jinja")
    with pytest.raises(FileNotFoundError, match=r"there is no chat template .*none\.jinja"):
        load_tokenizer("tiny-dense", tmp_path / "none.jinja")


def test_variables_and_system_message_apply_to_environment_prompts(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", {"prompt": [USER], "answer": "2"}, {"prompt": [SYSTEM, USER], "answer": "2"})
    settings = DatasetSettings(
        path=path, reward="exact", workers=0, system="Be brief.", template_variables={"enable_thinking": False}
    )
    sampling, reader = SamplingSettings(max_new_tokens=8), tokenizer(THINKS)
    encoding = PromptEncoding(reader, sampling, SequenceLimit(400))
    environment = build_environment(settings, 0, encoding)
    encoder = encoding.encoder(environment)
    expected = f"[no thinking]{TEXT_OF_SYSTEM}{TEXT_OF_USER}<|im_start|>assistant\n"
    assert [reader.decode(encoder.prompt(environment.tasks[index].prompt)) for index in range(2)] == [expected] * 2
    environment.close()
    with pytest.raises(ValueError, match="'enable_thinking', which the tokenizer's chat template does not read"):
        build_environment(settings, 0, replace(encoding, tokenizer=byte_tokenizer()))


def test_system_message_requires_message_prompts(tmp_path: Path) -> None:
    rows = read_rows(written(tmp_path / "a.jsonl", {"prompt": "1+1?"}))
    assert DatasetTasks(rows, chat=True, system="Be brief.")[0].prompt == [SYSTEM, USER]
    with pytest.raises(ValueError, match="system is given, but chat is off"):
        DatasetTasks(rows, system="Be brief.")


def test_generation_prompt_gets_the_system_message() -> None:
    reader = byte_tokenizer()
    prompt = Encoder(tokenizer=reader, system="Be brief.").prompt([USER])
    assert reader.decode(prompt) == f"{TEXT_OF_SYSTEM}{TEXT_OF_USER}<|im_start|>assistant\n"

"""A run on messages exports the template that it was trained with, and warns where turns do not end."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from postlude.cli import main
from postlude.data.chat import Encoder
from postlude.data.chat_template import PLAIN_TEMPLATE
from postlude.hf.export import export_hf
from postlude.hf.load import CHAT_TEMPLATE, load_model, load_tokenizer
from postlude.recipes.dataset import prepare_chat
from tests.commands import run_command

ENDLESS = CHAT_TEMPLATE.replace("<|im_end|>", "")
MARKED_WITHOUT_END = CHAT_TEMPLATE.replace(
    "{{ message.content }}", "{% generation %}{{ message.content }}{% endgeneration %}"
)
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


def tokenizer(template: str | None) -> Any:
    tiny = load_tokenizer("tiny-dense")
    tiny.chat_template = template
    return tiny


@pytest.mark.parametrize(
    ("template", "sentences"),
    [
        (CHAT_TEMPLATE, []),
        (None, ["org/base has no chat template, so messages are written like 'User: ?\\n\\nAssistant: what was said."]),
        (ENDLESS, ["the chat template of org/base ends an assistant's turn with"]),
        (MARKED_WITHOUT_END, ["the chat template of org/base ends an assistant's turn with"]),
        ("{{ raise_exception('only for tools') }}", []),
    ],
)
def test_what_a_template_lacks_is_logged_once(
    template: str | None, sentences: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    tiny = tokenizer(template)
    for _ in range(2 if template is None else 1):
        with caplog.at_level(logging.WARNING):
            prepare_chat(tiny, "org/base")
    assert len(caplog.messages) == len(sentences)
    for message, sentence in zip(caplog.messages, sentences, strict=True):
        assert message.startswith(sentence)
    assert tiny.chat_template == (template or PLAIN_TEMPLATE)


@pytest.mark.parametrize("plain", [[], ["--plain"]])
def test_a_template_without_an_end_is_said_before_a_reply(
    plain: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    export_hf(load_model("tiny-dense"), tmp_path / "endless", tokenizer=tokenizer(ENDLESS))
    assert main(["generate", str(tmp_path / "endless"), "--prompt", "Hi", "--max-new-tokens", "2", *plain]) == 0
    assert ["ends an assistant's turn without a special token" in message for message in caplog.messages] == (
        [] if plain else [True]
    )


@pytest.mark.parametrize(("column", "streaming"), [("messages", False), ("messages", True), ("text", False)])
def test_the_plain_template_is_exported_with_a_model_that_is_trained_on_messages(
    column: str, streaming: bool, tmp_path: Path
) -> None:
    export_hf(load_model("tiny-dense"), tmp_path / "base", tokenizer=tokenizer(None))
    (tmp_path / "rows.jsonl").write_text(json.dumps({column: TALK if column == "messages" else "Hello."}) + "\n")
    data = ["--data.path=rows.jsonl", f"--data.streaming={streaming}", "--batch_size=1", "--held_out.rows=0"]
    done = run_command(
        ["sft", "--model=base", "--run=run", *data, "--steps=1", "--budget=64", "--loggers=[]"], tmp_path
    )
    assert done.returncode == 0, done.stderr
    exported = load_tokenizer(tmp_path / "run" / "model")
    if column == "text":
        assert exported.chat_template is None
        assert "chat template" not in done.stderr
        return
    assert done.stderr.count("has no chat template") == 1
    assert exported.chat_template == PLAIN_TEMPLATE
    rendered = exported.apply_chat_template(TALK[:1], add_generation_prompt=True, return_dict=False)
    assert rendered == Encoder(tokenizer=tokenizer(None)).prompt(TALK[:1])

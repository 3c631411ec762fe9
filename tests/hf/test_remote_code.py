"""Python files of a model's directory run only where the user said so."""

import io
import json
import sys
from pathlib import Path

import pytest

from postlude import export_hf, load_model, load_tokenizer
from postlude.cli import main
from postlude.hf.read_model import read_model
from postlude.recipes.config.settings import RunConfig

CODE = """
from pathlib import Path

from transformers import LlamaConfig, PreTrainedTokenizerFast

Path({mark!r}).touch()


class Config(LlamaConfig):
    pass


class Own(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model whose tokenizer and config name code of their own, which leaves a file when it runs."""
    directory = tmp_path / "model"
    export_hf(load_model("tiny-dense"), directory)
    load_tokenizer("tiny-dense").save_pretrained(directory)
    (directory / "own.py").write_text(CODE.format(mark=str(tmp_path / "ran")))
    for name, entries in (
        ("tokenizer_config.json", {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}),
        ("config.json", {"auto_map": {"AutoConfig": "own.Config"}}),
    ):
        path = directory / name
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return directory


def test_code_of_a_model_runs_only_with_the_users_word(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text on standard input, such as a prompt that is piped into a command, is not taken for consent."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\nyes\n"))
    assert read_model(directory)[1].pattern == read_model("tiny-dense")[1].pattern
    for load in (lambda: load_tokenizer(directory), RunConfig(model=str(directory)).load_tokenizer):
        with pytest.raises(ValueError, match=r"is Python code of its own.* --trust-remote-code"):
            load()
    assert main(["logprobs", str(directory), "--text", "-", "--device", "cpu"]) != 0
    assert "--trust-remote-code" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()

    trusting = RunConfig(model=str(directory), trust_remote_code=True)
    assert trusting.load_tokenizer().encode("a") == load_tokenizer("tiny-dense").encode("a")
    assert (tmp_path / "ran").exists()

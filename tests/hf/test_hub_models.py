"""A Hub model is read from its cached directory; weights are downloaded when they are read."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from postlude import export_hf, load_model, load_tokenizer
from postlude.hf.load import byte_tokenizer, check_weights
from postlude.hf.read_model import read_model, resolve_path
from tests.hub_server import Hub, serve_hub, use_hub

NAME = "org/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    export_hf(load_model("tiny-dense", seed=3), tmp_path / "local", tokenizer=byte_tokenizer())
    files = {file.name: file.read_bytes() for file in (tmp_path / "local").iterdir()}
    unread_files = {
        "original/model.safetensors": b"unread",
        "consolidated.safetensors": b"unread",
        "flax.msgpack": b"unread",
    }
    repos = {("models", NAME): files | unread_files, ("models", "org/torch"): {"config.json": b"{}", "model.bin": b"x"}}
    with serve_hub(repos) as hub:
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        yield hub


def test_hub_name_equals_its_cached_directory(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_model(NAME)[1] == read_model(tmp_path / "local")[1]
    assert load_tokenizer(NAME).get_vocab() == byte_tokenizer().get_vocab()
    assert not any("safetensors" in request for request in hub.requests), "no weight is downloaded for a config"
    assert check_weights(NAME) == check_weights(tmp_path / "local")
    hub_state, local_state = load_model(f"{NAME}@main").state_dict(), load_model(tmp_path / "local").state_dict()
    assert hub_state.keys() == local_state.keys()
    assert all(torch.equal(hub_state[name], local_state[name]) for name in hub_state)
    assert not any(part in request for request in hub.requests for part in ("original", "consolidated", "msgpack"))
    hub.requests.clear()
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache", offline=True)
    assert load_model(NAME).config == read_model(tmp_path / "local")[1]
    assert not hub.requests


def test_unreadable_hub_name_gives_clear_error(hub: Hub) -> None:
    with pytest.raises(FileNotFoundError, match=r"'org/none' is no directory here, and the .* no model of that name"):
        read_model("org/none")
    with pytest.raises(FileNotFoundError, match=r"model org/torch of .* has no \.safetensors; its files are: \.bin"):
        resolve_path("org/torch", weights=True)

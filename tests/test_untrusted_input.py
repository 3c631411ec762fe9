"""Files, templates and texts of others are bounded, stay in their directory, and do not write to the terminal."""

import asyncio
import io
import json
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette

from postlude.commands import generate
from postlude.data import chat_template
from postlude.data.chat_template import ChatTemplate, TemplateTimeout, read_chat_template
from postlude.error_output import escape_controls, print_error
from postlude.hf.tensor_sources import SafetensorsSource
from postlude.recipes.config.raw import ConfigError, read
from postlude.serving.http.server import listening
from postlude.serving.launch.launcher import LocalLauncher, ServerCommand
from postlude.sharded_tensors import read_state

ESCAPES = "\x1b]0;title\x07a\x1b[31mb\x9bc\r\n\td"
SHOWN = "\\x1b]0;title\\x07a\\x1b[31mb\\x9bc\\x0d\n\td"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal, SHOWN), (io.StringIO, ESCAPES)])
def test_a_completion_does_not_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], shown: str
) -> None:
    """A file or a pipe gets it as it is."""
    completion = SimpleNamespace(text=ESCAPES)
    loaded = SimpleNamespace(generate=lambda *_, **__: [[completion]]), SimpleNamespace(chat_template=None)
    monkeypatch.setattr(generate, "load_generator", lambda options: loaded)
    monkeypatch.setattr(generate, "sampling_from_options", lambda options: None)
    monkeypatch.setattr(generate, "encode", lambda *_: [1])
    monkeypatch.setattr(sys, "stdout", output := stream())
    generate.run(SimpleNamespace(prompt=["p"], system=None, plain=True, n=1, json=False, model="m"))  # type: ignore[arg-type]
    assert output.getvalue() == shown + "\n"


def test_an_error_does_not_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(ESCAPES)
    assert capsys.readouterr().err == SHOWN + "\n"
    assert escape_controls("ü 日\n\t\\x1b") == "ü 日\n\t\\x1b"


@pytest.mark.parametrize("file", ["/etc/passwd", "../other/model.safetensors"])
def test_an_index_names_files_of_its_directory_only(tmp_path: Path, file: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"norm.weight": file}}))
    with pytest.raises(ValueError, match=f"names {file}, which is not in its directory"):
        SafetensorsSource(tmp_path)
    tensors = {"norm.weight": {"dtype": "F32", "shape": [1], "parts": [[file, [0], [1]]]}}
    (tmp_path / "state.json").write_text(json.dumps({"format": 2, "files": {}, "tensors": tensors}))
    with pytest.raises(ValueError, match=f"names {file}, which is not beside it"):
        read_state(tmp_path)


def test_a_config_whose_aliases_multiply_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"values in .*bomb\.yaml with its aliases; at most 1,000,000 are read"):
        read(tmp_path / "bomb.yaml", [])


def test_a_chat_template_that_does_not_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = "{% for i in range(99999) %}"
    source = f"{loop * 4}{{% endfor %}}{{% endfor %}}{{% endfor %}}{{% endfor %}}"
    (tmp_path / "template.jinja").write_text(source)
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.2)
    with pytest.raises(TemplateTimeout, match=r"does not render one short message in 0\.2 s"):
        read_chat_template(tmp_path / "template.jinja")
    tokenizer: Any = SimpleNamespace(chat_template=source, special_tokens_map={})
    with pytest.raises(TemplateTimeout, match=r"does not render one short message in 0\.2 s"):
        ChatTemplate(tokenizer, {}).render([{"role": "user", "content": "?"}])


@pytest.fixture
def use_up_descriptors() -> Iterator[Callable[[], None]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def use_up() -> None:
        os.close(free := os.dup(0))  # the lowest one
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))

    yield use_up
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_server_without_file_descriptors_says_so_once(
    use_up_descriptors: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def serve() -> None:
        async with listening(Starlette(), "127.0.0.1", 0) as address:
            clients = [socket.socket() for _ in range(3)]
            use_up_descriptors()
            for client in clients:
                client.connect(("127.0.0.1", int(address.rpartition(":")[2])))
            while not caplog.messages:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            for client in clients:
                client.close()

    asyncio.run(serve())
    assert [message.partition(",")[0] for message in caplog.messages] == [
        "no file descriptor is left for a new connection"
    ]


def test_a_server_that_ends_with_open_connections_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def serve() -> None:
        async with listening(Starlette(), "127.0.0.1", 0) as address:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")

    asyncio.run(serve())
    assert not caplog.messages


def test_a_resumed_run_keeps_the_logs_of_its_earlier_servers(tmp_path: Path) -> None:
    for start in range(2):
        launcher = LocalLauncher(tmp_path)
        for number in range(2):
            command = ServerCommand((sys.executable, "-c", f"print({start}, {number})"))
            process = launcher.start(command)
            while process.exit_reason() is None:
                pass
            process.stop()
    assert [(tmp_path / f"{number}.log").read_text() for number in range(4)] == ["0 0\n", "0 1\n", "1 0\n", "1 1\n"]

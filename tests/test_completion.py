"""`postlude completion`: what completes a word, and that bash, zsh and fish insert it."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from postlude.cli import main
from postlude.commands.completion import FILES, SCRIPTS
from postlude.recipes.config.keys import options_of, stored_schema
from postlude.recipes.registry import RECIPES
from tests.conftest import PATIENCE
from tests.test_start import started

SRC = Path(__file__).parents[1] / "src"


def candidates(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[set[str], bool]:
    """Returns the candidates for the last word of a line, and whether files are candidates too."""
    assert main(["completion", "bash", "--line", line]) == 0
    *lines, places = capsys.readouterr().out.splitlines()
    return {line.partition("\t")[0] for line in lines}, places == FILES


@pytest.mark.parametrize(
    ("line", "expected", "files"),
    [
        ("postlude gr", {"grpo"}, False),
        ("postlude grpo one", {"one-gpu"}, True),
        ("postlude launch slurm grpo one", {"one-gpu"}, True),
        ("postlude launch slurm grpo one-gpu --optimizer.lr", {"--optimizer.lr"}, False),
        ("postlude demo --dry", {"--dry-run"}, False),
        ("postlude grpo demo --optimizer", {"--optimizer", "--optimizer."}, False),
        ("postlude grpo --optimizer.schedule.s", {"--optimizer.schedule.shape", "--optimizer.schedule.steps"}, False),
        ("postlude grpo --optimizer.schedule.shape ", {"constant", "linear", "cosine"}, False),
        (
            "postlude grpo --optimizer.schedule.shape=c",
            {f"--optimizer.schedule.shape={c}" for c in ("constant", "cosine")},
            False,
        ),
        ("postlude grpo --rollout n", {"native"}, False),
        ("postlude ppo --trust_remote_code ", {"true", "false"}, False),
        ("postlude sft --model tiny-m", {"tiny-moe"}, True),
        ("postlude sft --data.path ", set(), True),
        ("postlude grpo --seed ", set(), False),
        ("postlude grpo --help asyn", {"asynchrony."}, False),
        ("postlude verify tiny-dense --dtype f", {"float16", "float32"}, False),
        ("postlude verify tiny-h", {"tiny-hybrid"}, True),
        ("postlude completion f", {"fish"}, False),
        ("postlude status ", set(), True),
        ("postlude dance ", set(), False),
        ("postlude grpo 'open quote --see", {"--seed"}, False),
        ("postlude mine.py:Trainer --dev", {"--device"}, False),
    ],
)
def test_last_word_is_completed(line: str, expected: set[str], files: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert candidates(line, capsys) == (expected, files)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_key_is_reached_from_section_to_section(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    reached, sections = set[str](), ["--"]
    while sections:
        words, _ = candidates(f"postlude {recipe} {sections.pop()}", capsys)
        sections += [word for word in words if word.endswith(".")]
        reached |= words
    paths = {option.path for option in options_of(stored_schema(recipe)) if "*" not in option.path}
    leaves = {path for path in paths if not any(other.startswith(f"{path}.") for other in paths)}
    assert {f"--{path}" for path in leaves if not path.endswith(".kind")} <= reached


def test_completion_imports_nothing_heavy() -> None:
    lines = ("postlude ", "postlude grpo --optimizer.", "postlude plan tiny-dense --", "postlude sft ")
    results = started(*(["completion", "zsh", "--line", line] for line in lines))
    assert not any(code for code, _, _ in results)
    assert "--optimizer.lr\t" in results[1][1]
    *_, (_, _, modules) = results
    assert not {name for name in modules if name.split(".")[0] in ("torch", "pydantic", "yaml", "rich", "numpy")}


class Terminal:
    """An interactive shell on a pseudo-terminal."""

    def __init__(self, command: list[str], directory: Path) -> None:
        self.process, descriptor = pty.fork()
        if self.process == 0:
            os.chdir(directory)
            variables = {"PATH": f"{directory / 'bin'}:{os.environ['PATH']}", "TERM": "dumb", "HOME": str(directory)}
            os.execvpe(command[0], command, variables)
        self.descriptor = descriptor

    def send(self, keys: str, until: str) -> str:
        """Types keys and returns what is shown, to the end of the first match of a pattern."""
        os.write(self.descriptor, keys.encode())
        shown, end = "", time.monotonic() + PATIENCE
        while not (match := re.search(until, shown)) and time.monotonic() < end:
            if select.select([self.descriptor], [], [], 1.0)[0]:
                shown += os.read(self.descriptor, 65536).decode(errors="replace")
        assert match, f"no {until!r} in {shown!r}"
        return shown[: match.end()]

    def close(self) -> None:
        os.kill(self.process, 9)
        os.waitpid(self.process, 0)
        os.close(self.descriptor)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Returns a working directory with a file to complete, and the command in bin/."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "postlude"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={SRC} exec {sys.executable} -m postlude "$@"\n')
    command.chmod(0o755)
    (tmp_path / "my run.yaml").touch()
    for shell, script in SCRIPTS.items():
        (tmp_path / f"script.{shell}").write_text(script)
    return tmp_path


@pytest.fixture(params=["bash", "zsh"])
def terminal(request: pytest.FixtureRequest, directory: Path) -> Iterator[Terminal]:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    options = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"]}[request.param]
    terminal = Terminal([request.param, *options], directory)
    ready = {"bash": "", "zsh": "autoload -U compinit; compinit -u; bindkey -e; "}[request.param]
    terminal.send(f"{ready}source ./script.{request.param}; PS1=; PROMPT=; echo rea''dy\n", "ready\r\n")
    yield terminal
    terminal.close()


@pytest.mark.slow  # starts shells, and each Tab a command
def test_tab_completes_in_an_interactive_shell(terminal: Terminal) -> None:
    cases = {  # what is typed before each Tab, what the Tab adds, and what is typed then
        ("postlude compl", "etion"): "postlude completion",
        ("postlude grpo dem", "o ", "--dry", "-run"): "postlude grpo demo --dry-run",
        ("postlude grpo --asyn", "chrony.", "max_s", "taleness ", "2"): "postlude grpo --asynchrony.max_staleness 2",
        ("postlude grpo --optimizer.schedule.shape=li", "near"): "postlude grpo --optimizer.schedule.shape=linear",
        ("postlude sft my", r"\ run.yaml"): r"postlude sft my\ run.yaml",
        ("postlude sft --data.path=my", r"\ run.yaml"): r"postlude sft --data.path=my\ run.yaml",
    }
    for (*parts,), line in cases.items():
        last = parts.pop() if len(parts) % 2 else ""
        for part, added in zip(parts[::2], parts[1::2], strict=True):  # a Tab is handled before more is typed
            terminal.send(f"{part}\t", f"{re.escape(part[-1])}[^ -~]*{re.escape(added)}")
        os.write(terminal.descriptor, last.encode())
        shown = terminal.send("\x01echo '<\x05>'\n", r"\n<.*>\r\n")
        assert re.sub(r" >$", ">", shown.strip().splitlines()[-1]) == f"<{line}>"


@pytest.mark.slow  # as above
def test_fish_completes(directory: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")

    def complete(line: str) -> list[str]:
        command = ["fish", "--no-config", "-c", f"source script.fish; complete -C '{line}'"]
        variables = {"PATH": f"{directory / 'bin'}:{os.environ['PATH']}", "HOME": str(directory)}
        done = subprocess.run(command, cwd=directory, env=variables, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    assert complete("postlude compl") == ["completion\tprint the script that completes commands and config keys"]
    assert [line.partition("\t")[0] for line in complete("postlude grpo --optimizer.l")] == ["--optimizer.lr"]
    assert complete("postlude grpo --optimizer.schedule.shape=li") == ["--optimizer.schedule.shape=linear"]
    assert complete("postlude sft my") == ["my run.yaml"]
    assert complete("postlude sft --data.path=my") == ["--data.path=my run.yaml"]

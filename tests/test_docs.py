"""The code and the commands in the documentation work, and its tables match the source.

The blocks of a page run in their order. Each block of the README runs alone.
"""

import ast
import contextlib
import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from postlude.cli import _parse as parsed
from postlude.hf.read_model import read_model
from postlude.layout import Layout
from postlude.recipes.config.load import load
from postlude.recipes.registry import RECIPES

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if "```python" in page.read_text()]


def blocks_of(page: Path, language: str = "python") -> list[tuple[int, str]]:
    """Returns the code blocks of a page: the line before each, and its text."""
    text = page.read_text()
    matches = re.finditer(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(text[: block.start()].count("\n") + 1, block.group(1)) for block in matches]


def ran(page: Path, line: int, block: str, namespace: dict[str, object]) -> None:
    exec(compile("\n" * line + block, str(page), "exec", dont_inherit=True), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_in_the_documentation_runs(page: Path) -> None:
    """A block may use what earlier blocks of its page define."""
    namespace: dict[str, object] = {"__name__": "documentation"}
    for line, block in blocks_of(page):
        ran(page, line, block, namespace)


@pytest.mark.parametrize(
    ("line", "block"), blocks_of(README), ids=lambda value: f"line {value}" if isinstance(value, int) else ""
)
def test_a_block_of_the_readme_runs_when_pasted_alone(
    line: int, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a run writes to it
    ran(README, line, block, {"__name__": "documentation"})


COMMANDS = [
    (page.name, words)
    for page in (README, ROOT / "docs" / "recipes.md")
    for _, block in blocks_of(page, "bash")
    for text in block.splitlines()
    if (words := shlex.split(text, comments=True))[:1] == ["postlude"] and words[1] in RECIPES
    if len(words) > 2 and not words[2].startswith("-") and words[2] not in ("CONFIG.yaml", "my.yaml")
]


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=lambda value: value if isinstance(value, str) else " ".join(value[1:])
)
def test_command_in_the_documentation_is_valid(page: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    load(RECIPES[words[1]].config, Path(words[2]), [word for word in words[3:] if word != "--dry-run"])


@pytest.mark.parametrize(
    ("model", "layout"), [("tiny-dense", "tp=3"), ("tiny-moe", "dp_shard=3,ep=3"), ("tiny-dense", "pp=2,vpp=4")]
)
def test_error_in_the_parallelism_page_equals_the_real_one(model: str, layout: str) -> None:
    with pytest.raises(ValueError, match="cannot") as refused:
        read_model(model)[1].check_layout(Layout.parse(layout))
    assert f"`{refused.value}`" in " ".join((ROOT / "docs" / "parallelism.md").read_text().split())


@pytest.mark.parametrize("page", [README, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name)
def test_full_commands_have_all_required_arguments(page: Path) -> None:
    """Checks commands with arguments; `postlude verify` alone is the name of a command."""
    commands = re.findall(
        r"`(postlude \w+ [^-`][^`]*)`|^(?:\$ )?(postlude \w+ [^-].*)$", page.read_text(), re.MULTILINE
    )
    for command in (" ".join("".join(groups).split()) for groups in commands):
        if "..." not in command and "…" not in command:
            stand_ins = {"N": "8", "T": "8", "RECIPE": "sft"}
            words = [stand_ins.get(word, word) for word in shlex.split(command, comments=True)[1:]]
            with contextlib.suppress(SystemExit) if "--help" in words else contextlib.nullcontext():
                parsed(words)


def test_commands_for_several_nodes_name_their_rendezvous() -> None:
    """torchrun's default backend, static, waits for a node rank and a master that these commands do not give."""
    pages = [README, *(ROOT / "docs").glob("*.md"), *(ROOT / "src" / "postlude" / "configs").rglob("*.yaml")]
    texts = [page.read_text().replace("\\\n", " ") for page in pages]
    commands = [line for text in texts for line in text.splitlines() if "torchrun --nnodes" in line]
    assert len(commands) > 10
    assert [command for command in commands if "--rdzv-backend c10d" not in command] == []


def test_the_objective_in_the_readme_is_the_example() -> None:
    example = (ROOT / "examples" / "objective.py").read_text()
    assert example[example.index("import torch") :] in README.read_text()


def test_the_block_in_the_architecture_is_the_example() -> None:
    example = (ROOT / "examples" / "block.py").read_text()
    block = example[example.index("@dataclass") : example.index("PATTERN = ")].strip()
    assert block in (ROOT / "docs" / "architecture.md").read_text()


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
MOST_LINES_RUN = 7450  # in a step of the demo
READING_PATH = ARCHITECTURE.split("## Reading path", 1)[1].split("\n## ", 1)[0]


def test_files_of_the_reading_path_have_their_stated_length() -> None:
    """To within 10 %."""
    stated = {
        file: int(lines) for file, lines in re.findall(r"\| `([\w/]+\.py)` (?:\| \d+ )?\| (\d+) \| \D", READING_PATH)
    }
    actual = {file: len((ROOT / "src" / "postlude" / file).read_text().splitlines()) for file in stated}
    wrong = {file: lines for file, lines in actual.items() if abs(lines - stated[file]) > 0.1 * lines}
    assert len(stated) > 60
    assert not wrong, f"docs/architecture.md states other numbers of lines for these files: {wrong}"


@pytest.mark.thorough  # 20 s: it runs two steps of the demo with a profiler
def test_the_reading_path_has_the_lines_that_a_step_runs() -> None:
    command = [sys.executable, "-m", "tests.reading_path"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=600)
    run: dict[str, int] = json.loads(ended.stdout[ended.stdout.index("{") :])
    stated = {file: int(lines) for file, lines in re.findall(r"\| `([\w/]+\.py)` \| (\d+) \| \d+ \|", READING_PATH)}
    wrong = {file: lines for file in stated if abs((lines := run.get(file, 0)) - stated[file]) > 15 + 0.1 * lines}
    assert not wrong, f"docs/architecture.md states other numbers of lines run for these files: {wrong}"
    assert [file for file, lines in run.items() if lines >= 60 and file not in stated] == []
    total = sum(run.values())
    assert total <= MOST_LINES_RUN
    for page in (ARCHITECTURE, README.read_text()):
        (lines,) = re.findall(r"runs ([\d,]+) lines of functions", page)
        assert abs(int(lines.replace(",", "")) - total) <= 0.05 * total


def test_every_package_is_in_the_table_of_packages() -> None:
    table = ARCHITECTURE.split("## Packages", 1)[1].split("\n## ", 1)[0]
    source = [path for path in (ROOT / "src" / "postlude").iterdir() if not path.name.startswith(("__", "py.typed"))]
    names = {f"{path.name}/" if path.is_dir() else path.name for path in source}
    assert set(re.findall(r"^\| `([\w./]+)` \|", table, re.MULTILINE)) == names


def test_every_name_in_the_glossary_exists_and_means_one_thing() -> None:
    glossary = ARCHITECTURE.split("## Glossary", 1)[1]
    names = re.findall(r"^\| `(\w+)` \|", glossary, re.MULTILINE)
    assert len(names) == len(set(names)) >= 50
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    words = set(re.findall(r"\w+", source))
    definitions = Counter(re.findall(r"^(?:class (\w+)\b|(\w+)(?:: TypeAlias)? = )", source, re.MULTILINE))
    for name in names:
        assert name in words, f"{name} is in the glossary, but not in src"
        defined = definitions[name, ""] + definitions["", name]
        assert defined == name[0].isupper(), f"{name} is defined {defined} times"


def test_the_glossary_has_the_classes_that_most_files_use() -> None:
    names = set(re.findall(r"^\| `(\w+)` \|", ARCHITECTURE.split("## Glossary", 1)[1], re.MULTILINE))
    classes, files = set(), Counter[str]()
    for path in (ROOT / "src").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        classes |= {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        files.update({node.id for node in nodes if isinstance(node, ast.Name)})
    common = {name for name in classes if files[name] >= 10}
    assert len(common) >= 30
    assert not common - names


def test_architecture_has_a_worked_example_for_each_extension() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for heading in ("## Add a block", "## Add a family", "## Add an objective"):
        section = text.split(heading, 1)[1].split("\n## ", 1)[0]
        assert "```python" in section, heading


@pytest.mark.parametrize(
    "page", [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
)
def test_links_are_valid(page: Path) -> None:
    for target, heading in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if "://" not in target:
            linked_page = page.parent / target if target else page
            assert linked_page.exists(), f"{page.name} links to {target}"
            if heading:
                headings = re.findall(r"^#+ (.*)", linked_page.read_text(), re.MULTILINE)
                slugs = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
                assert heading in slugs, f"{page.name} links to {target}#{heading}"


def test_the_cookbook_shows_the_processors_of_the_examples() -> None:
    """Each has at most 25 lines."""
    cookbook = (ROOT / "docs" / "cookbook.md").read_text()
    paths = sorted((ROOT / "examples" / "peers").glob("*.py"))
    assert len(paths) == 4
    for path in paths:
        assert f"(../examples/peers/{path.name})\n```python\n{path.read_text()}```" in cookbook
        assert len(path.read_text().splitlines()) <= 25

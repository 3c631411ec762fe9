"""In the migration pages, each Postlude name is an existing config key or metric."""

import re
from pathlib import Path

import pytest

from postlude.recipes.config.load import load
from postlude.recipes.config.schema import options
from postlude.recipes.registry import RECIPES
from postlude.recipes.report.metrics import explain

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("from-*.md"))
REQUIRED = {"sft": ["--data.path=x"], "dpo": ["--data.path=x"], "distill": ["--teacher=x"]}
SECTIONS = {  # keys that a kind needs before one of its own can be set
    "environment.reward": ["--environment.kind=dataset", "--environment.path=x"],
    "environment.overlong": ["--environment.kind=dataset", "--environment.path=x", "--environment.reward=math"],
    "environment.kind": [
        f"--environment.{word}" for word in ("path=x", "max_turns=2", "reward=math", "tools=[a.py:b]")
    ],
}


def rows(page: Path) -> list[tuple[str, list[str]]]:
    """Returns the section of each row of a table and the code in its second column."""
    results = []
    for section in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]:
        heading, _, body = section.partition("\n")
        for line in body.splitlines():
            if line.startswith("| ") and not line.startswith("|---"):
                results.append((heading, re.findall(r"`([^`]+)`", line.strip("|").split("|")[1])))
    return results


def names(page: Path) -> list[tuple[str, str]]:
    return [(heading, name) for heading, codes in rows(page) for name in codes]


def test_there_is_a_page_for_each_framework() -> None:
    assert [page.stem for page in PAGES] == ["from-nemo-rl", "from-trl", "from-verl"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_config_key_exists_and_takes_its_value(page: Path) -> None:
    checked = 0
    for heading, code in names(page):
        command = re.search(r"`postlude (\w+)`", heading)
        if command is None:
            continue
        key, _, value = code.partition(": ")
        keys = {option.path for option in options(RECIPES[command[1]].config)}
        assert key in keys, f"{page.name}, {heading}: {key} is no key"
        if value:
            words = [*REQUIRED.get(command[1], []), *SECTIONS.get(key, []), f"--{key}={value}"]
            load(RECIPES[command[1]].config, None, words)
        checked += 1
    assert checked > 40


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_metric_exists(page: Path) -> None:
    metrics = [name for heading, name in names(page) if heading == "Metrics"]
    assert len(metrics) > 15
    for name in metrics:
        assert explain(name) is not None, f"{page.name}: {name} is no metric"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_foreign_setting_is_mapped_twice(page: Path) -> None:
    """A row's first column is one setting; two rows with the same one would contradict each other."""
    for section in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]:
        first = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| ")]
        assert len(first) == len(set(first)), section.partition("\n")[0]

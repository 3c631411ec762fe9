"""The documentation's code runs: every python block of a page, in order, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if "```python" in page.read_text()
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_in_the_documentation_runs(page: Path) -> None:
    text = page.read_text()
    namespace: dict[str, object] = {"__name__": "documentation"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert blocks
    for block in blocks:
        line = text[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block.group(1), str(page), "exec", dont_inherit=True), namespace)


def test_the_objective_in_the_readme_is_the_example() -> None:
    example = (ROOT / "examples" / "objective.py").read_text()
    assert example[example.index("import torch") :] in (ROOT / "README.md").read_text()


def test_architecture_has_a_worked_example_for_each_extension() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for heading in ("## Add a block", "## Add a family", "## Add an objective"):
        section = text.split(heading, 1)[1].split("\n## ", 1)[0]
        assert "```python" in section, heading


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"

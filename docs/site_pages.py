"""A hook of mkdocs: pages that are generated from the source, and links to files outside of docs/.

The README is the home page. Commands and config keys come from the parser and the schema, notebooks become pages, and
a file of the repository that a page links to is copied to source/ of the site. A page of docs/ that the navigation of
mkdocs.yml does not have is put at its end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

import postlude
from postlude.cli import DEMO, DEMO_RECIPE, _parser
from postlude.objectives import __all__ as objective_names
from postlude.recipes import __all__ as recipe_names
from postlude.recipes.config.keys import type_text
from postlude.recipes.config.schema import options
from postlude.recipes.registry import RECIPES

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")
ADVANTAGES = ("grpo", "rloo", "reinforce_plus_plus", "whiten", "gae")
SAMPLING = (
    "protocol.Completion",
    "protocol.Request",
    "session.Session",
)
SHIM, VENDORED_SHIM = "https://unpkg.com/iframe-worker/shim", "vendor/iframe-worker.js"
NOTEBOOKS = (*sorted(ROOT.glob("docs/notebooks/*.ipynb")), *sorted(ROOT.glob("examples/*.ipynb")))
SITE_PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
SITE_PAGES |= {str(path.relative_to(ROOT)): f"notebooks/{path.stem}.md" for path in NOTEBOOKS}


def home() -> str:
    """Returns the README."""
    return (ROOT / "README.md").read_text()


def changelog() -> str:
    """Returns the changelog."""
    return (ROOT / "CHANGELOG.md").read_text()


def commands() -> str:
    """Returns the page of every command, with its help. Fields of recipes are on the page of configs."""
    parser, _ = _parser({**RECIPES, DEMO: DEMO_RECIPE})
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {choice.dest: choice.help for choice in subparsers._choices_actions}
    lines = ["# Commands", "", "`postlude COMMAND --help` prints the same.", ""]
    lines += ["| command | what it does |", "|---|---|"]
    lines += [f"| [`{name}`](#{name}) | {summary} |" for name, summary in helps.items()]
    for name, command in subparsers.choices.items():
        lines += ["", f"## {name}", "", f"{helps[name]}.", ""]
        if command.recipe is not None:
            command.recipe = None  # its fields have a page of their own
            keys = DEMO_RECIPE.command if name == DEMO else name
            lines += [f"Config keys: [{keys}](config.md#{keys}).", ""]
        lines += ["```text", _help(command), "```"]
    return "\n".join(lines) + "\n"


def _help(command: argparse.ArgumentParser) -> str:
    columns, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), "100"
    try:
        return command.format_help().rstrip()
    finally:
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns


def config() -> str:
    """Returns the page of every config key, by recipe."""
    lines = ["# Config keys", "", "Keys of a config file by recipe; `--key value` overrides them. A key in parentheses"]
    lines += ["belongs to that kind of its section. `postlude schema RECIPE` prints a JSON Schema for editors."]
    lines += ["Every key is a link to itself.", ""]
    for name, recipe in RECIPES.items():
        lines += [
            f"## {name}",
            "",
            f"{recipe.help}.",
            "",
            "| key | takes | default | what it is |",
            "|---|---|---|---|",
        ]
        anchors: set[str] = set()
        for option in options(recipe.config):
            kind = f" ({option.kind})" if option.kind else ""
            default = "required" if option.default is MISSING else f"`{json.dumps(option.default, default=str)}`"
            anchor = ".".join(filter(None, (name, option.path, option.kind)))
            target = "" if anchor in anchors else f'<a id="{anchor}"></a>'  # sections of several kinds share keys
            anchors.add(anchor)
            key = f"{target}[`{option.path}`](#{anchor}){kind}"
            cells = [key, type_text(option.node).replace("[", r"\["), default, option.help]
            lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def api() -> str:
    """Returns the page of the public names, which mkdocstrings fills with signatures and docstrings."""
    homes = {name: f"{home}.{name}" for name, home in postlude._HOME.items()}
    lines = [
        "# Python API",
        "",
        "The public names of `postlude`, of `postlude.objectives` and of `postlude.recipes`, and what [a loop of your",
        "own](../own-loop.md) needs to sample.",
        "",
    ]
    advantages = "postlude.objectives.advantages"
    sections = {
        "postlude": [homes[name] for name in postlude.__all__],
        "postlude.objectives": [f"postlude.objectives.{name}" for name in objective_names],
        advantages: [f"{advantages}.{name}" for name in ADVANTAGES],
        "postlude.generate": [f"postlude.generate.{name}" for name in SAMPLING],
        "postlude.recipes": [f"postlude.recipes.api.{name}" for name in recipe_names],
    }
    for heading, names in sections.items():
        lines += [f"## {heading}", ""]
        for name in names:
            lines += [f"::: {name}", ""]
            recipe = {"evaluate": "eval"}.get(name.rpartition(".")[2], name.rpartition(".")[2])
            if heading == "postlude.recipes" and recipe in RECIPES:
                lines += [f"Its keyword arguments are the [config keys of {recipe}](config.md#{recipe}).", ""]
    return "\n".join(lines)


def notebook(path: Path) -> str:
    """Returns a notebook as a page: text, code, and what the code printed."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        outputs = [output.get("data", {}) | output for output in cell.get("outputs", ())]
        printed = "".join(text for output in outputs for text in output.get("text", ()))
        parts += [f"```text\n{printed.rstrip()}\n```"] if printed.strip() else []
        parts += ["".join(output["image/svg+xml"]) for output in outputs if "image/svg+xml" in output]
    here = f"This page is `{path.relative_to(ROOT)}` of the repository. The test suite runs it."
    return "\n\n".join([*parts, here]) + "\n"


def generated_pages() -> dict[str, Callable[[], str]]:
    """Returns the pages that are not files of docs/, by their path in the site."""
    pages = {"index.md": home, "changelog.md": changelog}
    pages |= {"reference/commands.md": commands, "reference/config.md": config, "reference/api.md": api}
    for path in NOTEBOOKS:
        pages[f"notebooks/{path.stem}.md"] = lambda path=path: notebook(path)
    return pages


def links_inside(text: str, page: str) -> tuple[str, set[str]]:
    """Returns a page's text with links that work in the site, and the files of the repository that it links to.

    `page` is its path in the site. A directory has no page, so a link to one becomes its text, and a notebook is a
    page.
    """
    files: set[str] = set()
    base = dirname({place: file for file, place in SITE_PAGES.items()}.get(page, f"docs/{page}"))

    def replaced(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2] or ""
        path = normpath(f"{base}/{target}" if base else target)
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        if path in SITE_PAGES:
            inside = SITE_PAGES[path]
        elif path.startswith("docs/") and not path.endswith(".py"):
            inside = path.removeprefix("docs/")
        elif (ROOT / path).is_file():
            files.add(path)
            inside = f"source/{path}.txt"
        else:
            return "]"
        return f"]({relpath(inside, dirname(page) or '.')}{anchor})"

    outside_of_code = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    parts = [part if part.startswith("```") else LINK.sub(replaced, part) for part in outside_of_code]
    return "".join(parts), files


def on_config(config: Any) -> Any:
    """Adds the pages of docs/ that the navigation does not have, as its last section."""
    listed = re.findall(r"[\w/.-]+\.md", json.dumps(config.nav))
    missing = [path.name for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in listed]
    if missing:
        config.nav.append({"More": missing})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages, and the files of the repository that pages link to."""
    from mkdocs.structure.files import File

    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
    texts = {name: make() for name, make in generated_pages().items()}
    for name, text in texts.items():
        files.append(File.generated(config, name, content=text))
    for name, text in [*texts.items(), *_pages()]:
        for path in links_inside(text, name)[1]:
            uri = f"source/{path}.txt"
            if files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Makes the links of a page work in the site."""
    return links_inside(markdown, page.file.src_uri)[0]


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Lets a page load the copy of the theme's shim that is in the site: search on disk then needs no other host."""
    return output.replace(SHIM, relpath(VENDORED_SHIM, dirname(page.file.dest_uri) or "."))


def on_post_template(output: str, template_name: str, config: Any) -> str:
    """Does the same in pages that are not made from Markdown. A server may show 404.html at any path."""
    return output.replace(SHIM, f"/{VENDORED_SHIM}")


def _pages() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "docs").glob("*.md")):
        yield path.name, path.read_text()

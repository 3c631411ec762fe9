"""The model card: what a model is, what it was made from, how, and what it scores. It is the README.md of an export."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MARK = "<!-- written by postlude: a new export replaces this file; take this line out to keep yours -->"
HUB = re.compile(r"[\w.-]+/[\w.-]+")  # a name on the hub, such as org/model


@dataclass(frozen=True)
class ModelCard:
    """What the caller knows of a model; what the model itself knows is added when it is written."""

    base: str = ""
    """What it was made from: a name on the hub, or a path."""
    how: str = ""
    """How it was made, in a sentence or a command."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What it was trained with, by name."""
    scores: Mapping[str, Any] = field(default_factory=dict)
    """What it was measured to do, by what was measured."""

    def text(self, title: str, facts: Mapping[str, Any], *, library: str = "transformers") -> str:
        """The card as Markdown. `facts` are what the model knows of itself, `library` is what loads it."""
        front = [f"library_name: {library}", "pipeline_tag: text-generation", "tags:", "- postlude"]
        if HUB.fullmatch(self.base):
            front.append(f"base_model: {self.base}")
        parts = ["---", *front, "---", MARK, "", f"# {title}", ""]
        if self.base:
            parts += [f"Made from `{self.base}`.", ""]
        if self.how:
            parts += [self.how, ""]
        for heading, table in (("What it is", facts), ("Training", self.settings), ("Scores", self.scores)):
            if table:
                parts += [f"## {heading}", "", "| | |", "|---|---|"]
                parts += [f"| {_cell(name)} | {_cell(value)} |" for name, value in table.items()]
                parts.append("")
        return "\n".join(parts)


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text.replace("|", "\\|").replace("\n", " ")

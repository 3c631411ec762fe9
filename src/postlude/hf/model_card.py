"""ModelCard: the README.md of an export: what the model is, what it was made from, how, and its scores."""

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
    """The caller's description of a model. Facts from its config are added when the card is written."""

    base: str = ""
    """The model it was made from: a name on the hub, or a path."""
    method: str = ""
    """The way it was made, in a sentence or a command."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Training settings by name."""
    scores: Mapping[str, Any] = field(default_factory=dict)
    """Scores by name."""

    def text(self, title: str, facts: Mapping[str, Any], *, library: str = "transformers") -> str:
        """Returns the card as Markdown. `facts` come from the model's config, `library` loads the model."""
        front = [f"library_name: {library}", "pipeline_tag: text-generation", "tags:", "- postlude"]
        if HUB.fullmatch(self.base):
            front.append(f"base_model: {self.base}")
        parts = ["---", *front, "---", MARK, "", f"# {title}", ""]
        if self.base:
            parts += [f"Made from `{self.base}`.", ""]
        if self.method:
            parts += [self.method, ""]
        for heading, table in (("What it is", facts), ("Training", self.settings), ("Scores", self.scores)):
            if table:
                parts += [f"## {heading}", "", "| | |", "|---|---|"]
                parts += [f"| {_cell(name)} | {_cell(value)} |" for name, value in table.items()]
                parts.append("")
        return "\n".join(parts)


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text.replace("|", "\\|").replace("\n", " ")

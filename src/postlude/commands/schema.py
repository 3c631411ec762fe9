"""`postlude schema`: a recipe's config as JSON Schema, for editors."""

from __future__ import annotations

import argparse
import json

from rich.console import Console

from postlude.checks import check_writable
from postlude.recipes.config.schema import file_schema
from postlude.recipes.registry import RECIPES


def run(options: argparse.Namespace) -> None:
    """Prints the schema, or writes it to a file."""
    console = Console()
    text = json.dumps(file_schema(RECIPES[options.recipe].config), indent=1, ensure_ascii=False) + "\n"
    if options.to is None:
        print(text, end="")
    else:
        check_writable("--to", options.to.parent, "the file")
        options.to.parent.mkdir(parents=True, exist_ok=True)
        options.to.write_text(text, encoding="utf-8")
        console.print(f"schema: {options.to}", markup=False, highlight=False, soft_wrap=True)

"""The thousand-GPU table in docs/scale-out.md equals the output of docs/thousand.py for its layouts."""

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from postlude.layout import Layout
from postlude.plan.forecast import forecast

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def thousand() -> ModuleType:
    spec = importlib.util.spec_from_file_location("thousand", DOCS / "thousand.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "thousand", module)  # where its dataclasses look for it
        spec.loader.exec_module(module)
    return module


def table() -> list[list[str]]:
    """Returns the table's rows: a name, and a cell for each model."""
    lines = (DOCS / "scale-out.md").read_text().partition("## A thousand GPUs on paper")[2].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| |"))
    last = next(number for number, line in enumerate(lines) if number > first and not line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[first:last] if "---" not in line]


@pytest.mark.parametrize("column", [1, 2, 3])
def test_table_in_docs_equals_the_formulas(thousand: ModuleType, column: int) -> None:
    """Except for the search, which takes minutes: that these layouts are the fastest."""
    (_, *names), *written = table()
    by_name = {row[0]: row[column] for row in written}
    shape = next(shape for shape in thousand.SHAPES if shape.name == names[column - 1])
    layout = Layout.parse(by_name["layout (planner)"].strip("`"))
    start = shape.start()
    microbatches = math.ceil(thousand.STEP_TOKENS / (start.options.budget * layout.dp))
    options = replace(start.options, layout=layout, overlap=True)
    train = forecast(replace(start, options=options, microbatches=microbatches))
    assert dict(thousand.rows(thousand.balanced(shape, train, layout.world_size))) == by_name

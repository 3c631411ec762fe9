"""Runs the notebooks of docs/notebooks and stores what their cells print: python docs/run_notebooks.py [NAME...]."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parent / "notebooks"


def run(path: Path) -> dict[str, Any]:
    """Returns the notebook with the printed text of each cell. An exception of a cell is raised."""
    notebook: dict[str, Any] = json.loads(path.read_text())
    namespace: dict[str, Any] = {"__name__": "notebook"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), namespace)
        lines = printed.getvalue().splitlines(keepends=True)
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": lines}] if lines else []
    return notebook


if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())  # notebooks write into the working directory
    for name in sys.argv[1:] or sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")):
        file = NOTEBOOKS / f"{name}.ipynb"
        text = json.dumps(run(file), indent=1, ensure_ascii=False)
        file.write_text(text + "\n")

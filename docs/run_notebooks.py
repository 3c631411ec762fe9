"""Runs notebooks in a kernel and stores what their cells show: python docs/run_notebooks.py [NAME...]."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = {path.stem: path for path in (*ROOT.glob("docs/notebooks/*.ipynb"), *ROOT.glob("examples/*.ipynb"))}
CELL_SECONDS = 600


def run(path: Path, directory: Path) -> Any:
    """Returns the notebook with the outputs of its cells, run in this directory. An exception of a cell is raised."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=CELL_SECONDS, coalesce_streams=True, resources={"metadata": {"path": str(directory)}}
    ).execute()
    for cell in notebook.cells:
        cell.metadata.clear()  # it has times
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]  # of this machine
    return notebook


if __name__ == "__main__":
    for name in sys.argv[1:] or NOTEBOOKS:
        nbformat.write(run(NOTEBOOKS[name], Path(tempfile.mkdtemp())), NOTEBOOKS[name])

"""Run a notebook and store its outputs in it:  python docs/run_notebook.py [docs/notebooks/pandas.ipynb [FOLDER]]

FOLDER is the working directory of its code, by default a temporary one. Needs the extra [notebook].
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent / "notebooks" / "pandas.ipynb"
SECONDS = 3600  # for one cell


def run(path: Path, folder: Path) -> None:
    """Run all cells in `folder`; write the notebook with outputs, without warnings and times, which differ each time.

    Raises:
        CellExecutionError: at the first cell that fails; the file is unchanged.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    # A kernel sends its stream in as many pieces as time makes of it: together, a cell has one of each name.
    NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=resources, coalesce_streams=True).execute()
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, path)


if __name__ == "__main__":
    named = [Path(argument) for argument in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as temporary:
        run(named[0] if named else NOTEBOOK, named[1] if named[1:] else Path(temporary))

"""The notebook of the examples runs from top to bottom, and what is committed of its outputs is small."""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "explore.ipynb"


def test_the_notebook_runs() -> None:
    """Every cell executes and shows what it did when it was committed: the same kinds of output, the same plan."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    committed, notebook = (nbformat.read(NOTEBOOK, as_version=4) for _ in range(2))
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    for before, after in zip(committed.cells, notebook.cells, strict=True):
        if after.cell_type == "code":
            kinds = [[output.output_type for output in cell.outputs] for cell in (before, after)]
            assert kinds[0] == kinds[1], after.source
    texts = [
        [o.text for cell in book.cells for o in cell.get("outputs", ()) if "text" in o]
        for book in (committed, notebook)
    ]
    assert texts[0] == texts[1]


def test_the_notebook_is_small() -> None:
    """Committed with its outputs, under 400 kB."""
    assert NOTEBOOK.stat().st_size < 400_000

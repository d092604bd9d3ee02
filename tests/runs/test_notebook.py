"""The notebook of the documentation runs: progress, figures and the report are readable there."""

import math
import os
import sys
from pathlib import Path

import pytest

from tests.lib.run_support import go

NOTEBOOK = Path(__file__).parents[2] / "docs" / "how-to" / "notebook.ipynb"

SMALL = """import pytest
from tests.lib.run_support import small_library
small_library(pytest.MonkeyPatch())"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_notebook_of_the_documentation_runs(monkeypatch):
    import nbclient  # noqa: PLC0415 - seconds, of every process that collects tests
    import nbformat  # noqa: PLC0415

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(SMALL))
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    _, first, table, more, shown = (cell.outputs for cell in notebook.cells if "outputs" in cell)
    (drawn,) = [each.data["text/plain"] for each in first if each.output_type == "display_data"]
    assert drawn.startswith("█")  # one line, drawn anew
    assert "step 8/8  loss" in drawn
    printed = "".join(each.text for each in first if each.output_type == "stream")
    assert "step 4/8  held out: loss" in printed
    assert "step 3/8" not in printed
    assert "eval_loss" in table[0].data["text/html"]
    (value,) = [each for each in more if each.output_type == "execute_result"]
    assert 0 < float(value.data["text/plain"]) < math.log(258)
    assert "FinishedRun" in shown[0].data["text/plain"]


def test_metrics_are_a_frame_with_a_row_for_each_step():
    run = go("steps=3 eval.every=2")
    frame = run.metrics
    assert frame.index.tolist() == [1, 2, 3]
    assert frame["loss"].notna().all()
    assert frame["eval_loss"].notna().tolist() == [False, True, True]
    assert frame["eval_loss"].iloc[-1] == run.result["eval_loss"]
    assert 'sandbox="allow-scripts"' in run._repr_html_()

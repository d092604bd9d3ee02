"""An error in the user's code is shown where it is theirs, with its causes, on one line."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from trainer.core.user_code import described, excerpt, place_of

SOURCE = """
import torch

def shapes(ids):
    head = torch.nn.Linear(3, 4)
    wide = torch.ones(2, 5)
    return head(wide)

def chained():
    try:
        {}["width"]
    except KeyError as error:
        raise ValueError("no width") from error

def hidden():
    try:
        {}["width"]
    except KeyError:
        raise ValueError("no width") from None
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "own_faults.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_faults", raising=False)  # another test's
    module: ModuleType = pytest.importorskip("own_faults")
    monkeypatch.delitem(sys.modules, "own_faults")
    return module


def test_an_error_of_a_library_names_the_users_line_and_the_shapes_there(own):
    with pytest.raises(RuntimeError) as caught:
        own.shapes(torch.zeros(2, 5, dtype=torch.int64))
    error = caught.value.with_traceback(caught.tb.tb_next)
    assert place_of(error) == " (own_faults.py:7)"
    *lines, shapes = excerpt(error).splitlines()
    assert lines == [f'  File "{own.__file__}", line 7, in shapes', "    return head(wide)"]
    assert shapes == "  with ids (2, 5) int64, wide (2, 5) float32"


def test_causes_are_told_from_what_was_silenced(own):
    with pytest.raises(ValueError, match="no width") as caught:
        own.chained()
    assert described(caught.value.with_traceback(caught.tb.tb_next)) == (
        "ValueError: no width (own_faults.py:13); caused by KeyError: 'width' (own_faults.py:11)"
    )
    with pytest.raises(ValueError, match="no width") as caught:
        own.hidden()
    assert "caused by" not in described(caught.value)


def test_where_no_code_of_the_user_ran_there_is_no_place():
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    error = caught.value.with_traceback(caught.tb.tb_next)
    assert (place_of(error), excerpt(error)) == ("", "")
    assert described(error).startswith("JSONDecodeError: Expecting")

"""What a mistake is answered with, as a terminal shows it: the tables beside this file.

Each section of a table has lines as they are typed, `$ train ...`, and below each line all that is
answered, without its `train: error: `. `...` stands for anything, as in doctest, and `[3]` for an
exit code other than 2, as in cram. What `with` has is typed too, where a line says nothing else of
it; `toys: true` is the small run of `tests/lib/run_support.py`. `files` are there, and what the
function `folder` makes. No line leaves anything behind.
"""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lib.nightly import nightly
from tests.lib.run_support import BASE, overrides
from trainer.cli.main import run

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)

LONGEST = 300
"""Characters of a line that is answered, so that it can be read at once."""

ERROR = "train: error: "
PROGRESS = "Loading weights"  # transformers' own bar


def sections() -> list[Any]:
    """All sections of all tables; those that take seconds are for the night."""
    found = []
    for path in sorted(Path(__file__).parent.glob("*.yaml")):
        for name, section in yaml.safe_load(path.read_text()).items():
            is_long = section.get("nightly", False)
            values = nightly(section) if is_long else pytest.param(section)
            found.append(pytest.param(*values.values, marks=values.marks, id=f"{path.stem}-{name}"))
    return found


def lines_of(answers: str) -> list[tuple[str, str]]:
    """What is typed, and what is shown."""
    blocks = re.split(r"^\$ train ?", answers, flags=re.MULTILINE)[1:]
    pairs = (block.partition("\n") for block in blocks)
    return [(typed, shown.strip()) for typed, _, shown in pairs]


def argv_of(typed: str, section: dict[str, Any]) -> list[str]:
    """The words of a line, and those that all lines of its section have."""
    usual = overrides(section.get("with", ""), BASE if section.get("toys") else {})
    base = dict(word.split("=", 1) for word in usual)
    return overrides(typed, base) if base else shlex.split(typed)


def answer(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command line shows, as the tables have it."""
    capsys.readouterr()
    code = run(argv)
    here = str(Path.cwd())
    lines = capsys.readouterr().err.replace(f"{here}/", "").replace(here, ".").splitlines()
    shown = [line.removeprefix(ERROR) for line in lines if line and not line.startswith(PROGRESS)]
    assert code
    assert any(line.startswith(ERROR) for line in lines), lines
    assert all(len(line) <= LONGEST for line in shown), shown
    return "\n".join(shown if code == 2 else [*shown, f"[{code}]"])


def is_as(pattern: str, shown: str) -> bool:
    """Whether a text is a pattern's, in which `...` stands for anything."""
    expected = ".*".join(map(re.escape, pattern.split("...")))
    return re.fullmatch(expected, shown, re.DOTALL) is not None


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("section", sections())
def test_a_line_is_answered_as_the_table_says_and_leaves_nothing(
    section: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("WANDB_MODE", "WORLD_SIZE", "TRAIN_RECIPES", "HYDRA_FULL_ERROR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text in section.get("files", {}).items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    if "folder" in section:
        module, _, name = section["folder"].rpartition(".")
        getattr(importlib.import_module(module), name)(Path.cwd())
    before = sorted(Path().rglob("*"))
    others = []
    for typed, expected in lines_of(section["answers"]):
        shown = answer(argv_of(typed, section), capsys)
        if not is_as(expected, shown):
            others.append(f"$ train {typed}\n{shown}")
    assert not others, "\n".join(["these are answered otherwise:", *others])
    after = [path for path in sorted(Path().rglob("*")) if "__pycache__" not in path.parts]
    assert after == before

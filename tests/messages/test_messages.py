"""What a mistake is answered with, as a terminal shows it: the tables beside this file.

Each section of a table has lines as they are typed, `$ train ...`, and below each line all that is
answered, without its `train: error: `. `...` stands for anything, as in doctest, and `[3]` for an
exit code other than 2, as in cram. What `with` has is typed too, where a line says nothing else of
it; `toys: true` is the small run of `tests/lib/run_support.py`. `files` are there, and what the
function `folder` makes; `slow: true` is their tier. No line leaves anything behind.
"""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lib.nightly import nightly, slow
from tests.lib.run_support import BASE, overrides
from tests.messages import folders
from trainer.cli.main import run

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)

LONGEST = 450
"""Characters of a line that is answered, so that it can be read at once."""

ERROR = "train: error: "
# Transformers' own bar, and notes of what takes longer than a few seconds
PROGRESS = ("Loading weights", "train: comparing ")


SECTIONS = {
    f"{path.stem}-{name}": section
    for path in sorted(Path(__file__).parent.glob("*.yaml"))
    for name, section in yaml.safe_load(path.read_text()).items()
}
TIERS = {"slow": slow, "nightly": nightly}
"""The key of a section whose lines build models, or are rare."""


def tiered(name: str) -> Any:
    return next((mark(name) for tier, mark in TIERS.items() if SECTIONS[name].get(tier)), name)


NAMES = [*map(tiered, SECTIONS)]


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
    """What a command line shows, as the tables have it; what is no line of ours has a `?`."""
    capsys.readouterr()
    code = run(argv)
    here = str(Path.cwd())
    lines = capsys.readouterr().err.replace(f"{here}/", "").replace(here, ".").splitlines()
    shown = []
    for line in lines:
        if line and not line.startswith(PROGRESS):
            shown.append(line.removeprefix(ERROR) if line.startswith("train: ") else f"? {line}")
    assert all(len(line) <= LONGEST for line in shown), shown
    return "\n".join(shown if code == 2 else [*shown, f"[{code}]"])


def is_as(pattern: str, shown: str) -> bool:
    """Whether a text is a pattern's, in which `...` stands for anything."""
    expected = ".*".join(map(re.escape, pattern.split("...")))
    return re.fullmatch(expected, shown, re.DOTALL) is not None


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("name", NAMES)
def test_a_line_is_answered_as_the_table_says_and_leaves_nothing(name, monkeypatch, capsys):
    section = SECTIONS[name]
    for variable in ("WANDB_MODE", "WORLD_SIZE", "TRAIN_RECIPES", "HYDRA_FULL_ERROR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for file, text in section.get("files", {}).items():
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(text)
    if "folder" in section:
        getattr(folders, section["folder"])(Path.cwd())
    before = sorted(Path().rglob("*"))
    lines, others = lines_of(section["answers"]), []
    assert lines
    for typed, expected in lines:
        shown = answer(argv_of(typed, section), capsys)
        if not is_as(expected, shown):
            others.append(f"$ train {typed}\n{shown}")
    assert not others, "\n".join(["these are answered otherwise:", *others])
    after = [path for path in sorted(Path().rglob("*")) if "__pycache__" not in path.parts]
    assert after == before


def test_an_answer_that_is_another_is_seen():
    shown = "seed=-1: must be a whole number, e.g. 0"
    assert is_as(shown, shown)
    assert is_as("seed=-1: must be ... 0", shown)
    assert not any(
        is_as(other, shown) for other in ("", "seed=-1: must be", "...1", f"{shown}\n[3]")
    )

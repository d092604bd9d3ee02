"""The house rules, held by the tools that check them: lint, format, types, import layers, size."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent
ROOMS = sorted((CHECKOUT / "trainer").rglob("*.py"))
LONGEST_FILE = 400

TOOLS = {
    "ruff check": [sys.executable, "-m", "ruff", "check", "."],
    "ruff format": [sys.executable, "-m", "ruff", "format", "--check", "."],
    "mypy": [sys.executable, "-m", "mypy"],
    "import-linter": [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())",
    ],
}


@pytest.mark.parametrize("tool", TOOLS)
def test_the_house_rules_hold(tool):
    done = subprocess.run(TOOLS[tool], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("room", ROOMS, ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_a_room_is_small_and_says_what_it_is_for(room):
    text = room.read_text()
    assert len(text.splitlines()) <= LONGEST_FILE
    assert text == "" or text.startswith('"""')


PICKLES = "pickle|cPickle|dill|cloudpickle|marshal|shelve|joblib"
RUNS_WHAT_IT_READS = (
    rf"^\s*(import|from) ({PICKLES})\b|\btorch\.(load|save)\(|\byaml\.(unsafe_)?load\("
    r"|(?<![\w.])(eval|exec)\(|weights_only=False|shell=True"
)


@pytest.mark.parametrize(
    ("pattern", "example", "allowed"),
    [
        (r"\.item\(\)", "loss.item()", "report"),  # a host sync
        (RUNS_WHAT_IT_READS, "import pickle", None),
        (RUNS_WHAT_IT_READS, "x = torch.load(f)", None),
        (RUNS_WHAT_IT_READS, "eval('1')", None),
        (r"\bTODO\b|\bFIXME\b", "# TODO", None),
    ],
)
def test_what_has_no_place_is_nowhere(pattern, example, allowed):
    assert re.search(pattern, example)
    found = [
        f"{room.relative_to(CHECKOUT)}: {line.strip()}"
        for room in ROOMS
        for line in room.read_text().splitlines()
        if re.search(pattern, line) and room.parent.name != allowed
    ]
    assert not found


def test_no_room_is_a_drawer_for_everything():
    assert not [room for room in ROOMS if room.stem in {"utils", "util", "helpers", "misc"}]

"""The house rules, held by the tools that check them: lint, format, types, import layers, size."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib import ratchets
from tests.lib.walk import files_naming, files_of_a_sample

CHECKOUT = Path(__file__).parent.parent
FILES = {
    str(path.relative_to(CHECKOUT)): path.read_text()
    for path in sorted((CHECKOUT / "trainer").rglob("*.py"))
}
LONGEST_FILE = 400
SLACK = 0.96  # of a limit, below which it is to be lowered

TOOLS = {
    "ruff check": ["-m", "ruff", "check", "."],
    "ruff format": ["-m", "ruff", "format", "--check", "."],
    "mypy": ["-m", "mypy"],
    "import-linter": ["-c", "from importlinter.cli import lint_imports as l; exit(l())"],
}


@pytest.mark.parametrize("tool", TOOLS)
def test_the_house_rules_hold(tool):
    argv = [sys.executable, *TOOLS[tool]]
    done = subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_every_file_is_small_says_what_it_is_for_and_is_no_drawer_for_everything():
    drawers = {"utils", "util", "helpers", "misc"}
    assert not [name for name in FILES if Path(name).stem in drawers]
    assert not [name for name, text in FILES.items() if len(text.splitlines()) > LONGEST_FILE]
    assert not [name for name, text in FILES.items() if text and not text.startswith('"""')]


def test_what_may_only_fall_does_not_rise():
    """Figures that fell far are to be written down, by `python -m tests.lib.ratchets`."""
    limits, now = json.loads(ratchets.RATCHETS.read_text()), ratchets.measured()
    for kind, figures in now.items():
        for name, figure in figures.items():
            limit = limits[kind].get(name, ratchets.MOST_IMPORTS)
            assert figure <= limit, f"{kind} {name}: {figure} is above {limit}"
            assert figure >= SLACK * limit, (
                f"{kind} {name}: {figure} is far below {limit}: lower it"
            )
        assert limits[kind].keys() <= figures.keys(), "take out what is gone"


PICKLES = "pickle|cPickle|dill|cloudpickle|marshal|shelve|joblib"
RUNS_WHAT_IT_READS = (
    rf"^\s*(import|from) ({PICKLES})\b|\btorch\.(load|save)\(|\byaml\.(unsafe_)?load\("
    r"|(?<![\w.])(eval|exec)\(|weights_only=False|shell=True"
)


@pytest.mark.parametrize(
    ("pattern", "examples", "allowed"),
    [
        (r"\.item\(\)", ["loss.item()"], "trainer/report"),  # a host sync
        (RUNS_WHAT_IT_READS, ["import pickle", "x = torch.load(f)", "eval('1')"], " "),
        (r"\btorch\.cuda\b", ["torch.cuda.Event()"], "trainer/core/gpu.py"),
        (r"\bTODO\b|\bFIXME\b", ["# TODO"], " "),
    ],
)
def test_what_has_no_place_is_nowhere(pattern, examples, allowed):
    assert all(re.search(pattern, example) for example in examples)
    texts = {name: text for name, text in FILES.items() if not name.startswith(allowed)}
    assert not [name for name, text in texts.items() if re.search(pattern, text, re.MULTILINE)]


def test_few_of_hydras_private_names_are_used():
    lines = [line for text in FILES.values() for line in text.splitlines()]
    assert len([line for line in lines if "hydra._internal" in line]) <= 4


def test_a_value_and_a_sample_pass_few_files():
    assert len(files_naming("global_batch")) <= 8, "from the config to the optimizer"
    assert len(files_of_a_sample()) <= 16, "in one step, from reading to loss"

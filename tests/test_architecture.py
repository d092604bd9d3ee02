"""The house rules, held by the tools that check them: lint, format, types, import layers, size."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.walk import files_naming, files_of_a_sample

CHECKOUT = Path(__file__).parent.parent
FILES = {
    str(path.relative_to(CHECKOUT)): path.read_text()
    for path in sorted((CHECKOUT / "trainer").rglob("*.py"))
}
LONGEST_FILE = 400
MOST_IMPORTS = 15  # modules of ours that one imports; numbers of the exceptions may only fall
MORE_IMPORTS = {
    "trainer/assemble/components.py": 33,
    "trainer/assemble/tuning.py": 25,
    "trainer/cli/main.py": 16,
    "trainer/training/window.py": 17,
    "trainer/assemble/run.py": 16,
    "trainer/commands/train.py": 16,
    "trainer/commands/verify_sync.py": 17,
}

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


def imported(text):
    """Name the modules of ours that a file imports, also within functions."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("trainer."):
            path = node.module.replace(".", "/")
            inner = {f"{path}/{alias.name}.py" for alias in node.names} & FILES.keys()
            yield from inner or {f"{path}.py"}


def test_a_module_imports_few_of_ours():
    counts = {name: len(set(imported(text))) for name, text in FILES.items()}
    more = {name: count for name, count in counts.items() if count > MOST_IMPORTS}
    assert more == MORE_IMPORTS, "lower the numbers of those that fell, and take out the others"


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

"""The house rules, held by the tools that check them: lint, format, types, import layers, size."""

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.lib import ratchets
from tests.lib.nightly import slow
from tests.lib.walk import files_naming, files_of_a_sample

FILES = ratchets.sources()
SLACK = 0.96  # of a limit, below which it is to be lowered

TOOLS = {
    "ruff check": ["-m", "ruff", "check", "."],
    "ruff format": ["-m", "ruff", "format", "--check", "."],
    "mypy": ["-m", "mypy"],  # 27 s of a processor; faster ones miss what it finds
    "import-linter": ["-c", "from importlinter.cli import lint_imports as l; exit(l())"],
}


@pytest.mark.parametrize("tool", [slow(t) if t == "mypy" else t for t in TOOLS])
def test_the_house_rules_hold(tool):
    argv = [sys.executable, *TOOLS[tool]]
    done = subprocess.run(argv, cwd=ratchets.CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_every_file_is_small_says_what_it_is_for_and_is_no_drawer_for_everything():
    drawers = {"utils", "util", "helpers", "misc"}
    assert not [name for name in FILES if Path(name).stem in drawers]
    assert not [name for name, text in FILES.items() if len(text.splitlines()) > 400]
    assert not [name for name, text in FILES.items() if text and not text.startswith('"""')]


def test_what_may_only_fall_does_not_rise():
    """Figures that fell far are to be written down, by `python -m tests.lib.ratchets`."""
    limits, now = json.loads(ratchets.RATCHETS.read_text()), ratchets.measured()
    for kind, figures in now.items():
        for name, figure in figures.items():
            limit = limits[kind].get(name, ratchets.MOST_IMPORTS)
            assert figure <= limit, f"{kind} {name}: {figure} is above {limit}"
            assert figure >= SLACK * limit, f"{kind} {name}: {figure} is far below {limit}"
        assert limits[kind].keys() <= figures.keys(), "take out what is gone"


SAME_NAME = {
    "Auto": "YAML names both by path: a mode of BatchNorm, and a cut",
    "main": "how a process begins: the command line's, and a rank's",
    "run": "a command line, and one job of it",
    "train": "what Python imports, and the loop over steps",
}


def public_names(text):
    """Name the functions, classes, aliases and constants at the top of a module."""
    names = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                each = target.elts if isinstance(target, ast.Tuple) else [target]
                names |= {part.id for part in each if isinstance(part, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def test_a_public_name_names_one_thing():
    counts = Counter(name for text in FILES.values() for name in public_names(text))
    assert {name for name, count in counts.items() if count > 1} == SAME_NAME.keys()


VAGUE = {
    *("told", "said", "heard", "held", "alike", "spread", "dealt", "settle", "kept", "untouched"),
    *("bare", "modest", "leaves", "meet", "imagined", "lookout", "pulse", "private", "saves"),
    *("kit", "news", "alone", "lowered", "bulk", "board"),
}
OF_LIBRARIES = {"tree_leaves", "PrivateAttr", "TensorBoardTracker"}


def identifiers(text):
    """Give every name that a module defines or uses, of attributes, arguments and imports too."""
    for node in ast.walk(ast.parse(text)):
        for field in ("name", "id", "attr", "arg", "asname"):
            if isinstance(name := getattr(node, field, None), str):
                yield name


def vague(name):
    """Whether a part of a name is a word that says little; `held_out` is the field's."""
    parts = re.sub("held_?out", "", name, flags=re.IGNORECASE)
    words = re.sub(r"([a-z])([A-Z])", r"\1_\2", parts).lower()
    return not VAGUE.isdisjoint(re.split(r"[_./]", words)) and name not in OF_LIBRARIES


def test_names_say_what_a_thing_is():
    assert vague("is_alone")
    assert vague("KeptRows")
    assert not vague("num_held_out")
    names = {name for text in FILES.values() for name in identifiers(text)}
    assert not sorted(filter(vague, {*names, *FILES}))


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


def test_no_run_is_a_part_of_the_project():
    listed = ["git", "ls-files", "outputs"]
    done = subprocess.run(listed, cwd=ratchets.CHECKOUT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["outputs/.gitignore"]

"""What TAB makes of a line in bash, zsh and fish: the words that a program then gets."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import pytest

from tests.lib.cli_support import CHECKOUT
from tests.lib.nightly import nightly
from trainer.cli.completion import offers, quoted, split_line
from trainer.cli.compose import Composer

SHELLS = {"bash": ["--norc", "--noprofile"], "zsh": ["-f"], "fish": ["--no-config"]}
INSTALL = {
    "bash": 'eval "$({} -m trainer --shell-completion install=bash)"',
    "zsh": 'eval "$({} -m trainer --shell-completion install=zsh)"',
    "fish": "{} -m trainer --shell-completion install=fish | source",
}
TYPED = {
    "./x": "./x$(touch PWN).jsonl",
    "./y": "./y`touch PWN`;touch PWN",
    "./fo": "./folder $(touch PWN)",
    "./s": "./say 'a' \"b\" & c.txt",
    "./é": "./é*.txt",
}
"""What is typed behind `data.path=`, and the name that there is."""
PATIENCE_S = 60


def completed(shell: str, lines: list[str], folder: Path) -> list[list[str]]:
    """Give the words of each line, typed with a TAB at its end, as a program gets them."""
    program, got = folder / "bin" / "train", folder / "got"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport sys\nopen('{got}', 'a').write(repr(sys.argv) + '\\n')\n"
    )
    program.chmod(0o755)
    environ = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "TERM": "xterm"}
    environ |= {"PYTHONPATH": str(CHECKOUT), "TRAIN_RECIPES": str(folder / "recipes")}
    environ |= {"HOME": str(folder / "bin"), "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
    child = pexpect.spawn(shell, SHELLS[shell], env=environ, cwd=str(folder / "work"))
    try:
        child.sendline(INSTALL[shell].format(sys.executable))
        for number, line in enumerate(lines, start=1):
            child.send(f"train {line}\t")
            child.send("\r")
            until = time.monotonic() + PATIENCE_S
            while not got.exists() or got.read_text().count("\n") < number:
                assert time.monotonic() < until, child.read_nonblocking(100_000, 1)
                time.sleep(0.05)
    finally:
        child.close(force=True)
    return [eval(line)[1:] for line in got.read_text().splitlines()]


OFFERED = [
    ("train pl", ["plan"], False),
    ("train -m pl", ["plan"], False),
    ("train batch.global=4  pl", ["plan"], False),
    ("train  plan accum=", ["accum=auto", "accum=fixed"], True),
    ("train steps=5 plan ", ["steps=", "data="], True),
    ("train plan data.path='a b' st", ["steps="], True),
    ("train report ", ["run=", "to=", "outputs="], False),
    ("train report run=./a t", ["to="], False),
    ("train report run=./fo", ["run=./folder"], False),
    ("train data.path=.", ["data.path=./folder", "data.path=./file"], False),
    ("train data.path=./none/", [], False),
]
"""Lines, what is offered, and whether more is."""


def test_a_command_is_offered_anywhere_and_report_what_it_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").touch()
    with Composer.of().open() as hydra:
        for line, found, others in OFFERED:
            given = offers(split_line(line)[0][1:], hydra)
            assert {*found} <= {*given} if others else {*found} == {*given}, line
            assert not ("plan" in line and {"plan", "verify"} & {*given} - {*found}), line


@pytest.mark.parametrize("quote", ["", "'", '"'])
def test_bash_reads_back_what_is_offered(quote):
    names = [*TYPED.values(), "a\\b", "~x", "[a]", "{0: 64}", "a=b c"]
    typed = [f"{quote}{quoted(name, quote)}{quote}" for name in names]
    script = " ".join(["printf", r"'%s\n'", *typed])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == names


def test_a_line_is_split_as_a_shell_does_it():
    for line, found in {
        "train ": (["train", ""], ""),
        "train a=./b\\ c": (["train", "a=./b c"], ""),
        "train a=./b\\ ": (["train", "a=./b "], ""),
        "train 'a b' c=\"d 'e": (["train", "a b", "c=d 'e"], '"'),
        "train c='d \"e": (["train", 'c=d "e'], "'"),
    }.items():
        assert split_line(line) == found


@pytest.mark.parametrize(
    ("shell", "typed"),
    [
        ("bash", ["./x"]),
        nightly("bash", [*TYPED]),
        nightly("zsh", [*TYPED]),
        nightly("fish", [*TYPED]),
    ],
)
def test_no_name_of_a_file_is_run(shell, typed, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    work = tmp_path / "work"
    for name in TYPED.values():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).mkdir() if "folder" in name else (work / name).touch()
    recipe = "mine$(touch PWN)"
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / f"{recipe}.yaml").write_text("steps: 1\n")
    lines = [f"plan steps=1 data.path={each}" for each in typed]
    found = completed(shell, [*lines, "recipe=min"], tmp_path)
    assert found == [
        *(["plan", "steps=1", f"data.path={TYPED[each]}"] for each in typed),
        [f"recipe={recipe}"],
    ]
    assert not [*tmp_path.rglob("PWN")]

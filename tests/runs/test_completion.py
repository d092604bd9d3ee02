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
NAMES = {
    "data.path=./x": "./x$(touch PWN).jsonl",
    "data.path=./y": "./y`touch PWN`;touch PWN",
    "data.path=fo": "folder $(touch PWN)/",
    "data.path=./s": "./say 'a' \"b\" & c.txt",
    "data.path=./é": "./é*.txt",
    "rm ru": "run$(touch PWN)",
    "evaluate run=ru": "run$(touch PWN)",
}
"""What is typed, and the name that there is, of a file, a folder or a run."""
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
    ("train  plan accum=", ["accum=auto", "accum=budget", "accum=fixed"], False),
    ("train steps=5 plan ", ["steps=", "data="], True),
    ("train plan data.path='a b' st", ["steps="], True),
    ("train batch.golbal=5 plan stop.me", ["stop.metric="], False),
    ("train report ", ["run=", "to=", "outputs="], False),
    ("train report run=./a t", ["to="], False),
    ("train report run=./fo", ["run=./folder/"], False),
    ("train data.path=.", ["data.path=.hidden"], False),
    ("train data.path=./", ["data.path=./folder/", "data.path=./file", "data.path=./~"], True),
    ("train data=text data.path=fi", ["data.path=file"], False),
    ("train recipe=fi", ["recipe=file"], False),
    ("train outputs=f", ["outputs=folder/"], False),
    ("train init=~", [], False),
    ("train data.path=./none/", [], False),
    ("train precision=f", ["precision=fp16", "precision=fp32"], False),
    ("train -m precision=fp32,b", ["precision=fp32,bf16"], False),
    ("train compile=", ["compile=false", "compile=true"], False),
    ("train model=hf model.task=q", ["model.task=question_answering"], False),
    ("train optimizer=sgd optimizer.nesterov=", ["optimizer.nesterov=true"], True),
    ("train logger=[wandb,t", ["logger=[wandb,tensorboard"], False),
    ("train run=", ["run=auto", "run=mine", "run=1-mine", "run=swept/", "run=sweep/"], False),
    ("train evaluate run=swept/", ["run=swept/0"], False),
    ("train report run=mine,s", ["run=mine,swept", "run=mine,sweep"], False),
    ("train rm ", ["mine", "1-mine", "2-plan", "swept", "sweep", "yes=", "outputs="], False),
    ("train rm mine s", ["swept", "sweep"], False),
    ("train rm mine yes=", ["yes=false", "yes=true"], False),
    ("train ls sort=m", ["sort=metric"], False),
]
"""Lines, what is offered, and whether more is."""


def test_words_paths_and_runs_are_offered_where_they_may_stand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for name in ("file", "~", ".hidden"):
        Path(name).touch()
    for name, text in {
        "outputs/day/1-mine/config.yaml": "command: train\nname: mine\n",
        "outputs/day/2-plan/config.yaml": "command: plan\nname: null\n",
        "outputs/sweep/multirun.yaml": "",
        "outputs/sweep/0/config.yaml": "command: train\nname: swept\n",
    }.items():
        Path(name).parent.mkdir(parents=True)
        Path(name).write_text(text)
    for line, found, others in OFFERED:
        given = offers(split_line(line)[0][1:], Composer.of())
        assert {*found} <= {*given} if others else {*found} == {*given}, line
        assert not ("plan" in line and {"plan", "verify"} & {*given} - {*found}), line


@pytest.mark.parametrize("quote", ["", "'", '"'])
def test_bash_reads_back_what_is_offered(quote):
    names = [*NAMES.values(), "a\\b", "~x", "[a]", "{0: 64}", "a=b c"]
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
        ("bash", ["data.path=./x", "rm ru"]),
        nightly("bash", [*NAMES]),
        nightly("zsh", [*NAMES]),
        nightly("fish", [*NAMES]),
    ],
)
def test_no_name_of_a_file_or_a_run_is_code(shell, typed, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    work = tmp_path / "work"
    for name in NAMES.values():
        path = work / name
        if "run" in name:
            path = work / "outputs" / name / "config.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if name.endswith("/") else path.touch()
    recipe = "mine$(touch PWN)"
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / f"{recipe}.yaml").write_text("steps: 1\n")
    expected = [[f"recipe={recipe}"]]
    for each in reversed(typed):
        *command, last = each.split()
        key, equals, _ = last.rpartition("=")
        expected.insert(0, [*command, f"{key}{equals}{NAMES[each]}"])
    assert completed(shell, [*typed, "recipe=min"], tmp_path) == expected
    assert not [*tmp_path.rglob("PWN")]

"""What README.md and docs/ say: their code is the source's, and their commands run."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import textwrap
from pathlib import Path

import pytest

from tests.lib.cli_support import CHECKOUT
from tests.lib.hf_toys import save_job_files
from tests.lib.run_support import shell, small_library

README = (CHECKOUT / "README.md").read_text()
EXTENDING = (CHECKOUT / "docs" / "extending.md").read_text()
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]
SHORT = ["steps=2", "batch.global=8", "wandb.mode=disabled", "device=cpu"]
TINY = ["data.max_length=32", "model.width=16", "model.num_heads=2", "model.num_layers=1"]
TEXT = ["data=text", "data.path=corpus.jsonl", "data.field=body"]
PLAIN = {"evaluate", "export"}
"""Commands that read a run and take none of its settings."""


def blocks(text: str, language: str) -> list[str]:
    """Give the fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)


def commands(text: str) -> list[list[str]]:
    """Give what is typed behind `train` in a page's shell blocks."""
    lines = [line for block in blocks(text, "sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("train ")]


def shortened(line: list[str]) -> list[str]:
    """Make a command small; one that reads a run takes that run's settings."""
    if line[0] in PLAIN or line[0].startswith("resume"):
        return line
    mine = [word.replace("=128,256", "=8") for word in line]
    is_sweep = line[0] == "-m"
    mine = [
        w for w in mine if w.partition("=")[0] not in {"steps", "" if is_sweep else "batch.global"}
    ]
    keys = {word.partition("=")[0] for word in mine}
    has_own_size = {"model._target_", "model.path"} & keys
    small = SHORT if has_own_size else [*SHORT, *TINY, *(TEXT if is_sweep else [])]
    return [*mine, *(word for word in small if word.partition("=")[0] not in keys)]


def test_the_readme_is_short_and_leads_to_files_that_are_there():
    assert len(README.splitlines()) <= 170
    assert len(README.encode()) <= 10_000
    named = re.findall(r"`(trainer/[\w/]+\.py)`", README)
    assert len(named) >= 5
    assert all((CHECKOUT / name).is_file() for name in named)
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_loop_in_the_readme_is_the_source():
    (loop,) = (block for block in blocks(README, "python") if "loss.backward()" in block)
    source = (CHECKOUT / "trainer" / "accumulate" / "sum.py").read_text()
    assert loop in source or textwrap.indent(loop, " " * 8) in source


@pytest.mark.filterwarnings("ignore::DeprecationWarning:datasets")
@pytest.mark.usefixtures("own_folder")
def test_the_commands_of_the_readme_run_one_after_the_other(monkeypatch):
    monkeypatch.syspath_prepend(str(Path.cwd()))
    save_job_files()
    Path("corpus.jsonl").write_text(
        "".join(json.dumps({"body": f"{n} words " * 9}) + "\n" for n in range(200))
    )
    Path("README.md").write_text(README)
    small_library(monkeypatch)
    (own,) = (block for block in blocks(README, "python") if "# mine.py" in block)
    ast.parse(own)
    Path("mine.py").write_text(own)
    typed = [line for line in commands(README) if line]
    assert len(typed) >= 8
    for line in typed:
        assert shell(shlex.join(shortened(line))) == 0, line
    assert shell("export run=auto export.to=weights") == 0
    assert Path("weights/adapter_model.safetensors").is_file()


@pytest.mark.usefixtures("own_folder")
def test_the_classes_of_extending_run_together(monkeypatch):
    monkeypatch.syspath_prepend(str(Path.cwd()))
    small_library(monkeypatch)
    Path("README.md").write_text(README)
    Path("mine.py").write_text("\n".join(blocks(EXTENDING, "python")))
    parts = {
        **{"model": "Conv", "data": "Rings", "objective": "Brier", "accum": "Pairs"},
        **{"accum.gradient": "Strategy", "scheduler": "InverseRoot", "optimizer": "SignSGD"},
        "sync": "Halves",
    }
    words = [f"{part}._target_=mine.{kind}" for part, kind in parts.items()]
    assert shell(shlex.join([*words, "hooks=[mine.Watch]", "name=own", *SHORT])) == 0
    (log,) = Path().glob("outputs/*/*-own/metrics.jsonl")
    last = [entry for entry in map(json.loads, log.read_text().splitlines()) if "loss" in entry][-1]
    assert last["micro_batches"] == 4
    assert "right" in last
    lines = commands(EXTENDING.replace("\\\n", ""))
    assert len(lines) == 6
    for line in lines:
        if "transformers" not in line[0]:
            assert shell(shlex.join(shortened(line))) == 0, line


@pytest.mark.usefixtures("own_folder")
def test_the_commands_on_images_and_batch_sizes_run(monkeypatch):
    monkeypatch.syspath_prepend(str(Path.cwd()))
    small_library(monkeypatch)
    pages = [(CHECKOUT / "docs" / name).read_text() for name in ("images.md", "batch_size.md")]
    Path("mine.py").write_text("\n".join(blocks("\n".join([EXTENDING, *pages]), "python")))
    lines = [line for page in pages for line in commands(page)]
    assert len(lines) == 9
    for line in lines:
        small = TINY if {"batch=ramp", "batch=noise_ramp"} & {*line} else ["steps=2"]
        typed = [word for word in line if not (word == "steps=20" and "steps=2" in small)]
        assert shell(shlex.join([*typed, *small, "wandb.mode=disabled"])) == 0, line


def test_the_reference_of_keys_is_what_the_schema_gives():
    generated = runpy.run_path(str(CHECKOUT / "docs" / "generate.py"))["page"]()
    page = CHECKOUT / "docs" / "configuration.md"
    assert page.read_text() == generated, "run `python docs/generate.py`"

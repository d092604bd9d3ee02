"""The wheel, installed and run from a folder that has nothing to do with the checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent


def ended(command: list[str], cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **more}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def succeed(command: list[str], cwd: Path, **environment: str) -> str:
    done = ended(command, cwd, **environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    succeed(build, CHECKOUT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    install = ["install", "--quiet", "--no-deps", "--no-index", "--target", str(folder)]
    succeed([sys.executable, "-m", "pip", *install, str(wheel)], folder)
    return folder


def train(installed: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the console script of the installed wheel."""
    return ended([str(installed / "bin" / "train"), *words], cwd, PYTHONPATH=str(installed))


def test_every_option_and_recipe_is_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for folder in ("conf", "recipes"):
        files = sorted((CHECKOUT / folder).rglob("*.yaml"))
        assert files
        assert {f"trainer/{file.relative_to(CHECKOUT)}" for file in files} <= names
    strangers = {name.partition("/")[0] for name in names} - {"trainer"}
    assert all(name.endswith(".dist-info") for name in strangers)


def test_the_installed_package_is_the_one_that_runs_from_any_folder(installed, tmp_path):
    where = "import trainer.config.recipes as r; print(r.__file__, r.data_dir('conf'))"
    paths = succeed([sys.executable, "-c", where], tmp_path, PYTHONPATH=str(installed))
    assert all(Path(path).is_relative_to(installed) for path in paths.split())
    shown = train(installed, tmp_path, "--help")
    assert shown.returncode == 0, shown.stderr
    assert {"gpt_tiny", "quickstart"} <= set(re.findall(r"\w+", shown.stdout))
    refused = train(installed, tmp_path, "batch.golbal=3", "recipe=quickstart")
    assert refused.returncode == 2
    assert "Did you mean batch.global?" in refused.stderr


def test_a_plan_is_made_from_any_folder(installed, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(40):
        (corpus / f"{number}.txt").write_text("to be or not to be " * (number + 1))
    words = ("plan", "data=text", "data.path=corpus", "batch.global=16", "accum=fixed")
    done = train(installed, tmp_path, *words, "accum.micro=8", "device=cpu")
    assert done.returncode == 0, done.stderr
    (plan,) = tmp_path.glob("outputs/*/*/plan.json")
    assert '"global_batch": 16' in plan.read_text()

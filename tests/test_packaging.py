"""The wheel, installed and run from a folder that has nothing to do with the checkout."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent


def succeed(command: list[str], cwd: Path, **more: str) -> str:
    how = {"cwd": cwd, "env": {**os.environ, **more}, "capture_output": True, "text": True}
    done = subprocess.run(command, timeout=120, check=False, **how)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    succeed(build, CHECKOUT)
    (built,) = folder.glob("*.whl")
    return built


PARTS = ("trainer/**/*.py", "trainer/features/page/page.*", "conf/**/*.yaml", "recipes/*.yaml")


def test_every_module_option_and_recipe_is_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for files in PARTS:
        found = [str(file.relative_to(CHECKOUT)) for file in CHECKOUT.glob(files)]
        assert found
        assert {f"trainer/{name.removeprefix('trainer/')}" for name in found} <= names
    strangers = {name.partition("/")[0] for name in names} - {"trainer"}
    assert all(name.endswith(".dist-info") for name in strangers)


@pytest.mark.slow
def test_the_installed_package_runs_from_any_folder(wheel, tmp_path):
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = ["install", "--quiet", "--no-deps", "--no-index", "--target", str(installed)]
    succeed([sys.executable, "-m", "pip", *install, str(wheel)], elsewhere)

    def answer(*command: str) -> str:
        return succeed([*command], elsewhere, PYTHONPATH=str(installed))

    where = answer(sys.executable, "-c", "import trainer; print(trainer.__file__)")
    assert Path(where.strip()).is_relative_to(installed)
    script = str(installed / "bin" / "train")
    assert {"gpt_tiny", "quickstart"} <= set(re.findall(r"\w+", answer(script, "--help")))
    assert "global: 64" in answer(script, "--cfg", "job", "recipe=quickstart")

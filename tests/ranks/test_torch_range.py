"""Shards under the lowest and the highest torch of the promised range, each installed afresh."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.lib.nightly import nightly

ROOT = Path(__file__).parents[2]
BESIDE = ("hatchling", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist")  # for tests


def torch_range() -> tuple[str, str]:
    """What pip installs as the lowest torch that the package allows, and as the highest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (promised,) = (each for each in project["dependencies"] if each.startswith("torch"))
    (lowest,) = re.findall(r">=([\d.]+)", promised)
    return f"torch=={lowest}.*", promised


@pytest.mark.parametrize("torch", [nightly(each) for each in torch_range()])
def test_shards_work_with_both_ends_of_the_range_of_torch(tmp_path, torch):
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    python = tmp_path / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", torch, *BESIDE, ROOT]
    subprocess.run(install, check=True)
    run = [python, "-m", "pytest", "-q", "-n", "0", "-m", "not nightly", "-p", "no:cacheprovider"]
    files = [ROOT / "tests" / "ranks" / name for name in ("test_fsdp.py", "test_ranks.py")]
    subprocess.run([*run, *files], cwd=ROOT, check=True)

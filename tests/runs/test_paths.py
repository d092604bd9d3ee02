"""A run goes on from any folder with the files that it began with."""

from pathlib import Path

import pytest
import yaml

from tests.lib.nightly import nightly
from tests.lib.run_support import go, on, saved, shell

SHAPE = "model=gpt_tiny model.width=16 model.num_heads=2 model.num_layers=1"
TEXT = f"{SHAPE} steps=2 data=text data.max_length=32 eval.samples=8"


@pytest.fixture(autouse=True)
def corpus(own_folder: Path) -> Path:
    Path("corpus").mkdir()
    for number in range(40):
        Path("corpus", f"{number}.txt").write_text(f"document {number}")
    Path("elsewhere").mkdir()
    return Path("corpus").absolute()


@pytest.mark.parametrize("is_from_recipe", [False, nightly(True)])
def test_a_relative_path_means_the_same_when_the_run_goes_on_from_another_folder(
    corpus, is_from_recipe, monkeypatch
):
    typed = "data.path=corpus"
    if is_from_recipe:
        Path("mine.yaml").write_text("data:\n  path: corpus\n")
        typed = "recipe=mine.yaml"
    run = go(f"{TEXT} {typed}")
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert config["data"]["path"] == saved(run, "terms")["contract"]["data.path"] == str(corpus)
    assert on(run, f"{typed} steps=3").result["step"] == 3
    monkeypatch.chdir("elsewhere")
    assert on(run, "steps=4").result["step"] == 4
    assert shell(f"evaluate run={run.folder} trust=[tests]") == 0

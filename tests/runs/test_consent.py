"""Whose run it is: consent that its own user gave once, and that nobody else can give for them."""

import shutil
from pathlib import Path

import pytest
import yaml

from tests.lib.cli_support import CHECKOUT, OWN_CLASSES, OWN_RUN, python
from tests.lib.run_support import go, shell
from trainer.cli.python_api import FinishedRun


@pytest.fixture
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "state-home"
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    return home


def asks(
    run: Path | FinishedRun, capsys: pytest.CaptureFixture[str], line: str = "evaluate run={}"
) -> bool:
    """Whether a command asks for trust in a run, and does nothing else."""
    capsys.readouterr()
    code = shell(line.format(run.folder if isinstance(run, FinishedRun) else run))
    asked = "comes from a recipe or a saved run; to trust it, type 'trust=[tests]'"
    assert code == (2 if asked in capsys.readouterr().err else 0)
    return code == 2


def test_a_run_needs_no_further_consent_of_who_made_it(state_home, capsys):
    run = go("steps=2 hooks=[tests.lib.run_toys.Slow]")
    assert "trust=" not in capsys.readouterr().out
    for line in ("evaluate run={}", "export run={} export.to=weights", "verify run={}"):
        assert not asks(run, capsys, line)
    assert not asks(run, capsys, "resume={} steps=3")
    assert not asks(run, capsys, "resume={} steps=4"), "noted anew when it goes on"
    assert str(run.folder) in (state_home / "step-trainer" / "runs.jsonl").read_text()


def test_a_run_that_the_user_did_not_make_asks_as_a_strangers(state_home, capsys, tmp_path):
    run = go("steps=1 model.width=4 model._target_=tests.lib.run_toys.DoubleNet").folder
    for name, old, new in (
        ("config.yaml", "width: 4", "width: 6"),
        ("config.yaml", "run_toys.DoubleNet", "run_toys.LossNet"),
        (".hydra/overrides.yaml", "model.width=4", "model.width=6"),
    ):
        path = run / name
        before = path.read_text()
        assert old in before
        path.write_text(before.replace(old, new))
        assert asks(run, capsys), name
        path.write_text(before)
    Path("friend.yaml").write_text("hooks: [{_target_: tests.lib.run_toys.Slow}]\n")
    assert asks(run, capsys, "resume={} steps=2 recipe=./friend.yaml"), "a recipe adds no consent"
    planted = run / ".hydra" / "resumed" / "overrides.yaml"
    planted.parent.mkdir()
    planted.write_text(yaml.safe_dump(["model._target_=tests.lib.run_toys.LossNet"]))
    assert asks(run, capsys)
    shutil.rmtree(planted.parent)
    assert not asks(run, capsys)
    assert asks(run.rename(tmp_path / "moved"), capsys)


def test_a_class_from_another_file_needs_trust_and_one_that_was_edited_none(
    state_home, tmp_path, capsys, monkeypatch
):
    Path("toy.py").write_text(OWN_CLASSES)
    run = go("steps=1 model._target_=toy.Net").folder
    Path("toy.py").write_text(f"{OWN_CLASSES}\n# edited\n")
    assert shell(f"evaluate run={run}") == 0
    (tmp_path / "theirs").mkdir()
    monkeypatch.chdir(tmp_path / "theirs")
    Path("toy.py").write_text("raise RuntimeError('ran')\n")
    capsys.readouterr()
    assert shell(f"evaluate run={run}") == 2
    assert "to trust it, type 'trust=[toy,tests]'" in capsys.readouterr().err


def test_without_a_folder_for_its_state_runs_have_to_be_trusted(state_home, capsys):
    state_home.write_text("no folder")
    run = go("steps=1")
    assert "'trust=[tests]'" in capsys.readouterr().out
    assert asks(run, capsys)
    assert shell(f"evaluate run={run.folder} trust=[tests]") == 0


TRAP = """
from pathlib import Path
with (Path(__file__).parents[{up}] / "ran").open("a") as file:
    file.write(__name__)
"""


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """A folder of a stranger's with modules that Hydra and PyTorch would look for."""
    folder = tmp_path / "trapped"
    (folder / "hydra_plugins" / "x").mkdir(parents=True)
    (folder / "hydra_plugins" / "x" / "__init__.py").write_text("")
    (folder / "hydra_plugins" / "x" / "e.py").write_text(TRAP.format(up=2))
    for name in ("triton", "yaml", "dataclasses", "torchao", "__future__", "typing", "rich"):
        (folder / f"{name}.py").write_text(TRAP.format(up=0))
    return folder


@pytest.mark.parametrize(("line", "code"), [("evaluate run=.", 4), ("--info plugins", 0)])
def test_nothing_in_the_current_folder_runs_for_a_command_that_names_no_class_there(
    line, code, trapped
):
    """Even where an empty entry of PYTHONPATH means that folder."""
    done = python(f"-m trainer {line}", trapped, PYTHONPATH=f":{CHECKOUT}")
    assert done.returncode == code, done.stderr
    assert not (trapped / "ran").exists()


@pytest.mark.nightly
def test_a_class_of_the_current_folder_brings_nothing_of_it_that_is_installed(trapped):
    (trapped / "net.py").write_text(OWN_CLASSES)
    for name in ("triton", "torchao"):  # what is not may come from a folder that was consented to
        (trapped / f"{name}.py").unlink()
    done = python(f"-m trainer {OWN_RUN} parallel.ranks=2 num_workers=1", trapped)
    assert done.returncode == 0, done.stderr
    assert not (trapped / "ran").exists()


def test_an_option_of_ones_own_that_hydra_does_not_take_is_no_consent(tmp_path, capsys):
    (tmp_path / "own" / "optimizer").mkdir(parents=True)
    (tmp_path / "own" / "optimizer" / "adamw.yaml").write_text("_target_: mine.Opt\n")
    Path("friend.yaml").write_text("optimizer: {_target_: mine.Opt}\n")
    assert shell("plan recipe=./friend.yaml --config-dir own") == 2
    assert "optimizer._target_=mine.Opt: comes from a recipe" in capsys.readouterr().err

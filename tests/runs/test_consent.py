"""Whose run it is: consent that its own user gave once, and that nobody else can give for them."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest
import yaml

from tests.lib.run_support import go, read_json, shell
from trainer.cli.main import FinishedRun

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def config_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "config-home"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
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


def test_a_run_needs_no_further_consent_of_who_made_it(
    config_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = go("steps=2 hooks=[tests.lib.run_toys.Slow]")
    assert "trust=" not in capsys.readouterr().out
    key = config_home / "step-trainer" / "key"
    assert (len(key.read_bytes()), stat.S_IMODE(key.stat().st_mode)) == (32, 0o600)
    for line in ("evaluate run={}", "export run={} export.to=weights", "verify run={}"):
        assert not asks(run, capsys, line)
    assert not asks(run, capsys, "resume={} steps=3")
    assert not asks(run, capsys, "resume={} steps=4"), "signed anew when it goes on"
    moved = run.folder.rename("moved")
    assert not asks(moved, capsys)
    assert read_json(moved / "status.json")["step"] == 4


def test_what_the_user_did_not_sign_asks_as_a_strangers_run(
    config_home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = go("steps=1").folder
    other = go("steps=1 model.width=4 model._target_=tests.lib.run_toys.DoubleNet").folder
    signed = (other / "consent.json").read_bytes()
    for name, old, new in (
        ("config.yaml", "width: 4", "width: 6"),
        ("config.yaml", "run_toys.DoubleNet", "run_toys.LossNet"),
        (".hydra/overrides.yaml", "model.width=4", "model.width=6"),
        ("consent.json", '"hmac_sha256":', '"hmac":'),
    ):
        copy = shutil.copytree(other, tmp_path / "copy", dirs_exist_ok=True)
        path = copy / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
        assert asks(copy, capsys), name
    Path("friend.yaml").write_text("hooks: [{_target_: tests.lib.run_toys.Slow}]\n")
    assert asks(run, capsys, "resume={} steps=2 recipe=./friend.yaml"), "a recipe adds no consent"
    (run / "consent.json").write_bytes(signed)
    assert asks(run, capsys), "the signature of another run"
    planted = other / ".hydra" / "resumed" / "overrides.yaml"
    planted.parent.mkdir()
    planted.write_text(yaml.safe_dump(["model._target_=tests.lib.run_toys.LossNet"]))
    assert asks(other, capsys)
    shutil.rmtree(planted.parent)
    assert not asks(other, capsys)
    (config_home / "step-trainer" / "key").write_bytes(bytes(32))
    assert asks(other, capsys), "signed with another key"
    assert asks(other, capsys, "resume={} steps=2")


def test_without_a_key_runs_have_to_be_trusted(
    config_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_home.write_text("no folder")
    run = go("steps=1")
    assert "'trust=[tests]'" in capsys.readouterr().out
    assert asks(run, capsys)
    assert shell(f"evaluate run={run.folder} trust=[tests]") == 0

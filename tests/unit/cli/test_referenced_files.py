"""Data and weights that are not there are missed before torch is imported, runs found by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib.cli_support import make_own_folder
from tests.lib.run_support import TOYS, go, overrides, read_json, shell
from trainer.core.errors import ConfigError, NoCheckpointError

NET = "from torch import nn\n\nclass Net(nn.Module):\n    pass\n"

MISSING = {
    "data=text data.path=no.txt": (3, "data.path=no.txt: no such file or folder"),
    "data=tokens data.path=no.bin model.vocab_size=9": (
        3,
        "data.path=no.bin: no such file or folder",
    ),
    "init=nowhere": (4, "init=nowhere: no such file or folder"),
}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_own_folder(tmp_path, monkeypatch, NET)


def test_what_is_not_there_is_one_line_and_makes_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for line, (code, words) in MISSING.items():
        assert shell(f"plan {line}") == code
        (shown,) = capsys.readouterr().err.splitlines()
        assert words in shown
    assert not Path("outputs").exists()


def test_weights_that_cannot_be_used_are_named_by_their_key() -> None:
    Path("empty").mkdir()
    with pytest.raises(NoCheckpointError, match=r"init=empty: no weights here"):
        go("init=empty")


def test_the_newest_run_of_a_name_is_evaluated_and_exported() -> None:
    older, newer = go("steps=1 name=mine"), go("steps=2 name=mine")
    go("steps=1 name=other")
    assert shell("evaluate run=auto name=mine trust=[tests]") == 0
    assert read_json(newer.folder / "evaluate.json")["step"] == 2
    assert not (older.folder / "evaluate.json").exists()
    assert shell("export run=auto name=other export.to=weights trust=[tests]") == 0
    assert read_json(Path("weights/config.json"))["step"] == 1
    newest = go("steps=3 name=last")
    assert shell("evaluate run=auto trust=[tests]") == 0
    assert read_json(newest.folder / "evaluate.json")["step"] == 3
    with pytest.raises(NoCheckpointError, match="run=auto: no run named nobody below"):
        go("command=evaluate run=auto name=nobody")
    with pytest.raises(NoCheckpointError, match="run=auto: no run named nobody below"):
        go("command=verify run=auto name=nobody")


def test_a_null_holdout_of_a_class_that_takes_none_says_what_to_type() -> None:
    with pytest.raises(ConfigError, match=r"data\.holdout=null: must be .*Rows takes no holdout"):
        go("data.holdout=null")


def test_commands_that_follow_name_the_folder_of_options_that_a_run_had(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("own/model").mkdir(parents=True)
    Path("own/model/mine.yaml").write_text(f"# Mine.\n_target_: {TOYS}.Net\n")
    line = " ".join(overrides("model=mine steps=1"))
    line = line.replace(f"model._target_={TOYS}.Net ", "")
    assert shell(f"--config-dir=own {line}") == 0
    shown = capsys.readouterr().out.splitlines()
    commands = [each.strip() for each in shown if each.strip().startswith("train ")]
    follow = [each for each in commands if "evaluate run=" in each or "resume=" in each]
    assert len(follow) == 2
    assert all("--config-dir=own" in each and "trust=" not in each for each in follow)
    assert shell(follow[0].removeprefix("train ")) == 0
    folder = Path(follow[0].split()[2].partition("=")[2])
    assert "config_dir" not in (folder / "config.yaml").read_text()

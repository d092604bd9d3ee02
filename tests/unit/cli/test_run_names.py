"""What runs are called: by name, folder and path; and which word is one run's alone."""

from pathlib import Path

from tests.lib.run_folders import left_run, left_sweep
from trainer.cli.run_names import RunNames
from trainer.core.run_folder import RunFolder, all_runs


def test_a_run_is_found_by_each_of_its_names_and_shown_by_one_that_is_its_own(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    outputs = Path("outputs").absolute()
    bare = left_run(outputs / "first")
    named = left_run(outputs / "day" / "1-first", config={"name": "first"}, began=2.0)
    other = left_run(outputs / "day" / "2-train", config={"name": "other"})
    sweep = left_sweep(outputs / "multirun" / "day" / "3-train", [], [], name="swept")
    names = RunNames(outputs, all_runs(outputs))
    assert names.find("first") == [named, bare], "the newest first"
    assert names.find("day/1-first/") == [named]
    assert names.find("2-train") == names.find("other") == [other]
    assert names.find("swept") == names.find("3-train") == [sweep]
    assert names.find("swept/1") == [sweep / "1"]
    assert names.find("swept/2") == names.find("nobody") == names.find("") == []
    shown = [names.shortest(RunFolder(path)) for path in (bare, named, other, sweep / "0")]
    assert shown == ["outputs/first", "1-first", "other", "swept/0"]
    assert (names.near("Frist"), names.near("nobody")) == ("first", None)


def test_a_word_of_a_config_is_read_without_the_rest(tmp_path):
    section = {"every": "10min", "best": "eval_f1", "mode": None}
    config = {"name": "null", "log": {"best": "x"}, "checkpoint": section, "steps": 5, "seed": None}
    run = RunFolder(left_run(tmp_path / "run", config=config))
    expected = {"name": "null", "checkpoint.best": "eval_f1", "steps": "5", "command": "train"}
    assert {key: run.word(key) for key in expected} == expected
    assert not any(map(run.word, ("seed", "checkpoint.mode", "best", "log.mode", "checkpoint")))

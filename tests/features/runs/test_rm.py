"""What is removed, what is refused, and that it is asked for."""

import os
from pathlib import Path

import pytest

from tests.lib.run_folders import left_run, left_sweep
from tests.lib.run_support import in_use, shell
from trainer.core import durable

DAY = Path("outputs/2026-01-02")


def test_runs_and_sweeps_are_removed_by_any_of_their_names_and_nothing_else(tmp_path, capsys):
    linked = tmp_path / "elsewhere"
    linked.mkdir()
    (linked / "file").touch()
    for name in ("path", "called", "folder", "stays"):
        left_run(DAY / f"1-{name}", config={"name": name})
    (DAY / "1-path" / "link").symlink_to(linked)
    (DAY / f"{durable.TRASH}of-one-that-was-interrupted").mkdir()
    sweep = left_sweep(Path("outputs/multirun/day/2-swept"), ["seed=1"], ["seed=2"], name="swept")
    left_sweep(Path("outputs/multirun/other/3-whole"), ["seed=1"], name="whole")
    words = f"{DAY}/1-path/ called 1-folder swept/1 whole whole/0"
    assert shell(f"rm {words} yes=true") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("outputs/2026-01-02/1-path: completed, step 4, ")
    assert shown[4].startswith("outputs/multirun/other/3-whole: a sweep of 1 run, ")
    assert shown[5].startswith("removed 5 runs, ")
    assert sorted(path.name for path in DAY.iterdir()) == ["1-stays"]
    assert sorted(path.name for path in sweep.iterdir()) == ["0", "multirun.yaml"]
    assert not Path("outputs/multirun/other").exists(), "a day without runs goes, too"
    assert (linked / "file").exists()
    assert shell("rm stays swept yes=true") == 0
    assert [*Path("outputs").iterdir()] == []


def test_a_run_that_a_process_uses_stays_and_so_do_the_others(capsys):
    left_run(DAY / "1-free")
    sweep = left_sweep(Path("outputs/multirun/day/2-swept"), ["seed=1"])
    with in_use(sweep / "0"):
        for word in ("2-swept", "2-swept/0"):
            assert shell(f"rm 1-free {word} yes=true") == 4
            error = f"train: error: {word}: in use by process 1 on 'elsewhere'; stop it first\n"
            assert capsys.readouterr().err == error
    assert (DAY / "1-free").is_dir()
    assert (sweep / "0" / "config.yaml").is_file()


@pytest.mark.parametrize(
    ("answer", "is_gone"),
    [("y", True), ("yes ", True), ("", False), ("nope", False), (None, False)],
)
def test_it_is_asked_once_on_a_terminal(answer, is_gone, monkeypatch, capsys):
    left_run(DAY / "1-run")
    asked = []

    def reply(question):
        asked.append(question)
        if answer is None:
            raise EOFError
        return answer

    monkeypatch.setattr(os, "isatty", lambda _: True)
    monkeypatch.setattr("builtins.input", reply)
    assert shell("rm 1-run") == 0
    (question,) = asked
    assert question.startswith("remove 1 run, ")
    assert (DAY / "1-run").exists() != is_gone
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .startswith("removed 1 run, " if is_gone else "nothing was removed")
    )

"""The table of runs: what it shows, in which order, of whatever folders there are."""

import os
import re
import shlex
import time
from pathlib import Path

from tests.lib.cli_support import python
from tests.lib.run_folders import left_run, left_sweep
from tests.lib.run_support import in_use, shell

DAY = Path("outputs/2026-01-02")
BEST = {"checkpoint": {"every": "10min", "best": "eval_f1", "mode": "auto"}}
RUNNING = {"state": "running", "step": 0}


def figures(step, **of_evaluation):
    return [{"step": step, "loss": 1.0}, {"step": step, **of_evaluation}]


def listed(line, capsys):
    """The cells of each row that a command prints on stdout; and its notes."""
    assert shell(line) == 0
    shown = capsys.readouterr()
    return [row.split() for row in shown.out.splitlines()], shown.err.splitlines()


def test_runs_are_listed_with_their_state_figure_and_what_was_typed_that_differs(capsys):
    now, same = time.time(), ["data=text", "hydra.run.dir=x", "model=own"]
    here = f"data.path='{Path.cwd()}/my a'"
    left_run(
        DAY / "1-done",
        [*same, "seed=1", here, "name=first"],
        began=now - 7300,
        config={"name": "first"},
        plan={"steps": 4},
        result={"eval_loss": 0.25},
    )
    left_run(
        DAY / "2-train",
        [*same, "seed=2", f"resume='{Path.cwd()}/{DAY}/2-train'"],
        status={"state": "failed", "step": 2},
        began=now - 125,
        plan={"steps": 1000},
        entries=[*figures(1, eval_loss=2.0), *figures(2, eval_loss=3.0), {"step": 3, "loss": 1.0}],
    )
    dead = left_run(DAY / "3-train", same, status=RUNNING, began=now - 90000, config=BEST)
    (dead / "metrics.jsonl").write_text(
        '{"step": 1, "eval_f1": 0.5}\n{"step": 2, "eval_f1": 0.4}\n'
    )
    live = left_run(DAY / "4-train", same, status=RUNNING, began=now - 1, entries=figures(7))
    left_run(DAY / "5-plan", config={"command": "plan"})
    left_sweep(Path("outputs/multirun/day/6-s"), [*same, "seed=2"], name="s")
    with in_use(live):
        (head, *rows), notes = listed("ls", capsys)
    assert head == ["name", "state", "step", "held", "out", "started", "ago", "typed"]
    assert [[*row[:5], *row[7:]] for row in rows[:4]] == [
        ["4-train", "running", "7", "loss", "-", "1", "s"],
        ["2-train", "failed", "3/1,000", "loss", "3.0000", "2", "min", "seed=2"],
        ["first", "completed", "4/4", "loss", "0.2500", "2", "h", "seed=1", "data.path='my", "a'"],
        ["3-train", "killed", "2", "f1", "0.5000", "1", "d"],
    ]  # fmt: skip
    assert rows[4][0] == "s/0"
    assert notes == ["train: 5 runs, newest first"]
    (_, row), _ = listed("ls last=1 sort=name", capsys)
    assert row[0] == "2-train"
    assert row[8:] == ["data=text", "seed=2"], "of one run all that was typed"


def test_runs_are_sorted_and_those_left_out_are_counted(capsys):
    for name, loss, step in (("b", 2.0, 10), ("a", 1.0, 5), ("c", None, 20)):
        result = {"eval_loss": loss}
        left_run(DAY / name, began=step, status={"state": "completed", "step": step}, result=result)
    (DAY / "c" / "result.json").write_text('{"stopped": "pruned: others were better at step 20"}')
    f1 = {"metric": "eval_f1", "value": 0.5, "step": 1}
    left_run(DAY / "less", config=BEST, result={"best": f1})
    left_run(DAY / "more", config=BEST, result={"best": f1 | {"value": 0.9}}, began=2.0)
    for order, names in {
        "when": ["c", "b", "a", "more", "less"],
        "metric": ["more", "less", "a", "b", "c"],
        "name": ["a", "b", "c", "less", "more"],
        "step": ["c", "b", "a", "more", "less"],
    }.items():
        rows, _ = listed(f"ls sort={order}", capsys)
        assert [row[0] for row in rows[1:]] == names, order
        assert [row[0] for row in rows if row[1] == "pruned"] == ["c"]
    rows, notes = listed("ls last=2 sort=metric", capsys)
    assert len(rows) == 3
    assert notes == ["train: 2 of 5 runs, by metric, the best first; last=5 shows all"]


def test_a_name_is_whole_on_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    long = "12-30-01-123456-" + "a" * 24
    for number, name in enumerate(("12-30-01-123457-train", long)):
        left_run(
            DAY / name,
            ["data=text", f"seed={number}", f"optimizer.lr={'0' * 70}{number}"],
            began=1.0 + number,
        )
    assert shell("ls") == 0
    shown = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    head, first, *below = shown.splitlines()
    assert "started" not in head, "there is no room"
    assert first.startswith(f"{long}  completed  4 ")
    assert max(map(len, [head, first, *below])) <= 80
    assert below[:2] == ["  seed=1", f"  optimizer.lr={'0' * 57}..."]


def test_whatever_is_in_a_folder_breaks_no_table(capsys):
    left_run(DAY / "good", ["seed=1"])
    texts = ("", "{", "[1]", '{"state": ["x"], "step": 1e999}', "\xff\0", "\x1b[31m: [")
    for number, text in enumerate(texts):
        folder = left_run(DAY / f"odd{number}", began=-5.0 - number)
        for file in filter(Path.is_file, folder.rglob("*")):
            file.write_bytes(text.encode("latin-1"))
    left_run(DAY / "bare").joinpath("config.yaml").unlink()
    locked = left_run(DAY / "locked")
    for path in (locked / ".hydra", locked / "status.json", locked):
        path.chmod(0)
    pipe = left_run(DAY / "pipe")
    for file in ("config.yaml", "status.json", "metrics.jsonl"):
        (pipe / file).unlink()
        os.mkfifo(pipe / file)
    (DAY / "loop").symlink_to("loop")
    (DAY / "up").symlink_to("..")
    left_run(DAY / "\x1b[31mred\n", began=3.0)
    rows, _ = listed("ls", capsys)
    names = [row[0] for row in rows[1:]]
    assert {"good", "bare", "pipe", r"\x1b[31mred\n", *(f"odd{n}" for n in range(6))} <= {*names}
    (good,) = [row for row in rows if row[0] == "good"]
    assert good[-1] == "seed=1", "of nothing else it is known what was typed"
    locked.chmod(0o700)


def test_torch_is_not_imported_and_metrics_are_read_at_their_end_alone(tmp_path):
    run = left_run(tmp_path / DAY / "long", status={"state": "failed"})
    with (run / "metrics.jsonl").open("r+b") as file:
        # A hole that takes no room on the disk, and that no machine could read whole
        file.seek(1 << 42)
        file.write(b'\n{"step": 7, "eval_loss": 0.5}\n')
    code = (
        "import sys; from trainer.cli.main import run;"
        "assert run(['ls']) == 0 and run(['rm', 'long', 'yes=true']) == 0;"
        "assert not {'torch', 'hydra'} & {*sys.modules}"
    )
    done = python(shlex.join(["-c", code]), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "long  failed  7     0.5000" in done.stdout
    assert not (tmp_path / DAY).exists()

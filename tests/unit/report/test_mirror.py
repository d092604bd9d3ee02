"""The thread between metrics.jsonl and a tracker: what arrives, and which are abandoned."""

import json
import time
from threading import Event

import pytest

from tests.lib.tracked import mirror_of
from trainer.report.mirror import close_all, is_hanging
from trainer.report.tracker import Tracker


class Notes(Tracker):
    """Notes every call; `fault` names the method that fails, or hangs where it ends with `...`."""

    def __init__(self, fault=""):
        self.fault, self.calls, self.patience_s = fault, [], 0.3
        self.hangs = Event()  # until it is set

    def note(self, name, *given):
        if self.fault == f"{name}...":
            self.hangs.wait(60)
        if self.fault == name:
            raise RuntimeError("its own fault")
        self.calls.append((name, *given))

    def start(self, run):
        self.run = run
        self.note("start")

    def log(self, step, figures):
        self.note("log", step, figures)

    def flush(self):
        self.note("flush")

    def attach(self, file):
        self.note("attach", file.name)

    def finish(self, summary):
        self.note("finish", summary)


def write(folder, *entries):
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in entries)


def shown(folder, tracker, *entries, resumed_step=None, summary=None):
    """Mirror entries to a tracker, and give what was warned."""
    warnings = []
    mirror = mirror_of("mine", tracker, folder, warnings.append, resumed_step=resumed_step)
    mirror.start()
    write(folder, *entries)
    close_all([mirror], summary)
    return warnings


def test_a_tracker_gets_each_entry_once_and_goes_on_behind_what_has_arrived(tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    step, evaluation = {"step": 1, "loss": 2.0, "skipped": "nan", "x": None}, {"step": 2}
    evaluation |= {"eval_loss": 3, "bleu": 4, "eval_seconds": 5}
    first = Notes()
    assert not shown(tmp_path, first, step, {"step": 2, "loss": 1}, evaluation, summary={"a": 1})
    assert first.calls == [
        ("start",),
        ("attach", "plan.json"),
        ("log", 1, {"train/loss": 2.0, "train/skipped": 1}),
        ("log", 2, {"train/loss": 1}),
        ("log", 2, {"eval/loss": 3, "eval/bleu": 4, "eval/seconds": 5}),
        ("flush",),
        ("finish", {"a": 1}),
    ]
    assert (first.run.after, first.run.folder) == (-1, tmp_path / "mine")
    (tmp_path / "report.html").write_text("")
    second = Notes()  # the evaluation of step 2 may not have arrived, so that all of it comes again
    assert not shown(tmp_path, second, {"step": 3, "loss": 1}, resumed_step=2)
    assert (second.run.after, second.run.id) == (1, first.run.id)
    assert [call[1] for call in second.calls if call[0] == "log"] == [2, 2, 3]
    assert second.calls[-2:] == [("attach", "report.html"), ("finish", None)]
    back = Notes()
    shown(tmp_path, back, resumed_step=1)
    assert back.run.after == 1, "no further than the checkpoint"
    fresh = Notes()
    shown(tmp_path, fresh)
    assert fresh.run.after == -1


@pytest.mark.parametrize(
    ("fault", "warned"),
    [
        ("log", "mine is off (RuntimeError: its own fault (test_mirror.py:"),
        ("attach", "mine has not got plan.json (RuntimeError: its own fault"),
        ("log...", "mine did not finish in time and was abandoned; metrics.jsonl has everything, "),
    ],
)
def test_a_tracker_that_fails_or_hangs_is_one_warning_and_nothing_waits(tmp_path, fault, warned):
    (tmp_path / "plan.json").write_text("{}")
    tracker = Notes(fault)
    entries = [{"step": step, "loss": 1.0} for step in (1, 2, 3)]
    (warning,) = shown(tmp_path, tracker, *entries)
    assert warning.startswith(warned)
    assert is_hanging() == fault.endswith("..."), "which was not waited for"
    tracker.hangs.set()
    while is_hanging():
        time.sleep(0.05)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3
    if fault == "attach":
        assert [call[1] for call in tracker.calls if call[0] == "log"] == [1, 2, 3]

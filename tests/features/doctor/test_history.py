"""Runs are written into the history of a machine, which later limits of memory follow."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.lib.run_support import shell
from trainer.report.records import device_name
from trainer.tune import history
from trainer.tune.memory_limit import RESERVE, memory_limit

CPU = torch.device("cpu")
GIB = 2**30

pytestmark = pytest.mark.usefixtures("cache")


def past(taken: float) -> history.PastRun:
    """A run that took so many times the GiB that were counted for it."""
    return history.PastRun(
        ended="2026-05-01 12:30",
        folder="12-30-00-a",
        device=device_name(CPU),
        steps=3,
        predicted_bytes=GIB // 2,
        measured_bytes=int(taken * GIB / 2),
        counted_bytes=GIB,
        taken_bytes=int(taken * GIB),
        predicted_seconds=0.5,
        measured_seconds=0.6,
    )


def test_a_run_sets_predicted_beside_measured_in_its_record_its_page_and_the_history(capsys):
    line = (
        "train data=text data.path=c.txt batch.global=8 steps=2 eval.every=null hydra.run.dir=run"
    )
    Path("c.txt").write_text("a step is one update, and no more than that\n\n" * 40)
    for _ in range(2):
        history.add(past(1.1))
    assert shell(f"{line} accum=auto") == 0
    record = json.loads(Path("run/result.json").read_text())["predicted"]
    own = record["this_run"]
    assert own["steps"] == 2
    # What the process took beside its model is known within a factor, of a model so small
    assert 0.1 < own["measured_bytes"] / own["predicted_bytes"] < 100
    assert own["predicted_seconds"] > 0 < own["measured_seconds"]
    assert record["bytes_over_predicted"].count(1.1) == 2
    assert record["seconds_over_predicted"].count(1.2) == 2
    page = Path("run/report.html").read_text()
    assert re.search(r"3 runs on this machine took [\d.]+% to [\d.]+% of what was predicted", page)
    capsys.readouterr()
    assert shell("doctor history") == 0
    shown = capsys.readouterr().out
    assert f"{device_name(CPU)}: 3 runs" in shown
    assert "512 MiB -> 563 MiB        500 ms -> 600 ms  12-30-00-a" in shown
    assert shown.splitlines()[-2].endswith("  run")


def test_what_runs_took_beyond_their_prediction_is_kept_free_of_later_ones():
    before = memory_limit(CPU)
    for taken in (0.9, 0.8, 1.0, 1.2):
        history.add(past(taken))
    assert memory_limit(CPU).reserve == before.reserve == RESERVE["cpu"], "four tell too little"
    # Neither do runs so small that a process takes more beside them.
    small = replace(past(3.0), counted_bytes=2**20, taken_bytes=2**24)
    history.add(small)
    assert memory_limit(CPU).reserve == before.reserve
    history.add(past(1.0))
    learnt = memory_limit(CPU)
    assert learnt.reserve == pytest.approx(0.2 / 1.2 + 0.02)
    assert "as 5 runs took up to +20% of what was predicted" in learnt.source
    # An old surprise is forgotten once enough runs came after it.
    for _ in range(history.LAST_RUNS):
        history.add(past(0.9))
    assert memory_limit(CPU).reserve == RESERVE["cpu"]
    with history.history_file().open("a") as file:
        file.write("{no line of ours\n")
    assert len(history.past_runs()) == history.LAST_RUNS + 6

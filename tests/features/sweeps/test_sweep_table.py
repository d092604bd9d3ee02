"""Which columns of a sweep's table stand where they do not all fit."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from trainer.core.run_folder import RunFolder
from trainer.features.sweeps.places import newest_sweep
from trainer.features.sweeps.table import _notes, _print_table

FIGURES = ("step", "loss", "eval_loss", "eval_f1_macro", "eval_top_2", "tokens_per_second")
FIGURES_AS_SHOWN = ["step", "loss", "held-out loss", "held-out f1 macro", "held-out top 2"]
FIGURES_AS_SHOWN += ["tokens per second"]
ROWS: list[dict[str, Any]] = [
    {"rank": n + 1, "job": n, "optimizer.lr": "0.003", "batch.global": "128"}
    | {"eval_accuracy": 0.0947075, "state": "completed", "exit_code": 0}
    | dict.fromkeys(FIGURES, 0.0326774)
    for n in range(4)
]


@pytest.mark.parametrize(("width", "left_out"), [(200, []), (80, FIGURES_AS_SHOWN[2:])])
def test_what_tells_jobs_apart_is_shown_first_and_further_figures_as_far_as_they_fit(
    width, left_out
):
    file = StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    assert _print_table(ROWS, ["optimizer.lr", "batch.global"], console) == left_out
    _, *head, first = file.getvalue().splitlines()[:-3]
    assert first.split()[:6] == ["1", "0", "0.003", "128", "0.0947075", "completed"]
    assert len(head) == 2
    assert all(len(line.rstrip()) <= width for line in file.getvalue().splitlines())


def test_jobs_that_were_evaluated_on_other_samples_are_said_not_to_compare(tmp_path):
    rows = []
    for number, held_out in enumerate("aab"):
        folder = tmp_path / str(number) / "checkpoints" / "step-00000001"
        folder.mkdir(parents=True)
        parts = {"terms": {"state": {"held_out": held_out}}}
        (folder / "manifest.json").write_text(json.dumps({"parts": parts}))
        rows.append({**ROWS[number], "reason": None, "folder": tmp_path / str(number)})
    rows.append({**ROWS[3], "reason": None, "folder": None})
    assert [*_notes([*rows[:2], rows[3]], "eval_loss")] == []
    (note,) = _notes(rows, "eval_loss")
    assert note.startswith("eval_loss is of other held-out samples or tokens in some jobs")
    assert [*_notes(rows, "loss")] == []


def test_a_metric_that_no_job_has_is_named_with_those_that_there_are(tmp_path):
    (tmp_path / "result.json").write_text('{"eval_loss": null, "metrics": {"accuracy": null}}')
    row = {**ROWS[0], "rank": None, "reason": None, "folder": tmp_path}
    (note,) = _notes([row], "eval_f1")
    text = "no job has a number for it; evaluations gave eval_accuracy, eval_loss, eval_f1_macro, "
    assert note == f"sweep.metric=eval_f1: {text}eval_top_2"


def test_a_sweep_that_auto_goes_on_with_is_the_one_whose_first_job_began_last(
    tmp_path, monkeypatch
):
    outputs, begun = tmp_path / "outputs", []
    for number in range(2):
        sweep = outputs / "multirun" / "today" / str(number)
        (sweep / "0" / ".hydra").mkdir(parents=True)
        RunFolder(sweep / "0").record_start()
        typed = {"overrides": {"task": ["seed=1,2"]}, "runtime": {"cwd": str(Path.cwd())}}
        (sweep / "multirun.yaml").write_text(yaml.safe_dump({"hydra": typed}))
        begun.append(sweep)
    assert newest_sweep(str(outputs), ["seed=1,2"]) == begun[-1]
    monkeypatch.chdir(outputs)
    assert newest_sweep(str(outputs), ["seed=1,2"]) is None, (
        "its paths were those of another folder"
    )

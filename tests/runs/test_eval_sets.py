"""What is evaluated beside, or in place of, the part that a run holds out."""

from pathlib import Path

import pytest

from tests.lib.hf_toys import write_lines
from tests.lib.run_support import entries, go, read_json, shell
from trainer.cli.python_api import FinishedRun

GPT = "model=gpt_tiny model.width=16 model.num_heads=2 model.num_layers=1 scheduler=constant"
TEXT = f"{GPT} data=text data.path=d.jsonl data.max_length=32 eval.every=2"
SETS = "data.eval_path=val.jsonl eval.sets.web.path=web.jsonl eval.sets.seen.path=d.jsonl"
NAMES = ("loss", "accuracy")


@pytest.fixture(autouse=True)
def texts(own_folder: None) -> None:
    """Three files of a document a line, which share none."""
    for file, count in (("d.jsonl", 40), ("val.jsonl", 7), ("web.jsonl", 11)):
        write_lines(Path(file), [{"text": f"{file}, document {n}"} for n in range(count)])


def evaluations(run: FinishedRun) -> list[dict[str, float]]:
    """The evaluations of a run, without their times."""
    found = [entry for entry in entries(run) if "eval_seconds" in entry]
    return [{name: v for name, v in e.items() if name != "eval_seconds"} for e in found]


def test_a_file_and_named_sets_are_evaluated_whole_and_nothing_is_held_out_of_training(capsys):
    run = go(f"{TEXT} {SETS} steps=4")
    screen = capsys.readouterr().out
    plan, splits = (read_json(run.folder / name) for name in ("plan.json", "splits.json"))
    assert (plan["num_samples"], plan["num_held_out"]) == (40, 7)
    assert plan["eval_sets"] == {"web": 11, "seen": 40}
    (warning,) = plan["warnings"]
    assert warning.startswith("eval.sets.seen: 40 of 40 held-out samples that were compared")
    assert (splits["rule"], splits["overlap"]["found"]) == ("the samples of data.eval_path", 0)
    overlap = {"held_out": 11, "training": 40, "found": 0}
    assert splits["sets"]["web"] == {"num_samples": 11, "overlap": overlap}
    figures = [f"eval_{part}{name}" for part in ("", "web_", "seen_") for name in NAMES]
    assert [[*each] for each in evaluations(run)] == [["step", *figures]] * 2
    assert "step 4/4  web: loss " in screen
    # Each is what an evaluation of it alone gives.
    last = evaluations(run)[-1]
    assert shell(f"evaluate run={run.folder}") == 0
    record = read_json(run.folder / "evaluate.json")
    assert {name: record[name] for name in last} == pytest.approx(last, rel=1e-6)
    assert (record["samples"], record["sets"]["web"]["samples"]) == (7, 11)
    for file, part in (("val.jsonl", ""), ("web.jsonl", "web_")):
        assert shell(f"evaluate run={run.folder} data.path={file} data.holdout=all") == 0
        (path,) = run.folder.glob("evaluate-*.json")
        found = read_json(path)
        path.unlink()
        assert found["eval_loss"] == pytest.approx(last[f"eval_{part}loss"], rel=1e-6)
        assert "sets" not in found  # they are of the run's own data

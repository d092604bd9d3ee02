"""What a run does where nobody says: a small model on its data, and everything else."""

from pathlib import Path
from typing import Any

import pytest

from tests.lib.cli_support import prepared
from tests.lib.run_support import BASE, TOYS, entries, go, read_json, shell
from trainer import train

PLAIN = [
    f"{key}={value}"
    for key, value in BASE.items()
    if key.partition(".")[0] not in {"steps", "optimizer", "scheduler", "eval", "checkpoint"}
]
"""A run of which neither length, learning rate nor cadence is typed."""


def clock(line: str) -> tuple[Any, ...]:
    config = prepared(line).config
    rate = config.optimizer.params.get("lr")
    return rate, config.steps, config.epochs, config.eval.every, config.checkpoint.every


@pytest.mark.parametrize(
    ("line", "expected"),
    {
        "": (1.2e-2, 32, None, 16, 16),
        "optimizer=sgd": (0.1, 32, None, 16, 16),
        "optimizer.lr=1e-3 steps=7": (1e-3, 7, None, 16, 16),
        "epochs=2 eval.every=null": (1.2e-2, None, 2, None, 16),
        "recipe=quickstart": (1.2e-2, 6, None, None, None),
        "model=gpt_small eval.every=5": (None, None, None, 5, "10min"),
        f"model._target_={TOYS}.Net": (None, None, None, 0.1, "10min"),
        f"data._target_={TOYS}.Rows": (None, None, None, 0.1, "10min"),
        "recipe=gpt2_124m data.path=x": (6e-4, 19073, None, 500, 500),
    }.items(),
)
def test_the_toys_defaults_are_for_the_toy_alone(line, expected):
    Path("x").write_bytes(bytes(400))
    assert clock(line) == expected


def test_one_epoch_of_ten_evaluations_is_what_nobody_has_to_type(capsys):
    run = train([*PLAIN, "data.size=210"])
    screen = capsys.readouterr().out
    assert "learning rate  0.0003 (default), adamw, " in screen
    plan = read_json(run.folder / "plan.json")
    assert plan["defaults"][:3] == ["optimizer.lr=0.0003", "scheduler.warmup=0.03", "epochs=1"]
    assert plan["defaults"][3:] == ["eval.every=0.1", "checkpoint.every=10min"]
    assert (plan["steps"], plan["steps_per_epoch"], plan["warmup_steps"]) == (25, 25, 1)
    assert plan["cadences"] == {"log": 1, "evaluate": 3, "checkpoint": "10min"}
    evaluated = [entry["step"] for entry in entries(run) if "eval_loss" in entry]
    assert evaluated == [*range(3, 25, 3), 25]
    printed = screen.strip().splitlines()[-1].partition("train ")[2]
    assert printed.startswith("resume=")
    assert shell(printed) == 0
    assert read_json(run.folder / "plan.json")["steps"] == 50
    capsys.readouterr()
    assert shell(f"resume={run.folder}") == 0
    assert "is done after step 50; epochs=N trains further" in capsys.readouterr().out


def test_what_is_typed_is_not_shown_as_a_default():
    mixed = train(["command=plan", *PLAIN, "steps=2", "eval.every=0.5"])
    assert read_json(mixed.folder / "plan.json")["defaults"] == [
        "optimizer.lr=0.0003",
        "scheduler.warmup=0.03",
        "checkpoint.every=10min",
    ]


def saved(line: str) -> list[str]:
    folder = go(f"'hooks=[{TOYS}.Slow]' steps=8 checkpoint.keep=20 {line}").folder
    return sorted(path.name[-1] for path in (folder / "checkpoints").iterdir())


def test_checkpoints_come_by_time_or_by_a_share_of_the_run():
    assert len(saved("checkpoint.every=0.05s")) > 2
    assert saved("checkpoint.every=0.25") == ["2", "4", "6", "8"]

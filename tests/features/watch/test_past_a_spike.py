"""A fork goes past the samples of some steps; the line of a spike that says how."""

import re
import shlex

import pytest
import yaml

from tests.lib.nightly import slow
from tests.lib.run_support import TOYS, curve, entries, go, on, steps
from trainer import train

SPIKE = f"data._target_={TOYS}.Counting optimizer.lr=0.1 steps=44 name=job"
SPIKE += " checkpoint.every=6 checkpoint.keep=4 log.every=99"
TRUST = "trust=[tests]"


def consumed(run):
    """Ids by step, and those that were passed over before one."""
    found = [entry for entry in entries(run, "samples.jsonl") if entry["step"]]
    passed = {entry["step"]: entry["passed"] for entry in found if "passed" in entry}
    return {entry["step"]: entry["ids"] for entry in found}, passed


@pytest.mark.parametrize(
    "line",
    [
        "batch.unit=tokens batch.global=60",
        slow("batch.tail=drop"),
        slow("batch.global=null batch=ramp batch.stages={0:4,40:9,90:5}"),
        slow(
            "batch.global=null batch=ramp batch.stages={0:30,200:90,500:50} batch.unit=tokens "
            "batch.at=tokens"
        ),
    ],
)
def test_a_fork_has_the_samples_of_its_run_but_for_those_passed_over(line):
    run = go(f"{line} steps=22 checkpoint.every=1 checkpoint.keep=50")
    first, none = consumed(run)
    skip = ["data.skip_steps=[8-10,14]", TRUST, "resume_allow=[steps]"]
    fork = train([f"resume={run.folder}", "step=6", "steps=18", "name=past", *skip])
    ids, passed = consumed(fork)
    others = [*range(1, 8), 11, 12, 13, *range(15, 23)]
    assert [ids[step] for step in range(1, 19)] == [first[step] for step in others]
    assert (none, passed) == ({}, {8: first[8] + first[9] + first[10], 11: first[14]})
    # Samples that are passed over are not consumed, and the data stand behind them.
    last, of_run = steps(fork)[-1], steps(run)[-1]
    num_passed = sum(map(len, passed.values()))
    assert last["samples"] == sum(map(len, ids.values())) == of_run["samples"] - num_passed
    assert (last["passed_samples"], last["epoch"]) == (num_passed, of_run["epoch"])
    assert curve(fork, "loss")[:7] == curve(run, "loss")[:7] != curve(fork, "loss")[1:8]
    assert re.search(
        r"passed over +samples of steps 8-10, 14", (fork.folder / "train.log").read_text()
    )
    # It goes on from any of its steps, with ranks of any number, typed again or not.
    for step in (7, 9):
        again = train([f"resume={fork.folder}", f"step={step}", TRUST])
        assert consumed(again) == (ids, passed)
        assert curve(again, "loss") == curve(fork, "loss")
    # Of a fork the numbers are its own: its step 8 was step 11, and step 11 was step 15.
    other = train(
        [f"resume={fork.folder}", "step=6", "steps=14", "data.skip_steps=8-11", *skip[1:]]
    )
    assert [consumed(other)[0][step] for step in range(8, 15)] == [ids[s] for s in range(12, 19)]
    config = yaml.safe_load((other.folder / "config.yaml").read_text())
    assert config["data"]["skip_steps"] == ["8-15"]
    assert on(other, "data.skip_steps=8-15 steps=15").result["step"] == 15


def test_a_spike_names_the_command_that_goes_back_behind_it_and_past_its_samples():
    clean = go(SPIKE)
    ids, _ = consumed(clean)
    assert "far above" not in (clean.folder / "train.log").read_text()
    bad = sorted(ids[33] + ids[34])
    run = go(f"{SPIKE} data.downwards={str(bad).replace(' ', '')}")
    log = (run.folder / "train.log").read_text()
    (line,) = re.findall(r"step 35/44  the spike of .*", log)
    command = re.sub(".*: (?=train)", "", line)
    assert line.startswith("step 35/44  the spike of steps 33 to 34 is over; to go back behind it")
    assert command.endswith("step=30 data.skip_steps=31-34 name=job-past")
    past = train([*shlex.split(command)[1:], TRUST])
    assert [consumed(past)[0][step] for step in range(31, 41)] == [ids[s] for s in range(35, 45)]
    assert max(curve(past, "loss")[29:]) < 0.5 < max(curve(run, "loss")[29:])
    assert "far above" not in (past.folder / "train.log").read_text()

"""`profile=N` leaves a trace of N steps, with their phases, that viewers open."""

import gzip
import json
from pathlib import Path
from typing import Any

from tests.lib.run_support import curve, go, on, state

PHASES = ("data", "normalizer", "gather", "compute", "agree", "reduce", "update", "report")


def ranges(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """What was marked by name, in order of its begin."""
    with gzip.open(folder / "profile" / f"rank{rank}.json.gz") as file:
        events = json.load(file)["traceEvents"]
    marked = [e for e in events if e.get("cat") == "user_annotation"]
    assert len(events) > 20 * len(marked)  # operators, too
    return sorted(marked, key=lambda event: event["ts"])


def steps_in(marked: list[dict[str, Any]]) -> list[str]:
    return [e["name"] for e in marked if e["name"].startswith("ProfilerStep#")]


def test_so_many_steps_are_traced_with_their_phases_and_not_one_bit_differs(capsys):
    run = go("steps=7 profile=2")
    marked = ranges(run.folder)
    assert steps_in(marked) == ["ProfilerStep#4", "ProfilerStep#5"]
    first = next(e for e in marked if e["name"] == "ProfilerStep#4")
    inside = [e for e in marked if first["ts"] <= e["ts"] and _end(e) <= _end(first)]
    assert [e["name"] for e in inside if "phase: " in e["name"]] == [f"phase: {p}" for p in PHASES]
    plain = go("steps=7")
    assert not (plain.folder / "profile").exists()
    assert curve(plain, "loss") == curve(run, "loss")
    assert all(state(run)[name].equal(tensor) for name, tensor in state(plain).items())
    assert "no trace" not in capsys.readouterr().out
    on(run, "steps=14 profile=20")
    assert steps_in(ranges(run.folder)) == [f"ProfilerStep#{n}" for n in (11, 12, 13, 14)]
    assert not (on(run, "steps=17 profile=2").folder / "profile" / "rank1.json.gz").exists()
    assert "profile=2: no trace, which begins with the 4th step" in capsys.readouterr().out


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])

"""`parallel=auto`: whole copies of the model where they fit in memory, else shards of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lib.run_support import go, read_json
from trainer.core.errors import DoesNotFitError

pytestmark = pytest.mark.usefixtures("own_folder")

DEEP = (
    "model._target_=trainer.models.gpt.GPT +model.vocab_size=16 +model.width=64 "
    "+model.num_layers=8 +model.num_heads=2 +model.max_length=16"
)


def planned(memory: str, line: str = "") -> dict[str, Any]:
    """The plan for four GPUs of so much memory, on each of the machines."""
    typed = f"command=plan {DEEP} device=cuda parallel.ranks=4 accum=auto accum.memory={memory}"
    return read_json(go(f"{typed} {line}").folder / "plan.json")


def test_whole_copies_are_taken_where_a_step_fits(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned("1GiB")
    assert plan["parallel"] == "ddp"
    assert plan["parallel_why"].startswith("parallel=auto takes ddp: of ")
    assert plan["parallel_why"] in " ".join(capsys.readouterr().out.split())


def test_shards_are_taken_where_a_whole_copy_does_not_fit() -> None:
    plan = planned("7MiB")
    assert plan["parallel"] == "fsdp"
    assert "take ddp 6." in plan["parallel_why"]
    assert plan["predicted_peak_bytes"] <= plan["memory_limit_bytes"]
    with pytest.raises(DoesNotFitError):
        planned("7MiB", "parallel=ddp")


@pytest.mark.nightly
def test_where_nothing_fits_it_is_said_of_what_needs_least() -> None:
    with pytest.raises(DoesNotFitError, match="does not fit, even alone"):
        planned("1MiB")


def test_sums_that_do_not_depend_on_the_layout_are_those_of_whole_copies() -> None:
    typed = "deterministic=layout accum=fixed accum.micro=3 parallel.ranks=2"
    plan = read_json(go(f"command=plan {typed}").folder / "plan.json")
    assert (plan["parallel"], plan["parallel_why"]) == ("ddp", None)

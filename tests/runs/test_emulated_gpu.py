"""Runs on a GPU made of Python: the losses of a CPU, no mixed devices, one wait a step."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.lib.cli_support import python
from tests.lib.emulated_kinds import KINDS
from tests.lib.nightly import LIMIT_S, nightly, slow

SHOWN = ["auto", "packed", "ghost", "contrastive", "chat"]
PAIRS = [slow("auto", "deep"), nightly("adapter", "deep adapter")]
LEARNING = [k for k in KINDS if k != "mixed devices"]
EACH = [*SHOWN[:1], *map(slow, SHOWN[1:]), *(nightly(k) for k in LEARNING if k not in SHOWN)]

OF_A_MODEL = "at models/bind.py"
"""Where a model is called: what a library's own forward waits for, as it looks at its mask."""
TOLERANCE = {"half precision": 1e-3, "muon": 1e-4}
"""Where a CPU rounds to half precision, and the emulated device does not; as a fraction."""


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run all kinds that this session asks for, in one process, which has the device."""
    kinds = {"mixed devices"}
    for item in request.session.items:
        if item.path == Path(__file__):
            asked = getattr(item, "callspec", None)
            kinds.update(asked.params.values() if asked else ())
    folder = tmp_path_factory.mktemp("emulated")
    words = ["-m", "tests.lib.emulated_runs", "results.json", *sorted(kinds)]
    done = python(shlex.join(words), folder, LIMIT_S)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "results.json").read_text())


def ours(waits: dict[str, int]) -> dict[str, int]:
    """Leave out the waits of a library's own forward."""
    return {place: count for place, count in waits.items() if OF_A_MODEL not in place}


@pytest.mark.parametrize("kind", EACH)
def test_the_losses_are_those_of_a_cpu_and_no_devices_are_mixed(kind, results):
    found = results[kind]
    assert "failed" not in found, found["failed"]
    expected, entries = found["cpu"]["entries"], found["auto"]["entries"]
    assert len(entries) == len(expected)
    for one, other in zip(expected, entries, strict=True):
        for name in {"loss", "grad_norm", "eval_loss"} & one.keys():
            bound = TOLERANCE.get(kind, 2e-6)
            assert other[name] == pytest.approx(one[name], rel=bound), (name, other["step"])


@pytest.mark.parametrize("kind", EACH)
def test_the_host_waits_once_a_step(kind, results):
    found = results[kind]["auto"]
    # Documents are parted by their lengths where no kernel takes them all, as in fp32.
    per_micro_batch = int(kind == "packed")
    between = found["waits"][:-1]
    steps = [entry for entry in found["entries"] if "loss" in entry]
    expected = [1 + per_micro_batch * step["micro_batches"] for step in steps[1:-1]]
    assert [sum(ours(waits).values()) for waits in between] == expected, between
    assert not any(results[kind]["cpu"]["waits"])


@pytest.mark.parametrize(("small", "large"), PAIRS)
def test_saving_and_evaluating_wait_no_longer_for_more_tensors(small, large, results):
    few, many = (ours(results[kind]["auto"]["waits_at_the_end"]) for kind in (small, large))
    assert few == many
    assert 0 < sum(few.values()) < 20


def test_a_model_that_mixes_devices_fails_there_and_not_on_a_cpu(results):
    assert "found at least two devices" in results["mixed devices"]["failed"]

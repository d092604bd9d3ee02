"""A manifest that lies at random places, signed as a stranger's would be, never crashes a run.

Every value of the present format's golden checkpoint may be replaced, removed, or exchanged for
another one. The run that is to go on from it either does, or is refused with the code of what is
wrong, or ends with 6 where moments changed places and led to what is not finite, or with 1 where an
optimizer cannot take a step with what it was handed; it runs in a process of its own, so that a
kernel that was led astray is seen.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.reliability import lab
from tests.reliability.make_golden import GOLDEN, SETTINGS
from tests.reliability.support import cases, replay
from trainer.checkpoint import manifest as manifests

NUM_LIES = 24
NUM_LIES_NIGHTLY = 1000

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**31, 2**63, 10**30, 1e308, 0.5, "", "../x", "F64", "BOOL"),
    *([], {}, [[]], [0], [10**9, 10**9], [-1], {"$float": "nan"}, {"$tuple": []}, {"$pairs": []}),
    *({"$tensor": "model.head.weight"}, {"$tensor": "rng.cpu"}),
)

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def places(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Find where values stand in a tree of JSON."""
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield (*above, key)
        yield from places(tree[key], (*above, key))


def lie(body: dict[str, Any], chance: Random) -> str:
    """Replace, remove or exchange a value, one time in three among the files."""
    found = list(places(body))
    head = chance.choice(["meta", "meta", "files"])
    place = chance.choice([each for each in found if each[0] == head])
    holder = body
    for key in place[:-1]:
        holder = holder[key]
    kind, last = chance.randrange(4), place[-1]
    if kind == 0:
        del holder[last]
    elif kind == 1:
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        other = chance.choice(keys)
        holder[last], holder[other] = holder[other], holder[last]
    else:
        holder[last] = copy.deepcopy(chance.choice(VALUES))
    return f"{place}: {('removed', 'exchanged', 'replaced', 'replaced')[kind]}"


def tell_lies(count: int, tmp_path: Path) -> None:
    golden = GOLDEN / f"format-{manifests.FORMAT_VERSION}" / "checkpoints"
    settings, codes = lab.config(*SETTINGS), dict[int, int]()
    for case, chance in cases(count):
        run, log = tmp_path / f"run{case}", tmp_path / f"log{case}"
        shutil.copytree(golden, run / "checkpoints")
        (path,) = run.glob("checkpoints/*/manifest.json")
        body = json.loads(path.read_bytes())
        del body["sha256"]
        about = f"{replay(case)}: {lie(body, chance)}"
        path.write_bytes(manifests.sign(body))
        code = lab.fork(lambda r=run: lab.run(settings, r, resume=True).code, log).wait()
        assert code in (0, 2, 3, 4, 6, lab.RAISED), f"{about}: {code} {log.read_text()}"
        codes[code] = codes.get(code, 0) + 1
        shutil.rmtree(run)
    print(f"{count} lies, by exit code: {codes}")
    assert codes.get(4, 0) > count // 3


def test_a_random_lie_never_crashes_a_run(tmp_path: Path) -> None:
    tell_lies(NUM_LIES, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_thousand_random_lies_crash_no_run(tmp_path: Path) -> None:
    tell_lies(NUM_LIES_NIGHTLY, tmp_path)

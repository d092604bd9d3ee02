"""Harness 12: the stored checkpoint of this format loads bit for bit, and altered ones do not.

`golden/format-N` was written by the program that had format N; what it holds is spelled out beside
it. `python -m tests.reliability.test_golden`, once for each format that is released, writes it.
"""

import copy
import functools
import json
import operator
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.lib.nightly import counts
from tests.lib.ranks_support import Ranks
from tests.reliability import lab
from tests.reliability.rank_work import run_as_rank
from tests.reliability.support import cases, replay
from tests.reliability.test_hostile_checkpoints import sign
from trainer.assemble import saved
from trainer.checkpoint.manifest import FORMAT_VERSION
from trainer.checkpoint.store import CheckpointStore
from trainer.core.world import World
from trainer.data.text import Text
from trainer.data.tokens import TokenWindows
from trainer.data.view import DataView

GOLDEN_RUN = Path(__file__).parent / "golden" / f"format-{FORMAT_VERSION}"
SETTINGS = (
    *("model.width=2", "model.tied=true", "steps=3", "eval.every=null"),
    *("optimizer.lr=0.012", "scheduler.warmup=0"),
)


def expected(folder: Path) -> dict[str, object]:
    """Spell out a checkpoint: every tensor's bytes, and all else."""
    loaded = CheckpointStore(folder).load(set_aside=False)
    tensors = {
        name: [kind, list(shape), whole.hex()]
        for name in sorted(loaded.tensors)
        for kind, shape, whole in [lab.bits(loaded.tensors[name][...])]
    }
    return {"step": loaded.step, "tensors": tensors, "parts": loaded.parts}


def trained(world: World, run: Path) -> None:
    """Train on ranks that hold shards, so that tensors lie in slices."""
    saved.environment = dict  # what a machine is called belongs to no golden file
    ended = run_as_rank(world, (*SETTINGS, "parallel=fsdp"), run, {"stop_after": 2})
    assert ended["code"] == 75, ended


def test_a_golden_checkpoint_loads_bit_for_bit_and_is_trained_on(tmp_path):
    wanted = json.loads((GOLDEN_RUN / "expected.json").read_text())
    assert json.loads(json.dumps(expected(GOLDEN_RUN / "checkpoints"))) == wanted
    shutil.copytree(GOLDEN_RUN / "checkpoints", tmp_path / "checkpoints")
    ended = lab.run(lab.config(*SETTINGS), tmp_path, resume=True)
    assert ended.code == 0, ended
    assert CheckpointStore(tmp_path / "checkpoints").steps()[-1] == 3


class Unmarked:
    """Rows of one's own, without a fingerprint; wherever they are imported from."""

    __module__ = "rows"

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(index + 2), "labels": torch.arange(index + 2)}


def test_data_keep_the_fingerprint_that_older_checkpoints_know(tmp_path, cache):
    """Another one would refuse every run that goes on after an upgrade."""
    (tmp_path / "corpus.txt").write_text("\n\n".join(f"document {i}" for i in range(9)))
    (tmp_path / "tokens.bin").write_bytes(bytes(range(200)))
    found = [
        DataView(Text(str(tmp_path / "corpus.txt"), overlong="cut")).fingerprint[:16],
        DataView(TokenWindows(str(tmp_path / "tokens.bin"), max_length=8)).fingerprint[:16],
        DataView(Unmarked()).fingerprint[:16],
    ]
    assert found == ["cbd9ab3bcf2a19cb", "18328a487bb56a0d", "2e051d435eb599f8"]


VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**31, 2**63, 10**30, 1e308, 0.5, "", "../x", "F64", "BOOL"),
    *([], {}, [[]], [0], [10**9, 10**9], [-1], {"$float": "nan"}, {"$tuple": []}, {"$pairs": []}),
    *({"$tensor": "model.head.weight"}, {"$tensor": "rng.cpu"}),
)


def places(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Find where values stand in a tree of JSON."""
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield (*above, key)
        yield from places(tree[key], (*above, key))


def lie(body: dict[str, Any], chance: Random) -> str:
    """Replace, remove or exchange a value, one time in three among the files."""
    head = chance.choice(["parts", "parts", "files"])
    *keys, last = place = chance.choice([each for each in places(body) if each[0] == head])
    holder: Any = functools.reduce(operator.getitem, keys, body)
    kind = chance.choice(["removed", "exchanged", "replaced", "replaced"])
    if kind == "removed":
        del holder[last]
    elif kind == "exchanged":
        other = chance.choice([*holder] if isinstance(holder, dict) else range(len(holder)))
        holder[last], holder[other] = holder[other], holder[last]
    else:
        holder[last] = copy.deepcopy(chance.choice(VALUES))
    return f"{place}: {kind}"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@counts(6, 300)
def test_a_random_lie_never_crashes_a_run(count, tmp_path):
    """It goes on, is refused by code, or ends with 6 or 1 where moments were led astray."""
    settings, codes, run = lab.config(*SETTINGS), Counter[int](), tmp_path / "run"
    for case, chance in cases(count):
        about, log = [replay(case)], tmp_path / f"log{case}"
        shutil.copytree(GOLDEN_RUN / "checkpoints", run / "checkpoints")
        step = run / "checkpoints" / "step-00000002"
        sign(step, lambda body, about=about, chance=chance: about.append(lie(body, chance)))
        code = lab.fork(lambda: lab.run(settings, run, resume=True).code, log).wait()
        assert code in (0, 2, 3, 4, 6, lab.RAISED), f"{about}: {code} {log.read_text()}"
        codes[code] += 1
        shutil.rmtree(run)
    print(f"{count} lies, by exit code: {codes}")
    assert codes[4] > count // 4


if __name__ == "__main__":
    ranks = Ranks()
    with tempfile.TemporaryDirectory() as place:
        ranks.run(2, trained, Path(place) / "run")
        GOLDEN_RUN.mkdir(parents=True)
        shutil.copytree(Path(place) / "run" / "checkpoints", GOLDEN_RUN / "checkpoints")
    ranks.close()
    content = json.dumps(expected(GOLDEN_RUN / "checkpoints"), indent=1, sort_keys=True)
    (GOLDEN_RUN / "expected.json").write_text(content + "\n")

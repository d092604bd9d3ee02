"""Writes the golden checkpoint of the present format; run once for each format that is released.

python -m tests.reliability.make_golden
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from tests.lib.ranks_support import Ranks
from tests.reliability import lab
from tests.reliability.rank_work import run_as_rank
from trainer.checkpoint.manifest import FORMAT_VERSION
from trainer.checkpoint.store import CheckpointStore
from trainer.commands import train
from trainer.core.world import World

GOLDEN = Path(__file__).parent / "golden"
SETTINGS = (
    *("model.width=2", "model.tied=true", "steps=3", "eval.every=null"),
    *("optimizer.lr=0.012", "scheduler.warmup=0"),
)
RANKS = 2


def expected(folder: Path) -> dict[str, object]:
    """Spell out a checkpoint: every tensor's bytes, and all else."""
    loaded = CheckpointStore(folder).load(set_aside=False)
    tensors = {
        name: [kind, list(shape), whole.hex()]
        for name in sorted(loaded.tensors)
        for kind, shape, whole in [lab.bits(loaded.read(name))]
    }
    return {"step": loaded.step, "tensors": tensors, "meta": loaded.meta}


def trained(world: World, run: Path) -> None:
    """Train on ranks that hold shards, so that tensors lie in slices."""
    train.environment = dict  # what a machine is called belongs to no golden file
    ended = run_as_rank(world, (*SETTINGS, "parallel=fsdp"), run, {"stop_after": 2})
    assert ended["code"] == 75, ended


if __name__ == "__main__":
    target = GOLDEN / f"format-{FORMAT_VERSION}"
    ranks = Ranks()
    with tempfile.TemporaryDirectory() as place:
        ranks.run(RANKS, trained, Path(place) / "run")
        target.mkdir(parents=True)
        shutil.copytree(Path(place) / "run" / "checkpoints", target / "checkpoints")
    ranks.close()
    content = json.dumps(expected(target / "checkpoints"), indent=1, sort_keys=True)
    (target / "expected.json").write_text(content + "\n")

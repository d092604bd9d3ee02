"""Writes the golden checkpoint of the present format; run once for each format that is released.

python -m tests.reliability.make_golden
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from tests.reliability import lab
from trainer.checkpoint.manifest import FORMAT_VERSION
from trainer.checkpoint.store import CheckpointStore
from trainer.commands import train

GOLDEN = Path(__file__).parent / "golden"
SETTINGS = ("model.width=2", "model.tied=true", "steps=3", "eval.every=null")


def expected(folder: Path) -> dict[str, object]:
    """Spell out a checkpoint: every tensor's bytes, and all else."""
    loaded = CheckpointStore(folder).load(set_aside=False)
    tensors = {
        name: [kind, list(shape), whole.hex()]
        for name, tensor in sorted(loaded.tensors.items())
        for kind, shape, whole in [lab.bits(tensor)]
    }
    return {"step": loaded.step, "tensors": tensors, "meta": loaded.meta}


if __name__ == "__main__":
    target = GOLDEN / f"format-{FORMAT_VERSION}"
    train.environment = dict  # what a machine is called belongs to no golden file
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        lab.run(lab.config(*SETTINGS), run, after_step=lab.stop_at(2))
        target.mkdir(parents=True)
        shutil.copytree(run / "checkpoints", target / "checkpoints")
    content = json.dumps(expected(target / "checkpoints"), indent=1, sort_keys=True)
    (target / "expected.json").write_text(content + "\n")

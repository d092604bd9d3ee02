"""The losses of a few steps are those that TRL's trainer logs of the same pairs and weights."""

from pathlib import Path

import pytest

from tests.lib.nightly import slow
from tests.lib.preference_toys import ONE_STEP, save_fixed_files
from tests.lib.run_support import curve, go

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

NEAR = 5e-6
"""In fp32; from one step to the next a loss changes by 1e-2 at least."""
# Logged by `trl.DPOTrainer` of TRL 1.16.0, with transformers 5.24 and torch 2.13, on a CPU in fp32.
# They are made again where TRL is installed: `python -m tests.lib.preference_toys FOLDER`, and for
# each loss `python benchmarks/dpo.py --folder FOLDER --pairs 10 --steps 4 --rounds 1 --loss ipo`.
TRL = {
    "sigmoid": [0.6931472, 0.6716466, 0.6509819, 0.6303300],
    "ipo": [25.0000000, 22.2361965, 19.2817478, 21.3326454],
    "hinge": [1.0000000, 0.9109728, 0.8048545, 0.6611067],
}


@pytest.mark.parametrize("loss", ["sigmoid", slow("ipo"), slow("hinge")])
def test_the_losses_of_four_steps_are_those_of_trl(loss):
    save_fixed_files(Path())
    run = go(
        f"{ONE_STEP} model.path=model objective=dpo objective.loss={loss} accum.micro=3 "
        "optimizer.lr=0.1 steps=4"
    )
    assert curve(run, "loss") == pytest.approx(TRL[loss], rel=NEAR)

"""`batch=noise_ramp`: the batch grows with the measured noise scale, and decisions are saved."""

import math
import shlex
from pathlib import Path

import pytest

from tests.lib.cli_support import prepared
from tests.lib.run_support import curve, entries, go, overrides, read_json, saved, state
from tests.reliability.rank_work import run_as_rank
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.core.world import World
from trainer.features.batch_size.noise_ramp import NoiseRamp

OWN = "tests.lib.noise_toys"  # of a noise scale of 24 samples
TOY = f"model._target_={OWN}.DoubleLinear data._target_={OWN}.Gaussian data.holdout=0"
TOY += f" objective._target_={OWN}.Linear scheduler=constant"
TOY += " accum.micro=1 optimizer.lr=1e-4 batch=noise_ramp"
RAMP = f"{TOY} batch.global=4 batch.max=12 batch.every=10 log.noise_scale=1 steps=50"
SIZES = [4] * 30 + [8] * 10 + [12] * 10


def config_of(line: str) -> RunConfig:
    return prepared(shlex.join(overrides(line))).config


@pytest.mark.slow
def test_a_run_that_goes_on_on_one_or_two_ranks_decides_as_the_uninterrupted_one(ranks):
    """Bit for bit on one rank; on two to 1e-12, from a checkpoint before the first decision."""
    line = f"{RAMP} scheduler.scale=sqrt scheduler.reference_batch=4"
    whole, same, wide = (Path(name).absolute() for name in ("whole", "same", "wide"))
    assert run_as_rank(World(), config_of(line), whole, {}) == {"code": 0}
    assert curve(whole, "batch_size") == SIZES
    assert [len(entry["ids"]) for entry in entries(whole, "samples.jsonl")] == SIZES
    expected = [1e-4 * math.sqrt(size / 4) for size in SIZES]
    assert curve(whole, "lr") == pytest.approx(expected, rel=1e-12)
    log = (whole / "train.log").read_text()
    assert "step 31/50  the global batch is 8 from here on" in log
    assert saved(whole, "batch")["decisions"] == [[0, 4], [30, 8], [40, 12]]

    for folder, at in ((same, 33), (wide, 15)):
        assert run_as_rank(World(), config_of(line), folder, {"stop_after": at})["code"] == 75
    assert run_as_rank(World(), config_of(line), same, {"resume": True}) == {"code": 0}
    for name, tensor in state(whole).items():
        assert tensor.equal(state(same)[name]), name
    two = config_of(f"{line} parallel.ranks=2")
    assert ranks.run(2, run_as_rank, two, wide, {"resume": True}) == [{"code": 0}] * 2
    for folder in (same, wide):
        assert entries(folder, "samples.jsonl") == entries(whole, "samples.jsonl")
        assert curve(folder, "loss") == pytest.approx(curve(whole, "loss"), rel=1e-12)


def test_what_a_run_has_grown_to_is_within_the_bounds_of_the_one_that_goes_on():
    ramp = NoiseRamp(global_batch=4, max=12)
    state = ramp.state() | {"decisions": [[0, 4], [30, 8]]}
    ramp.load(state)
    with pytest.raises(ConfigError, match=r"^batch\.max=4: .* has grown to 8 already"):
        NoiseRamp(global_batch=4, max=4).load(state)
    with pytest.raises(ConfigError, match=r"^batch\.global=2: type 4, as the run began"):
        NoiseRamp(global_batch=2, max=12).load(state)


def test_the_batch_stays_below_the_noise_scale_which_is_measured_unasked(capsys):
    line = RAMP.replace("batch.max=12", "batch.max=96")
    sizes = curve(go(f"{line} steps=120"), "batch_size")
    assert sizes == sorted(sizes)
    assert 16 <= sizes[-1] <= 24
    run = go(f"{line} log.noise_scale=null steps=20")
    assert saved(run, "batch")["noise"]["noise"]["count"] == 2
    capsys.readouterr()
    plan = read_json(go(f"command=plan {line}").folder / "plan.json")
    assert plan["largest_batch"] == 96
    shown = " ".join(capsys.readouterr().out.split())
    assert "batch 4 samples a step at first, 96 at most" in shown
    assert "batch grows with the noise scale, asked every 10 steps" in shown

"""Whole runs on a GPU: the curve of a CPU, the bits of a resumption, and what ends one."""

import pytest
import torch

from tests.lib.gpu_support import DATA, MODEL, ON_A_GPU, compiled_for, run_gpt
from tests.lib.nightly import nightly
from tests.lib.run_support import TOYS, curve, overrides, state, steps
from tests.lib.run_toys import Stop
from trainer import train
from trainer.core.errors import DataError, Preempted

pytestmark = pytest.mark.usefixtures("own_folder")

ANOTHER_CUT = "accum=budget accum.max_tokens=96"


@pytest.mark.parametrize("device", [ON_A_GPU, nightly("cpu")], indirect=True)
def test_a_gpu_learns_along_the_curve_of_a_cpu(device):
    expected = curve(run_gpt("cpu", "steps=20"), "loss")
    found = curve(run_gpt(device, f"steps=20 {ANOTHER_CUT}"), "loss")
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found == pytest.approx(expected, rel=1e-3)
    assert expected[-1] < expected[0]
    assert curve(run_gpt(device, "steps=1 seed=1"), "loss")[0] != pytest.approx(
        expected[0], rel=1e-5
    )


@pytest.mark.parametrize("device", [ON_A_GPU, nightly("cpu")], indirect=True)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(device, monkeypatch):
    line = "steps=5 deterministic=true"
    whole = run_gpt(device, line)
    monkeypatch.setattr(Stop, "at", 2)
    with pytest.raises(Preempted):
        run_gpt(device, f"{line} hooks=[{TOYS}.Stop] hydra.run.dir=stopped")
    resumed = train(["resume=stopped", "trust=[tests]"])
    assert curve(resumed, "loss") == curve(whole, "loss")
    assert_same_state(state(resumed), state(whole))


@pytest.mark.parametrize("device", [ON_A_GPU, nightly("cpu")], indirect=True)
def test_the_same_command_gives_the_same_bits(device):
    line = f"steps=4 deterministic=true {ANOTHER_CUT}"
    one, other = run_gpt(device, line), run_gpt(device, line)
    assert curve(one, "loss") == curve(other, "loss")
    assert_same_state(state(one), state(other))


@pytest.mark.parametrize("device", [ON_A_GPU, nightly("cpu")], indirect=True)
def test_a_token_beyond_the_vocabulary_is_named_and_harms_nothing(device):
    with pytest.raises(DataError, match="17") as ended:
        run_gpt(device, "data._target_=tests.lib.gpu_support.OneTooLarge")
    assert ended.value.exit_code == 3
    assert float(torch.ones(8, device=device).sum()) == 8  # the context is alive


@pytest.mark.parametrize("device", [ON_A_GPU, nightly("cpu")], indirect=True)
def test_a_loss_scale_that_is_too_large_skips_steps_until_it_is_not(device):
    taken = steps(run_gpt(device, "precision=fp16 model.init_std=2 steps=8"))
    skipped = ["skipped" in entry for entry in taken]
    assert skipped[0]
    assert skipped == sorted(skipped, reverse=True)
    assert not skipped[-1]
    assert taken[-1]["loss"] < taken[0]["loss"]


@pytest.mark.parametrize("device", [ON_A_GPU, nightly("cpu")], indirect=True)
def test_the_planned_step_is_proven_on_the_device(device):
    line = f"{MODEL} {DATA} batch.global=16 device={device} {ANOTHER_CUT}"
    report = train(["verify", *overrides(line)]).result
    assert report["verdict"] == "exact"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("device", [ON_A_GPU, nightly("cpu")], indirect=True)
@pytest.mark.parametrize("packed", ["false", "true"])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_compiled_run_is_the_run_at_caps_that_leave_filler(device, packed, positions):
    line = (
        f"precision=bf16 model.positions={positions} accum.packed={packed} steps=3 "
        "accum=budget accum.max_tokens=100"
    )
    plain = curve(run_gpt(device, line), "loss")
    with compiled_for(device):
        compiled = curve(run_gpt(device, f"{line} compile=true"), "loss")
    assert compiled == pytest.approx(plain, rel=2e-2)


def assert_same_state(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

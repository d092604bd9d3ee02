"""Memory on a GPU: predicted, retried, and how often the host waits for the device."""

import json
import os
import subprocess
import sys
import warnings

import pytest
import torch

from benchmarks.gpu_waits import GpuWaits, ReadNumbers
from tests.lib.cli_support import CHECKOUT
from tests.lib.gpu_support import ON_A_GPU, run_gpt
from tests.lib.nightly import nightly
from tests.lib.run_support import entries, go, read_json

pytestmark = pytest.mark.usefixtures("own_folder")

GPT_OF_A_GPU = (
    "model=gpt2 model.vocab_size=8192 model.num_layers=4 model.max_length=256 precision=bf16 "
    "data._target_=tests.lib.gpu_support.Windows batch.global=64 device=cuda steps=3"
)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["false", "true"])
@pytest.mark.parametrize("packed", ["false", "true"])
@pytest.mark.parametrize("cap", [1024, 4096, 16384])
def test_a_step_takes_the_memory_that_was_predicted(cap, packed, recompute):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    run = go(
        f"{GPT_OF_A_GPU} accum=budget accum.max_tokens={cap} accum.packed={packed} "
        f"activation_checkpointing={recompute}"
    )
    measured = torch.cuda.max_memory_allocated() - held
    plan = read_json(run.folder / "plan.json")
    assert plan["predicted_peak_bytes"] == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("device", [ON_A_GPU, nightly("cpu")], indirect=True)
def test_many_ragged_steps_need_no_retry(device):
    count = 200 if device == "cuda" else 6

    def retries():
        if device == "cpu":
            return 0
        stats = torch.cuda.memory_stats()
        return stats["num_alloc_retries"] + stats["num_ooms"]

    before = retries()
    run = run_gpt(device, f"steps={count} accum=auto")
    assert retries() == before
    assert not [entry for entry in entries(run) if "replays" in entry]


@pytest.mark.gpu
def test_segments_may_grow_where_nobody_says_otherwise(tmp_path):
    script = (
        "import torch; from tests.lib.gpu_support import run_gpt; run_gpt('cuda', 'steps=1');"
        "kept = torch.ones(2**20, device='cuda');"
        "import json; print(json.dumps([s['is_expandable'] for s in torch.cuda.memory_snapshot()]))"
    )
    settings = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")
    environment = {n: value for n, value in os.environ.items() if n not in settings}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": os.pathsep.join([str(CHECKOUT), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert any(json.loads(done.stdout.splitlines()[-1]))


WAITS: list = []
"""What counts while a run of this file goes on."""


class Counts:
    """A hook that counts between two steps."""

    def on_step(self, entry):
        if WAITS and entry["step"] == 3:
            WAITS[0].begin()
        if WAITS and entry["step"] == 7:
            WAITS[0].end()


FIXED, BUDGET = "accum=fixed accum.micro=4", "accum=budget accum.max_tokens=64"


@pytest.mark.parametrize(
    ("device", "line"),
    [
        *(pytest.param("cuda", line, marks=pytest.mark.gpu) for line in (FIXED, BUDGET)),
        *(("cpu", BUDGET), nightly("cpu", FIXED)),
    ],
    indirect=["device"],
)
def test_a_step_waits_for_the_device_once(device, line):
    WAITS[:] = [GpuWaits() if device == "cuda" else ReadNumbers()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_gpt(device, f"{line} steps=9 hooks=[{__name__}.Counts]")
    places = WAITS.pop().places(caught)
    if device == "cpu":  # where the figures of a step are read at once, which makes nobody wait
        places = {at: n for at, n in places.items() if not at.startswith("metrics.py")}
    assert sum(places.values()) == 4, places

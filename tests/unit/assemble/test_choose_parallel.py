"""`parallel=auto`: whole copies of the model where they fit in memory, else shards of it."""

import pytest
import torch
from torch import nn

from tests.lib.cli_support import prepared
from tests.lib.run_support import overrides
from trainer.assemble.hardware import auto_mode, parallel_mode, parallel_setup
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.core.world import World

pytestmark = pytest.mark.usefixtures("own_folder")


def config_of(line: str) -> RunConfig:
    return prepared(" ".join(overrides(line))).config


@pytest.mark.parametrize(
    ("memory", "local_size", "mode"),
    [("1GiB", 4, "ddp"), ("33MiB", 4, "fsdp"), ("33MiB", 2, "hsdp"), ("17MiB", 2, "fsdp")],
)
def test_the_fewest_shards_that_fit_in_half_of_the_memory_are_taken(memory, local_size, mode):
    line = f"command=plan device=cuda parallel.ranks=4 accum=auto accum.memory={memory}"
    module = nn.Linear(1024, 1023)  # 4 MiB, and 16 with its gradient and moments
    found, why = auto_mode(config_of(line), World(size=4, local_size=local_size), module)
    assert found == mode
    assert why.startswith(f"parallel=auto chose {mode}: memory limit ")
    assert "ddp 16.0 MiB" in why


def test_ordered_sums_are_of_whole_copies_and_no_parallelism_of_one_rank():
    ordered = config_of("deterministic=layout accum.micro=3")
    assert parallel_mode(ordered, World(size=2)) == "ddp"
    with pytest.raises(ConfigError, match="parallel=none: is one rank, and there are 2"):
        parallel_mode(config_of("parallel=none"), World(size=2))


@pytest.mark.parametrize(
    ("module", "dtype"),
    [
        (nn.LayerNorm(6), torch.bfloat16),
        (nn.Sequential(nn.BatchNorm1d(6)), None),
        (nn.LayerNorm(6, dtype=torch.float64), None),
    ],
)
def test_a_gpu_gathers_in_bf16_but_for_norms_that_take_no_mixed_dtypes(module, dtype):
    line = "command=plan device=cuda accum=auto accum.memory=1GiB parallel=fsdp parallel.ranks=2"
    setup = parallel_setup(config_of(line), World(size=2), module, "fsdp", "bf16")
    assert setup.dtype == dtype

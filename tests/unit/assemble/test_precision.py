"""What `precision` becomes, by hardware, model and checkpoint."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.lib.config_support import checked
from trainer.assemble.hardware import resolve_precision
from trainer.core.errors import ConfigError
from trainer.core.gpu import has_fast_bf16
from trainer.core.world import World

CPU = torch.device("cpu")


def became(word, recorded=None, dtype=torch.float32, **values):
    config = checked({"precision": word, **values})
    terms = recorded and {"precision": recorded}
    return resolve_precision(config, World(), nn.Linear(2, 2).to(dtype), terms)


def test_auto_is_bf16_where_the_hardware_is_made_for_it_and_a_weight_is_in_fp32():
    flags = Path("/proc/cpuinfo").read_text()
    assert has_fast_bf16(CPU) == ("avx512_bf16" in flags or "amx_bf16" in flags)
    assert became("auto") == ("bf16" if has_fast_bf16(CPU) else "fp32")
    away = {"command": "plan", "device": "cuda", "accum.memory": 2**34}
    assert became("auto", **away) == "bf16", "on a GPU that is not here"
    assert became("auto", dtype=torch.bfloat16, **away) == "fp32"
    assert became("bf16", dtype=torch.float64) == "bf16", "what is typed counts"
    with pytest.raises(ConfigError, match=r"type precision=fp32 resume_allow=\[precision\]$"):
        became("auto", recorded="tf32")

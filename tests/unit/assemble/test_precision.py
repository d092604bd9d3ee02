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


def test_auto_is_bf16_where_the_processor_has_instructions_for_it():
    flags = Path("/proc/cpuinfo").read_text()
    assert has_fast_bf16(CPU) == ("avx512_bf16" in flags or "amx_bf16" in flags)
    assert became("auto") == ("bf16" if has_fast_bf16(CPU) else "fp32")


def test_a_model_without_a_weight_in_fp32_is_left_as_it_is():
    assert became("auto", dtype=torch.float64) == became("auto", dtype=torch.bfloat16) == "fp32"
    assert became("bf16", dtype=torch.float64) == "bf16", "what is typed counts"


def test_auto_is_bf16_on_a_gpu_that_is_not_here():
    assert became("auto", command="plan", device="cuda", **{"accum.memory": 2**34}) == "bf16"


def test_tf32_is_refused_where_there_is_no_gpu():
    with pytest.raises(ConfigError, match=r"type precision=fp32 resume_allow=\[precision\]$"):
        became("auto", recorded="tf32")

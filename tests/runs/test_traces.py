"""Tuning and replays leave Hugging Face models as one plain forward does.

The first forward of a transformers model that gives its hidden states registers hooks that capture
them, and notes in a flag that it did.
"""

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from tests.lib.heads import BERT, BUILT
from tests.lib.run_support import curve, go

pytestmark = pytest.mark.filterwarnings("ignore")


def seen_of(model: nn.Module, fields: Mapping[str, Tensor]) -> tuple[int, list[int], Tensor]:
    """Count the hooks and the hidden states of each kind, and give the logits."""
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        output = model(**fields, output_hidden_states=True)
    hidden = [len(value) for name, value in output.items() if name.endswith("hidden_states")]
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return hooks, hidden, output["logits"]


def assert_as_after_one_forward(model: nn.Module) -> None:
    fields = {"input_ids": torch.arange(12).view(2, 6)}
    fresh = BERT.build()
    fresh.load_state_dict(model.state_dict())
    fresh.eval()(**fields)
    (hooks, hidden, logits), expected = seen_of(model, fields), seen_of(fresh, fields)
    assert (hooks, hidden) == expected[:2]
    assert torch.equal(logits, expected[2])


def test_tuning_and_a_replayed_step_leave_a_model_as_after_one_forward():
    line = (
        "model._target_=tests.lib.heads.bert data._target_=tests.lib.heads.masked "
        "objective=model_loss objective.reduction=mean objective.causal=false "
        "batch.global=8 accum=auto steps=1"
    )
    failing = "accum.gradient._target_=tests.lib.support.Failing +accum.gradient.at=0"
    run = go(f"{line} {failing} +accum.gradient.phase=forward")
    assert curve(run, "replays") == [1]
    assert_as_after_one_forward(BUILT[-1])

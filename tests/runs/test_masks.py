"""A causal model of transformers runs without a mask, once a trial has shown that it may."""

import pytest

from tests.lib.heads import MASKED
from tests.lib.nightly import slow
from tests.lib.run_support import go


@pytest.mark.parametrize("line", ["accum=auto steps=1 eval.every=1", slow("command=verify")])
def test_tuning_training_evaluation_and_verification_give_a_causal_model_no_mask(line):
    MASKED.clear()
    model = "model._target_=tests.lib.heads.gpt2 data._target_=tests.lib.heads.causal"
    go(f"{line} {model}")
    assert MASKED[:3] == [False, True, True], "the trial"
    assert len(MASKED) > 6
    assert not any(MASKED[3:])

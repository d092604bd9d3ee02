"""What cannot be is told in one line: the key or the sample, the value, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib.run_support import TOYS, go
from trainer.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("own_folder")


GPT = "model=gpt_tiny model.width=16 model.num_layers=1 model.num_heads=2"


@pytest.mark.parametrize(
    ("line", "words"),
    {
        "accum=budget accum.max_tokens=11": [
            "accum.max_tokens: 11 is less than the longest sample, of 12 tokens",
            "The nearest valid value is accum.max_tokens=12",
        ],
        f"{GPT} model.vocab_size=5 data._target_={TOYS}.Known": [
            "model.vocab_size=5: the data hold 16 different tokens",
            "the smallest valid value is 16",
        ],
        f"{GPT} data._target_={TOYS}.Rows": ["model.vocab_size: the data do not state", "set it"],
        "optimizer._target_=torch.optim.SGD optimizer.rate=0.1": ["optimizer.rate", "SGD"],
        "objective=classify": ["classify"],
        "steps=null epochs=1 scheduler.warmup=99": ["warmup=99: exceeds the run's", "valid value"],
    }.items(),
)
def test_what_does_not_fit_together_is_refused_by_key(line, words):
    with pytest.raises(ConfigError) as raised:
        go(line)
    for word in words:
        assert word in str(raised.value), str(raised.value)
    assert not list(Path().glob("outputs/*/*/metrics.jsonl"))

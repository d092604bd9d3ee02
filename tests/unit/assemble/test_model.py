"""A model is counted before it takes memory that is not there."""

import pytest
import torch
from torch import nn

from tests.lib.run_support import go
from trainer.core.errors import DoesNotFitError
from trainer.models import first_weights
from trainer.models.gpt import GPT

pytestmark = pytest.mark.usefixtures("own_folder")


class Wide(nn.Module):
    """Has 1 TB of weights, which are asked for in one piece of 4 GB after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 4)
        self.layers = nn.ModuleList(nn.Linear(2**15, 2**15) for _ in range(250))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(input_ids)


def test_a_model_that_cannot_fit_is_refused_before_it_takes_the_memory():
    with pytest.raises(DoesNotFitError, match=r"Wide has 268,4.* available .*: use a smaller") as e:
        go(f"model._target_={__name__}.Wide accum=auto")
    assert "\n" not in str(e.value)


built: list[str] = []


class Known(GPT):  # type: ignore[misc] # final
    """Is what the built-in model is, in a folder of the user's."""

    def __init__(self, **settings: int) -> None:
        super().__init__(vocab_size=16, width=8, num_layers=1, num_heads=2)
        built.append(str(self.embedding.weight.device))


def places_of(line: str) -> list[str]:
    built.clear()
    go(line)
    return [*built]


def test_a_small_model_is_built_once_and_a_large_one_is_counted_first(monkeypatch):
    line = f"model._target_={__name__}.Known steps=1"
    away = f"{line} command=plan device=h100 accum=auto"
    assert places_of(line) == ["cpu"]
    # No values are made for a trial on this machine.
    monkeypatch.setattr("trainer.training.model.any_values", None)
    assert places_of(f"{away} parallel=fsdp parallel.ranks=2") == ["meta"], "in shards"
    monkeypatch.setattr(first_weights, "LARGE_BYTES", 100)
    assert places_of(line) == ["meta", "cpu"]
    assert places_of(away) == ["meta"]

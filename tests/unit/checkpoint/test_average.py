"""The average of the weights, and what a checkpoint gives by it; more in runs/test_ema.py."""

import pytest
import torch
from torch import nn

from tests.lib.run_toys import LowNet
from tests.reliability.support import put
from trainer.checkpoint.average import AVERAGE, WeightAverage
from trainer.checkpoint.state import capture
from trainer.checkpoint.store import MODEL, CheckpointStore
from trainer.checkpoint.weights import ModelPart, open_weights
from trainer.core.errors import NoCheckpointError


def move(module: nn.Module) -> None:
    """Change what is trained, as an update does."""
    with torch.no_grad():
        for each in module.parameters():
            each.add_(torch.randn_like(each), alpha=int(each.requires_grad))


def test_weights_in_bf16_are_averaged_in_fp32():
    low = LowNet()
    whole = LowNet().float()
    whole.load_state_dict(low.state_dict())
    followed = WeightAverage(0.999), WeightAverage(0.999)
    for each, module in zip(followed, (low, whole), strict=True):
        each.begin(module)
    for step in range(3):
        move(low)
        whole.load_state_dict(low.state_dict())
        for each in followed:
            each.after_update(step + 1)
    found, expected = (each.state()["weights"] for each in followed)
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32
        assert tensor.equal(expected[name]), name
        assert not tensor.equal(tensor.bfloat16())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.bfloat16()


def test_step_ema_gives_the_average_in_the_place_of_what_is_trained(tmp_path):
    module, average = Tied(), WeightAverage(0.9)
    average.begin(module)
    for step in range(3):
        move(module)
        average.after_update(step + 1)
    store = CheckpointStore(tmp_path / "checkpoints")
    put(store, 3, *capture({MODEL: ModelPart(module), AVERAGE: average}))
    fresh = Tied()
    open_weights(tmp_path, step="ema").fill(fresh)
    expected = module.state_dict() | {
        name: tensor.bfloat16() for name, tensor in average.state()["weights"].items()
    }
    expected["head.weight"] = expected["embed.weight"]
    for name, tensor in fresh.state_dict().items():
        assert tensor.equal(expected[name]), name
    for weights in ({"head": 1}, {"norm.weight": 1}, 1):
        average.state = lambda weights=weights: {"updates": 1, "weights": weights}
        put(store, store.steps()[-1] + 1, *capture({MODEL: ModelPart(module), AVERAGE: average}))
        with pytest.raises(NoCheckpointError, match="step=ema: cannot be used"):
            open_weights(tmp_path, step="ema")

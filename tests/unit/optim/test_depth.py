"""Layer-wise decay is what groups written by hand give, for any model with a list of blocks."""

from typing import Any

import pytest
import torch
from torch import nn

from trainer.core.errors import ConfigError
from trainer.features.muon.muon import Muon
from trainer.models.gpt import GPT
from trainer.optim.optimizers import AdamW, OptimizerSpec, OwnOptimizer


def settings(model: nn.Module, spec: OptimizerSpec, key: str = "lr") -> dict[str, Any]:
    """Learning rate, or another setting, of each parameter by its name."""
    of = {id(p): g[key] for g in spec.build(model).param_groups for p in g["params"]}
    return {name: of[id(p)] for name, p in model.named_parameters()}


def test_blocks_have_falling_rates_as_groups_by_hand_have():
    model = GPT(11, width=12, num_layers=2, num_heads=2, max_length=8)
    by_hand = {"embedding*": 0.125, "blocks.0.*": 0.25, "blocks.1.*": 0.5, "*": 1.0}
    groups = {pattern: {"lr": 0.01 * scale} for pattern, scale in by_hand.items()}
    decaying = AdamW(lr=0.01, weight_decay=0.1, layer_decay=0.5)
    grouped = AdamW(lr=0.01, weight_decay=0.1, groups=groups)
    for key in ("lr", "weight_decay"):
        assert settings(model, decaying, key) == settings(model, grouped, key)


@pytest.mark.parametrize(
    "spec",
    [
        Muon(lr=1.0, layer_decay=0.5, groups={"classifier.bias": {"lr": 3.0}}),
        OwnOptimizer.of(
            torch.optim.RAdam,
            {"lr": 1.0, "layer_decay": 0.5, "groups": {"classifier.bias": {"lr": 3.0}}},
        ),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_a_model_of_transformers_has_its_rates_and_those_of_groups_stay(spec):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 20}
    config = transformers.BertConfig(num_hidden_layers=3, **small)
    found = settings(transformers.BertForSequenceClassification(config), spec)
    for name, rate in found.items():
        parts = name.split(".")
        depth = 1 + int(parts[3]) if "layer" in parts else 0
        behind = parts[0] == "classifier" or "pooler" in parts
        expected = 3.0 if name == "classifier.bias" else 1.0 if behind else 0.5 ** (4 - depth)
        assert rate == expected, name


def test_an_output_layer_has_the_whole_rate_wherever_it_is_declared():
    class HeadFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.embedding = nn.Linear(4, 9), nn.Embedding(9, 4)
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def get_output_embeddings(self):
            return self.head

    found = settings(model := HeadFirst(), spec := AdamW(lr=1.0, layer_decay=0.5))
    assert (found["head.weight"], found["embedding.weight"]) == (1.0, 0.125)
    model.head.weight = model.embedding.weight
    assert settings(model, spec)["head.weight"] == 0.125


@pytest.mark.parametrize("name", ["head", "norm"])
def test_an_end_that_is_declared_ahead_of_the_blocks_is_refused_and_behind_them_has_the_rate(name):
    stem, end = {"inputs": nn.Linear(4, 4)}, {name: nn.Linear(4, 4)}
    body = {"blocks": nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))}
    spec = AdamW(lr=1.0, layer_decay=0.5)
    found = settings(nn.ModuleDict(stem | body | end), spec)
    assert (found["inputs.bias"], found[f"{name}.bias"]) == (0.125, 1.0)
    for early in (end | stem | body, stem | {"body": nn.ModuleDict(end | body)}):
        with pytest.raises(ConfigError, match=rf"layer_decay=0\.5: {name}, by its name an end"):
            spec.build(nn.ModuleDict(early))

"""Parameter groups say what they mean, and the optimizers are PyTorch's own arithmetic."""

import math

import pytest
import torch
from torch import nn

from tests.lib.support import tiny_gpt
from trainer.core.errors import ConfigError
from trainer.features.muon.muon import Muon
from trainer.optim.optimizers import (
    SGD,
    AdamW,
    HalfLives,
    OptimizerSpec,
    OwnOptimizer,
    param_groups,
)


def names_by_group(model: nn.Module, groups: list[dict]) -> dict[str, set[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {group["name"]: {names[id(p)] for p in group["params"]} for group in groups}


class TiedAndOdd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight
        self.norm = nn.LayerNorm((3, 4))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.expert_bias = nn.Parameter(torch.zeros(2, 4))


def test_norms_biases_and_scalars_are_not_decayed_unless_a_group_asks_for_it():
    model = TiedAndOdd()
    groups = param_groups(model, 0.1, 0.01, {})
    assert names_by_group(model, groups) == {
        "decayed": {"embedding.weight"},
        "not decayed": {"head.bias", "norm.weight", "norm.bias", "scale", "expert_bias"},
    }
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(0.1, 0.01), (0.1, 0.0)]
    (group,) = param_groups(model, 0.1, 0.01, {"*": {"weight_decay": 0.3}})
    assert (group["name"], group["weight_decay"], len(group["params"])) == ("*", 0.3, 6)
    for pattern in ("embedding.*", "head.weight"):  # one parameter, by all of its names
        groups = param_groups(model, 0.1, 0.0, {pattern: {"weight_decay": 0.2}})
        assert names_by_group(model, groups)[pattern] == {"embedding.weight"}
        assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))


def test_a_group_with_its_own_rate_keeps_the_rule_for_norms_and_the_first_pattern_counts():
    model = tiny_gpt(bias=True, norm="layer")
    groups = param_groups(
        model, 0.1, 0.01, {"blocks.0.*norm*": {"lr": 1.0}, "blocks.0.*": {"lr": 0.5}}
    )
    assert {g["name"]: (g["lr"], g["weight_decay"]) for g in groups} == {
        "blocks.0.*norm* not decayed": (1.0, 0.0),
        "blocks.0.* decayed": (0.5, 0.01),
        "blocks.0.* not decayed": (0.5, 0.0),
        "decayed": (0.1, 0.01),
        "not decayed": (0.1, 0.0),
    }
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(map(id, model.parameters())), "each is in one group"
    norms = names_by_group(model, groups)["blocks.0.*norm* not decayed"]
    assert {name.split(".")[2] for name in norms} == {"attention_norm", "mlp_norm"}


@pytest.mark.parametrize(
    ("spec", "reference"),
    [
        (
            AdamW(lr=0.01, weight_decay=0.1, betas=[0.9, 0.95]),
            lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=False),
        ),
        (
            SGD(lr=0.01, weight_decay=0.1, momentum=0.9, nesterov=True),
            lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True, foreach=False),
        ),
    ],
)
def test_our_builders_take_the_steps_of_pytorch(spec, reference):
    ours, theirs = tiny_gpt(), tiny_gpt()
    mine = spec.build(ours)
    other = reference(param_groups(theirs, spec.lr, spec.weight_decay, spec.groups))
    ids = torch.tensor([[1, 2, 3, 4]])
    for _ in range(3):
        for model, optimizer in ((ours, mine), (theirs, other)):
            optimizer.zero_grad(set_to_none=True)
            model(ids).square().sum().backward()
            optimizer.step()
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)


class Signed(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay=0.25, power=1.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "power": power})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                decay = group["weight_decay"] * parameter
                parameter.sub_(group["lr"] * (parameter.grad.sign() + decay))


def test_a_users_own_optimizer_is_called_with_parameter_groups():
    model = tiny_gpt()
    spec = OwnOptimizer.of(
        Signed, {"lr": 0.1, "power": 2.0, "groups": {"embedding.*": {"lr": 0.2}}}
    )
    optimizer = spec.build(model)
    assert {g["name"]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups} == {
        "embedding.* decayed": (0.2, 0.25),
        "decayed": (0.1, 0.25),
        "not decayed": (0.1, 0.0),
    }
    assert optimizer.defaults["power"] == 2.0
    with pytest.raises(ConfigError, match=r"^optimizer\.lr: Signed has no default"):
        OwnOptimizer.of(Signed, {})
    assert OwnOptimizer.of(torch.optim.AdamW, {}).lr == 1e-3


SPECS = [
    AdamW(lr=1e-3, weight_decay=0.1, betas=[0.9, 0.95], groups={"embed*": {"weight_decay": 0.2}}),
    Muon(lr=1e-3, weight_decay=0.1),
    OwnOptimizer.of(torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.1}),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_half_lives_in_samples_survive_another_batch_and_the_way_back(spec):
    def rates(spec: OptimizerSpec) -> list[float]:
        """What means keep of themselves."""
        found = {**vars(spec), **vars(spec).get("options", {})}
        momentum = [found["momentum"]] if "momentum" in found else []
        return [*found["betas"], *momentum]

    ratio, factor = 4.0, 2.0
    spec = spec.for_batch(1.0, 1.0)  # with its default betas written out
    there = spec.for_batch(ratio, factor)
    back = there.for_batch(1 / ratio, 1 / factor)
    assert rates(back) == pytest.approx(rates(spec), rel=1e-12)
    assert back.weight_decay == pytest.approx(spec.weight_decay, rel=1e-12)
    batch = 256
    for before, after in zip(rates(spec), rates(there), strict=True):
        # The logarithm of a rate just below 1 has lost some digits.
        half_life = batch * math.log(0.5) / math.log(before)
        assert ratio * batch * math.log(0.5) / math.log(after) == pytest.approx(half_life, rel=1e-9)
        assert batch * math.log(0.5) / math.log(after) != pytest.approx(half_life), "a control"
    # What a sample takes from a weight: the decay of a step, over its samples.
    lost = 1e-3 * factor * there.weight_decay / (ratio * batch)
    assert lost == pytest.approx(1e-3 * spec.weight_decay / batch, rel=1e-12)
    for pattern, own in spec.groups.items():
        changed = there.groups[pattern]["weight_decay"] / own["weight_decay"]
        assert changed == pytest.approx(there.weight_decay / spec.weight_decay, rel=1e-12)


def test_groups_that_follow_a_ramp_come_back_to_what_they_were():
    model = torch.nn.Linear(3, 2)
    spec = AdamW(lr=0.1, weight_decay=0.2, groups={"bias": {"weight_decay": 0.5}})
    optimizer = spec.build(model)
    before = [(group["betas"], group["weight_decay"]) for group in optimizer.param_groups]
    decays = tuple(group["weight_decay"] for group in optimizer.param_groups)
    follow = HalfLives(spec=spec, optimizer=optimizer, reference_batch=64, decays=decays)
    follow(256, 2.0)
    for group, (betas, decay) in zip(optimizer.param_groups, before, strict=True):
        assert group["betas"] == pytest.approx([beta**4 for beta in betas], rel=1e-12)
        assert group["weight_decay"] == pytest.approx(2 * decay, rel=1e-12)
    follow(64, 1.0)
    assert before == [(group["betas"], group["weight_decay"]) for group in optimizer.param_groups]

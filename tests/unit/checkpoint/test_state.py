"""Capture and restore: a run stopped anywhere goes on bit for bit, with every optimizer."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.reliability.lab import seed_everything
from tests.reliability.support import parts_of, put
from trainer.checkpoint.codec import decode, encode
from trainer.checkpoint.state import assert_finite, capture, restore
from trainer.checkpoint.store import CheckpointStore, Loaded
from trainer.checkpoint.weights import checkpoint_weights
from trainer.core.errors import NoCheckpointError, NonFiniteError
from trainer.core.stateful import SavedFields

WIDTH = 6


class Net(nn.Module):
    """Tied, normalised, convolutional, with dropout, a frozen part and state of its own."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width, bias=False)
        self.conv = nn.Conv2d(1, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.3)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("none", torch.zeros(0, 3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        image = self.conv(x[:, None, :, None]).mean((1, 3))
        return self.head(self.drop(self.norm(self.embed(x) + image))) + self.frozen(x)

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "mark": torch.tensor(self.calls)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["mark"], torch.tensor(state["calls"]))
        self.calls = state["calls"]


def two_groups(params: list[nn.Parameter]) -> Optimizer:
    groups = [
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0, "name": "plain"},
        {"params": [p for p in params if p.dim() != 1]},
    ]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95))


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "two groups": two_groups,
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, fused=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, line_search_fn="strong_wolfe"),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


class Counter(SavedFields):
    count: int = 0


def build(kind: str, width: int = WIDTH) -> tuple[Net, Optimizer]:
    model = Net(width)
    return model, OPTIMIZERS[kind]([p for p in model.parameters() if p.requires_grad])


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    """Take steps whose data and masks come from the global generators."""
    for _ in range(steps):
        shift = random.random() + np.random.random()
        x = torch.randn(5, WIDTH) + shift

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def through_disk(folder: Path, model: nn.Module, optimizer: Optimizer) -> Loaded:
    store = CheckpointStore(folder)
    put(store, 3, *capture(parts_of(model, optimizer)))
    return store.load()


def trained(kind: str, folder: Path) -> Loaded:
    """The checkpoint of a model that took a step."""
    model, optimizer = build(kind)
    train(model, optimizer, 1)
    return through_disk(folder, model, optimizer)


def everything(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    tensors, parts = capture(parts_of(model, optimizer))
    return {"tensors": {n: t.clone() for n, t in tensors.items()}, "parts": parts}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["parts"] == other["parts"]
    assert one["tensors"].keys() == other["tensors"].keys()
    for name, tensor in one["tensors"].items():
        assert tensor.dtype == other["tensors"][name].dtype, name
        assert torch.equal(tensor, other["tensors"][name]), name


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(kind, tmp_path):
    seed_everything(1)
    model, optimizer = build(kind)
    train(model, optimizer, 3)
    loaded = through_disk(tmp_path, model, optimizer)
    train(model, optimizer, 3)
    uninterrupted = everything(model, optimizer)

    seed_everything(2)
    model, optimizer = build(kind)
    train(model, optimizer, 1)
    restore(loaded, parts_of(model, optimizer))
    before = {name: loaded.tensors[name][...].clone() for name in loaded.tensors}
    train(model, optimizer, 3)
    assert_same(everything(model, optimizer), uninterrupted)
    for name, tensor in before.items():
        assert torch.equal(tensor, loaded.tensors[name][...]), "training wrote into it"


def test_settings_are_the_checkpoint_s_unless_the_run_changed_them_and_ties_and_layouts_stay(
    tmp_path,
):
    loaded = trained("two groups", tmp_path)
    assert "model.embed.weight" in loaded.tensors
    assert "model.head.weight" not in loaded.tensors
    weights = checkpoint_weights(loaded).values
    assert weights["head.weight"] is weights["embed.weight"]
    model, optimizer = build("two groups")
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    restore(loaded, parts_of(model, optimizer))
    assert model.head.weight is model.embed.weight
    weight, strides = model.conv.weight, Net().conv.weight.stride()
    assert weight.stride() == optimizer.state[weight]["exp_avg"].stride() == strides
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.01]
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.95)
    assert isinstance(optimizer.param_groups[0]["betas"], tuple)
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    restore(loaded, parts_of(model, optimizer, keeps_settings=True))
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_state_follows_the_parameter_name_and_not_its_position(tmp_path):
    loaded = trained("Adagrad", tmp_path)
    other = Net()
    trained_ones = [p for p in other.parameters() if p.requires_grad]
    turned = torch.optim.Adagrad(trained_ones[::-1], lr=0.01)
    restore(loaded, parts_of(other, turned))
    for name, parameter in other.named_parameters():
        if parameter.requires_grad:
            saved = loaded.tensors[f"optimizer.state.{name}.sum"][...]
            assert torch.equal(turned.state[parameter]["sum"], saved)


def test_names_do_not_depend_on_compilation(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))
    compiled = nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"))
    loaded = through_disk(tmp_path, model, torch.optim.SGD(model.parameters()))
    restore(loaded, parts_of(compiled, torch.optim.SGD(compiled.parameters())))
    assert torch.equal(next(compiled.parameters()), model[0].weight)


def changed(**parts: nn.Module | None) -> tuple[nn.Module, Optimizer]:
    """A model with other parts, of which one group is trained."""
    model = Net()
    for name, part in parts.items():
        setattr(model, name, part)
    return model, torch.optim.SGD(model.embed.parameters())


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda: build("SGD", WIDTH + 1), r"different embed.weight \(float32 \[6, 6\] in the"),
        (lambda: changed(more=nn.Linear(1, 1)), "missing more.bias, more.weight: resume with"),
        (lambda: changed(norm=None), "unexpected norm.bias, norm.num_batches_tracked.* and 2 more"),
        (lambda: (Net().double(), changed()[1]), r"different .*float32 .*float64"),
        (lambda: build("two groups"), r"its optimizer \(SGD\) and groups .* \(AdamW\): .*init="),
        (changed, r"its optimizer \(SGD\) and groups are not this run's \(SGD\)"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_with_names(other, text, tmp_path):
    loaded = through_disk(tmp_path, *build("SGD"))
    with pytest.raises(NoCheckpointError, match=text) as refusal:
        restore(loaded, parts_of(*other()))
    assert "\n" not in str(refusal.value)


def test_a_part_may_be_missing_where_that_is_said_and_of_other_types_it_is_one_line(tmp_path):
    put(CheckpointStore(tmp_path), 1, *capture({"own": Counter(count=3)}))
    loaded, part = CheckpointStore(tmp_path).load(), Counter()
    restore(loaded, {"own": part, "new": Counter()}, may_lack={"new"})
    assert part.count == 3
    with pytest.raises(NoCheckpointError, match="new is missing, and this run reads version 1"):
        restore(loaded, {"new": Counter()})
    typed = type("Typed", (Counter,), {"__annotations__": {"count": dict}, "count": {}})()
    with pytest.raises(NoCheckpointError, match=f"{loaded.path}: own cannot be restored .*count"):
        restore(loaded, {"own": typed})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.complex64])
def test_a_value_that_is_not_finite_is_found_and_named(dtype):
    most = torch.full((3,), torch.finfo(dtype).max, dtype=torch.float64).to(dtype)
    fine = {"model.a": most, "model.b": torch.zeros(0), "model.c": torch.tensor(7)}
    assert_finite(fine)
    assert_finite({})
    for value in (float("nan"), float("inf"), float("-inf")):
        bad = torch.tensor([0, value, 0]).to(dtype)
        with pytest.raises(NonFiniteError, match=r"not saved: model\.bad not finite"):
            assert_finite({**fine, "model.bad": bad})


def test_any_tree_comes_back_from_json_as_it_was():
    tensor, nan = torch.tensor([1.0, float("nan")]), float("nan")
    tree = {
        "plain": [None, True, 3, -0.0, 1e300, "text", "", [], (), {}],
        "numbers": (nan, float("inf"), -float("inf"), 2**70),
        "keys": {1: "a", -2: {"$tensor": "no tensor"}, "$float": [], "1.5": ({"x": (tensor,)},)},
        "$tuple": {"$pairs": tensor},
    }
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(tree, "root", tensors), allow_nan=False)
    back = decode(json.loads(text), tensors.__getitem__)
    assert repr(back) == repr(tree)
    assert len(tensors) == 1, "one that occurs twice is stored once"

"""`optimizer=NAME` for the optimizers of PyTorch: the same as by `_target_`, and mistakes."""

import inspect
import shlex
from pathlib import Path

import pytest
import torch

from tests.lib.cli_support import prepared
from tests.lib.nightly import nightly
from tests.lib.run_support import TOYS, go, overrides, read_json, state
from tests.lib.run_toys import DeepNet
from tests.reliability.rank_work import run_as_rank
from trainer.config.option_files import options_of

NAMES = "Adadelta Adafactor Adagrad Adam Adamax ASGD NAdam RAdam RMSprop Rprop"
TORCH = {name.lower(): name for name in NAMES.split()}
GROUPS = "'optimizer.groups={*bias: {lr: 0.03}}'"


def test_every_optimizer_of_torch_is_an_option_or_is_refused():
    unfit = {"lbfgs", "optimizer", "sparseadam"}
    kinds = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    there = {kind.__name__.lower() for kind in kinds if issubclass(kind, torch.optim.Optimizer)}
    options = options_of("optimizer")
    assert options.keys() == there - unfit == TORCH.keys() | {"adamw", "sgd", "muon"}
    for name, kind in TORCH.items():
        usual = inspect.signature(getattr(torch.optim, kind)).parameters
        for argument in options[name].keys() - {"_target_", "groups", "layer_decay"}:
            default = usual[argument].default
            shown = [*default] if isinstance(default, tuple) else default
            assert options[name][argument] == shown, f"{name}: {argument}"


@pytest.mark.parametrize("name", ["adafactor", *map(nightly, sorted(TORCH.keys() - {"adafactor"}))])
def test_an_option_is_the_class_that_it_names_bit_for_bit(name):
    spelt = name if name != "adafactor" else "Adafactor"
    ends = state(go(f"optimizer={spelt} {GROUPS} steps=2"))
    same = state(go(f"optimizer._target_=torch.optim.{TORCH[name]} {GROUPS} steps=2"))
    control = state(go(f"optimizer={name} steps=2"))
    assert all(tensor.equal(ends[key]) for key, tensor in same.items())
    assert name == "rprop" or not all(tensor.equal(ends[key]) for key, tensor in control.items())


class HeadFirst(DeepNet):
    """Registers its output layer ahead of its hidden one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = self._modules.pop("norm")


def test_muon_leaves_out_the_layer_that_gives_the_output_and_the_plan_names_the_rest(capsys):
    run = go(f"command=plan model._target_={__name__}.HeadFirst optimizer=muon")
    text = " ".join(capsys.readouterr().out.split())
    assert "muon 1 hidden weight of 64 parameters; adamw for" in text
    assert "hidden norm.*.weight" in text
    plan = read_json(run.folder / "plan.json")
    assert plan["muon"] == ["norm.1.weight"]
    assert "head.weight" in plan["muon_others"]


def test_what_takes_no_shards_is_refused_under_them(ranks):
    own = f"model._target_={TOYS}.Net optimizer=rprop parallel=fsdp parallel.ranks=2"
    config = prepared(shlex.join(overrides(own))).config
    for each in ranks.run(2, run_as_rank, config, Path("run").absolute(), {}):
        assert each["code"] == 2
        assert "Rprop needs whole weights" in str(each)

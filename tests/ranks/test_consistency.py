"""Ranks begin with the same config, data and model, or not at all; and a model can be laid out."""

import socket
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.lib.nightly import nightly
from tests.lib.ranks_work import POLICIES, Arrays, BlockLM, error, gradient_of_step
from tests.lib.support import EXACT, Bench, replicated
from tests.reliability import lab
from trainer.core.errors import ConfigError, TrainError
from trainer.core.own_code import OWN_CODE
from trainer.core.world import World
from trainer.data.view import DataView
from trainer.launch import rank as launch_rank
from trainer.launch.rank import _agree
from trainer.models.bind import bind
from trainer.models.first_weights import build_on_meta
from trainer.models.gpt import GPT
from trainer.models.recompute import separable_blocks
from trainer.parallel.fsdp import Sharded, make_mesh
from trainer.plan.cuts import Fixed
from trainer.report.records import package_version
from trainer.training.consistency import check_consistency

MODELS = {
    "same": "",
    "governed": "",
    "strided": "",
    "on meta": "",
    "ungoverned": "weights differ between ranks",
    "rank": "2.weight of rank 1 is not",
    "buffer": "1.running_mean of rank 1",
    "names": "(own1)",
    "frozen": "(0.weight)",
    "on meta, by rank": "weights differ between ranks",
}


def built(how: str, rank: int) -> nn.Module:
    """A model that begins the same on all ranks, except where `how` says."""
    torch.manual_seed(0)
    np.random.seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2500))
    with torch.no_grad():
        if how == "governed":
            model[0].weight.copy_(torch.from_numpy(np.random.rand(4, 3)))
        if how == "ungoverned":
            model[0].weight.copy_(torch.from_numpy(np.random.default_rng().random((4, 3))))
        if how == "rank":
            model[2].weight[2000, 3] = 0.5 + rank
        if how == "buffer":
            model[1].running_mean.fill_(rank)
    if how == "strided":
        model.register_parameter("gain", nn.Parameter(torch.ones(1, 2)[:, 1]))
        model.register_buffer("mean", torch.ones(2)[::2])
    if how == "names":
        model.register_parameter(f"own{rank}", nn.Parameter(torch.ones(1)))
    if how == "frozen":
        model[0].weight.requires_grad_(rank == 0)
    return model


def refusal(
    world: World, *, dataset: Any = (), module: nn.Module | None = None, weights: Any = None
) -> str:
    """What ranks refuse to begin with; nothing where they do not."""
    loader: Any = SimpleNamespace(dataset=DataView.of(dataset))
    try:
        check_consistency(world, [loader], module or nn.Module(), weights)
    except TrainError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused_models(world: World, ways: list[str]) -> list[str]:
    found = []
    for how in ways:
        module, weights = built(how, world.rank), None
        if how.startswith("on meta"):
            torch.manual_seed(world.rank if how == "on meta, by rank" else 0)
            module, weights = build_on_meta(lambda: GPT(width=8, num_heads=2))
        found.append(refusal(world, module=module, weights=weights))
    return found


def test_ranks_whose_models_differ_are_refused_and_the_tensor_is_named(ranks):
    first, second = ranks.run(2, refused_models, list(MODELS))
    assert first == second
    for (how, words), line in zip(MODELS.items(), first, strict=True):
        assert words in line, how
        assert line.startswith("ConfigError: model: ") == bool(words) == bool(line), how


class Numbers(list[int]):
    """A data set of one token per sample."""

    fingerprint = "as it was"

    @property
    def lengths(self) -> list[int]:
        return [1] * len(self)


def refused_data(world: World) -> list[str]:
    data = [Numbers(range(5)), Numbers(range(5 + world.rank)), Numbers(range(5))]
    data[2].fingerprint = f"of rank {world.rank}"
    return [refusal(world, dataset=each) for each in data]


def test_ranks_that_read_other_samples_are_refused(ranks):
    first, second = ranks.run(2, refused_data)
    assert first == second
    assert first[0] == ""
    for line in first[1:]:
        assert line.startswith("DataError: data: rank 1 has another data set")


def shared(how: str) -> BlockLM:
    """Three blocks, of which the first shares something as `how` says."""
    torch.manual_seed(0)
    module = BlockLM()
    first, last = module.blocks[0], module.blocks[2]
    if how == "module":
        last.up = first.up
    if how == "parameter":
        last.up.weight = first.up.weight
    if how == "root":
        module.norm.weight = first.norm.weight
    if how == "block":
        module.blocks[2] = first
    return module


def in_shards(module: nn.Module, world: World) -> Sharded:
    return Sharded(module, bind(module), separable_blocks(module), world, make_mesh(world))


def gradients(world: World, how: str, sync: str) -> Arrays:
    lay_out = in_shards if world.size > 1 else replicated
    made = {"model": lambda: shared(how), "sync": POLICIES[sync](), "lay_out": lay_out}
    return gradient_of_step(Bench(Fixed(micro=3), world=world, **made))[0]


@pytest.mark.parametrize(
    ("how", "sync"),
    [("parameter", "deferred"), ("block", "immediate"), nightly("root", "deferred")],
)
def test_blocks_that_share_parameters_are_sharded_exactly(ranks, how, sync):
    expected = gradients(World(), how, "deferred")
    for found in ranks.run(2, gradients, how, sync):
        assert error(found, expected) <= EXACT[torch.float64]


@pytest.mark.parametrize(
    ("how", "count"), {"": 3, "module": 1, "parameter": 1, "root": 2, "block": 2}.items()
)
def test_only_blocks_that_share_nothing_are_sharded_on_their_own(how, count):
    assert len(separable_blocks(shared(how))) == count


def test_a_block_in_two_lists_is_not_sharded_on_its_own():
    blocks = [nn.Sequential(nn.Linear(4, 4)) for _ in range(2)]
    model = nn.Module()
    model.encoder, model.decoder = nn.ModuleList(blocks), nn.ModuleList(blocks)
    assert separable_blocks(model) == ()
    stack = model.decoder
    model.encoder, model.decoder = nn.ModuleDict({"own": stack}), nn.ModuleDict({"own": stack})
    assert separable_blocks(model) == ()


def refused_types(world: World) -> str:
    module = shared("").double()
    module.blocks[1].norm.float()
    with pytest.raises(ConfigError) as refused:
        in_shards(module, world)
    return str(refused.value)


def test_a_block_of_several_types_is_refused_in_one_line(ranks):
    (first, _) = ranks.run(2, refused_types)
    assert first.startswith("parallel=fsdp: FSDP2 needs one parameter dtype per block")
    assert "blocks.1.norm.weight torch.float32" in first


def refused_code(world: World, folder: Path) -> list[str]:
    """What is said of a user's module that imports another, of which rank 1 has another copy."""
    found = []
    for name in ("same", "other"):
        here = folder / f"{name}-{world.rank}"
        here.mkdir()
        (here / f"{name}_net.py").write_text(f"import {name}_rates\nclass Net: pass\n")
        rate = world.rank if name == "other" else 1
        (here / f"{name}_rates.py").write_text(f"{rate = }\n")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OWN_CODE, "folder", here)
            OWN_CODE.permit(f"{name}_net.Net")
            import_module(f"{name}_net")
            found.append(refusal(world))
    return found


def test_ranks_whose_modules_of_the_user_differ_are_refused_and_the_module_is_named(
    ranks, tmp_path
):
    first, second = ranks.run(2, refused_code, tmp_path)
    assert first == second
    host = socket.gethostname()
    assert first == [
        "",
        f"ConfigError: other_rates: its file on {host} (rank 1) differs from that on {host} "
        "(rank 0); put the same file on every host",
    ]


def agreed(world: World, folder: Path, lines: list[str], copy: str | None = None) -> str:
    """What a rank says to a config of its own, and where its sources are another copy."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            if copy is not None:
                patch.setattr(launch_rank, "__file__", f"{copy}-{world.rank}/launch/rank.py")
            _agree(lab.config(lines[world.rank]), folder, world)
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_that_were_given_another_config_are_refused(ranks, tmp_path):
    line = "seed: rank 1 has a different value than rank 0; type the same command on every node"
    assert ranks.run(2, agreed, tmp_path, ["seed=0", "seed=1"]) == [line, line]


def going_on(world: World, folder: Path) -> str:
    """What a rank says where `resume=auto` found a run on rank 0 alone."""
    found = str(folder) if world.is_main else None
    with pytest.raises(ConfigError) as raised:
        _agree(lab.config().model_copy(update={"resume": found}), folder, world)
    return str(raised.value)


def test_ranks_of_which_one_finds_no_run_to_go_on_with_name_its_host(ranks, tmp_path):
    host = socket.gethostname()
    line = f"resume: rank 1 ({host}) found no run to go on with, where another rank did: "
    for said in ranks.run(2, going_on, tmp_path):
        assert said.startswith(line)


def test_ranks_that_run_other_sources_are_refused_and_their_hosts_are_named(ranks, tmp_path):
    for rank in range(2):
        copy = tmp_path / f"trainer-{rank}" / "optim" / "schedules.py"
        copy.parent.mkdir(parents=True)
        copy.write_text(f"WARMUP = 0.0{rank}\n")
    place = f"{package_version('step-trainer')} on {socket.gethostname()}"
    line = f"step-trainer: rank 1 ({place}) has other sources than rank 0 ({place}); install the "
    lines = ["seed=0", "seed=0"]
    for said in ranks.run(2, agreed, tmp_path, lines, str(tmp_path / "trainer")):
        assert said.startswith(line)
    assert ranks.run(2, agreed, tmp_path, lines) == ["", ""]

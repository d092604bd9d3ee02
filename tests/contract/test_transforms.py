"""Model transforms of a user's own: two files in a folder, and no edit of this program."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tests.lib.cli_support import prepared
from tests.lib.run_support import curve, read_json, state
from tests.reliability.rank_work import run_as_rank
from trainer import train
from trainer.assemble.instantiate import look_up_transforms
from trainer.cli.python_api import FinishedRun
from trainer.core.errors import ConfigError

CODE = """
from torch import nn

from tests.goldens.mine import Adapted
from trainer.models.transform import ModelTransform


class LowRank(ModelTransform):
    draws_on_meta = True

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, model):
        model.requires_grad_(False)
        for block in model.blocks:
            block.attention.qkv = Adapted(block.attention.qkv, self.rank)
        return model


def root_mean_square(model, eps=1e-6):  # replaces every LayerNorm, with the weight that it has
    for part in list(model.modules()):
        for name, norm in part.named_children():
            if isinstance(norm, nn.LayerNorm):
                own = nn.RMSNorm(norm.normalized_shape, eps=eps)
                own.weight = norm.weight
                setattr(part, name, own)
    return model


root_mean_square.draws_on_meta = True


def double(model):  # keeps every name
    model.head.weight.data.mul_(2.0)
    return model


def fresh_head(model):  # writes to a weight in place
    nn.init.zeros_(model.head.weight)
    return model


fresh_head.draws_on_meta = True


def zero_head(model):  # reads and writes values, so that it needs them
    model.head.weight.data.sub_(model.head.weight.data)
    return model


def nothing(model):
    pass
"""

RECIPE = """
transforms:
  - own_transforms.root_mean_square
  - _target_: own_transforms.LowRank
    rank: 2
"""

LINE = (
    "model=gpt_tiny model.width=16 model.num_layers=2 model.num_heads=2 model.norm=layer data=text "
    "data.path=corpus.txt data.max_length=32 batch.global=8 accum=fixed accum.micro=3 "
    "wandb.mode=disabled device=cpu precision=fp32 eval.every=null"
)
BEGUN = f"{LINE} init=weights"
READ = "trust=[own_transforms]"
ADAPTED = f"{BEGUN} recipe=adapter.yaml {READ}"


def go(line: str, **how: str) -> FinishedRun:
    return train(line.split(), **how)


class Runs(NamedTuple):
    """A base's exported weights, and a run that adapts them."""

    base: Mapping[str, torch.Tensor]
    adapted: FinishedRun


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        Path("own_transforms.py").write_text(CODE)
        Path("adapter.yaml").write_text(RECIPE)
        Path("corpus.txt").write_text("\n\n".join(f"Line {i} of {i % 7}" * 2 for i in range(60)))
        go(f"export run={go(f'{LINE} steps=3').folder} export.to=weights")
        return Runs(load_file("weights/model.safetensors"), go(f"{ADAPTED} steps=3"))


@pytest.fixture(autouse=True)
def _beside_the_runs(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs.adapted.folder.parents[2])


def weights_of(run: FinishedRun | Path) -> dict[str, torch.Tensor]:
    return {n.removeprefix("model."): t for n, t in state(run).items() if n.startswith("model.")}


def test_a_transformed_model_begins_with_the_base_s_weights_and_trains_what_is_left(runs):
    trained = weights_of(runs.adapted)
    own = {name for name in trained if ".down." in name or ".up." in name}
    assert len(own) == 4
    assert all(bool(trained[name].any()) for name in own), "zeros before the first step"
    kept = {name.replace(".base.", "."): trained[name] for name in trained.keys() - own}
    assert kept.keys() == runs.base.keys()
    for name, tensor in runs.base.items():
        assert torch.equal(kept[name], tensor), name


@pytest.mark.slow
def test_every_command_reads_the_run_and_a_resumption_takes_the_same_steps(runs):
    folder = runs.adapted.folder
    early, whole = (go(f"{ADAPTED} steps={steps} scheduler=constant") for steps in (2, 3))
    resumed = weights_of(go(f"resume={early.folder} steps=3 {READ}"))
    for name, tensor in weights_of(whole).items():
        assert torch.equal(resumed[name], tensor), name
    with pytest.raises(
        ConfigError, match=r"transforms=.*: the run has .*own_transforms.*resume_allow"
    ):
        go(f"resume={folder} steps=5 transforms=[]")
    found = go(f"evaluate run={folder} {READ}").result
    assert found["eval_loss"] == pytest.approx(runs.adapted.result["eval_loss"])
    go(f"export run={folder} export.to=adapted {READ}")
    exported = load_file("adapted/model.safetensors")
    assert all(torch.equal(exported[n], t) for n, t in weights_of(runs.adapted).items())
    assert [each["_target_"] for each in read_json(Path("adapted/config.json"))["transforms"]]
    assert go(f"verify {ADAPTED} steps=1").result["verdict"] == "exact"


@pytest.mark.slow
def test_an_adapter_of_a_user_s_own_is_an_option_in_two_files(runs, capsys):
    Path("conf/adapter").mkdir(parents=True, exist_ok=True)
    Path("conf/adapter/low.yaml").write_text("_target_: own_transforms.LowRank\nrank: 4 # of it\n")
    line = f"{BEGUN} transforms=[own_transforms.root_mean_square] steps=3"
    option = go(f"{line} adapter=low adapter.rank=2", config_dir="conf")
    by_class = go(f"{line} adapter._target_=own_transforms.LowRank adapter.rank=2")
    for run in (option, by_class):
        assert curve(run, "loss") == curve(runs.adapted, "loss")
    with pytest.raises(ConfigError, match=r"adapter\.rank=4: the run has 2"):
        go(f"resume={by_class.folder} adapter.rank=4 {READ}")
    export = f"export {READ} run={by_class.folder}"
    go(f"{export} export.to=own_adapter")
    assert read_json(Path("own_adapter/config.json"))["adapter"]["rank"] == 2
    shown = " ".join("".join(capsys.readouterr()).split())
    assert "LowRank has no method `save`: the whole model is written" in shown
    assert "from_pretrained" not in shown
    with pytest.raises(ConfigError, match=r"export\.merge=true: LowRank has no method `merge`"):
        go(f"{export} export.to=own_merged export.merge=true")


def test_a_function_says_whether_it_draws_on_the_meta_device():
    for name, draws in (("fresh_head", True), ("zero_head", False)):
        config = prepared(f"{BEGUN} transforms=[own_transforms.{name}]").config
        assert look_up_transforms(config)[1] is draws


@pytest.mark.nightly
def test_a_function_that_needs_values_has_them_and_what_is_no_model_is_refused(ranks):
    zeroed = go(f"{BEGUN} transforms=[own_transforms.zero_head] steps=1")
    assert curve(zeroed, "loss")[0] == pytest.approx(torch.tensor(258.0).log().item(), rel=1e-6)
    double = "transforms=[own_transforms.double] steps=1"
    doubled = go(f"{BEGUN} {double}")
    again = go(f"{LINE} init={doubled.folder} {double} optimizer.lr=0")
    assert torch.equal(*(weights_of(run)["head.weight"] for run in (again, doubled)))
    shards = "transforms=[own_transforms.fresh_head] parallel=fsdp parallel.ranks=2"
    config = prepared(f"{BEGUN} {shards}").config
    for answer in ranks.run(2, run_as_rank, config, Path("meta").absolute(), {}):
        assert answer["code"] == 2
        assert "transforms: one writes to head.weight on the meta" in answer["error"]
    with pytest.raises(ConfigError, match=r"=own_transforms.nothing: gives NoneType, no mod"):
        go(f"{LINE} transforms=[own_transforms.nothing]")

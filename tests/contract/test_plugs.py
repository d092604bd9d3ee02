"""Everything that can be plugged in keeps what its kind promises: built in, or a user's own.

The contract tests run over whatever files lie in `conf/`, so that a new one needs no new test.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests.lib.cli_support import in_subprocess
from tests.lib.run_support import (
    TOYS,
    curve,
    entries,
    go,
    only_run,
    overrides,
    read_json,
    state,
    steps,
)
from trainer.cli.main import FinishedRun

CONF = Path(__file__).parents[2] / "conf"

EXACT = 1e-12
"""Relative difference in float64 of what is only cut differently."""

UPDATE = (
    f"model._target_={TOYS}.DoubleNet optimizer=sgd optimizer.momentum=0 optimizer.lr=1 "
    "scheduler=constant clip_norm=null steps=1"
)
"""One step that moves every weight by minus its gradient."""

NEEDED = {
    "accum/fixed": "accum.micro=3",
    "accum/budget": "accum.max_tokens=40",
    "objective/classify": f"model._target_={TOYS}.Vision data._target_={TOYS}.Images",
    "objective/model_loss": f"model._target_={TOYS}.LossNet",
}
"""What an option cannot be without."""

TINY = {"width": 16, "num_layers": 1, "num_heads": 2, "max_length": 32, "vocab_size": 300}
"""Values for the keys that make a model or a data set large."""


def options(group: str) -> list[str]:
    """The files of a group, without the one that stands for a user's own class."""
    return sorted(file.stem for file in (CONF / group).glob("*.yaml") if file.stem != "own")


def tiny(group: str, option: str) -> str:
    """Shrink an option where its file has the keys."""
    content = yaml.safe_load((CONF / group / f"{option}.yaml").read_text())
    held = [key for key in TINY if key in content and not (group == "data" and key == "vocab_size")]
    return " ".join(f"{group}.{key}={TINY[key]}" for key in held)


def chosen(group: str, option: str) -> str:
    return f"{group}={option} {NEEDED.get(f'{group}/{option}', '')}"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def assert_same_gradient(found: FinishedRun, expected: FinishedRun) -> None:
    """The update of the first step is the same to the rounding of float64."""
    for name, tensor in state(expected).items():
        if name.startswith("model."):
            scale = float(tensor.abs().max())
            assert tensor.dtype == torch.float64
            assert float((state(found)[name] - tensor).abs().max()) <= EXACT * scale, name
    assert curve(found, "loss") == pytest.approx(curve(expected, "loss"), rel=EXACT)
    assert curve(found, "grad_norm") == pytest.approx(curve(expected, "grad_norm"), rel=EXACT)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The whole batch in one piece."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("whole"))
        return go(f"{UPDATE} accum.micro=8")


@pytest.mark.parametrize("option", options("accum"))
def test_every_cut_gives_the_gradient_of_the_whole_batch(option: str, whole: FinishedRun) -> None:
    run = go(f"{UPDATE} {chosen('accum', option)}")
    assert_same_gradient(run, whole)
    assert sum(s["num_samples"] for s in read_json(run.folder / "plan.json")["shapes"]) == 8


@pytest.mark.parametrize("option", options("accum/gradient"))
def test_every_gradient_strategy_gives_the_gradient_of_the_whole_batch(
    option: str, whole: FinishedRun
) -> None:
    assert_same_gradient(go(f"{UPDATE} accum.gradient={option}"), whole)


@pytest.mark.parametrize("option", options("sync"))
def test_every_sync_policy_gives_the_gradient_of_the_whole_batch(
    option: str, whole: FinishedRun
) -> None:
    assert_same_gradient(go(f"{UPDATE} sync={option}"), whole)


@pytest.mark.parametrize("normalizer", ["micro_batches", "samples"])
def test_the_check_has_teeth(normalizer: str, whole: FinishedRun) -> None:
    wrong = go(f"{UPDATE} batch.normalizer={normalizer}")
    with pytest.raises(AssertionError):
        assert_same_gradient(wrong, whole)


@pytest.mark.parametrize("option", options("model"))
def test_every_model_trains_and_its_step_does_not_depend_on_the_cut(option: str) -> None:
    line = f"model={option} {tiny('model', option)} steps=2"
    run = go(line)
    assert all(np.isfinite(curve(run, "loss")))
    other = go(f"{line} accum.micro=8")
    assert curve(other, "loss") == pytest.approx(curve(run, "loss"), rel=1e-5)
    assert curve(other, "grad_norm") == pytest.approx(curve(run, "grad_norm"), rel=1e-4)
    fresh = state(go(f"{line} optimizer.lr=0"))
    still = [n for n, t in state(run).items() if n.startswith("model.") and t.equal(fresh[n])]
    assert not still, "every weight learns"


@pytest.mark.parametrize("option", options("data"))
def test_every_data_set_has_what_a_run_needs(option: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("\n\n".join(f"Line {i} of {i % 7}" * 2 for i in range(60)))
    np.arange(1, 2000, dtype="<u2").tofile(tmp_path / "corpus.bin")
    content = yaml.safe_load((CONF / "data" / f"{option}.yaml").read_text())
    path = "corpus.bin" if "dtype" in content else "corpus.txt"
    more = f"data.path={path}" if "path" in content else ""
    vocabulary = "model.vocab_size=2000" if "vocab_size" in content else ""
    line = (
        f"model=gpt_tiny model.width=16 model.num_layers=1 model.num_heads=2 {vocabulary} "
        f"data={option} {tiny('data', option)} {more} steps=2"
    )
    run = go(line)
    plan = read_json(run.folder / "plan.json")
    assert plan["num_held_out"] > 0
    assert plan["num_tokens"] >= plan["num_samples"] > 8
    assert run.result["eval_loss"] > 0
    ledger = entries(run, "samples.jsonl")
    assert ledger == entries(go(f"{line} num_workers=1 accum.micro=8"), "samples.jsonl")
    longest = max(shape["length"] for shape in plan["shapes"])
    assert longest <= TINY["max_length"]


@pytest.mark.parametrize("option", options("objective"))
def test_every_objective_sums_alike_for_every_cut(option: str) -> None:
    line = f"{UPDATE} {chosen('objective', option)}"
    run, other = go(line), go(f"{line} accum=budget accum.max_tokens=40")
    assert_same_gradient(other, run)
    (evaluated,) = [entry for entry in entries(run) if "eval_loss" in entry]
    assert np.isfinite(evaluated["eval_loss"])


@pytest.mark.parametrize("option", options("optimizer"))
def test_every_optimizer_moves_what_is_not_frozen_by_the_rate_of_its_group(option: str) -> None:
    groups = '\'optimizer.groups={"embed*": {frozen: true}, "head.bias": {lr: 0.0}}\''
    line = f"optimizer={option} optimizer.lr=0.1 {groups} scheduler=constant"
    one, two = state(go(f"{line} steps=1")), state(go(f"{line} steps=2"))
    moved = {n for n, t in two.items() if n.startswith("model.") and not t.equal(one[n])}
    assert moved == {"model.norm.weight", "model.norm.bias", "model.head.weight"}


@pytest.mark.parametrize("option", options("optimizer"))
def test_norms_and_biases_do_not_decay(option: str) -> None:
    line = f"optimizer={option} optimizer.lr=0.01 steps=1"
    plain, decayed = (go(f"{line} optimizer.weight_decay={decay}") for decay in (0, 0.5))
    changed = {
        name
        for name, tensor in state(decayed).items()
        if name.startswith("model.") and not tensor.equal(state(plain)[name])
    }
    assert changed == {"model.embed.weight", "model.head.weight"}


@pytest.mark.parametrize("option", options("scheduler"))
def test_every_schedule_is_a_function_of_the_step(option: str) -> None:
    line = f"scheduler={option} scheduler.warmup=2 optimizer.lr=0.01 steps=6"
    rates = curve(go(line), "lr")
    assert rates == curve(go(f"{line} accum.micro=8"), "lr")
    assert rates[0] < rates[1] <= 0.01
    assert all(0 < rate <= 0.01 for rate in rates)


MINE = """
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from trainer.accumulate.base import GradientStrategy, divided, seed_draws
from trainer.objectives.base import Objective, Sums, logits_of
from trainer.parallel.sync import SyncPolicy
from trainer.plan.cut import Cut, Plan
from trainer.plan.traffic import Moves


class Halves(SyncPolicy):
    name = "halves"
    summary = "a reduction in every micro-batch"
    lockstep = True

    def __init__(self, loud=False):
        self.loud = loud

    def micro_batch(self, model, *, is_last):
        if self.loud and model.world.is_main:
            print("reduces", is_last)
        return model.reducing(across=True)

    def moves(self, micro_batches):
        return Moves(gathers=micro_batches, reductions=micro_batches, across=micro_batches)


@dataclass(frozen=True, kw_only=True)
class Pairs(Cut):
    size: int = 2

    def cut(self, lengths, layout):
        order = np.argsort(lengths, kind="stable")
        slots = tuple(order[i : i + self.size] for i in range(0, len(order), self.size))
        padded = tuple(int(lengths[slot].max()) for slot in slots)
        return Plan(ranks=(slots,), lengths=lengths, padded_lengths=(padded,))

    def smaller(self, plan):
        return None


class Backwards(GradientStrategy):
    def __init__(self, scale=1.0):
        self.scale = scale

    def backward(self, model, objective, micro_batches, divisors, sync):
        total = torch.zeros((), dtype=torch.float64)
        for index in reversed(range(len(micro_batches))):
            seed_draws(micro_batches[index].rng_key, torch.device("cpu"))
            with sync.micro_batch(model, is_last=index == 0):
                sums = objective.sums(model.call, micro_batches[index].fields)
                loss = self.scale * divided(sums.losses, divisors[index])
                loss.backward()
            total += loss.detach()
        return total


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(16, width, dtype=torch.float64)
        self.head = nn.Linear(width, 16, dtype=torch.float64)

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))


class Lines:
    def __init__(self, size=40):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        ids = (torch.arange(2 + index * 5 % 9) * 3 + index) % 16
        return {"input_ids": ids, "labels": ids}


class Distance(Objective):
    def weights(self, fields):
        return {"distance": float((fields["labels"] >= 0).sum())}

    def sums(self, model, fields):
        logits = logits_of(model({"input_ids": fields["input_ids"]}))
        goal = nn.functional.one_hot(fields["labels"].clamp(min=0), 16)
        terms = (logits - goal).square().sum(-1)
        return Sums(losses={"distance": terms[fields["labels"] >= 0].sum()})


class Watch:
    def on_step(self, step):
        print("seen", step["step"])
"""

OWN = (
    "model._target_=mine_{0}.Net model.width=4 data._target_=mine_{0}.Lines data.size=30 "
    "objective._target_=mine_{0}.Distance optimizer._target_=torch.optim.SGD optimizer.lr=1 "
    "scheduler=constant clip_norm=null steps=1 hooks=[mine_{0}.Watch]"
)


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """A user's own folder: a module of theirs, and options of theirs. Gives the module's name."""
    name = f"mine_{abs(hash(tmp_path)) % 10**9}"
    (tmp_path / f"{name}.py").write_text(MINE)
    (tmp_path / "my_conf" / "accum" / "gradient").mkdir(parents=True)
    (tmp_path / "my_conf" / "accum" / "pairs.yaml").write_text(f"_target_: {name}.Pairs\nsize: 2\n")
    (tmp_path / "my_conf" / "accum" / "gradient" / "back.yaml").write_text(
        f"_target_: {name}.Backwards\nscale: 1.0\n"
    )
    return name


def own(name: str, line: str = "") -> FinishedRun:
    return go(f"{OWN.format(name.removeprefix('mine_'))} {line}")


def test_model_data_objective_optimizer_and_hook_come_from_the_current_folder(
    mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = own(mine)
    assert "seen 1" in capsys.readouterr().out
    assert state(run)["model.embed.weight"].shape == (16, 4)
    assert read_json(run.folder / "plan.json")["model"] == f"{mine}.Net"
    assert "eval_distance" not in entries(run)[-1], "one loss term is the loss"


@pytest.mark.parametrize("way", ["folder", "target"])
def test_a_cut_of_one_s_own_takes_two_files_or_its_name(way: str, mine: str) -> None:
    whole = own(mine, "accum.micro=8")
    line = OWN.format(mine.removeprefix("mine_"))
    if way == "folder":
        run = go(f"{line} accum=pairs", config_dir="my_conf")
    else:
        run = own(mine, f"accum._target_={mine}.Pairs accum.size=2")
    shapes = read_json(run.folder / "plan.json")["shapes"]
    assert [shape["num_samples"] for shape in shapes] == [2, 2, 2, 2]
    lengths = [shape["length"] for shape in shapes]
    assert lengths == sorted(lengths)
    assert_same_gradient(run, whole)


@pytest.mark.parametrize("way", ["folder", "target"])
def test_a_gradient_strategy_of_one_s_own_takes_two_files_or_its_name(way: str, mine: str) -> None:
    whole = own(mine, "accum.micro=8")
    line = OWN.format(mine.removeprefix("mine_"))
    if way == "folder":
        run = go(f"{line} accum.gradient=back", config_dir="my_conf")
        twice = go(f"{line} accum.gradient=back accum.gradient.scale=2", config_dir="my_conf")
    else:
        run = own(mine, f"accum.gradient._target_={mine}.Backwards")
        twice = own(mine, f"accum.gradient._target_={mine}.Backwards accum.gradient.scale=2")
    assert_same_gradient(run, whole)
    assert curve(twice, "loss")[0] == pytest.approx(2 * curve(whole, "loss")[0], rel=EXACT)


def test_a_sync_policy_of_one_s_own_takes_two_files(mine: str, tmp_path: Path) -> None:
    """On two ranks, where it is what reduces the gradient."""
    whole = own(mine, "accum.micro=8")
    (tmp_path / "my_conf" / "sync").mkdir()
    (tmp_path / "my_conf" / "sync" / "halves.yaml").write_text(
        f"_target_: {mine}.Halves\nloud: false\n"
    )
    line = OWN.format(mine.removeprefix("mine_")).replace(f"hooks=[{mine}.Watch]", "")
    line += " sync=halves sync.loud=true parallel.ranks=2 accum.micro=2 hydra.run.dir=two"
    done = in_subprocess(f"--config-dir my_conf {shlex.join(overrides(line))}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("reduces")] == [
        "reduces False",
        "reduces True",
    ]
    run = FinishedRun(
        folder=tmp_path / "two", exit_code=0, result=read_json(tmp_path / "two/result.json")
    )
    assert_same_gradient(run, whole)
    plan = read_json(run.folder / "plan.json")
    assert plan["sync"] == "halves"
    assert "halves" in {row["policy"] for row in plan["sync_table"]}


def test_options_of_one_s_own_work_as_typed_in_a_shell(mine: str, tmp_path: Path) -> None:
    line = OWN.format(mine.removeprefix("mine_"))
    done = in_subprocess(
        f"--config-dir my_conf {line} accum=pairs accum.gradient=back batch.global=8 "
        "wandb.mode=disabled device=cpu",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "seen 1" in done.stdout
    assert len(steps(only_run())) == 1


def test_a_data_set_may_have_next_to_nothing() -> None:
    run = go(f"data._target_={TOYS}.Plain steps=3 batch.global=7")
    again = go(f"data._target_={TOYS}.Plain steps=3 batch.global=7 accum.micro=7")
    assert curve(run, "loss") == pytest.approx(curve(again, "loss"), rel=1e-6)
    plan = read_json(run.folder / "plan.json")
    assert plan["num_held_out"] > 0
    assert plan["num_samples"] + plan["num_held_out"] == 30


def test_a_data_set_may_bring_its_split_and_its_collate() -> None:
    run = go(f"data._target_={TOYS}.Split steps=5")
    plan = read_json(run.folder / "plan.json")
    assert (plan["num_samples"], plan["num_held_out"]) == (40, 9)
    assert run.result["eval_loss"] > 0
    assert curve(run, "epoch")[-1] == 1.0


def test_images_count_as_one_token_each() -> None:
    line = f"model._target_={TOYS}.Vision data._target_={TOYS}.Images objective=classify steps=3"
    run = go(line)
    assert curve(run, "tokens") == [8, 16, 24]
    assert curve(run, "padding") == [0.0] * 3
    sorted_ = go(f"{line} accum=auto")
    assert curve(sorted_, "loss") == pytest.approx(curve(run, "loss"), rel=1e-9)
    tokens = go(f"{line} batch.unit=tokens")
    assert entries(tokens, "samples.jsonl") == entries(run, "samples.jsonl")
    assert "accuracy" in run.result["metrics"]


def test_an_optimizer_written_by_hand_follows_the_schedule_and_groups() -> None:
    line = f"optimizer._target_={TOYS}.Descent optimizer.lr=0.5 scheduler=cosine steps=4"
    run = go(line)
    assert curve(run, "lr")[0] == 0.5
    assert curve(run, "lr") == sorted(curve(run, "lr"), reverse=True)
    assert curve(run, "loss")[-1] != curve(run, "loss")[0]

"""A ramp of the global batch is two files of one's own, with its sizes, steps and rates."""

from itertools import chain
from pathlib import Path

import pytest

from tests.lib.run_support import BASE, TOYS, curve, entries, overrides, read_json, state
from tests.lib.run_toys import Stop
from tests.reliability.rank_work import on_ranks
from trainer import train
from trainer.cli.python_api import FinishedRun
from trainer.core.errors import ConfigError, Preempted

RAMP = """
from dataclasses import dataclass

from trainer.config.components import Count
from trainer.plan.batch_size import BatchSize


@dataclass(frozen=True, kw_only=True)
class Ramp(BatchSize):  # `first` samples for `first_steps` steps, then batch.global
    first: Count = 8
    first_steps: Count = 3

    def size(self, at):
        return self.first if at.step < self.first_steps else self.global_batch

    def lr_factor(self, at):
        return self.size(at) / self.global_batch
"""
OPTION = "_target_: ramp.Ramp\nglobal: 16\nfirst: 8\nfirst_steps: 3\n"
LINE = "batch=growing accum.micro=3 epochs=2 scheduler=constant"
SIZES = [8, 8, 8, 16, 2, 16, 16, 10]
"""Of 42 samples an epoch: three small steps, one large one and the rest; then large ones."""


@pytest.fixture(autouse=True)
def _files(own_folder: None) -> None:
    Path("ramp.py").write_text(RAMP)
    Path("my_conf/batch").mkdir(parents=True)
    Path("my_conf/batch/growing.yaml").write_text(OPTION)


def typed(line: str) -> list[str]:
    """Settings over the usual ones, whose size and length of the run give way."""
    base = {key: value for key, value in BASE.items() if key not in ("steps", "batch.global")}
    return overrides(line, base)


def go(line: str) -> FinishedRun:
    return train(typed(line), config_dir="my_conf")


def ids_of(run: FinishedRun | Path) -> list[list[int]]:
    return [entry["ids"] for entry in entries(run, "samples.jsonl")]


def test_a_ramp_of_one_s_own_has_its_sizes_steps_and_rates_and_goes_on_in_the_middle(
    capsys, ranks, monkeypatch
):
    whole = go(LINE)
    ids, ends = ids_of(whole), state(whole)
    assert [len(each) for each in ids] == SIZES
    for epoch in (ids[:5], ids[5:]):
        assert sorted(chain(*epoch)) == sorted({*chain(*ids)})
    assert curve(whole, "lr") == pytest.approx([0.006] * 3 + [0.012] * 5)
    plan = read_json(go(f"command=plan {LINE}").folder / "plan.json")
    assert [plan[key] for key in ("global_batch", "largest_batch", "steps")] == [8, 16, 8]
    assert plan["steps_per_epoch"] == 5
    assert "8 samples a step at first, 16 at most" in " ".join(capsys.readouterr().out.split())

    monkeypatch.setattr(Stop, "at", 2)
    with pytest.raises(Preempted):
        go(f"{LINE} hooks=[{TOYS}.Stop] hydra.run.dir=part")
    assert ids_of(Path("part")) == ids[:2]
    rest = train(["resume=part", "trust=[tests,ramp]"], config_dir="my_conf")
    assert ids_of(rest) == ids
    assert all(tensor.equal(ends[name]) for name, tensor in state(rest).items())
    assert curve(rest, "lr") == curve(whole, "lr")
    two = on_ranks(ranks, ["--config-dir=my_conf", *typed(f"{LINE} parallel.ranks=2")])
    assert ids_of(two) == ids


def test_sizes_are_checked_and_may_be_tokens_and_their_argument_has_a_type():
    with pytest.raises(ConfigError, match=r"batch\.first=0: must be a whole number of at least 1"):
        go(f"{LINE} batch.first=0")
    with pytest.raises(ConfigError, match="gave 20 for step 0; give 1 to `largest`, 16"):
        go(f"{LINE} batch.first=20")
    run = go(f"{LINE} batch._target_=ramp.Ramp batch.unit=tokens batch.global=120 batch.first=30")
    tokens = curve(run, "tokens")
    assert [30 <= tokens[0] < 42, 120 <= tokens[3] - tokens[2] < 132] == [True, True]

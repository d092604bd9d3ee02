"""Several sources of data: their figures, their order, and what is typed wrongly."""

from collections import Counter
from pathlib import Path

import pytest

from tests.lib.run_support import (
    TOYS,
    curve,
    entries,
    go,
    on,
    overrides,
    read_json,
    shell,
    state,
    steps,
)
from tests.lib.run_toys import Rows
from tests.reliability.rank_work import on_ranks
from trainer.cli.python_api import FinishedRun
from trainer.core.errors import ConfigError

OWN = f"{{_target_:{__name__}.Others,size:21}}"
LINE = (
    f"model._target_={TOYS}.DoubleNet data=mixture data.holdout=0.3 data.stopping=all_exhausted "
    f"'data.sources={{rows:{{_target_:{TOYS}.Rows,size:30,weight:3}},others:{OWN}}}' "
    "objective=next_token eval.every=3 scheduler=constant"
)


class Others(Rows):
    """Other rows."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.tokens = [(tokens * 5 + 3) % 16 for tokens in self.tokens]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("mixture"))
        return go(f"{LINE} steps=9")


def numbers(run: FinishedRun | Path, name: str) -> list[float]:
    """A figure of every step, 0 where it is of nothing."""
    return [value or 0.0 for value in curve(run, name)]


def test_an_epoch_holds_each_source_by_its_weight_and_is_shuffled(run):
    plan, splits = (read_json(run.folder / name) for name in ("plan.json", "splits.json"))
    rows, others = plan["mixture"]["rows"], plan["mixture"]["others"]
    assert (rows["num_available"], others["num_available"]) == (21, 15)
    assert (rows["num_samples"], others["num_samples"]) == (45, 15)
    assert rows["repeats"] == pytest.approx(45 / 21)
    assert (plan["num_samples"], plan["num_held_out"]) == (60, 15)
    assert plan["eval_sets"] == {"rows": 9, "others": 6}
    assert [len(splits["sources"][name]["held_out"]) for name in ("rows", "others")] == [9, 6]
    first = [i for entry in entries(run, "samples.jsonl")[:7] for i in entry["ids"]]
    drawn = Counter(i < 45 for i in first)  # those of rows come first
    assert len(set(first)) == 56
    assert abs(drawn[True] - 42) < 4


def test_figures_of_each_source_are_exact_and_add_up_to_those_of_all(run):
    last = [entry for entry in entries(run) if "eval_loss" in entry][-1]
    assert shell(f"evaluate run={run.folder} trust=[tests] eval.predictions=true") == 0
    lines = entries(run, "predictions.jsonl")
    assert not [*run.folder.glob("predictions-*")]
    for prefix, names in (("", {"rows", "others"}), ("rows_", {"rows"}), ("others_", {"others"})):
        own = [line for line in lines if line["source"] in names and line["terms"]]
        terms = sum(line["terms"] for line in own)
        mean = sum(line["loss"] * line["terms"] for line in own) / terms
        assert last[f"eval_{prefix}loss"] == pytest.approx(mean, rel=1e-12)
    record = read_json(run.folder / "evaluate.json")
    assert (record["samples"], record["sets"]["rows"]["samples"]) == (15, 9)


def test_losses_of_the_sources_are_exact_shares_of_the_loss_of_every_step(run):
    data = [Rows(30), Others(21)]
    held_out = read_json(run.folder / "splits.json")["sources"]
    train = [
        [i for i in range(len(each)) if i not in held_out[name]["held_out"]]
        for name, each in zip(("rows", "others"), data, strict=True)
    ]
    places = [(0, train[0][k % 21]) for k in range(45)] + [(1, i) for i in train[1]]
    ledger = [entry["ids"] for entry in entries(run, "samples.jsonl")]
    for entry, ids in zip(steps(run), ledger, strict=True):
        terms = [0, 0]
        for source, i in (places[each] for each in ids):
            terms[source] += int((data[source][i]["labels"][1:] >= 0).sum())
        shares = [entry["loss_rows"], entry["loss_others"]]
        mean = sum(n * (share or 0.0) for n, share in zip(terms, shares, strict=True)) / sum(terms)
        assert entry["loss"] == pytest.approx(mean, rel=1e-12)


STAGES = f"{LINE.replace(',weight:3', '').replace('data.stopping=all_exhausted', '')} steps=9"
STAGES += " 'data.weights={0:{rows:3},20:{rows:1,others:1},44:{rows:1,others:3}}'"


def test_weights_change_by_samples_and_every_restart_has_the_same_samples_and_counts(ranks):
    run = go(f"{STAGES} checkpoint.every=1 checkpoint.keep=9")
    ledger = entries(run, "samples.jsonl")
    ids = [i for entry in ledger for i in entry["ids"]]
    counts = [Counter(i < 21 for i in ids[a:b]) for a, b in ((0, 20), (20, 44), (44, 68))]
    assert [(each[True], each[False]) for each in counts] == [(20, 0), (12, 12), (6, 18)]
    rows = [i for i in ids if i < 21]
    assert len({*rows[:21]}) == 21, "no sample comes again before all others of its source"
    # A step that passes the beginning of a stage has samples of both.
    for counted in (steps(run), ledger):
        assert [entry["drawn/others"] for entry in counted][:4] == [0, 0, 2, 4]
    assert run.result["sources"] == {"rows": 38, "others": 30}
    stages = read_json(run.folder / "plan.json")["mixture_stages"]
    assert [stage["samples"] for stage in stages[:2]] == [
        {"rows": 20, "others": 0},
        {"rows": 12, "others": 12},
    ]
    # Where others are yet to come, the weights of later stages may change.
    fork = on(run, "step=3")
    assert entries(fork, "samples.jsonl") == ledger
    assert curve(fork, "loss") == curve(run, "loss")
    assert fork.result["sources"] == run.result["sources"]
    assert (
        "step 4/9  samples before this step, by source: rows 22"
        in (fork.folder / "train.log").read_text()
    )
    changed = "'data.weights={0:{rows:3},20:{rows:1,others:1}}'"
    with pytest.raises(ConfigError, match=r"data\.weights\.44\.others=null: the run has 3"):
        on(run, f"step=3 {changed}")
    later = on(run, f"step=3 {changed} resume_allow=[data.weights]")
    assert entries(later, "samples.jsonl")[:5] == ledger[:5]
    assert entries(later, "samples.jsonl")[6:] != ledger[6:]
    # A fork goes past samples of a mixture, too.
    past = on(run, "step=3 steps=7 data.skip_steps=4-5 resume_allow=[steps]")
    assert [e["ids"] for e in entries(past, "samples.jsonl")[3:]] == [e["ids"] for e in ledger[5:]]
    two = on_ranks(ranks, overrides(f"{STAGES} parallel.ranks=2"))
    assert entries(two, "samples.jsonl") == ledger


def test_a_run_goes_on_within_an_epoch_bit_for_bit_and_two_ranks_take_the_same_steps(run, ranks):
    part = on(go(f"{LINE} steps=4"), "steps=9")
    assert entries(part, "samples.jsonl") == entries(run, "samples.jsonl")
    expected = state(run)
    assert all(tensor.equal(expected[name]) for name, tensor in state(part).items())
    two = on_ranks(ranks, overrides(f"{LINE} steps=9 parallel.ranks=2"))
    for name in ("loss", "grad_norm", "loss_rows", "loss_others"):
        assert numbers(two, name) == pytest.approx(numbers(run, name), rel=1e-12)

"""Everything that can be plugged in keeps what its kind promises: built in, or a user's own.

The contract tests run over whatever files lie in `conf/`, so that a new one needs no new test.
"""

import json
import shlex
import sys
from itertools import cycle, islice, zip_longest
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests.lib import objective_toys, pair_toys, run_toys
from tests.lib.cli_support import prepared
from tests.lib.config_support import CONF
from tests.lib.nightly import slow
from tests.lib.picture_toys import draw_pictures
from tests.lib.run_support import (
    TOYS,
    curve,
    entries,
    go,
    on,
    overrides,
    read_json,
    small_library,
    state,
)
from tests.reliability.rank_work import on_ranks, run_as_rank
from trainer.assemble import reporter as assemble_reporter
from trainer.cli import saved_runs
from trainer.cli.main import run as run_line
from trainer.cli.python_api import FinishedRun
from trainer.core.errors import ConfigError

OBJECTIVES, PAIRS = objective_toys.__name__, pair_toys.__name__
EXACT = 1e-12
"""Relative difference in float64 of what is only cut differently."""

UPDATE = (
    f"model._target_={TOYS}.DoubleNet optimizer=sgd optimizer.momentum=0 optimizer.lr=1 "
    "scheduler=constant clip_norm=null steps=1"
)
"""One step that moves every weight by minus its gradient."""

SCORES = f"model._target_={OBJECTIVES}.Scorer data._target_={OBJECTIVES}.Scores"
NEEDED = {
    "accum/fixed": "accum.micro=3",
    "accum/budget": "accum.max_tokens=40",
    **dict.fromkeys(
        ("objective/classify", "objective/multiple_choice"),
        f"model._target_={TOYS}.Vision data._target_={TOYS}.Images",
    ),
    "objective/contrastive": f"model._target_={PAIRS}.DoubleTowers data._target_={PAIRS}.Pairs",
    "objective/next_token_balanced": f"model._target_={PAIRS}.DoubleExperts "
    "objective.experts_per_token=1",
    "objective/model_loss": f"model._target_={TOYS}.LossNet",
    "objective/regression": SCORES,
    "objective/multi_label": f"{SCORES} data.whole=true",
    "model/hf": "model.config=llama.json",
    "batch/noise_ramp": "batch.max=16",
    "batch/ramp": "batch.stages={0:4,8:8}",
    "data/hf": "data.path=corpus.jsonl",
    "data/image_text": "data.image_size=4",
    "data/images": "data.path=pictures data.size=8",
    "data/mixture": "data.sources.own.path=corpus.jsonl",
    "data/text": "data.path=corpus.txt",
    "data/tokens": "data.path=corpus.bin data.vocab_size=258",
}
"""What an option cannot be without."""

LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300},
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "max_position_embeddings": 32},
}
TINY = {"width": 16, "num_layers": 1, "num_heads": 2, "max_length": 32, "vocab_size": 300}
"""Values for the keys that make a model or a data set large."""

pytestmark = pytest.mark.usefixtures("own_folder")


def options(group: str) -> list[str]:
    """The files of a group, without the one that stands for a user's own class."""
    others = {"own", "two_pass"}  # the latter for an objective of its own: test_contrastive.py
    others |= {"masked_lm", "seq2seq", "question_answering"}  # test_hugging_face_steps.py
    return sorted(f.stem for f in (CONF / group).glob("*.yaml") if f.stem not in others)


def chosen(group: str, option: str) -> str:
    """Choose an option, shrunk where its file has the keys, with what it needs."""
    content = yaml.safe_load((CONF / group / f"{option}.yaml").read_text())
    keys = [key for key in TINY if key in content and (group, key) != ("data", "vocab_size")]
    key = group.replace("/", ".")
    small = [f"{key}.{each}={TINY[each]}" for each in keys]
    return " ".join([f"{key}={option}", *small, NEEDED.get(f"{group}/{option}", "")])


def assert_same_gradient(found: FinishedRun | Path, expected: FinishedRun) -> None:
    """The update of the first step is the same to the rounding of float64."""
    for name, tensor in state(expected).items():
        if name.startswith("model."):
            scale = float(tensor.abs().max())
            assert tensor.dtype == torch.float64
            assert float((state(found)[name] - tensor).abs().max()) <= EXACT * scale, name
    for name in ("loss", "grad_norm"):
        assert curve(found, name) == pytest.approx(curve(expected, name), rel=EXACT)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The whole batch in one piece."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("whole"))
        return go(f"{UPDATE} accum.micro=8")


TOGETHER = [*zip_longest(*map(options, PLUGS := ("accum", "accum/gradient", "sync")))]
"""Each option once, beside one of each other kind."""


@pytest.mark.parametrize("picked", TOGETHER, ids=str)
def test_every_cut_strategy_and_policy_gives_the_gradient_of_the_whole_batch(picked, whole):
    pairs = zip(PLUGS, picked, strict=True)
    run = go(f"{UPDATE} {' '.join(chosen(*pair) for pair in pairs if pair[1])}")
    assert_same_gradient(run, whole)
    assert sum(s["num_samples"] for s in read_json(run.folder / "plan.json")["shapes"]) == 8


POLICY = """
import torch.distributed as dist
from trainer.parallel.sync import SyncPolicy


class Halves(SyncPolicy):
    name = "halves"

    def __init__(self, lockstep=True, answer="across"):
        self.lockstep, self.answer = lockstep, answer

    def reduction(self, index, *, is_last):
        return "none" if index % 2 else self.answer


class Torn(Halves):
    def reduction(self, index, *, is_last):
        return super().reduction(index + dist.get_rank(), is_last=is_last)
"""


def with_policy(line: str) -> list[str]:
    """Define a policy in two files, and type it."""
    Path("policy.py").write_text(POLICY)
    Path("own/sync").mkdir(parents=True, exist_ok=True)
    text = "_target_: policy.Halves\nlockstep: true\nanswer: across\n"
    Path("own/sync/halves.yaml").write_text(text)
    return ["--config-dir=own", *overrides(f"sync=halves {UPDATE} parallel.ranks=2 {line}")]


def test_a_policy_that_reduces_in_every_second_micro_batch_gives_the_whole_gradient(whole, ranks):
    """What is computed between two reductions goes along with the second, the last included."""
    run = on_ranks(ranks, with_policy("accum.micro=1 parallel=fsdp"))
    assert read_json(run / "plan.json")["accum_steps"] == 4
    assert_same_gradient(run, whole)


def test_a_policy_whose_answer_no_micro_batch_may_have_is_refused(ranks, capsys):
    for typed, words in {
        "sync.lockstep=false": "set Halves.lockstep = True",
        "sync.answer=all": "`reduction` of Halves gives 'all': give 'none', 'within', 'across'",
    }.items():
        assert run_line(["plan", *with_policy(typed)]) == 2
        assert words in capsys.readouterr().err
    typed = [each for each in with_policy("sync._target_=policy.Torn") if each != "sync=halves"]
    config, run = prepared(shlex.join(typed)).config, Path("run").absolute()
    for answer in ranks.run(2, run_as_rank, config, run, {}):
        assert answer["code"] == 2
        assert "`reduction` of Torn answers otherwise on other ranks" in answer["error"]


def test_the_check_has_teeth(whole):
    with pytest.raises(AssertionError):
        assert_same_gradient(go(f"{UPDATE} batch.normalizer=samples"), whole)


IMAGES = {"model": ["resnet", "vit"], "data": ["digits", "images"]}
"""What is of images."""


TRAINED_ELSEWHERE = {("gpt2", "text"), ("gpt2", "hf"), ("gpt_small", "image_text")}
TRAINED_ELSEWHERE |= {("gpt_tiny", "mixture"), ("gpt_small", "tokens")}
"""Data sets that the tests of their own train on, and models of one class with another here."""


def paired(first: str, second: str) -> list[tuple[str, str]]:
    """Every option of two groups at least once, beside one of the other."""
    ones, others = (
        [o for o in options(group) if o not in IMAGES.get(group, [])] for group in (first, second)
    )
    return [*islice(zip(cycle(ones), cycle(others)), max(len(ones), len(others)))]


@pytest.mark.parametrize(
    ("model", "data"),
    [
        *(slow(*each) if each in TRAINED_ELSEWHERE else each for each in paired("model", "data")),
        slow("resnet", "digits"),
        slow("vit", "images"),
    ],
)
def test_every_model_learns_from_every_data_set_and_its_step_does_not_depend_on_the_cut(
    model, data, monkeypatch
):
    small_library(monkeypatch)
    Path("corpus.txt").write_text("\n\n".join(f"Line {i} of {i % 7}" * 2 for i in range(60)))
    Path("corpus.jsonl").write_text("".join(f'{{"text": "Line {i}"}}\n' for i in range(60)))
    (np.arange(1, 2000, dtype="<u2") % 258).tofile("corpus.bin")
    draw_pictures(Path("pictures"))
    Path("llama.json").write_text(json.dumps(LLAMA))
    line = f"{chosen('model', model)} {chosen('data', data)} steps=2"
    if model == "resnet":
        line += " batchnorm=ghost batchnorm.group=4 accum.micro=4"
    if model.startswith("gpt"):
        line = line.replace(" data=", " model.vocab_size=null data=")
    run, other = go(f"{line} checkpoint.every=1 checkpoint.keep=2"), go(f"{line} accum.micro=8")
    assert curve(other, "loss") == pytest.approx(curve(run, "loss"), rel=1e-5)
    assert curve(other, "grad_norm") == pytest.approx(curve(run, "grad_norm"), rel=1e-4)
    first = state(run, 1)
    still = [n for n, t in state(run).items() if n.startswith("model.") and t.equal(first[n])]
    assert not still, "every weight learns"
    plan = read_json(run.folder / "plan.json")
    assert plan["num_held_out"] > 0
    assert plan["num_tokens"] >= plan["num_samples"] > 8
    assert max(shape["length"] for shape in plan["shapes"]) <= TINY["max_length"]
    assert run.result["eval_loss"] > 0
    assert [len(entry["ids"]) for entry in entries(run, "samples.jsonl")] == [8, 8]


WAYS = ["next_token", "classify", "model_loss"]
"""One of each way to a loss: of tokens, of rows, the model's own."""


SHOWN_WITH_THEIR_DATA = {"cosent", "cosine", "distill", "dpo", "orpo", "reward"}
"""Objectives of pairs, scores and a teacher: the tests of their features cut them."""
OBJECTIVES = [o for o in options("objective") if o not in SHOWN_WITH_THEIR_DATA]


@pytest.mark.parametrize("option", [o if o in WAYS else slow(o) for o in OBJECTIVES])
def test_every_objective_sums_alike_for_every_cut(option):
    line = f"{UPDATE} {chosen('objective', option)}"
    run, other = go(line), go(f"{line} accum=budget accum.max_tokens=40")
    assert_same_gradient(other, run)
    assert np.isfinite(run.result["eval_loss"])


OURS = ["adamw", "muon", "sgd"]
"""Optimizers of this program; the others are PyTorch's own classes."""
PYTORCHS = [option for option in options("optimizer") if option not in OURS]


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [
        *zip(OURS, options("scheduler"), strict=False),
        *(slow(*pair) for pair in zip(cycle(OURS), options("scheduler")[3:], strict=False)),
        *(slow(*pair) for pair in zip(PYTORCHS, cycle(options("scheduler")), strict=False)),
    ],
)
def test_every_optimizer_moves_what_is_not_frozen_and_every_schedule_warms_up_and_stays_below(
    optimizer, scheduler
):
    groups = '\'optimizer.groups={"embed*": {frozen: true}, "head.bias": {lr: 0.0}}\''
    line = f"model._target_={TOYS}.DeepNet optimizer={optimizer} optimizer.lr=0.1 {groups} "
    line += f"scheduler={scheduler}"
    if optimizer == "rprop":  # whose step sizes are bounded from below, whatever the rate
        line += " optimizer.step_sizes=[0,50]"
    run = go(f"{line} scheduler.warmup=2 steps=4 checkpoint.every=1 checkpoint.keep=2")
    one, two = state(run, 3), state(run, 4)
    moved = {n for n, t in two.items() if n.startswith("model.") and not t.equal(one[n])}
    inner = {f"model.norm.{layer}.{kind}" for layer in (0, 1) for kind in ("weight", "bias")}
    assert moved == {*inner, "model.head.weight"}
    rates = curve(run, "lr")
    assert rates[0] < rates[1] <= 0.1
    assert all(0 < rate <= 0.1 for rate in rates)


OWN = (
    "model._target_=mine.DoubleNet model.width=4 data._target_=mine.Rows data.size=30 "
    "objective._target_=mine.Squared optimizer._target_=torch.optim.SGD optimizer.lr=1 "
    "scheduler=constant clip_norm=null steps=1 hooks=[mine.Watch]"
)


def test_classes_of_one_s_own_take_two_files_or_their_name():
    """A module in the current folder; options in another, for a cut and a gradient strategy."""
    Path("mine.py").write_text(Path(run_toys.__file__).read_text())
    Path("my_conf/accum/gradient").mkdir(parents=True)
    Path("my_conf/accum/pairs.yaml").write_text("_target_: mine.Pairs\nsize: 2\n")
    Path("my_conf/accum/gradient/back.yaml").write_text("_target_: mine.Scaled\nscale: 1.0\n")
    whole = go(f"{OWN} accum.micro=8")
    assert [name for name, _ in sys.modules["mine"].Watch.seen[:1]] == ["step"]
    assert state(whole)["model.embed.weight"].shape == (16, 4)
    assert read_json(whole.folder / "plan.json")["model"] == "mine.DoubleNet"
    assert "eval_squared" not in entries(whole)[-1], "one loss term is the loss"
    named = "accum._target_=mine.Pairs accum.size=2"
    twice = "accum.gradient._target_=mine.Scaled accum.gradient.scale=2"
    pairs, both = go(f"{OWN} {named}"), go(f"{OWN} {named} {twice}")
    assert_same_gradient(pairs, whole)
    assert curve(both, "loss")[0] == pytest.approx(2 * curve(whole, "loss")[0], rel=EXACT)
    options = "accum=pairs accum.gradient=back accum.gradient.scale=2"
    assert_same_gradient(go(f"{OWN} {options}", config_dir="my_conf"), both)
    plan = read_json(pairs.folder / "plan.json")
    assert plan["neighbours"] == 2
    assert [shape["num_samples"] for shape in plan["shapes"]] == [2, 2, 2, 2]
    assert "  pairs          2 neighbours of 1 rank" in (pairs.folder / "train.log").read_text()


NOTES = """
from trainer.report.tracker import Tracker


class Notes(Tracker):
    def __init__(self, path="notes.txt"):
        self.path = path

    def start(self, run):
        self.file = open(self.path, "a")
        print(run.name, run.config["steps"], run.plan["global_batch"], file=self.file)

    def log(self, step, figures):
        print(step, *figures, file=self.file)

    def finish(self, summary):
        self.file.close()


class Asks:
    def on_step(self, values, model):
        return {"weights": sum(p.numel() for p in model.parameters())}
"""


def test_a_tracker_of_one_s_own_takes_two_files_or_its_name():
    """An option of the user's folder, and the class by its path, in one run; the hook's figures."""
    Path("notes.py").write_text(NOTES)
    Path("my_conf/trackers").mkdir(parents=True)
    Path("my_conf/trackers/notes.yaml").write_text("_target_: notes.Notes\npath: a.txt\n")
    own = "'logger=[notes,{_target_: notes.Notes, path: b.txt}]' hooks=[notes.Asks] name=n steps=2"
    run = go(f"{own} eval.every=2", config_dir="my_conf")
    for path in ("a.txt", "b.txt"):
        first, one, two, evaluation = Path(path).read_text().splitlines()
        assert first == "n 2 8"
        assert (one.split()[:2], two.split()[:2]) == (["1", "train/epoch"], ["2", "train/epoch"])
        assert "train/weights" in one
        assert evaluation.split()[:2] == ["2", "eval/loss"]
    count = sum(t.numel() for n, t in state(run).items() if n.startswith("model."))
    assert curve(run, "weights") == [count] * 2
    for typed, words in {
        f"{own} notes.pth=c.txt": r"notes\.pth: unknown setting\. Did you mean notes\.path",
        "logger=[] tensorboard.folder=x": r"tensorboard\.folder=x: tensorboard is not among",
    }.items():
        with pytest.raises(ConfigError, match=words):
            go(typed, config_dir="my_conf")


def test_trackers_come_and_go_with_a_resumption_unless_a_package_is_missing(monkeypatch):
    run = go("logger=[tensorboard] tensorboard.folder=boards steps=1")
    assert list(Path("boards").glob("*/events*"))
    assert on(run, "logger=[] steps=2").exit_code == 0
    old, new = (saved_runs.parse([each])[0] for each in ("wandb.project=p", "logger=[my.wandb]"))
    assert saved_runs.staying(old, new, {}) == []
    before = (run.folder / "config.yaml").read_bytes()
    monkeypatch.setattr(assemble_reporter, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs tensorboard, .*pip install '\.\[tens"):
        on(run, "logger=[tensorboard] steps=3")
    assert (run.folder / "config.yaml").read_bytes() == before


def test_the_jobs_of_a_sweep_and_of_a_search_are_a_group(tmp_path):
    for record in ("multirun.yaml", "search.yaml"):
        sweep = tmp_path / record.removesuffix(".yaml")
        sweep.mkdir()
        assert assemble_reporter.group_of(sweep / "0") is None
        (sweep / record).touch()
        assert assemble_reporter.group_of(sweep / "0") == sweep.name


def test_a_data_set_may_have_next_to_nothing_or_bring_its_split_and_its_collate():
    plan = read_json(go(f"data._target_={TOYS}.Plain steps=1 batch.global=7").folder / "plan.json")
    assert plan["num_held_out"] > 0
    assert plan["num_samples"] + plan["num_held_out"] == 30
    run = go(f"data._target_={TOYS}.Split steps=5")
    plan = read_json(run.folder / "plan.json")
    assert (plan["num_samples"], plan["num_held_out"]) == (40, 9)
    assert run.result["eval_loss"] > 0
    assert curve(run, "epoch")[-1] == 1.0

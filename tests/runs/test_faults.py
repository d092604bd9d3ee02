"""What cannot be is told in one line: the key or the sample, the value, and what to do."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from tests.lib.run_support import (
    TOYS,
    assert_same_bits,
    curve,
    entries,
    go,
    on,
    only_run,
    overrides,
    read_json,
    shell,
    state,
    steps,
)
from trainer.core import durable
from trainer.core.errors import ConfigError, NonFiniteError, SaveError

pytestmark = pytest.mark.usefixtures("own_folder")


GPT = "model=gpt_tiny model.width=16 model.num_layers=1 model.num_heads=2"


@pytest.mark.parametrize(
    ("line", "words"),
    {
        "model.widht=4": ["model.widht", "Did you mean model.width?"],
        "data.sise=4 model.nothing=1": ["data.sise", "Did you mean data.size?"],
        "data.zzz=4": ["data.zzz", "takes"],
        f"model._target_={TOYS}.Nett": [f"model._target_={TOYS}.Nett"],
        "model._target_=nowhere.Net": ["model._target_=nowhere.Net", "nowhere"],
        f"model._target_={TOYS}.Rows": ["Rows", "not a Module"],
        f"accum._target_={TOYS}.Net": ["not a Cut"],
        f"accum.gradient._target_={TOYS}.Cramped": ["accum.gradient.limit", "needs a value"],
        "device=cuda": ["device=cuda: no GPU is usable here"],
        "model.norm=batch accum=auto": ["BatchNorm", "accum=fixed accum.micro="],
        "model.norm=batch accum=budget accum.max_tokens=40": ["BatchNorm", "accum=fixed"],
        "accum=budget accum.max_tokens=11": [
            "accum.max_tokens: 11 is less than the longest sample, of 12 tokens",
            "The nearest valid value is accum.max_tokens=12",
        ],
        "model._target_=trainer.models.gpt.GPT model.width=10": [
            "3 heads do not share a width of 10"
        ],
        f"{GPT} model.vocab_size=5 data._target_={TOYS}.Known": [
            "model.vocab_size=5: the data hold 16 different tokens",
            "the smallest valid value is 16",
        ],
        f"{GPT} data._target_={TOYS}.Rows": ["model.vocab_size: these data do not say", "type it"],
        "optimizer._target_=torch.optim.SGD optimizer.rate=0.1": ["optimizer.rate", "SGD"],
        "objective=classify": ["classify"],
        "data.holdout=1.5": ["data.holdout"],
        "steps=null epochs=1 scheduler.warmup=99": ["scheduler.warmup: 99 steps", "type at most"],
    }.items(),
)
def test_what_does_not_fit_together_is_refused_by_key(line: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        go(line)
    for word in words:
        assert word in str(raised.value), str(raised.value)
    assert not list(Path().glob("outputs/*/*/metrics.jsonl"))


def test_all_wrong_arguments_of_a_class_come_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        go("model.widht=4 model.dropuot=0.1")
    assert len(raised.value.faults) == 2


def test_a_config_error_leaves_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert shell(" ".join(overrides("model.widht=4"))) == 2
    assert capsys.readouterr().err.startswith("train: error: model.widht: ")
    assert not list(Path().glob("outputs/*/*"))


RECIPE = "recipe=./recipe.yaml batch.global=8 accum=fixed accum.micro=4 steps=1 device=cpu"


def recipe(target: str) -> str:
    """A recipe that names a model's class; the line that uses it on data of one's own."""
    text = f"defaults:\n  - override /model: own\nmodel:\n  _target_: {target}\n"
    Path("recipe.yaml").write_text(text)
    return f"{RECIPE} data._target_={TOYS}.Rows wandb.mode=disabled"


def test_a_recipe_may_not_name_a_class_that_nobody_trusts() -> None:
    line = recipe(f"{TOYS}.Net")
    assert shell(line) == 2
    assert not list(Path().glob("outputs/*/*"))
    assert shell(f"{line} trust=[tests]") == 0


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "trainer.core.durable.os",
        "trainer.core.durable.shutil.rmtree",
        "trainer.build.instantiate.construct",
        "trainer.plan.cuts.Fixed",
        "trainer.nowhere.Net",
    ],
)
def test_what_is_no_model_is_not_called_for_a_recipe(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shell(recipe(target)) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert f"model._target_={target}" in said


def test_a_loss_that_stays_not_finite_ends_with_6_saved_as_it_last_was() -> None:
    line = (
        f"accum.gradient._target_={TOYS}.NotFinite accum.gradient.first=3 nonfinite.limit=3 "
        "steps=20 checkpoint.every=2"
    )
    with pytest.raises(NonFiniteError, match="not finite for 3 steps in a row") as raised:
        go(line)
    assert raised.value.exit_code == 6
    run = only_run()
    assert [entry.get("skipped") for entry in steps_of(run)] == [None, None, *["not finite"] * 3]
    assert read_json(run / "status.json")["exit_code"] == 6
    saved = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert saved == ["step-00000004", "step-00000005"]
    good = go(
        line.replace("first=3", "first=99").replace("steps=20", "steps=20 checkpoint.keep=99")
    )
    before = {n: t for n, t in state(good, 2).items() if not n.startswith("extra")}
    assert_same_bits({name: state(run)[name] for name in before}, before)


def steps_of(run: Path) -> list[dict[str, object]]:
    """Steps, those without a finite loss too."""
    return [entry for entry in entries(run) if "lr" in entry]


def test_a_few_steps_that_are_not_finite_are_passed_over_and_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = go(
        f"accum.gradient._target_={TOYS}.NotFinite accum.gradient.first=2 accum.gradient.last=3 "
        "nonfinite.limit=3 steps=5 scheduler=constant"
    )
    assert run.result["skipped_steps"] == 2
    found = steps_of(run.folder)
    assert [entry["step"] for entry in found] == [1, 2, 3, 4, 5]
    assert [entry["loss"] is None for entry in found] == [False, True, True, False, False]
    said = capsys.readouterr().out
    assert "step 2 updated nothing: not finite" in said
    assert all(bool(torch.isfinite(t).all()) for t in state(run).values() if t.is_floating_point())


class Full(durable.FileSystem):
    """A disk that takes no checkpoint after the first."""

    def __init__(self) -> None:
        self.num_checkpoints = 0

    def create(self, path: Path) -> int:
        if "checkpoints" in path.parts and path.name == "model.safetensors":
            self.num_checkpoints += 1
            if self.num_checkpoints > 1:
                raise OSError(errno.ENOSPC, "No space left on device")
        return super().create(path)


def test_a_full_disk_ends_with_8_and_leaves_the_older_checkpoint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with durable.use(Full()):
        assert shell(" ".join(overrides("checkpoint.every=2"))) == 8
    said = capsys.readouterr().err
    assert "could not be written: No space left on device" in said
    assert "make room" in said
    assert len(said.splitlines()) == 1
    run = only_run()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
    assert read_json(run / "status.json")["exit_code"] == 8
    assert state(run)
    whole = go("checkpoint.every=2")
    again = on(type(whole)(folder=run, exit_code=8, result={}))
    assert curve(again, "loss") == curve(whole, "loss")


def test_a_full_disk_behind_the_steps_ends_with_8_too() -> None:
    with durable.use(Full()), pytest.raises(SaveError) as raised:
        go("checkpoint.every=2 checkpoint.asynchronous=true")
    assert raised.value.exit_code == 8


def test_a_full_disk_may_be_told_not_to_stop_the_run_until_its_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with durable.use(Full()), pytest.raises(SaveError):
        go("checkpoint.every=2 checkpoint.on_full=continue steps=7")
    assert "going on without saving" in capsys.readouterr().out
    assert len(steps(only_run())) == 7


def test_bad_records_are_passed_over_when_asked_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f'{{"text": "a line of text, number {i}"}}' for i in range(200)]
    lines[50] = '{"text": '
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    line = f"{GPT} data=text data.path=corpus.jsonl data.max_length=32 steps=2"
    assert shell(" ".join(overrides(line))) == 3
    assert "corpus.jsonl:51" in capsys.readouterr().err.replace(", line ", ":")
    run = go(f"{line} data.on_bad=skip")
    plan = read_json(run.folder / "plan.json")
    assert plan["num_samples"] + plan["num_held_out"] == 199
    assert "1 " in capsys.readouterr().out

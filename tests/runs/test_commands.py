"""The commands beside training: evaluate, export, plan, verify."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model

from tests.lib.hf_toys import write_lines
from tests.lib.run_support import TOYS, entries, go, overrides, read_json, shell, state
from tests.lib.run_toys import Net
from tests.reliability.faults import FaultyDisk
from trainer import train
from trainer.cli.python_api import FinishedRun
from trainer.core import durable
from trainer.core.errors import ConfigError
from trainer.core.run_folder import hold


def screen_of(capsys: pytest.CaptureFixture[str]) -> str:
    """Everything on the screen, on one line."""
    return " ".join(capsys.readouterr().out.split())


def test_an_evaluation_takes_as_many_samples_as_asked_and_may_come_before_the_first_step(capsys):
    run = go("data.holdout=0.3 eval.at_start=true eval.samples=3 steps=2 optimizer.lr=0")
    evaluations = [e for e in entries(run) if "eval_loss" in e]
    assert [entry["step"] for entry in evaluations] == [0, 2]
    assert evaluations[0]["eval_loss"] == evaluations[1]["eval_loss"]  # of the same samples
    assert read_json(run.folder / "plan.json")["num_held_out"] > 3
    asked = f"evaluate run={run.folder} trust=[tests]"
    for more, count in (("", 3), ("eval.samples=null", 13), ("eval.samples=100", 13)):
        assert shell(f"{asked} {more}") == 0
        found = read_json(run.folder / "evaluate.json")["eval_loss"]
        assert f"held out ({count} samples): " in screen_of(capsys)
        assert (found == evaluations[0]["eval_loss"]) == (count == 3)


def test_a_run_is_read_by_every_command(capsys):
    run = go("checkpoint.every=2 steps=4 eval.every=2")
    asked = f"run={run.folder} trust=[tests]"
    before = {path: path.read_bytes() for path in run.folder.iterdir() if path.is_file()}
    for step in (2, "last"):
        taken = 4 if step == "last" else step
        assert shell(f"evaluate {asked} step={step}") == 0
        found = read_json(run.folder / "evaluate.json")
        assert found["step"] == taken
        assert f"{found['eval_loss']:.4f}" in screen_of(capsys)
        assert shell(f"export {asked} step={step} export.to=at-{step}") == 0
        weights = load_file(f"at-{step}/model.safetensors")
        assert weights["head.weight"].equal(state(run, taken)["model.head.weight"])
        again = go(f"init={run.folder} step={step} steps=1 optimizer.lr=0")
        assert [(e["step"], e["lr"]) for e in entries(again) if "lr" in e] == [(1, 0.0)]
        assert state(again)["model.head.weight"].equal(weights["head.weight"])
    assert found["eval_loss"] == pytest.approx(run.result["eval_loss"], rel=1e-6)
    assert all(path.read_bytes() == content for path, content in before.items())
    described = read_json(Path("at-last/config.json"))
    assert (described["model"]["_target_"], described["step"]) == (f"{TOYS}.Net", 4)
    model = Net()
    load_model(model, "at-last/model.safetensors")
    assert model.state_dict()["head.weight"].equal(weights["head.weight"])
    check_what_is_refused(run, asked, capsys)
    check_from_python(run, asked.split())


def check_what_is_refused(run: FinishedRun, asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    for line, text in (
        (f"evaluate {asked} step=3", "no checkpoint of step 3; has 2, 4"),
        (f"init={run.folder} step=3 {' '.join(overrides(''))}", "no checkpoint of step 3"),
        ("export run=at-2 export.to=weights", "not a run folder"),
    ):
        assert shell(line) == 4, line
        (fault,) = capsys.readouterr().err.splitlines()
        assert text in fault


def check_from_python(run: FinishedRun, typed: list[str]) -> None:
    evaluated = train(["evaluate", *typed])
    assert evaluated.result == read_json(run.folder / "evaluate.json")
    verified = train(["verify", *typed])
    assert verified.result == read_json(verified.folder / "verify.json")
    assert train(["export", *typed, "export.to=weights"]).result == {}
    for wrong in (["evaluat", *typed], ["-m", "seed=1,2"], ["plan", "evaluate", *typed]):
        with pytest.raises(ConfigError):
            train(wrong)


GPT = "model=gpt_tiny model.width=16 model.num_heads=2 model.num_layers=1"
TEXT = f"{GPT} data=text data.path=d.jsonl data.max_length=32 data.holdout=0.2 steps=2"


def write_texts(file: str, count: int) -> None:
    write_lines(Path(file), [{"text": f"{file}, document {number}"} for number in range(count)])


def test_an_evaluation_is_of_what_the_run_held_out_and_of_nothing_else(capsys):
    write_texts("d.jsonl", 40)
    write_texts("other.jsonl", 30)
    run = go(TEXT)
    held_out = read_json(run.folder / "plan.json")["num_held_out"]
    asked = f"evaluate run={run.folder}"
    for typed, text in (
        ("data.holdout=0.5", "data.holdout=0.5: the run has 0.2; leave it out; all of other data"),
        ("data.path=other.jsonl", "data.path=other.jsonl: the run has d.jsonl"),
    ):
        assert shell(f"{asked} {typed}") == 2
        (fault,) = capsys.readouterr().err.splitlines()
        assert text in fault
    assert shell(asked) == 0
    found = read_json(run.folder / "evaluate.json")
    assert (found["step"], found["samples"]) == (2, held_out)
    assert found["eval_loss"] == pytest.approx(run.result["eval_loss"], rel=1e-6)
    with Path("d.jsonl").open("a") as file:
        file.write('{"text": "appended"}\n')
    for command in ("evaluate", "verify", "plan"):
        key = "resume" if command == "plan" else "run"
        assert shell(f"{command} {key}={run.folder}") == 3, command
        (fault,) = capsys.readouterr().err.splitlines()
        assert "data: changed since the checkpoint was written" in fault
    assert read_json(run.folder / "evaluate.json") == found


def test_an_export_needs_neither_the_data_nor_the_gpu_of_the_run():
    write_texts("d.jsonl", 40)
    run = go(TEXT)
    Path("d.jsonl").unlink()
    assert shell(f"export run={run.folder} export.to=weights device=cuda") == 0
    weight = load_file("weights/model.safetensors")["embedding.weight"]
    assert weight.equal(state(run)["model.embedding.weight"])
    with pytest.raises(ConfigError, match=r"model\.num_layers=2: the run has 1; leave it out"):
        train(["export", f"run={run.folder}", "export.to=more", "model.num_layers=2"])


def test_figures_that_find_no_room_are_printed_and_the_old_ones_stay(capsys):
    run = go("steps=2")
    (run.folder / "evaluate.json").write_text("{}")
    capsys.readouterr()
    with durable.use(FaultyDisk(0, "ENOSPC")):
        assert shell(f"evaluate run={run.folder} trust=[tests]") == 8
    screen = capsys.readouterr()
    assert "step 2: held out" in screen.out
    (fault,) = screen.err.splitlines()
    assert f"{run.folder / 'evaluate.json'}: could not be written" in fault
    assert (run.folder / "evaluate.json").read_text() == "{}"
    with durable.use(FaultyDisk(0, "ENOSPC for good")):
        assert shell(" ".join(["plan", *overrides("")])) == 8
    with hold(run.folder):  # whoever holds the run clears away what a broken disk left
        assert not list(run.folder.glob(".tmp-*"))


MADE = (
    f"model._target_={TOYS}.Whole model.net._target_={TOYS}.Net.of model.net.width=4 "
    "model.norm._target_=torch.nn.LayerNorm model.norm._partial_=true "
    "'model.more=[{_target_:torch.nn.Linear,in_features:16,out_features:16}]'"
)


def test_a_model_that_a_factory_makes_does_all_that_a_model_does_by_the_lines_that_a_run_prints(
    capsys,
):
    run = go(f"{MADE} steps=2 eval.every=2 data.holdout=0.2").folder
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  train ")]
    words = [line.split()[1].partition("=")[0] for line in printed]
    assert words == ["evaluate", "export", "resume"]
    for line in printed:
        assert shell(line.removeprefix("  train ")) == 0, line
    assert read_json(run / "result.json")["step"] == 4
    assert go(f"{MADE} init=exported steps=1").exit_code == 0


@pytest.mark.slow
def test_commands_that_follow_name_the_folder_of_options_that_a_run_had(capsys):
    Path("own/model").mkdir(parents=True)
    Path("own/model/mine.yaml").write_text(f"# Mine.\n_target_: {TOYS}.Net\n")
    line = " ".join(overrides("model=mine steps=1"))
    assert shell(f"--config-dir=own {line}") == 0
    shown = [each.strip() for each in capsys.readouterr().out.splitlines()]
    follow = [each for each in shown if each.startswith(("train evaluate ", "train resume="))]
    assert len(follow) == 2
    assert all("--config-dir=own" in each and "trust=" not in each for each in follow)
    assert shell(follow[0].removeprefix("train ")) == 0


def test_a_plan_is_the_whole_arithmetic_and_starts_nothing(capsys):
    scaled = "scheduler.scale=linear scheduler.reference_batch=2 optimizer.lr=0.003"
    groups = "'optimizer.groups={*head.*: {lr: 0.01}}'"
    line = "accum=budget accum.max_tokens=40 steps=9 scheduler.warmup=2"
    run = go(f"command=plan {line} {scaled} {groups}").folder
    plan = read_json(run / "plan.json")
    assert not (run / "checkpoints").exists()
    assert not (run / "metrics.jsonl").exists()
    assert max(shape["num_samples"] * shape["length"] for shape in plan["shapes"]) <= 40
    parts = plan["memory_parts"]
    assert sum(parts.values()) == plan["predicted_peak_bytes"]
    assert set(parts) >= {"parameters", "gradients", "optimizer state", "activations"}
    text = screen_of(capsys)
    for words in (
        "batch 8 samples a step",
        "9 = 1.50 epochs, 6 steps per epoch",
        "keep: the last 2 samples",
        "2 steps of warm-up (22.2%)",
        "checkpoint at the end",
        "KiB predicted, ",
        "micro-batches of step 1",
        "learning rate 0.012, adamw",
        "*head.*: 2 tensors, 144 parameters, lr 0.04",
    ):
        assert words in text, words


def test_training_does_not_move_the_generators_of_a_notebook():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    go("steps=1 model.dropout=0.5")
    torch.manual_seed(5)
    assert torch.rand(3).equal(expected)

"""What a run leaves behind is what the interface lists, whole and true."""

import json

import numpy as np
import pytest
import yaml
from safetensors import safe_open

from tests.lib.run_support import TOYS, curve, entries, go, on, only_run, read_json, steps
from tests.lib.run_toys import Net, Rows, Watch
from tests.lib.support import PLAN_KEYS, STEP_KEYS
from trainer.cli.python_api import FinishedRun
from trainer.data.split import split_by_seed
from trainer.optim.schedules import Cosine
from trainer.plan.batch_size import ConstantSize
from trainer.plan.order import Order


def test_a_run_makes_one_folder_with_what_the_interface_lists(capsys):
    line = "steps=7 checkpoint.every=3 checkpoint.keep=2 eval.every=3 log.every=5 name=mine"
    run = go(f"{line} trust=[somewhere]")
    assert (run.exit_code, only_run()) == (0, run.folder)
    assert run.folder.name.endswith("-mine")
    assert run.folder.parent.parent.name == "outputs"
    listed = ".hydra .lock checkpoints config.yaml metrics.jsonl plan.json report.html result.json"
    listed += " samples.jsonl splits.json status.json train.log"
    assert sorted(path.name for path in run.folder.iterdir()) == listed.split()
    checkpoints = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert checkpoints == ["step-00000006", "step-00000007"]
    assert not list(run.folder.rglob("*.pt")) + list(run.folder.rglob("*.pkl"))
    records = {path.name for path in (run.folder / ".hydra").iterdir()}
    assert records >= {"config.yaml", "hydra.yaml", "overrides.yaml"}
    assert "trust" not in yaml.safe_load((run.folder / "config.yaml").read_text())
    check_metrics(run)
    check_ledger(run)
    screen = capsys.readouterr().out.splitlines()
    shown = [line for line in screen if line.startswith("step") and "lr" in line]
    assert [line.split()[1] for line in shown] == ["1/7", "5/7", "7/7"]
    check_records(run)
    before = {path: path.stat().st_mtime_ns for path in run.folder.rglob("*") if path.is_file()}
    assert on(run).exit_code == 0, "a finished run has nothing more to do"
    assert before == {p: p.stat().st_mtime_ns for p in run.folder.rglob("*") if p.is_file()}


def check_records(run: FinishedRun) -> None:
    folder = run.folder / "checkpoints" / "step-00000007"
    manifest = read_json(folder / "manifest.json")
    assert manifest["step"] == 7
    text = json.dumps(manifest)
    assert all(word in text for word in ("format", "sha256", "config_hash", "fingerprint"))
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {f"model.{name}" for name in Net().state_dict()}
    status = {"state": "completed", "exit_code": 0, "step": 7, "reason": None}
    found = read_json(run.folder / "status.json")
    assert found == {**status, "time": found["time"]}
    result = read_json(run.folder / "result.json")
    assert result == run.result
    assert result["loss"] == curve(run, "loss")[-1]
    evaluated = [entry for entry in entries(run) if "eval_loss" in entry]
    assert [entry["step"] for entry in evaluated] == [3, 6, 7]
    assert evaluated[-1]["eval_loss"] == result["eval_loss"]
    assert min(result["seconds"], result["tokens_per_second"]) > 0


def check_metrics(run: FinishedRun) -> None:
    found = steps(run)
    assert [entry["step"] for entry in found] == [1, 2, 3, 4, 5, 6, 7]
    assert all(entry.keys() == {*STEP_KEYS, "model_flops_per_second"} for entry in found)
    lengths = split_by_seed(Rows(), split="train", holdout=0.05, seed=0).lengths
    order = Order(len(lengths), 0, ConstantSize(global_batch=8))
    cursor, samples, tokens = order.start, 0, 0
    for entry in found:
        batch = order.next(cursor)
        cursor = batch.after
        samples += len(batch.ids)
        tokens += int(lengths[batch.ids].sum())
        assert (entry["samples"], entry["tokens"]) == (samples, tokens)
        assert entry["epoch"] == order.fractional_epoch(cursor)
        factor = Cosine().factor(entry["step"] - 1, 7)
        assert entry["lr"] == pytest.approx(1.2e-2 * factor, rel=1e-12)
        assert entry["memory_bytes"] > 2**20
        assert entry["tokens_per_second"] > 0


def test_the_plan_says_what_the_steps_then_do():
    run = go("accum=budget accum.max_tokens=40")
    plan = read_json(run.folder / "plan.json")
    assert plan.keys() >= set(PLAN_KEYS)
    first = steps(run)[0]
    for key in ("accum_steps", "micro_batches", "padding"):
        assert plan[key] == first[key]
    assert (plan["global_batch"], plan["unit"], plan["world_size"]) == (8, "samples", 1)
    assert (plan["max_tokens"], plan["steps"], plan["steps_per_epoch"]) == (40, 6, 6)
    assert (plan["sync"], plan["parallel"]) == ("deferred", "none")
    assert 0 < plan["predicted_peak_bytes"] < plan["memory_limit_bytes"]


def check_ledger(run: FinishedRun) -> None:
    view = split_by_seed(Rows(), split="train", holdout=0.05, seed=0)
    own = view.original_ids(range(len(view)))
    order = Order(len(own), 0, ConstantSize(global_batch=8))
    ledger = entries(run, "samples.jsonl")
    assert [entry["step"] for entry in ledger] == [1, 2, 3, 4, 5, 6, 7]
    cursor = order.start
    for entry in ledger:
        batch = order.next(cursor)
        np.testing.assert_array_equal(entry["ids"], own[batch.ids])
        cursor = batch.after
    first_epoch = sorted(sample for entry in ledger[:6] for sample in entry["ids"])
    assert first_epoch == own.tolist() != list(range(len(own)))


def test_hooks_see_copies_and_stop_nothing(capsys):
    Watch.seen.clear()
    run = go(
        f"'hooks=[{TOYS}.Watch, {{_target_: {TOYS}.Watch, word: my}}]' "
        "steps=4 checkpoint.every=2 eval.every=2"
    )
    seen = [(name, entry["step"]) for name, entry in Watch.seen if name[:2] != "my"]
    once = [("step", 1), ("step", 2), ("eval", 2), ("checkpoint", 2)]
    assert seen == [*once, ("step", 3), ("step", 4), ("eval", 4), ("checkpoint", 4)]
    for word in ("", "my"):
        given = [entry["loss"] for name, entry in Watch.seen if name == f"{word}step"]
        assert given == curve(run, "loss")
    assert capsys.readouterr().out.count("a watcher's own fault") == 2


def test_a_loss_that_does_not_fall_is_a_line_on_the_screen_and_in_the_log(capsys):
    line = "batch.global=21 accum.micro=21 scheduler=constant steps=110 optimizer.lr=1e-8"
    log = (go(line).folder / "train.log").read_text()
    text = "step 100/110  the loss, "
    assert capsys.readouterr().out.count(text) == log.count(text) == 1

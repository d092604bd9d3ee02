"""Going on with a run and reading one: what is replayed, what is refused, what is trusted."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lib.cli_support import (
    faults,
    in_process,
    make_own_folder,
    prepared,
)
from trainer.cli.compose import Job
from trainer.cli.main import composer_of
from trainer.cli.overrides import parse
from trainer.cli.saved_runs import newest
from trainer.cli.sweep import Sweep, prepare_sweep
from trainer.config.run_config import to_plain
from trainer.core.errors import ConfigError, NoCheckpointError
from trainer.report.run_status import to_go_on


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_own_folder(tmp_path, monkeypatch)


CUT = "accum=fixed accum.micro=8 steps=10"


def prepared_sweep(line: str) -> Sweep:
    composer = composer_of({})
    overrides, wrong = parse(shlex.split(line))
    with composer.open():
        return prepare_sweep(overrides, wrong, composer)


def make_run(line: str = CUT, **left: Any) -> Path:
    """Leave on disk what a run leaves, as far as the command line reads it."""
    job = prepared(line)
    return leave(job, **left)


def leave(
    job: Job,
    state: Mapping[str, Any] = {"state": "preempted", "step": 4},
    has_checkpoint: bool = True,
    began: float = 0.0,
) -> Path:
    folder = job.folder
    records = folder / ".hydra"
    records.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(dict(to_plain(job.config))))
    lines = [line.lstrip("+") for line in job.lines if not line.startswith("hydra")]
    (records / "overrides.yaml").write_text(yaml.safe_dump(lines))
    (folder / "status.json").write_text(json.dumps(state))
    if has_checkpoint:
        checkpoint = folder / "checkpoints" / "step-00000004"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
    os.utime(records / "overrides.yaml", (began, began))
    return folder


DONE = {"state": "completed", "step": 10, "exit_code": 0}


def test_a_run_goes_on_in_its_folder_with_its_own_settings_from_its_newest_records() -> None:
    run = make_run(f"{CUT} optimizer.lr=0.003 name=mine")
    ready = prepared(f"resume={run}")
    assert ready.folder == run
    config = ready.config
    assert (config.steps, config.name, config.accum.name) == (10, "mine", "fixed")
    assert config.optimizer.params["lr"] == 0.003
    assert config.resume == str(run)
    assert ready.composed.hydra.run.dir == str(run)
    assert ready.composed.hydra.output_subdir == ".hydra/resumed"
    again = run / ".hydra" / "resumed"
    again.mkdir()
    (again / "overrides.yaml").write_text("[accum=fixed, accum.micro=4, steps=20, name=mine]")
    ready = prepared(f"resume={run} resume_allow=[optimizer.lr]")
    assert ready.config.steps == 20, "the latest resumption is what the next one goes on from"


def test_execution_is_free_and_steps_may_grow() -> None:
    run = make_run()
    for change in ("accum=budget accum.max_tokens=4096", "accum=auto", "steps=20 num_workers=2"):
        assert prepared(f"resume={run} accum.micro=4 device=cpu {change}").folder == run
    config = prepared(f"resume={make_run('accum=fixed accum.steps=4 steps=10')} accum=auto").config
    assert config.accum.name == "auto", "a new option starts from its own values"
    assert config.accum.params == {"micro": None, "memory": None}


def test_what_changes_the_step_is_refused_with_a_diff() -> None:
    run = make_run()
    for change, texts in {
        "seed=1": ["seed=1: the run has 0"],
        "optimizer.lr=0.1 batch.global=64": ["batch.global=64", "optimizer.lr=0.1: the run has"],
        "steps=5": ["steps=5: the run has 10; may only grow"],
        "clip_norm=null": ["clip_norm=null: the run has 1.0"],
        "model.width=48": ["model.width=48: the run has 96"],
        "scheduler=constant": ["scheduler._target_"],
        "precision=bf16": ["precision=bf16: the run has fp32"],
        "recipe=quickstart": ["data.max_length"],
    }.items():
        with pytest.raises(ConfigError) as raised:
            prepared(f"resume={run} {change}")
        faults = raised.value.faults
        assert all(any(text in fault for fault in faults) for text in texts), faults
        assert all("resume_allow=[" in fault for fault in faults)


def test_a_key_that_is_named_may_change() -> None:
    run = make_run()
    ready = prepared(f"resume={run} optimizer.lr=0.1 seed=1 resume_allow=[optimizer.lr,seed]")
    assert ready.config.seed == 1
    with pytest.raises(ConfigError, match="seed=1"):
        prepared(f"resume={run} optimizer.lr=0.1 seed=1 resume_allow=[optimizer.lr]")
    with pytest.raises(ConfigError, match=r"resume_allow=.*Did you mean batch\.global\?"):
        prepared(f"resume={run} resume_allow=[batch.golbal]")


def test_a_finished_run_has_nothing_to_do_until_more_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = make_run(state=DONE)
    assert in_process(f"resume={run}") == 0
    screen = capsys.readouterr()
    assert len(screen.out.splitlines()) == 1
    assert "done after step 10" in screen.out
    assert screen.err == ""
    assert prepared(f"resume={run} steps=11").done is None
    epochs = make_run("accum=fixed accum.micro=8 epochs=2", state=DONE)
    assert prepared(f"resume={epochs}").done is not None
    assert prepared(f"resume={epochs} epochs=3").done is None


def test_a_run_that_is_not_there_or_cannot_go_on_is_exit_4(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for line, fault in (
        ("resume=nowhere", "resume=nowhere: no such folder"),
        ("verify +run=.", "run=.: not a run folder"),
    ):
        assert in_process(line) == 4
        assert faults(capsys.readouterr().err)[0].startswith(fault)
    with pytest.raises(NoCheckpointError, match="no checkpoint"):
        prepared(f"resume={make_run(has_checkpoint=False)}")
    with pytest.raises(NoCheckpointError, match=r"no training run; .* says command=plan"):
        prepared(f"resume={make_run('plan')}")


def test_auto_takes_the_newest_training_run_of_the_name() -> None:
    mine = [make_run("accum=fixed accum.micro=8 name=mine", began=t) for t in (10.0, 30.0, 20.0)]
    other = make_run("accum=fixed accum.micro=8", began=40.0)
    make_run("plan accum=fixed accum.micro=8 name=mine", began=50.0)
    make_run("accum=fixed accum.micro=8 name=mine", began=60.0, has_checkpoint=False)
    assert newest(Path("outputs").absolute(), "mine") == mine[1]
    assert newest(Path("outputs").absolute(), None) == other
    assert newest(Path("outputs").absolute(), "nobody") is None
    assert prepared("resume=auto name=mine").folder == mine[1]


def test_auto_goes_on_in_the_folder_that_is_typed() -> None:
    fresh = prepared("hydra.run.dir=runs/a resume=auto")
    assert (fresh.config.resume, Path("runs").exists()) == (None, False)
    made = prepared("hydra.run.dir=runs/a accum=fixed accum.micro=8")
    run = leave(made)
    assert prepared("hydra.run.dir=runs/a resume=auto").folder == run
    with pytest.raises(ConfigError, match=r"holds a run; resume=.*/a goes on with it"):
        prepared("hydra.run.dir=runs/a")


def test_a_run_folder_gives_no_trust() -> None:
    both = "model._target_=net.Net model.width=4 data._target_=net.Data"
    run = make_run(f"{both} {CUT} trust=[net,os]")
    with pytest.raises(ConfigError) as caught:
        prepared(f"resume={run}")
    why = "comes from a recipe or a saved run; to trust it, type 'trust=[net]'"
    assert caught.value.faults == (
        f"model._target_=net.Net: {why}",
        f"data._target_=net.Data: {why}",
    )
    trusted = prepared(f"resume={run} trust=[net]").config
    assert trusted.trust == ("net",)
    assert not trusted.model.typed_target
    typed = prepared(f"resume={run} model._target_=net.Net data._target_=net.Data").config
    assert typed.model.typed_target
    assert typed.model.params == {"width": 4}


def test_classes_of_the_model_libraries_want_no_trust() -> None:
    sizes = "model._target_=torch.nn.Linear model.in_features=2 model.out_features=2"
    run = make_run(f"{sizes} optimizer._target_=torch.optim.SGD {CUT}")
    again = prepared(f"resume={run}")
    assert again.config.resume == str(run)
    assert "trust" not in to_go_on(again.config, run)


@pytest.mark.parametrize("content", ["{a: 1}", "[1, 2]", "- [", "!!python/name:os.system ''"])
def test_records_that_are_no_overrides_are_refused(content: str) -> None:
    run = make_run()
    (run / ".hydra" / "overrides.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"overrides.yaml: "):
        prepared(f"resume={run}")


def test_evaluate_and_export_read_a_run_and_make_no_folder(tmp_path: Path) -> None:
    run = make_run("accum=fixed accum.micro=8 optimizer.lr=0.003")
    before = sorted(tmp_path.rglob("*"))
    ready = prepared(f"export run={run.relative_to(tmp_path)} export.to=weights device=cpu")
    assert ready.folder == run
    assert not ready.makes_folder
    assert ready.config.command == "export"
    assert ready.config.run == str(run)
    assert ready.config.optimizer.params["lr"] == 0.003
    assert ready.composed.hydra.output_subdir is None
    assert sorted(tmp_path.rglob("*")) == before
    plan = prepared(f"plan resume={run}")
    assert plan.folder != run
    assert (plan.config.resume, plan.config.accum.name) == (str(run), "fixed")


def test_a_recipe_given_as_a_file_is_found_again_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("optimizer: {lr: 0.007}\n")
    run = make_run("recipe=mine.yaml accum=fixed accum.micro=8")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert prepared(f"resume={run}").config.optimizer.params["lr"] == 0.007


def test_a_sweep_goes_on_where_it_was() -> None:
    line = "accum=fixed accum.micro=8,4 steps=10"
    first = prepared_sweep(line)
    task = [text for text in first.lines if not text.startswith("hydra")]
    (first.folder / "0").mkdir(parents=True)
    (first.folder / "multirun.yaml").write_text(
        yaml.safe_dump({"hydra": {"overrides": {"task": task}}})
    )
    again = prepared_sweep(f"{line} resume=auto")
    assert (again.folder, again.goes_on) == (first.folder, True)
    assert "hydra.output_subdir=.hydra/resumed" in again.lines
    assert prepared_sweep(f"{line} seed=3 resume=auto").folder != first.folder


STOPPED_EARLY = {"state": "preempted", "step": 0, "exit_code": 75}


def test_a_run_that_was_stopped_before_its_first_step_begins_again_in_its_folder() -> None:
    line = "accum=fixed accum.micro=8 steps=10 name=early"
    run = make_run(line, state=STOPPED_EARLY, has_checkpoint=False)
    for typed in (f"resume={run}", f"{line} resume=auto"):
        ready = prepared(typed)
        assert (ready.folder, ready.config.resume) == (run, None)
        assert ready.composed.hydra.output_subdir == ".hydra/resumed"
    with pytest.raises(ConfigError, match="seed"):
        prepared(f"resume={run} seed=3")


def test_weights_to_begin_with_are_typed_again_and_only_where_the_run_begins(
    tmp_path: Path,
) -> None:
    (tmp_path / "weights").mkdir()
    line = "accum=fixed accum.micro=8 steps=10 name=early init=weights"
    run = make_run(line, state=STOPPED_EARLY, has_checkpoint=False)
    with pytest.raises(ConfigError, match="init: the saved run started from weights; pass init="):
        prepared(f"resume={run}")
    assert prepared(f"{line} resume=auto").config.init == "weights"
    begun = make_run(line.replace("early", "begun"))
    ready = prepared(f"{line.replace('early', 'begun')} resume=auto")
    assert (ready.folder, ready.config.resume) == (begun, str(begun))
    assert ready.config.init is None


def add_overrides(run: Path, *lines: str) -> None:
    record = run / ".hydra" / "overrides.yaml"
    record.write_text(yaml.safe_dump([*yaml.safe_load(record.read_text()), *lines]))


def test_a_run_folder_does_not_say_where_anything_goes() -> None:
    run = make_run()
    record = run / ".hydra" / "overrides.yaml"
    own = yaml.safe_load(record.read_text())
    for line in (
        "+export={to: stolen}",
        "export.to=stolen",
        "wandb.entity=evil",
        "wandb={mode: online, entity: evil}",
        "wandb.mode=${data.mode}",
    ):
        record.write_text(yaml.safe_dump([*own, line]))
        config = prepared(f"resume={run}").config
        assert config.export.to is None
        assert (config.wandb.mode, config.wandb.entity) == ("offline", None)
    with pytest.raises(ConfigError, match="command=export: needs a folder"):
        prepared(f"export run={run}")
    assert prepared(f"resume={run} wandb.mode=online").config.wandb.mode == "online"
    lines = [*own, "model.p={mode: online, entity: evil}", "wandb=${model.p}"]
    record.write_text(yaml.safe_dump(lines))
    with pytest.raises(ConfigError) as caught:
        prepared(f"resume={run}")
    assert any(f.startswith("wandb.entity=evil: comes from") for f in caught.value.faults)


def test_no_command_follows_a_link_or_waits_for_a_pipe(tmp_path: Path) -> None:
    run = make_run()
    (run / "wandb").mkdir()
    (run / "wandb" / "debug-core.log").symlink_to(tmp_path / "log")  # W&B's, to its own log
    assert prepared(f"resume={run}").folder == run
    (run / "train.log").symlink_to(tmp_path / "precious")
    for command in ("resume=", "evaluate run=", "export run="):
        with pytest.raises(NoCheckpointError, match=r"train\.log: a link that leads out"):
            prepared(f"{command}{run}")
    (run / "train.log").unlink()
    (run / "status.json").unlink()
    os.mkfifo(run / "status.json")
    for command in ("resume=", "evaluate run=", "export run=", "init="):
        with pytest.raises(NoCheckpointError, match=r"status.json: neither a file nor a folder"):
            prepared(f"{command}{run}")


def test_a_status_or_config_that_says_nothing_counts_for_none() -> None:
    run = make_run()
    for step in ('"abc"', "1e400", "[1]", "null"):
        (run / "status.json").write_text(f'{{"state": "completed", "step": {step}}}')
        assert prepared(f"resume={run}").done is None
    (run / "config.yaml").write_text("[" * 2000)
    with pytest.raises(NoCheckpointError, match=r"no training run; .* says command=None"):
        prepared(f"resume={run}")

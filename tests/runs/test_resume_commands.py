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

from tests.lib.cli_support import OWN_RUN, faults, in_process, in_subprocess, make_own_folder
from trainer.cli.argv import split
from trainer.cli.main import _composer
from trainer.cli.prepare import Ready, prepare_run
from trainer.cli.saved_runs import newest
from trainer.cli.sweep import Sweep, prepare_sweep
from trainer.config.consent import ONLY_TYPED
from trainer.config.run_config import to_plain
from trainer.core.errors import ConfigError, NoCheckpointError
from trainer.report.run_status import to_go_on


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_own_folder(tmp_path, monkeypatch)


def prepared(line: str) -> Ready:
    request = split(shlex.split(line))
    command = [] if request.command is None else [f"command={request.command}"]
    return prepare_run([*command, *request.overrides], _composer(request))


def prepared_sweep(line: str) -> Sweep:
    request = split(shlex.split(line))
    return prepare_sweep(request.overrides, _composer(request))


def make_run(
    line: str = "accum=fixed accum.micro=8 steps=10",
    *,
    state: Mapping[str, Any] | None = None,
    has_checkpoint: bool = True,
    began: float = 0.0,
) -> Path:
    """Leave on disk what a run leaves, as far as the command line reads it."""
    job = prepared(line).job
    return leave(job.folder, to_plain(job.config), job.lines, state, has_checkpoint, began)


def leave(
    folder: Path,
    plain: Mapping[str, Any],
    lines: tuple[str, ...],
    state: Mapping[str, Any] | None = None,
    has_checkpoint: bool = True,
    began: float = 0.0,
) -> Path:
    records = folder / ".hydra"
    records.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(dict(plain)))
    (records / "overrides.yaml").write_text(
        yaml.safe_dump([line for line in lines if not line.startswith("hydra")])
    )
    (folder / "status.json").write_text(
        json.dumps(dict(state or {"state": "preempted", "step": 4}))
    )
    if has_checkpoint:
        checkpoint = folder / "checkpoints" / "step-00000004"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
    os.utime(records / "overrides.yaml", (began, began))
    return folder


DONE = {"state": "completed", "step": 10, "exit_code": 0}


def test_a_run_goes_on_in_its_folder_with_its_own_settings() -> None:
    run = make_run("accum=fixed accum.micro=8 steps=10 optimizer.lr=0.003 name=mine")
    ready = prepared(f"resume={run}")
    assert ready.job.folder == run
    assert ready.is_resumed
    config = ready.job.config
    assert (config.steps, config.name, config.accum.name) == (10, "mine", "fixed")
    assert config.optimizer.params["lr"] == 0.003
    assert config.resume == str(run)
    assert ready.job.composed.hydra.run.dir == str(run)


def test_the_first_records_of_a_run_stay_as_they_are() -> None:
    run = make_run()
    assert prepared(f"resume={run}").job.composed.hydra.output_subdir == ".hydra/resume_1"
    again = run / ".hydra" / "resume_1"
    again.mkdir()
    (again / "overrides.yaml").write_text(
        yaml.safe_dump(["accum=fixed", "accum.micro=4", "steps=20"])
    )
    ready = prepared(f"resume={run}")
    assert ready.job.composed.hydra.output_subdir == ".hydra/resume_2"
    assert ready.job.config.steps == 20, "the latest resumption is what the next one goes on from"


@pytest.mark.parametrize(
    "change",
    [
        "accum.micro=4",
        "accum=auto",
        "accum=budget accum.max_tokens=4096",
        "steps=20",
        "num_workers=2",
        "device=cpu",
    ],
)
def test_execution_is_free_and_steps_may_grow(change: str) -> None:
    run = make_run()
    assert prepared(f"resume={run} {change}").job.folder == run


@pytest.mark.parametrize(
    ("change", "said"),
    {
        "seed=1": ["seed=1: the run has 0"],
        "optimizer.lr=0.1 batch.global=64": ["batch.global=64", "optimizer.lr=0.1: the run has"],
        "steps=5": ["steps=5: the run has 10; may only grow"],
        "clip_norm=null": ["clip_norm=null: the run has 1.0"],
        "model.width=48": ["model.width=48: the run has 96"],
        "scheduler=constant": ["scheduler._target_"],
        "precision=bf16": ["precision=bf16: the run has fp32"],
        "recipe=quickstart": ["data.max_length"],
    }.items(),
)
def test_what_changes_the_step_is_refused_with_a_diff(change: str, said: list[str]) -> None:
    run = make_run()
    with pytest.raises(ConfigError) as raised:
        prepared(f"resume={run} {change}")
    for text in said:
        assert any(text in fault for fault in raised.value.faults), raised.value.faults
    assert all("resume_allow=[" in fault for fault in raised.value.faults)


def test_a_key_that_is_named_may_change() -> None:
    run = make_run()
    ready = prepared(f"resume={run} optimizer.lr=0.1 seed=1 resume_allow=[optimizer.lr,seed]")
    assert ready.job.config.seed == 1
    with pytest.raises(ConfigError, match="seed=1"):
        prepared(f"resume={run} optimizer.lr=0.1 seed=1 resume_allow=[optimizer.lr]")


def test_a_key_that_may_change_is_spelled_right() -> None:
    run = make_run()
    with pytest.raises(ConfigError, match=r"resume_allow=.*Did you mean batch\.global\?"):
        prepared(f"resume={run} resume_allow=[batch.golbal]")


def test_a_new_option_starts_from_its_own_values() -> None:
    run = make_run("accum=fixed accum.steps=4 steps=10")
    config = prepared(f"resume={run} accum=auto").job.config
    assert config.accum.name == "auto"
    assert config.accum.params == {"micro": None, "memory": None}


def test_a_finished_run_has_nothing_to_do_until_more_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = make_run(state=DONE)
    assert in_process(f"resume={run}") == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 1
    assert "done after step 10" in said.out
    assert said.err == ""
    assert prepared(f"resume={run} steps=11").done is None
    epochs = make_run("accum=fixed accum.micro=8 epochs=2", state=DONE)
    assert prepared(f"resume={epochs}").done is not None
    assert prepared(f"resume={epochs} epochs=3").done is None


@pytest.mark.parametrize(
    ("typed", "text"), [("nowhere", "no such folder"), (".", "not a run folder")]
)
def test_a_run_that_is_not_there_is_exit_4(
    typed: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in (f"resume={typed}", f"verify run={typed}", f"verify +run={typed}"):
        assert in_process(line) == 4
        key = "run" if "run=" in line else "resume"
        assert faults(capsys.readouterr().err)[0].startswith(f"{key}={typed}: {text}")


def test_a_run_without_a_checkpoint_or_of_another_command_is_exit_4() -> None:
    with pytest.raises(NoCheckpointError, match="no checkpoint"):
        prepared(f"resume={make_run(has_checkpoint=False)}")
    with pytest.raises(NoCheckpointError, match="folder of a plan"):
        prepared(f"resume={make_run('plan')}")


def test_auto_takes_the_newest_training_run_of_the_name() -> None:
    mine = [make_run("accum=fixed accum.micro=8 name=mine", began=t) for t in (10.0, 30.0, 20.0)]
    other = make_run("accum=fixed accum.micro=8", began=40.0)
    make_run("plan accum=fixed accum.micro=8 name=mine", began=50.0)
    make_run("accum=fixed accum.micro=8 name=mine", began=60.0, has_checkpoint=False)
    assert newest(Path("outputs").absolute(), "mine") == mine[1]
    assert newest(Path("outputs").absolute(), None) == other
    assert newest(Path("outputs").absolute(), "nobody") is None
    assert prepared("resume=auto name=mine").job.folder == mine[1]


def test_auto_with_none_starts_afresh(tmp_path: Path) -> None:
    ready = prepared("resume=auto")
    assert not ready.is_resumed
    assert ready.job.config.resume is None
    assert not (tmp_path / "outputs").exists()


def test_auto_goes_on_in_the_folder_that_is_typed() -> None:
    assert not prepared("hydra.run.dir=runs/a resume=auto").is_resumed
    made = prepared("hydra.run.dir=runs/a accum=fixed accum.micro=8").job
    run = leave(made.folder, to_plain(made.config), made.lines)
    assert prepared("hydra.run.dir=runs/a resume=auto").job.folder == run
    with pytest.raises(ConfigError, match=r"holds a run; resume=.*/a goes on with it"):
        prepared("hydra.run.dir=runs/a")


def test_a_run_folder_gives_no_trust() -> None:
    line = "model._target_=net.Net model.width=4 accum=fixed accum.micro=8"
    run = make_run(f"{line} trust=[net,os]")
    with pytest.raises(ConfigError, match=r"model._target_=net.Net: named by a recipe or a run"):
        prepared(f"resume={run}")
    trusted = prepared(f"resume={run} trust=[net]").job.config
    assert trusted.trust == ("net",)
    assert not trusted.model.typed_target
    typed = prepared(f"resume={run} model._target_=net.Net").job.config
    assert typed.model.typed_target
    assert typed.model.params == {"width": 4}


def test_classes_of_the_model_libraries_want_no_trust() -> None:
    sizes = "model._target_=torch.nn.Linear model.in_features=2 model.out_features=2"
    run = make_run(f"{sizes} optimizer._target_=torch.optim.SGD accum=fixed accum.micro=8")
    again = prepared(f"resume={run}")
    assert again.is_resumed
    assert "trust" not in to_go_on(again.job.config, run)


def test_all_classes_of_ones_own_are_one_line_to_trust() -> None:
    run = make_run("model._target_=net.Net data._target_=net.Data accum=fixed accum.micro=8")
    with pytest.raises(ConfigError) as caught:
        prepared(f"evaluate run={run}")
    assert caught.value.faults == (
        "model._target_=net.Net (data too): named by a recipe or a run, not by you; "
        "type 'trust=[net]'",
    )


@pytest.mark.parametrize(
    "planted",
    [
        "hydra.run.dir=elsewhere",
        "hydra/launcher=basic",
        "+hydra.callbacks.x._target_=os.system",
        "hydra.job.env_set.LD_PRELOAD=x",
        "name=${oc.env:HOME}",
        "x=[1",
    ],
)
def test_what_a_run_folder_may_not_say_is_refused(planted: str) -> None:
    run = make_run()
    (run / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump([planted]))
    with pytest.raises(ConfigError, match=r"overrides.yaml: "):
        prepared(f"resume={run}")


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
    assert ready.job.folder == run
    assert not ready.makes_folder
    assert ready.job.config.command == "export"
    assert ready.job.config.run == str(run)
    assert ready.job.config.optimizer.params["lr"] == 0.003
    assert ready.job.composed.hydra.output_subdir is None
    assert sorted(tmp_path.rglob("*")) == before


def test_plan_of_a_resumed_run_gets_a_folder_of_its_own() -> None:
    run = make_run()
    ready = prepared(f"plan resume={run}")
    assert ready.job.folder != run
    assert ready.job.config.resume == str(run)
    assert ready.job.config.accum.name == "fixed"


def test_a_recipe_given_as_a_file_is_found_again_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("optimizer: {lr: 0.007}\n")
    run = make_run("recipe=mine.yaml accum=fixed accum.micro=8")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert prepared(f"resume={run}").job.config.optimizer.params["lr"] == 0.007


def test_a_sweep_goes_on_job_by_job() -> None:
    line = "accum=fixed accum.micro=8,4 steps=10"
    first = prepared_sweep(line)
    (first.folder).mkdir(parents=True)
    task = [text for text in first.lines if not text.startswith("hydra.")]
    saved = {"hydra": {"overrides": {"task": task}}}
    (first.folder / "multirun.yaml").write_text(yaml.safe_dump(saved))
    done, cut = (ready.job for ready in first.ready)
    leave(done.folder, to_plain(done.config), done.lines, DONE)
    again = prepared_sweep(f"{line} resume=auto")
    assert again.folder == first.folder
    assert [ready.done is not None for ready in again.ready] == [True, False]
    assert [ready.is_resumed for ready in again.ready] == [True, False]
    assert again.ready[1].job.folder == cut.folder
    assert "hydra.output_subdir=.hydra/resume_1" in again.lines
    assert prepared_sweep(f"{line} seed=3 resume=auto").folder != first.folder


def test_a_run_that_wandb_recorded_goes_on_though_wandb_leaves_a_link_to_its_own_log() -> None:
    line = f"{OWN_RUN} wandb.mode=offline name=recorded".replace("wandb.mode=disabled ", "")
    assert in_subprocess(line, Path.cwd()).returncode == 0
    again = in_subprocess("resume=auto name=recorded steps=3 trust=[net]", Path.cwd())
    assert (again.returncode, again.stderr) == (0, "")


def test_any_other_link_out_of_a_run_is_refused(tmp_path: Path) -> None:
    run = make_run()
    (run / "train.log").symlink_to(tmp_path / "precious")
    with pytest.raises(NoCheckpointError, match="leads out of"):
        prepared(f"resume={run}")


STOPPED_EARLY = {"state": "preempted", "step": 0, "exit_code": 75}


def test_a_run_that_was_stopped_before_its_first_step_begins_again_in_its_folder() -> None:
    line = "accum=fixed accum.micro=8 steps=10 name=early"
    run = make_run(line, state=STOPPED_EARLY, has_checkpoint=False)
    for typed in (f"resume={run}", f"{line} resume=auto"):
        ready = prepared(typed)
        assert (ready.job.folder, ready.job.config.resume, ready.is_resumed) == (run, None, False)
        assert ready.note == f"{run} was stopped before its first step; it begins again"
        assert ready.job.composed.hydra.output_subdir == ".hydra/resume_1"
    with pytest.raises(ConfigError, match="seed"):
        prepared(f"resume={run} seed=3")


def test_weights_to_begin_with_are_typed_again_and_only_where_the_run_begins(
    tmp_path: Path,
) -> None:
    (tmp_path / "weights").mkdir()
    line = "accum=fixed accum.micro=8 steps=10 name=early init=weights"
    run = make_run(line, state=STOPPED_EARLY, has_checkpoint=False)
    with pytest.raises(ConfigError, match="init: the run was to begin with init=weights"):
        prepared(f"resume={run}")
    assert prepared(f"{line} resume=auto").job.config.init == "weights"
    begun = make_run(line.replace("early", "begun"))
    ready = prepared(f"{line.replace('early', 'begun')} resume=auto")
    assert (ready.job.folder, ready.job.config.resume) == (begun, str(begun))
    assert ready.job.config.init is None


def add_overrides(run: Path, *lines: str) -> None:
    record = run / ".hydra" / "overrides.yaml"
    record.write_text(yaml.safe_dump([*yaml.safe_load(record.read_text()), *lines]))


@pytest.mark.parametrize(
    "line",
    [
        "export={to: stolen}",
        "+export={to: stolen}",
        "export.to=stolen",
        "wandb.mode=online",
        "wandb.entity=evil",
        "wandb={mode: online, entity: evil}",
        "wandb.mode=${data.mode}",
    ],
)
def test_a_run_folder_does_not_say_where_anything_goes(line: str) -> None:
    run = make_run()
    add_overrides(run, line)
    config = prepared(f"resume={run}").job.config
    assert config.export.to is None
    assert (config.wandb.mode, config.wandb.entity) == ("offline", None)
    with pytest.raises(ConfigError, match=r"export\.to: train export needs a folder"):
        prepared(f"export run={run}")
    assert prepared(f"resume={run} wandb.mode=online").job.config.wandb.mode == "online"


def test_a_recipe_says_nothing_by_reference(tmp_path: Path) -> None:
    planted = {"mode": "online", "entity": "evil", "project": "p"}
    model = {"_target_": "torch.nn.ParameterDict", "parameters": planted}
    recipe = {"defaults": [{"override /model": "own"}], "model": model}
    (tmp_path / "friend.yaml").write_text(
        yaml.safe_dump(recipe | {"wandb": "${model.parameters}"}, sort_keys=False)
    )
    with pytest.raises(ConfigError) as caught:
        prepared("recipe=./friend.yaml")
    for name in (key for key in planted if f"wandb.{key}" in ONLY_TYPED):
        line = f"wandb.{name}={planted[name]}: comes from a recipe or a run; "
        refused = (line, f"{tmp_path / 'friend.yaml'}: defaults: ${{model.parameters}}: is not")
        assert any(fault.startswith(refused) for fault in caught.value.faults)


def test_a_run_folder_says_nothing_by_reference() -> None:
    run = make_run()
    add_overrides(run, "model.p={mode: online, entity: evil}", "wandb=${model.p}")
    with pytest.raises(ConfigError) as caught:
        prepared(f"resume={run}")
    assert any(f.startswith("wandb.entity=evil: comes from") for f in caught.value.faults)


def test_what_is_typed_is_no_stranger_s(tmp_path: Path) -> None:
    (tmp_path / "friend.yaml").write_text("seed: 3")
    for line in ("recipe=./friend.yaml", f"resume={make_run()}"):
        config = prepared(f"{line} wandb.mode=online wandb.entity=me").job.config
        assert (config.wandb.mode, config.wandb.entity) == ("online", "me")


@pytest.mark.parametrize(
    "key", ["hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.job.name"]
)
def test_a_secret_is_no_setting_of_hydra(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "qqqwwweee111222")
    with pytest.raises(ConfigError) as caught:
        prepared(f"{key}=a/qqqwwweee111222")
    (fault,) = caught.value.faults
    assert fault.startswith(f"{key}: holds the secret of $MY_API_KEY")


def test_a_run_folder_sets_nothing_of_hydra_as_a_mapping() -> None:
    run = make_run()
    add_overrides(run, "+hydra={callbacks: {x: {_target_: evil.Net}}}")
    with pytest.raises(ConfigError, match=r"\+hydra=.*: settings of Hydra are n"):
        prepared(f"resume={run}")


@pytest.mark.parametrize("command", ["resume=", "evaluate run=", "export run="])
def test_no_command_follows_a_link_or_waits_for_a_pipe(command: str, tmp_path: Path) -> None:
    run = make_run()
    (run / "train.log").symlink_to(tmp_path / "precious")
    with pytest.raises(NoCheckpointError, match=r"train\.log: a link that leads out"):
        prepared(f"{command}{run}")
    (run / "train.log").unlink()
    os.mkfifo(run / "metrics.jsonl")
    with pytest.raises(NoCheckpointError, match=r"metrics.jsonl: neither a file nor a folder"):
        prepared(f"{command}{run}")


def test_weights_are_not_read_from_a_folder_with_a_pipe() -> None:
    run = make_run()
    (run / "status.json").unlink()
    os.mkfifo(run / "status.json")
    with pytest.raises(NoCheckpointError, match=r"status.json: neither a file nor a folder"):
        prepared(f"init={run}")


@pytest.mark.parametrize("step", ['"abc"', "1e400", "[1]", "null", "[" * 2000])
def test_a_status_that_says_nothing_counts_for_none(step: str) -> None:
    run = make_run()
    (run / "status.json").write_text(f'{{"state": "completed", "step": {step}}}')
    assert prepared(f"resume={run}").done is None


def test_records_that_nest_without_end_are_one_line() -> None:
    run = make_run()
    (run / ".hydra" / "overrides.yaml").write_text("[" * 2000)
    with pytest.raises(ConfigError, match="cannot be read as a list of overrides"):
        prepared(f"resume={run}")
    (run / "config.yaml").write_text("[" * 2000)
    with pytest.raises(NoCheckpointError, match=r"config.yaml: cannot be read"):
        prepared(f"resume={run}")

"""Going on with a run and reading one: what is replayed, what is refused, what is trusted."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lib.cli_support import faults, make_own_folder, prepared
from tests.lib.run_support import shell
from trainer.cli.saved_runs import newest
from trainer.config.run_config import to_plain
from trainer.core.errors import ConfigError, NoCheckpointError
from trainer.core.format import shown_path
from trainer.core.run_folder import RunFolder


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_own_folder(tmp_path, monkeypatch)


CUT = "accum=fixed accum.micro=8 steps=10"


def make_run(
    line: str = CUT,
    state: Mapping[str, Any] = {"state": "preempted", "step": 4},
    has_checkpoint: bool = True,
    began: float = 0.0,
) -> Path:
    """Leave on disk what a run leaves, as far as the command line reads it."""
    job = prepared(line)
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
    (folder / RunFolder.START).write_text(json.dumps({"started": began}))
    return folder


DONE = {"state": "completed", "step": 10, "exit_code": 0}


def test_a_run_goes_on_in_its_folder_with_its_own_settings_from_its_newest_records(
    tmp_path, monkeypatch
):
    (tmp_path / "mine.yaml").write_text("optimizer: {lr: 0.003}\n")
    run = make_run(f"{CUT} recipe=mine.yaml name=mine")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ready = prepared(f"resume={run}")
    assert ready.folder == run
    config = ready.config
    assert (config.steps, config.name, config.accum.name) == (10, "mine", "fixed")
    assert config.optimizer.params["lr"] == 0.003
    assert ready.composed.hydra.output_subdir == ".hydra/resumed"
    again = run / ".hydra" / "resumed"
    again.mkdir()
    (again / "overrides.yaml").write_text("[accum=fixed, accum.micro=4, steps=20, name=mine]")
    ready = prepared(f"resume={run} resume_allow=[optimizer.lr]")
    assert ready.config.steps == 20, "the latest resumption is what the next one goes on from"


def test_a_cut_that_is_typed_starts_from_its_own_values():
    run = make_run("accum=fixed accum.steps=4 steps=10")
    for typed, params in {
        "accum=auto": {"micro": None, "memory": None},
        "accum.micro=8": {"micro": 8, "steps": None},
    }.items():
        assert prepared(f"resume={run} {typed}").config.accum.params == params


def test_what_changes_the_step_is_refused_with_a_diff():
    run = make_run(f"{CUT} precision=fp32")
    changes = {
        "seed=1": "seed=1: the run has 0",
        "steps=5": "steps=5: the run has 10; it may grow; to make it less",
        "scheduler=constant": "scheduler=constant: the run has scheduler=cosine",
        "recipe=quickstart": "data.max_length",
    }
    with pytest.raises(ConfigError) as raised:
        prepared(f"resume={run} {' '.join(changes)}")
    faults = raised.value.faults
    assert all(any(text in fault for fault in faults) for text in changes.values()), faults
    assert all("resume_allow=[" in fault for fault in faults)
    ready = prepared(f"resume={run} optimizer.lr=0.1 seed=1 resume_allow=[optimizer.lr,seed]")
    assert ready.config.seed == 1
    with pytest.raises(ConfigError, match=r"resume_allow=.*Did you mean batch\.global\?"):
        prepared(f"resume={run} resume_allow=[batch.golbal]")


def test_a_finished_run_has_nothing_to_do_until_more_is_asked_for(capsys):
    run = make_run(state=DONE)
    assert shell(f"resume={run}") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "done after step 10" in line
    assert prepared(f"resume={run} steps=11").done is None
    epochs = make_run("accum=fixed accum.micro=8 epochs=2", state=DONE)
    assert prepared(f"resume={epochs}").done is not None
    assert prepared(f"resume={epochs} epochs=3").done is None


@pytest.mark.parametrize("run", [make_run, lambda: "nowhere"])
def test_faults_of_what_was_typed_and_of_the_run_are_one_list(run, capsys):
    place = run()
    assert shell(f"resume={place} accum.micro=2,4 sede=3 --foo 5") == 2
    found = faults(capsys.readouterr().err)
    expected = ["--foo", "accum.micro=2,4", "resume=nowhere" if place == "nowhere" else "sede"]
    assert [line.partition(":")[0] for line in found] == expected


def test_a_run_that_cannot_go_on_is_refused():
    with pytest.raises(ConfigError, match="init=a: starts a new run; resume= goes on with an old"):
        prepared(f"resume={make_run()} init=a")
    with pytest.raises(NoCheckpointError, match="no checkpoint"):
        prepared(f"resume={make_run(has_checkpoint=False)}")
    with pytest.raises(NoCheckpointError, match=r"not a training run; .* says command=plan"):
        prepared(f"resume={make_run('plan')}")


def test_auto_takes_the_newest_training_run_of_the_name(capsys):
    mine = [make_run("accum=fixed accum.micro=8 name=mine", began=t) for t in (10.0, 30.0, 20.0)]
    other = make_run("accum=fixed accum.micro=8", began=40.0)
    make_run("plan accum=fixed accum.micro=8 name=mine", began=50.0)
    make_run("accum=fixed accum.micro=8 name=mine", began=60.0, has_checkpoint=False)
    assert newest(Path("outputs").absolute(), "mine") == RunFolder(mine[1])
    assert newest(Path("outputs").absolute(), None) == RunFolder(other)
    assert newest(Path("outputs").absolute(), "nobody") is None
    assert prepared("resume=auto name=mine").folder == mine[1]
    for line in ("resume=mine", "plan run=mine", f"resume={mine[1].name}/"):
        assert prepared(line).config.resume == str(mine[1]), line
    for line in ("evaluate run=mine", "evaluate run=auto name=mine"):
        assert prepared(line).folder == mine[1], line
    assert prepared("export run=auto export.to=weights").folder == other, "the newest of any name"
    with pytest.raises(NoCheckpointError, match="run=auto: no run named nobody below"):
        prepared("evaluate run=auto name=nobody")
    assert prepared("init=mine").config.init == str(mine[1])
    assert prepared(f"init={mine[2].name}").config.init == str(mine[2])
    noted = f"4 runs have this name; this is the newest that can be used: {shown_path(mine[1])}"
    keys = [
        line.partition("=")[0] for line in capsys.readouterr().err.splitlines() if noted in line
    ]
    assert keys == ["train: resume", "train: run", "train: init"], "each said once"
    assert shell("report run=mine") == 0
    assert capsys.readouterr().err.count("this is the newest: ") == 1


def test_auto_goes_on_in_the_folder_that_is_typed():
    fresh = prepared("hydra.run.dir=runs/a resume=auto")
    assert (fresh.folder, fresh.config.resume) == (Path("runs/a").absolute(), None)
    assert not Path("runs").exists()
    run = make_run("hydra.run.dir=runs/a accum=fixed accum.micro=8")
    assert prepared("hydra.run.dir=runs/a resume=auto").folder == run
    with pytest.raises(ConfigError, match=r"holds a run; resume=.*/a goes on with it"):
        prepared("hydra.run.dir=runs/a")


@pytest.mark.slow
def test_a_folder_that_is_typed_is_that_of_a_fork_or_plan_and_else_refused():
    run = make_run()
    for typed in (f"resume={run} step=4", f"plan resume={run}", f"verify run={run}"):
        assert prepared(f"{typed} hydra.run.dir=mine").folder == Path("mine").absolute(), typed
        with pytest.raises(ConfigError, match=r"^hydra.run.dir=.*: holds a run; resume="):
            prepared(f"{typed} hydra.run.dir={run}")
    for typed in (f"resume={run}", "evaluate run=auto"):
        with pytest.raises(ConfigError, match=r"^hydra.run.dir=mine: .* has a folder of its own"):
            prepared(f"{typed} hydra.run.dir=mine")
        assert prepared(f"{typed} hydra.run.dir={run}").folder == run


def test_a_run_folder_gives_no_trust():
    both = "model._target_=net.Net model.width=4 data._target_=net.Data"
    run = make_run(f"{both} {CUT} trust=[net,os]")
    with pytest.raises(ConfigError) as caught:
        prepared(f"resume={run}")
    why = "comes from a recipe or a saved run; to trust it, type 'trust=[net]'"
    assert caught.value.faults == (
        f"model._target_=net.Net: {why}",
        f"data._target_=net.Data: {why}",
    )
    assert not prepared(f"resume={run} trust=[net]").config.model.typed_target
    typed = prepared(f"resume={run} model._target_=net.Net data._target_=net.Data").config
    assert typed.model.typed_target
    assert typed.model.params == {"width": 4}


def test_evaluate_and_export_read_a_run_and_make_no_folder(tmp_path):
    run = make_run("accum=fixed accum.micro=8 optimizer.lr=0.003")
    before = sorted(tmp_path.rglob("*"))
    ready = prepared(f"export run={run.relative_to(tmp_path)} export.to=weights device=cpu")
    assert (ready.folder, ready.makes_folder) == (run, False)
    assert ready.config.optimizer.params["lr"] == 0.003
    assert sorted(tmp_path.rglob("*")) == before
    plan = prepared(f"plan resume={run}")
    assert plan.folder != run
    assert (plan.config.resume, plan.config.accum.name) == (str(run), "fixed")


STOPPED_EARLY = {"state": "preempted", "step": 0, "exit_code": 75}


def test_a_run_without_a_checkpoint_begins_again_in_its_folder_with_its_own_settings():
    run = make_run(f"{CUT} name=late optimizer.lr=0.003", has_checkpoint=False)
    for state in (
        json.dumps(STOPPED_EARLY),
        '{"state": "running"}',
        '{"state": "failed", "step": 7, "exit_code": 1}',
        "",
    ):
        (run / "status.json").write_text(state)
        for typed in (f"resume={run}", "resume=auto name=late"):
            ready = prepared(typed)
            assert (ready.folder, ready.config.resume) == (run, None)
            assert ready.composed.hydra.output_subdir == ".hydra/resumed"
            assert (ready.config.steps, ready.config.optimizer.params["lr"]) == (10, 0.003)
    assert "has no checkpoint: it begins again" in ready.note
    with pytest.raises(ConfigError, match="seed=3: the run has 0"):
        prepared("resume=auto name=late seed=3")
    (run / "forked.json").write_text("{}")  # killed while it took over its checkpoint
    assert prepared("resume=auto name=late").folder != run


def test_weights_to_begin_with_are_typed_again_and_only_where_the_run_begins(tmp_path):
    (tmp_path / "weights").mkdir()
    line = f"{CUT} name=early init=weights"
    run = make_run(line, state=STOPPED_EARLY, has_checkpoint=False)
    with pytest.raises(ConfigError, match=r"the saved run started from /.*weights; type init="):
        prepared(f"resume={run}")
    assert prepared(f"{line} resume=auto").config.init == str(tmp_path / "weights")
    numbered = make_run(f"{line} step=5", state=STOPPED_EARLY, has_checkpoint=False)
    with pytest.raises(ConfigError, match=r"type init=/.*weights step=5 again"):
        prepared(f"resume={numbered} init=weights")
    begun = make_run(line.replace("early", "begun"))
    ready = prepared(f"{line.replace('early', 'begun')} resume=auto")
    assert (ready.folder, ready.config.init) == (begun, None)


def test_a_run_folder_does_not_say_where_anything_goes():
    run = make_run()
    record = run / ".hydra" / "overrides.yaml"
    own = yaml.safe_load(record.read_text())
    stolen = ["export.to=stolen", "wandb={mode: online, entity: evil}"]
    record.write_text(yaml.safe_dump([*own, *stolen]))
    config = prepared(f"resume={run}").config
    params = config.logger[0].params
    assert (config.export.to, params["mode"], params["entity"]) == (None, "offline", None)
    with pytest.raises(ConfigError, match="command=export: needs a folder"):
        prepared(f"export run={run}")
    lines = [*own, "model.p={mode: online, entity: evil}", "wandb=${model.p}"]
    record.write_text(yaml.safe_dump(lines))
    with pytest.raises(ConfigError) as caught:
        prepared(f"resume={run}")
    assert any(f.startswith("wandb.entity=evil: comes from") for f in caught.value.faults)


def test_a_link_of_wandb_disturbs_no_command_and_none_waits_for_a_pipe(tmp_path):
    run = make_run()
    (run / "wandb").mkdir()
    (run / "wandb" / "debug-core.log").symlink_to(tmp_path / "log")  # W&B's, to its own log
    assert prepared(f"resume={run}").folder == run
    (run / "status.json").unlink()
    os.mkfifo(run / "status.json")
    with pytest.raises(NoCheckpointError, match=r"status.json: neither a file nor a folder"):
        prepared(f"export run={run}")

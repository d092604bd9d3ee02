"""The command line: what is typed, what it becomes, and whole runs from a user's own folder."""

import csv
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st

import trainer
from tests.lib.cli_support import CHECKOUT, OWN_RUN, make_own_folder, prepared
from tests.lib.run_support import only_run, shell
from trainer.cli.argv import COMMAND_HELP
from trainer.cli.compose import Composer
from trainer.cli.overrides import parse, quote, read_override
from trainer.cli.python_api import literal
from trainer.config.components import GROUPS
from trainer.config.keys import KEYS
from trainer.config.option_files import OWN, data_dir
from trainer.config.run_config import RunConfig
from trainer.core.errors import ConfigError
from trainer.features.sweeps.sweep import prepare_sweep


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_own_folder(tmp_path, monkeypatch)


def config_of(line: str) -> RunConfig:
    return prepared(line).config


def test_the_same_is_typed_in_many_ways():
    for line, other in {
        "plan +seed=3 --num-workers=2 accum.gradient=sum +accum=fixed ++accum.micro=8": (
            "command=plan accum.micro=8 num_workers=2 accum/gradient=sum accum=fixed seed=3"
        ),
        "model._target_=net.Net model.width=16 +model.depth=3": (
            "++model.width=16 model=gpt_small model._target_=net.Net model.depth=3"
        ),
    }.items():
        assert config_of(line) == config_of(other), line


def test_an_empty_mapping_empties_that_of_a_recipe():
    Path("mine.yaml").write_text("optimizer: {groups: {a: {lr: 1.0}}}")
    for typed, names in {"{}": [], "{b: {lr: 1}}": ["a", "b"]}.items():
        found = config_of(f"recipe=mine.yaml 'optimizer.groups={typed}'").optimizer
        assert [*found.params["groups"]] == names


def test_a_class_of_ones_own_replaces_the_option_and_its_keys(tmp_path):
    (tmp_path / "mine.yaml").write_text("model: {width: 64}\nseed: 5\n")
    for line in ("recipe=mine.yaml", "model=gpt_small"):
        model = config_of(f"{line} +model.depth=3 model._target_=net.Net").model
        assert (model.target, model.params, model.name) == ("net.Net", {"depth": 3}, None)
        assert model.typed_target
    (tmp_path / "theirs.yaml").write_text("model: {_target_: net.Net, width: 4}\n")
    model = config_of("recipe=theirs.yaml trust=[net] +model.depth=2").model
    assert (model.params, model.name) == ({"width": 4, "depth": 2}, None)
    named = config_of(
        "data._target_=net.Data data.size=8 accum._target_=net.Cut accum.gradient._target_=net.Sum "
        "objective._target_=net.Goal optimizer._target_=net.Opt scheduler._target_=net.Rate "
        "sync._target_=net.Sync hooks=[net.Hook] ~model.dropout"
    )
    assert {key for key, _ in named.own_classes()} == {
        "data", "accum", "accum.gradient", "objective", "optimizer", "scheduler", "sync", "hooks[0]"
    }  # fmt: skip
    assert (named.data.params, named.accum.packed) == ({"size": 8}, "auto")
    assert "dropout" not in named.model.params


def test_a_folder_of_ones_own_is_consent(tmp_path, capsys):
    group = tmp_path / "mine" / "model"
    group.mkdir(parents=True)
    (group / "tiny.yaml").write_text("_target_: net.Net\nwidth: 4\n")
    config = config_of("--config-dir mine model=tiny")
    assert (config.model.name, config.model.typed_target) == ("tiny", True)
    with pytest.raises(ConfigError, match=r"model.wdith: unknown .* Did you mean model.width"):
        config_of("--config-dir mine model=tiny +model.wdith=3")
    recipe = "defaults: [override /model: tiny]\nmodel: {_target_: os.System}\n"
    (tmp_path / "theirs.yaml").write_text(recipe)
    with pytest.raises(ConfigError, match=r"trust=\[os\]"):
        config_of("--config-dir mine recipe=theirs.yaml")
    line = f"--config-dir mine model=tiny recipe=theirs.yaml outputs={tmp_path}/far name=x"
    job = prepared(line)
    assert job.config.model.target == "net.Net"
    assert job.folder.is_relative_to(tmp_path / "far"), "absolute, since it was typed"
    assert shell("--help --config-dir mine") == 0
    assert "tiny" in capsys.readouterr().out


def test_a_sweep_is_expanded_as_hydra_expands_it():
    composer = Composer.of()
    for line, jobs in {
        "batch.global=16,32 accum=fixed,auto accum.micro=8": [
            [f"accum={cut}", f"++batch.global={size}", "++accum.micro=8"]
            for cut in ("fixed", "auto")
            for size in (16, 32)
        ],
        "scheduler=glob(c*)": [[f"scheduler={name}"] for name in ("constant", "cosine")],
        "model._target_=net.A,net.B accum.gradient=sum": [
            ["accum/gradient=sum", "model=own", f"++model._target_=net.{name}"] for name in "AB"
        ],
    }.items():
        overrides, wrong = parse(shlex.split(line))
        with composer.open():
            assert prepare_sweep(overrides, wrong, composer).jobs == jobs


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("abc XYZ/.-_,:=[]{}()'\"", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.from_regex(r"[x*][a-z0-9.*]{0,5}", fullmatch=True), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=12)
@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=30), VALUES)
def test_any_value_of_a_config_can_be_written_as_an_override(text, value):
    assert read_override(f"x={literal(value)}").value() == value
    if "${" not in text and "\\" not in text:
        assert read_override(f"x={quote(text)}").value() == text


def test_help_is_complete(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert shell("--help") == 0
    shown = capsys.readouterr().out
    for key in (*KEYS, *COMMAND_HELP):
        assert key in shown, key
    for group in GROUPS:
        for file in (data_dir("conf") / group.replace(".", "/")).glob("*.yaml"):
            assert file.stem in shown or file.stem == OWN
    assert max(map(len, shown.splitlines())) <= 80
    assert not any(line.endswith(" ") for line in shown.splitlines())
    for words in ("[auto|cpu|cuda]", "[keep|drop]", "[false|true|layout]", "[false|true|auto]"):
        assert words in shown


def test_hydras_flags_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COMP_LINE", "train plan accum=")
    for line, shown in {
        "seed=3 --cfg job accum.gradient=sum model._target_=net.Net": "_target_: net.Net",
        "--cfg job --package data --resolve data=text data.path=net.py": "path: net.py",
        "--info searchpath": "recipes",
        "--version": f"train {trainer.__version__}\n",
        "--shell-completion query=bash": "accum=fixed",
    }.items():
        assert shell(line) == 0
        assert shown in capsys.readouterr().out
    assert not (tmp_path / "outputs").exists()


def test_a_run_goes_on_is_evaluated_and_is_done(tmp_path, capsys):
    assert shell(f"{OWN_RUN} resume=auto") == 0
    assert "resume=auto: no run without a name below" in capsys.readouterr().out
    run = only_run()
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["model"], config["batch"]["global"]) == ({"_target_": "net.Net"}, 8)
    assert "trust" not in config
    assert json.loads((run / "status.json").read_text())["state"] == "completed"
    records = (run / ".hydra" / "overrides.yaml").read_text()
    assert {"batch.global=8", "accum.micro=3"} <= set(yaml.safe_load(records))
    assert shell("resume=auto steps=3 trust=[net]") == 0
    assert only_run() == run
    assert (run / ".hydra" / "overrides.yaml").read_text() == records
    assert "steps=3" in (run / ".hydra" / "resumed" / "overrides.yaml").read_text()
    config = (run / "config.yaml").read_text()
    assert yaml.safe_load(config)["steps"] == 3
    assert json.loads((run / "status.json").read_text())["step"] == 3
    assert shell(f"evaluate run={run} trust=[net]") == 0
    assert (run / "config.yaml").read_text() == config


def test_a_command_that_fails_before_its_first_step_leaves_no_folder(tmp_path, capsys):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 \xff")
    text = "data=text data.path=latin.txt model=gpt_tiny device=cpu"
    interrupted = OWN_RUN.replace("net.Net", "net.interrupted")
    for command, code in {
        **{f"{command} {text}": 3 for command in ("train", "plan", "verify")},
        **{f"{command} {interrupted}": 130 for command in ("train", "plan")},
        f"{OWN_RUN} model.width=x": 2,
    }.items():
        assert shell(command) == code, command
        assert not list(tmp_path.glob("outputs")), command
    assert "Traceback" not in capsys.readouterr().err
    assert shell(f"{OWN_RUN.replace('net.Net', 'net.broken')} hydra.run.dir=broken") == 1
    err = capsys.readouterr().err
    assert "RuntimeError: a fault in the user's own class" in err
    assert len(err.splitlines()) < 15
    assert not [*tmp_path.glob("outputs/*"), *tmp_path.glob("broken")]
    assert shell(f"{OWN_RUN} model.depth=1 name=first checkpoint.every=1") == 0
    first, fork = only_run(), f"resume={only_run()} step=1 trust=[net] name=fork"
    assert shell(f"{fork} hooks=[net.broken]") != 0
    assert only_run() == first, "nor does a fork, of which all steps are another's"
    # One that fails later says how to go on, and does.
    capsys.readouterr()
    assert shell(f"{OWN_RUN} steps=4 name=late hooks=[net.Exits] checkpoint.every=null") == 1
    *_, ended, _, last = capsys.readouterr().err.splitlines()
    assert ended == "train: ended after step 1; nothing is saved"
    assert last.startswith("train: begin again with: train resume=")
    assert shell(f"resume={last.rpartition('=')[2]} 'trust=[net]' hooks=[]") == 0


def test_a_reader_that_leaves_ends_in_silence(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-m", "trainer", "--info", "searchpath"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (-signal.SIGPIPE, b"")


def table_of(root: Path) -> tuple[Path, list[dict[str, str]]]:
    table = max(root.glob("outputs/multirun/*/*/sweep.csv"), key=lambda path: path.stat().st_mtime)
    with table.open() as file:
        return table.parent, list(csv.DictReader(file))


def test_a_failed_job_does_not_stop_a_sweep_and_ctrl_c_ends_it_with_its_table(tmp_path, capsys):
    line = f"-m {OWN_RUN.replace('net.Net', 'net.broken,net.Net')} seed=1"
    assert shell(line) == 1
    sweep, rows = table_of(tmp_path)
    of_jobs = [(row["rank"], row["job"], row["state"], row["model._target_"]) for row in rows]
    assert of_jobs == [("1", "1", "completed", "net.Net"), ("", "0", "failed", "net.broken")]
    assert rows[1]["reason"].startswith("RuntimeError: a fault in the user's own class (net.py:")
    assert "seed" not in rows[0]
    before = (sweep / "1" / "result.json").read_bytes()
    ended = json.loads(before)
    assert "1: model._target_=net.Net" in (sweep / "report.html").read_text()
    assert float(rows[0]["eval_accuracy"]) == ended["metrics"]["accuracy"]
    out = capsys.readouterr().out
    assert "job 0: RuntimeError: a fault in the user's own class" in out
    assert "…" not in out, "folded where the terminal is narrow, never cut"
    assert "job 1 of 2: model._target_=net.Net" in out
    assert "job 0: exit code 1\n" in out
    assert f"job 1: exit code 0, held-out loss {ended['eval_loss']:.4f}\n" in out
    assert (sweep / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert shell(f"{line} resume=auto") == 1
    again, _ = table_of(tmp_path)
    assert again == sweep, "of the same words"
    assert (sweep / "1" / ".hydra" / "resumed" / "overrides.yaml").is_file()
    assert (sweep / "1" / "result.json").read_bytes() == before, "a job that is done is not run"
    assert shell(f"-m {OWN_RUN.replace('net.Net', 'net.interrupted')} seed=1,2") == 130
    _, rows = table_of(tmp_path)
    assert [row["state"] for row in rows] == ["failed", "not started"]


@pytest.mark.nightly
def test_a_job_that_its_own_time_ends_does_not_end_the_sweep(tmp_path):
    assert shell(f"-m {OWN_RUN} seed=1,2 max_time=0.01s") == 75
    assert [row["exit_code"] for row in table_of(tmp_path)[1]] == ["75", "75"]


def test_a_run_from_python_is_the_same_run(tmp_path):
    ran = trainer.train(shlex.split(OWN_RUN))
    assert (ran.exit_code, ran.result["step"]) == (0, 2)
    classes = {"model": {"_target_": "net.Net"}, "data": {"_target_": "net.Data"}}
    numbers = {"batch": {"global": 8}, "accum": "fixed", "accum.micro": 3, "steps": 2}
    as_mapping = trainer.train(
        {**classes, **numbers, "wandb": {"mode": "disabled"}, "device": "cpu"}
    )
    typed = OWN_RUN.replace("model._", "++model._").replace("data._", "++data._")
    with initialize_config_dir(str(data_dir("conf")), version_base="1.3"):
        composed = compose("config", [*shlex.split(typed), "model=own", "data=own"])
        of_config = trainer.train(composed)
    assert ran.result["loss"] == as_mapping.result["loss"] == of_config.result["loss"]
    assert len({ran.folder, as_mapping.folder, of_config.folder}) == 3
    for run in (ran, as_mapping, of_config):
        config = yaml.safe_load((run.folder / "config.yaml").read_text())
        assert config["choices"]["accum"] == "fixed"


def test_python_gets_an_exception_with_the_faults():
    with pytest.raises(ConfigError) as raised:
        trainer.train({"batch": {"golbal": 3}, "seed": "x"})
    assert len(raised.value.faults) == 2
    with pytest.raises(ConfigError, match="cannot hold a set"):
        trainer.train({"name": {1, 2}})

"""W&B behind the seam: everything arrives, and nothing it does reaches training."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lib.cli_support import CHECKOUT, OWN_CLASSES, OWN_RUN, python
from tests.lib.nightly import nightly
from tests.lib.run_support import read_json
from tests.lib.tracked import mirror_of
from trainer.core.run_folder import RunFolder
from trainer.features.trackers.wandb import WandbTracker
from trainer.report.mirror import close_all

PROMISED_S = 10
"""How much longer a command may go on after its end, whatever W&B does."""

# Stands in for the package: writes down what it is given, or misbehaves. Its threads, exit hooks
# and replaced `sys.exit` are those of the real one, and worse.
STAND_IN = """
import atexit, json, os, sys, threading, time
FAULT = os.environ["FAULT"]
class Settings:
    def __init__(self, **given): self.given = given
class Run:
    def __init__(self, given):
        self.file = open(given["dir"] + "/given.jsonl", "a", buffering=1)
        self.tell("init", given | {"settings": given.pop("settings").given})
        self.summary, self.dir, self.starting_step = self, given["dir"], int(os.environ["BEGUN"])
    def tell(self, what, value): self.file.write(json.dumps([what, value]) + "\\n")
    def log(self, row, step): self.tell("log", [step, row])
    def define_metric(self, name, step_metric): self.tell("metric", [name, step_metric])
    def save(self, file, base_path, policy): self.tell("file", file.name)
    def update(self, summary): self.tell("summary", summary)
    def finish(self, exit_code):
        if FAULT == "hang in finish": time.sleep(60)
        self.tell("finish", exit_code)
        self.file.close()
def setup(settings): pass
def login(prompt): return FAULT != "no key" and not prompt
def teardown(): pass
def init(**given):
    if FAULT.startswith("hang"):
        atexit.register(time.sleep, 60)
        threading.Thread(target=time.sleep, args=(60,)).start()
        sys.exit = lambda code: os._exit(77)
    if FAULT == "hang in init": time.sleep(60)
    if FAULT == "never" or (FAULT == "no network" and given["mode"] == "online"):
        raise RuntimeError("cannot connect")
    return Run(given)
"""


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """Make a mirror whose wandb is the stand-in above, and read what that was given."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    for name in [each for each in sys.modules if each.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "run"
    folder.mkdir()
    warnings: list[str] = []

    def make(fault="", *, begun=0, resumed_step=None, group=None, **settings):
        monkeypatch.setenv("FAULT", fault)
        monkeypatch.setenv("BEGUN", str(begun))
        sys.modules.pop("wandb", None)
        more = {"resumed_step": resumed_step, "group": group}
        made = mirror_of("wandb", WandbTracker(**settings), folder, warnings.append, **more)
        made.start()
        return made

    def given():
        return [json.loads(line) for line in (folder / "given.jsonl").read_text().splitlines()]

    make.folder, make.warnings, make.given = folder, warnings, given
    yield make
    sys.modules.pop("wandb", None)


def write(folder, *steps):
    with (folder / RunFolder.METRICS).open("a") as file:
        file.writelines(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in steps)


def test_steps_and_evaluations_arrive_in_order_under_their_names(mirror):
    exits = sys.exit, sys.excepthook
    run = mirror(project="p", tags=("a", "b"), group="sweep 1")
    write(mirror.folder, 1)
    with (mirror.folder / RunFolder.METRICS).open("a") as file:
        file.write('{"step": 1, "eval_loss": 2.5, "eval_seconds": 1}\n{"step": 2, "lo')
    close_all([run], {"loss": 1.0, "eval_loss": float("nan")})
    given = mirror.given()
    assert given[1:] == [
        ["metric", ["train/*", "train/step"]],
        ["metric", ["eval/*", "train/step"]],
        ["log", [1, {"train/loss": 1.0, "train/step": 1}]],
        ["log", [1, {"eval/loss": 2.5, "eval/seconds": 1, "train/step": 1}]],
        ["summary", {"loss": 1.0, "eval_loss": None}],
        ["finish", 0],
    ]
    begun = given[0][1]
    assert (begun["mode"], begun["project"], begun["name"]) == ("offline", "p", "n")
    assert (begun["tags"], begun["job_type"], begun["group"]) == (["a", "b"], "train", "sweep 1")
    assert begun["config"] == {"batch": {"global": 8}}
    assert begun["settings"]["console"] == "off"
    assert not mirror.warnings
    assert (sys.exit, sys.excepthook) == exits


def test_a_resume_keeps_the_id_and_sends_what_the_server_has_not(mirror):
    first = mirror(mode="online")
    write(mirror.folder, 1, 2, 3)
    close_all([first], {})
    assert (mirror.folder / "wandb" / "logged").read_text() == "3"
    second = mirror(mode="online", begun=3, resumed_step=3)  # steps 0, 1 and 2 arrived
    write(mirror.folder, 4)
    close_all([second], None)
    given = mirror.given()
    assert len({value["id"] for what, value in given if what == "init"}) == 1
    assert [value[0] for what, value in given if what == "log"] == [1, 2, 3, 3, 4]
    assert given[-1] == ["finish", 1], "a run that failed is marked as failed"


@pytest.mark.parametrize(
    ("fault", "warned", "given"),
    [
        ("no network", "cannot connect); this run is recorded offline, to upload it later: ", True),
        ("no key", "no API key: run `wandb login` once); this run is recorded offline", True),
        ("never", "wandb is off", False),
    ],
)
def test_without_a_way_online_a_run_is_recorded_offline_or_not_with_one_warning(
    mirror, fault, warned, given
):
    run = mirror(fault, mode="online")
    write(mirror.folder, 1)
    close_all([run], {})
    assert any(warned in warning for warning in mirror.warnings)
    assert len(mirror.warnings) == 1 + (not given)
    assert (mirror.folder / "given.jsonl").exists() == given
    if given:
        done = ["init", "metric", "metric", "log", "summary", "finish"]
        assert [what for what, _ in mirror.given()] == done
        assert "wandb sync" in mirror.warnings[0]
    assert not WandbTracker(mode="disabled").is_on


def test_the_real_package_records_a_run_offline_and_asks_git_for_no_contents(tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "git").write_text(f'#!/bin/sh\necho "$@" >> {tools}/asked\npwd\n')
    (tools / "git").chmod(0o755)
    program = (
        "import sys; from pathlib import Path; from tests.lib.tracked import mirror_of\n"
        "from trainer.report.mirror import close_all\n"
        "from trainer.features.trackers.wandb import WandbTracker\n"
        "folder = Path(sys.argv[1]); (folder / 'plan.json').write_text('{}')\n"
        "mirror = mirror_of('wandb', WandbTracker(), folder, print)\n"
        "mirror.start(); (folder / 'metrics.jsonl').write_text('{\"step\": 1, \"loss\": 1.0}\\n')\n"
        "close_all([mirror], {'loss': 1.0}); sys.exit(3)"
    )
    paths = f"{tools}:{os.environ['PATH']}"
    done = python(shlex.join(["-c", program, str(tmp_path)]), tmp_path, PATH=paths)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
    run_id = (tmp_path / "wandb" / "id").read_text()
    (record,) = tmp_path.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb")
    assert b"train/loss" in record.read_bytes()
    assert (record.parent / "files" / "plan.json").read_text() == "{}"
    # Where the repository begins starts no program that it names; its status would.
    asked = (tools / "asked").read_text().split("\n") if (tools / "asked").exists() else []
    assert set(asked) <= {"rev-parse --show-toplevel", ""}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "typed", "code"),
    [
        nightly("server", "steps=2 wandb.mode=online", 0),
        nightly("hang in finish", "steps=2 parallel.ranks=2", 0),
        ("hang in init", "steps=100000", 75),
    ],
)
def test_a_wandb_that_hangs_delays_the_end_of_a_command_and_changes_nothing_of_it(
    fault, typed, code, tmp_path
):
    """By how much is measured against the same command without it, on the same machine."""
    (tmp_path / "net.py").write_text(OWN_CLASSES)
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(STAND_IN)
    path = [str(CHECKOUT), *([] if fault == "server" else [str(tmp_path / "packages")])]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    environ |= {"PYTHONPATH": os.pathsep.join(path), "FAULT": fault, "BEGUN": "0"}
    environ |= {"HOME": str(tmp_path), "WANDB_API_KEY": "a" * 40}
    # Its connections are taken, by the kernel, and never answered.
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        environ["WANDB_BASE_URL"] = f"http://127.0.0.1:{server.getsockname()[1]}"
        without, _ = end_of(f"{typed} wandb.mode=disabled", code, tmp_path / "without", environ)
        took, shown = end_of(typed, code, tmp_path / "run", environ)
    assert took - without < PROMISED_S, f"{took} s, and {without} s without it"
    assert read_json(tmp_path / "run" / "status.json")["exit_code"] == code
    assert shown.count("wandb did not finish in time and was abandoned") == 1, shown


def end_of(typed: str, code: int, run: Path, environ: dict[str, str]) -> tuple[float, str]:
    """Run a command to its end, or to a signal; gives the seconds of its end, and its words."""
    line = OWN_RUN.replace("steps=2 wandb.mode=disabled ", "").split()
    argv = [sys.executable, "-m", "trainer", *line, *typed.split(), f"hydra.run.dir={run.name}"]
    out, metrics, began = run.with_suffix(".out"), run / RunFolder.METRICS, None
    with out.open("wb") as file:
        shown = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(argv, cwd=run.parent, env=environ, **shown)
        if code == 75:
            while not metrics.exists() or len(metrics.read_bytes().splitlines()) < 20:
                assert process.poll() is None, out.read_text()
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            began = time.time()
        assert process.wait(60) == code, out.read_text()
    began = began or max(path.stat().st_mtime for path in run.glob("*.jsonl"))
    return time.time() - began, out.read_text()

"""A real MLflow server: jobs that start on it at the same moment, and a server that is away.

The server is that of the whole `mlflow`, of the Python that MLFLOW_PYTHON names, or of this one.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from urllib.request import urlopen

import pytest

from tests.lib.cluster import wait_for
from tests.lib.host_runs import weights
from tests.lib.nightly import LIMIT_S
from tests.lib.processes import Command, free_port, skip_without
from tests.lib.run_support import TOYS, overrides, steps
from tests.lib.tracked import mirror_of, mlflow_steps
from trainer.core.run_folder import RunFolder
from trainer.features.trackers.mlflow import MlflowTracker
from trainer.report.mirror import close_all

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(LIMIT_S),
    pytest.mark.filterwarnings("ignore"),  # of its libraries
]
PYTHON = os.environ.get("MLFLOW_PYTHON", sys.executable)
PATIENCE_S = 120
NUM_JOBS, LAST = 4, 400


@dataclass
class Server:
    """A server whose files lie in one folder."""

    folder: Path
    address: str
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        argv = [PYTHON, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1"]
        argv += ["--port", self.address.rpartition(":")[2]]
        argv += ["--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        argv += ["--artifacts-destination", str(self.folder / "files")]
        with (self.folder / "server.log").open("a") as log:
            self.process = subprocess.Popen(
                argv, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )
        wait_for(lambda: _answers(self.address), self, PATIENCE_S)

    def printed(self) -> str:
        """Give what it has printed, for messages of tests."""
        return (self.folder / "server.log").read_text()

    def send(self, number: int) -> None:
        """Send a signal to all of its processes."""
        assert self.process is not None
        os.killpg(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server that has started."""
    skip_without(PYTHON, "flask, mlflow", "pip install mlflow, and set MLFLOW_PYTHON")
    made = Server(tmp_path, f"http://127.0.0.1:{free_port()}")
    try:
        made.start()
        yield made
    finally:
        made.send(signal.SIGKILL)


def _answers(address: str) -> bool:
    with suppress(OSError), urlopen(f"{address}/health", timeout=5) as answer:
        return answer.status == 200
    return False


def test_four_jobs_of_a_new_experiment_start_at_once(server, tmp_path, monkeypatch):
    from mlflow import MlflowClient  # noqa: PLC0415 - seconds

    find, together, asked = MlflowClient.get_experiment_by_name, Barrier(NUM_JOBS), list[str]()

    def find_together(client: MlflowClient, name: str) -> object:
        found = find(client, name)
        asked.append(name)
        if len(asked) <= NUM_JOBS:
            together.wait(PATIENCE_S)
        return found

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", find_together)
    warnings, mirrors = list[str](), []
    for job in range(NUM_JOBS):
        run = tmp_path / f"run-{job}"
        run.mkdir()
        (run / RunFolder.METRICS).write_text('{"step": 1, "loss": 1.0}\n')
        tracker = MlflowTracker(tracking_uri=server.address, experiment="new")
        tracker.patience_s = PATIENCE_S
        mirrors.append(mirror_of("mlflow", tracker, run, warnings.append))
    for mirror in mirrors:
        mirror.start()
    close_all(mirrors, {"loss": 1.0})
    assert warnings == []
    client = MlflowClient(server.address)
    (experiment,) = client.search_experiments(filter_string="name = 'new'")
    runs = client.search_runs([experiment.experiment_id])
    assert [run.data.metrics for run in runs] == [{"train/loss": 1.0}] * NUM_JOBS
    assert {run.info.status for run in runs} == {"FINISHED"}


def begin(server: Server, last: int = LAST, *typed: str) -> Command:
    """Start a run of some 40 s that shows itself there; a server with SQLite is slow."""
    line = f"steps={last} hooks=[{','.join([f'{TOYS}.Slow'] * 5)}] logger=[mlflow] name=gpt"
    words = [*overrides(line), f"mlflow.tracking_uri={server.address}", *typed]
    return Command.start(server.folder, words)


@pytest.fixture
def undisturbed(server: Server) -> bytes:
    """The weights of a run that shows itself nowhere."""
    words = overrides(f"steps={LAST} logger=[] name=whole")
    assert Command.start(server.folder, words).end().code == 0
    return weights(server, "whole")


def shown(server: Server) -> list[int]:
    """The steps of the run's losses that the server has."""
    with suppress(ValueError, KeyError):  # no run yet, or no step of it
        return mlflow_steps(server.folder / "server.db")["train/loss"]
    return []


def with_loss(folder: Path) -> list[int]:
    """The steps that had loss terms."""
    return [entry["step"] for entry in steps(folder) if entry["loss"] is not None]


def wait_until_shown(server: Server) -> Path:
    """Wait until some steps are there; gives the folder of the run."""
    wait_for(lambda: len(shown(server)) > 10, server, PATIENCE_S)
    (folder,) = server.folder.glob("outputs/*/*-gpt")
    return folder


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stalls"])
def test_a_server_that_goes_away_holds_up_no_step_and_has_each_at_last(number, server, undisturbed):
    command = begin(server)
    folder = wait_until_shown(server)
    server.send(number)
    command.wait_for("outputs/*/*-gpt/metrics.jsonl", len(steps(folder)) + 50)
    if number == signal.SIGSTOP:
        server.send(signal.SIGCONT)
    assert command.end().code == 0
    assert [entry["step"] for entry in steps(folder)] == [*range(1, LAST + 1)]
    assert weights(server) == undisturbed
    if number == signal.SIGKILL:
        assert "sends it when it goes on (resume=RUN)" in (folder / "train.log").read_text()
        server.start()
        assert begin(server, 2 * LAST, f"resume={folder}").end().code == 0
    assert shown(server) == with_loss(folder)


def test_a_server_that_comes_late_is_said_to_be_away_and_has_each_step(server, undisturbed):
    server.send(signal.SIGKILL)
    command = begin(server)
    log = command.wait_for("outputs/*/*-gpt/train.log")
    says = f"mlflow.tracking_uri={server.address}: no server answers"
    wait_for(lambda: says in log.read_text(), server, PATIENCE_S)
    server.start()
    assert command.end().code == 0
    assert shown(server) == with_loss(log.parent)
    assert weights(server) == undisturbed

"""A real MLflow server, and jobs of a new experiment that start at the same moment.

The server is that of the whole `mlflow`, of the Python that MLFLOW_PYTHON names, or of this one.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from socket import create_server
from threading import Barrier
from urllib.request import urlopen

import pytest

from tests.lib.nightly import LIMIT_S
from tests.lib.tracked import mirror_of
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
NUM_JOBS = 4


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Start a server, and give its address."""
    probe = [PYTHON, "-c", "import mlflow, flask"]
    if subprocess.run(probe, check=False, capture_output=True).returncode:
        pytest.skip(f"{PYTHON} has no MLflow server; pip install mlflow, and set MLFLOW_PYTHON")
    with create_server(("127.0.0.1", 0)) as free:
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    argv = [PYTHON, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1"]
    argv += ["--port", address.rpartition(":")[2]]
    argv += ["--backend-store-uri", f"sqlite:///{tmp_path}/server.db"]
    argv += ["--artifacts-destination", str(tmp_path / "files")]
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(
            argv, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True
        )
    try:
        until = time.monotonic() + PATIENCE_S
        while not _answers(address):
            assert time.monotonic() < until, (tmp_path / "server.log").read_text()
            time.sleep(0.5)
        yield address
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def _answers(address: str) -> bool:
    try:
        with urlopen(f"{address}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
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
        tracker = MlflowTracker(tracking_uri=server, experiment="new")
        tracker.patience_s = PATIENCE_S
        mirrors.append(mirror_of("mlflow", tracker, run, warnings.append))
    for mirror in mirrors:
        mirror.start()
    close_all(mirrors, {"loss": 1.0})
    assert warnings == []
    client = MlflowClient(server)
    (experiment,) = client.search_experiments(filter_string="name = 'new'")
    runs = client.search_runs([experiment.experiment_id])
    assert [run.data.metrics for run in runs] == [{"train/loss": 1.0}] * NUM_JOBS
    assert {run.info.status for run in runs} == {"FINISHED"}

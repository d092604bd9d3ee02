"""MLflow behind the seam: jobs that start at the same time."""

import socket
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tests.lib.tracked import mirror_of, mlflow_steps
from trainer.core.run_folder import RunFolder
from trainer.features.trackers import mlflow
from trainer.features.trackers.mlflow import MlflowTracker
from trainer.report.mirror import close_all

pytestmark = pytest.mark.filterwarnings("ignore")  # of its libraries


def test_a_server_that_does_not_answer_is_named_once_and_asked_again(monkeypatch):
    named, interrupted = list[str](), Mock(side_effect=[None, None, KeyboardInterrupt])
    monkeypatch.setattr(mlflow, "getproxies", dict)
    monkeypatch.setattr(mlflow.time, "sleep", interrupted)
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert mlflow.why_no_answer(uri) is None
    with pytest.raises(KeyboardInterrupt):
        MlflowTracker(tracking_uri=uri).start(SimpleNamespace(warn=named.append))
    begin = f"mlflow.tracking_uri={uri}: no server answers (Connection refused)"
    assert [text.startswith(begin) for text in named] == [True]


@pytest.mark.slow  # seconds of migrations; a run with all trackers is in test_resumed.py
def test_an_experiment_that_another_job_creates_in_the_meantime_is_taken(tmp_path, monkeypatch):
    from mlflow import MlflowClient  # noqa: PLC0415 - seconds

    find, num_asked = MlflowClient.get_experiment_by_name, 0

    def found_too_late(client: MlflowClient, name: str) -> object:
        nonlocal num_asked
        num_asked += 1
        found = find(client, name)
        if num_asked == 1:
            client.create_experiment(name, artifact_location=(tmp_path / "files").as_uri())
        return found

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", found_too_late)
    run, warnings = tmp_path / "run", list[str]()
    run.mkdir()
    (run / RunFolder.METRICS).write_text('{"step": 1, "loss": 1.0}\n')
    mirror = mirror_of("mlflow", MlflowTracker(), run, warnings.append)
    mirror.start()
    close_all([mirror], {})
    assert (warnings, num_asked) == ([], 2)
    assert mlflow_steps(tmp_path / "mlflow.db") == {"train/loss": [1]}

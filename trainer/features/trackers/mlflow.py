"""Log a run's figures to MLflow: a SQLite file beside the runs, or a server that the user names."""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, final
from urllib.parse import urlsplit
from urllib.request import getproxies

from trainer.config.components import Address, NonEmptyText
from trainer.config.messages import flat
from trainer.report.tracker import TrackedRun, Tracker

FILE, UNFINISHED_FILE, ID_TAG = "mlflow.db", ".tmp-mlflow-{}.db", "run_id"
RETRY_S = 1.0  # until a server that did not answer is asked again
_PORTS = {"http": 80, "https": 443}
# What MLflow takes in a request at most
MOST_METRICS, MOST_PARAMS, LONGEST_PARAM = 1000, 100, 6000


@final
class MlflowTracker(Tracker):
    """Logs to one run of MLflow, which a resume finds by a tag; a step is never logged twice.

    MLflow forgets no point: where a run goes back behind steps, those of the killed process stay.

    Args:
        tracking_uri: a server, or `sqlite:///FILE`; None: `mlflow.db` in the folder of the runs.
        experiment: what the run is listed under.
    """

    package: ClassVar[str] = "mlflow"
    install: ClassVar[str] = ".[mlflow]"

    def __init__(
        self, tracking_uri: Address | None = None, experiment: NonEmptyText = "train"
    ) -> None:
        self._uri, self._experiment = tracking_uri, experiment
        self._batch: list[Any] = []
        if tracking_uri is None:
            # The tables of a new file take seconds
            self.patience_s = 60.0

    def start(self, run: TrackedRun) -> int:
        """See the base class."""
        self._warn = run.warn
        self._await_server()
        from mlflow import MlflowClient  # noqa: PLC0415 - seconds
        from mlflow.entities import Param  # noqa: PLC0415 - seconds

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        warnings.filterwarnings("ignore", module=r"(mlflow|alembic|sqlalchemy)\b")
        self._client = MlflowClient(self._uri or f"sqlite:///{_local(run.outputs)}")
        experiment = self._find_or_create(run.outputs)
        runs = self._client.search_runs([experiment], f"tags.{ID_TAG} = '{run.id}'")
        # The run that was stopped is there already, and goes on.
        if runs:
            self._run = runs[0]
        else:
            tags, name = {ID_TAG: run.id}, run.name or run.run_folder.name
            if run.group:
                tags["group"] = run.group
            self._run = self._client.create_run(experiment, tags=tags, run_name=name)
        self._id = self._run.info.run_id
        # The last step that each figure has there
        self._there = {each.key: each.step for each in self._run.data._metric_objs}
        if runs:
            self._client.update_run(self._id, status="RUNNING")
        else:
            params = [Param(k, str(v)[:LONGEST_PARAM]) for k, v in flat(run.config).items()]
            for begin in range(0, len(params), MOST_PARAMS):
                self._client.log_batch(self._id, params=params[begin : begin + MOST_PARAMS])
        return -1

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """See the base class."""
        from mlflow.entities import Metric  # noqa: PLC0415 - seconds

        now = int(time.time() * 1000)
        for name, value in figures.items():
            if step > self._there.get(name, -1):
                self._batch.append(Metric(name, value, now, step))

    def flush(self) -> None:
        """See the base class."""
        while self._batch:
            self._await_server()
            self._client.log_batch(self._id, metrics=self._batch[:MOST_METRICS])
            del self._batch[:MOST_METRICS]

    def attach(self, file: Path) -> None:
        """See the base class."""
        self._client.log_artifact(self._id, str(file))

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """See the base class."""
        if summary is not None:
            self._client.log_dict(self._id, dict(summary), "result.json")
        status = "FAILED" if summary is None else "FINISHED"
        self._client.set_terminated(self._id, status)

    def _await_server(self) -> None:
        """Wait until a server listens; MLflow tries ever more seldom, and gives up in minutes."""
        text = ""
        while self._uri and (why := why_no_answer(self._uri)):
            if not text:
                text = f"mlflow.tracking_uri={self._uri}: no server answers ({why})"
                self._warn(f"{text}; it is tried again, and metrics.jsonl has everything")
            time.sleep(RETRY_S)

    def _find_or_create(self, outputs: Path) -> str:
        """Give the experiment's id; files of a local one lie beside the SQLite file."""
        from mlflow.exceptions import MlflowException  # noqa: PLC0415 - seconds

        if found := self._client.get_experiment_by_name(self._experiment):
            return str(found.experiment_id)
        local = None
        # A server decides by itself where its files are
        if not self._uri:
            local = (outputs / "mlflow").absolute().as_uri()
        try:
            return str(self._client.create_experiment(self._experiment, artifact_location=local))
        except MlflowException:
            # Created in the meantime, by a job that started at the same time?
            if found := self._client.get_experiment_by_name(self._experiment):
                return str(found.experiment_id)
            raise


def why_no_answer(uri: str) -> str | None:
    """Say why nothing listens at the address of a server; None where it does, or is no address."""
    parts = urlsplit(uri)
    if parts.scheme not in _PORTS or getproxies():
        return None
    try:
        address = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        socket.create_connection(address, timeout=5.0).close()
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def _local(outputs: Path) -> Path:
    """Give the SQLite file of a folder; it is made aside, since a kill would leave half of it."""
    from mlflow import MlflowClient  # noqa: PLC0415 - seconds

    file, unfinished = outputs / FILE, outputs / UNFINISHED_FILE.format(uuid.uuid4().hex)
    if not file.exists():
        outputs.mkdir(parents=True, exist_ok=True)
        MlflowClient(f"sqlite:///{unfinished}").search_experiments(max_results=1)
        # Raised where a job beside this one was first.
        with suppress(FileExistsError):
            os.link(unfinished, file)
        unfinished.unlink()
    return file

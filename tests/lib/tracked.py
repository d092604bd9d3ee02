"""Read back what trackers were given: each figure with its steps, as a reader has them."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from trainer.features.trackers.wandb import _logged
from trainer.report.mirror import Mirror
from trainer.report.tracker import Tracker

Steps = dict[str, list[int]]


def mirror_of(name: str, tracker: Tracker, folder: Path, warn: Any, **more: Any) -> Mirror:
    """Make a mirror of a run folder as `assemble` does."""
    facts = {"name": "n", "group": None, "config": {"batch": {"global": 8}}, "plan": {}}
    facts |= {"outputs": folder.parent}
    return Mirror(name, tracker, folder, warn, **facts | more)


def tensorboard_steps(folder: Path) -> Steps:
    """By TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [e.step for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def mlflow_steps(file: Path) -> Steps:
    """By MLflow's own client; of the one run of the experiment."""
    from mlflow import MlflowClient  # noqa: PLC0415 - seconds

    client = MlflowClient(f"sqlite:///{file}")
    (experiment,) = client.search_experiments(filter_string="name = 'train'")
    (run,) = client.search_runs([experiment.experiment_id])
    names = run.data.metrics
    return {n: [m.step for m in client.get_metric_history(run.info.run_id, n)] for n in names}


def wandb_steps(folder: Path) -> Steps:
    """From all offline files, by W&B's own protocol; W&B has no public reader of them."""
    found: Steps = defaultdict(list)
    for name, step in _logged(folder, (folder / "id").read_text()):
        found[name].append(step)
    return {name: steps for name, steps in found.items() if "/" in name}

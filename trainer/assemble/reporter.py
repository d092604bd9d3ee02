"""Open the records of a run."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from trainer.assemble.instantiate import construct
from trainer.assemble.run import Run
from trainer.checkpoint.store import Loaded
from trainer.config.run_config import RunConfig, to_plain
from trainer.core.durable import write_record
from trainer.core.errors import ConfigError
from trainer.core.format import expanded
from trainer.core.run_folder import RunFolder
from trainer.report.console import Screen
from trainer.report.hooks import Hook, Hooks
from trainer.report.mirror import Mirror
from trainer.report.records import PlanRecord, git_revision
from trainer.report.reporter import Reporter, RunReporter, SilentReporter
from trainer.report.run_status import publish
from trainer.report.tracker import Tracker


def open_reporter(run: Run, plan: PlanRecord, folder: Path, loaded: Loaded | None) -> Reporter:
    """Open the records of a run, which may go on from a checkpoint. Collective."""
    config, messages = run.config, tuple[str, ...]()
    resumed_step: int | None = None
    if loaded is not None:
        resumed_step, messages = loaded.step, loaded.messages
    hooks, trackers = dict[str, Hook](), dict[str, Tracker]()

    def begin() -> None:
        for i, hook in enumerate(config.hooks):
            hooks[f"hooks[{i}] {hook.target}"] = construct(hook, f"hooks[{i}]", Hook, config.trust)
        for i, each in enumerate(config.logger):
            key, name = f"logger[{i}]", each.label
            # Each writes into a folder of its name, so that the second of a class needs another.
            if name in trackers:
                name += f"-{i}"
            tracker = trackers[name] = construct(each, key, Tracker, config.trust)
            # It is imported later, in a thread of its own.
            package = tracker.package.partition(".")[0]
            if package and find_spec(package) is None:
                text = f"needs {package}, which is not installed"
                raise ConfigError(f"{key}: {text}: pip install '{tracker.install or package}'")
        # Now that nothing refuses the run, its records say that it goes on.
        publish(folder)
        start = {"resumed_step": resumed_step, "git": git_revision(Path.cwd())}
        write_record(folder / RunFolder.PLAN, {**plan, **start})
        parts = {name: part.loader.dataset for name, part in run.data.held_out.items()}
        write_record(folder / RunFolder.SPLITS, run.split.to_json(run.data.train, parts))

    run.world.on_main(begin)
    if not run.world.is_main:
        return SilentReporter()
    screen = Screen(folder)
    for message in messages:
        screen.warn(message)
    return RunReporter(
        folder,
        screen,
        log_every=config.log.every,
        resumed_step=resumed_step,
        keep_samples=config.log.samples,
        hooks=Hooks(hooks, screen.warn, run.model.module),
        mirrors=_mirrors(config, plan, folder, screen, trackers, resumed_step),
    )


def _mirrors(
    config: RunConfig,
    plan: PlanRecord,
    folder: Path,
    screen: Screen,
    trackers: Mapping[str, Tracker],
    resumed_step: int | None,
) -> list[Mirror]:
    """Have metrics.jsonl read for each tracker that is on."""
    mirrors = list[Mirror]()
    for name, tracker in trackers.items():
        if tracker.is_on:
            mirror = Mirror(
                *(name, tracker, folder, screen.warn),
                resumed_step=resumed_step,
                name=config.name,
                group=group_of(folder),
                config=to_plain(config),
                plan=plan,
                outputs=expanded(config.outputs).absolute(),
            )
            mirrors.append(mirror)
    return mirrors


def group_of(folder: Path) -> str | None:
    """Name the folder of the sweep that a run is a job of; None outside of one."""
    sweep = RunFolder(folder.absolute()).sweep
    return None if sweep is None else sweep.name

"""Open the records of a run."""

from __future__ import annotations

from pathlib import Path

from trainer.assemble.components import Components
from trainer.assemble.instantiate import construct
from trainer.checkpoint.store import Loaded
from trainer.config.run_config import to_plain
from trainer.core.durable import write_record
from trainer.report.console import Screen
from trainer.report.records import Record
from trainer.report.reporter import Hook, Reporter, RunReporter, SilentReporter
from trainer.report.run_status import publish
from trainer.report.wandb import WandbMirror

PLAN_FILE = "plan.json"
SPLITS_FILE = "splits.json"


def open_reporter(
    components: Components, plan: Record, folder: Path, loaded: Loaded | None
) -> Reporter:
    """Open the records of a run, which may go on from a checkpoint. Collective."""
    components.world.on_main(lambda: _record_begin(folder, plan, components))
    if not components.world.is_main:
        return SilentReporter()
    config = components.config
    hooks = {
        f"hooks[{index}] {hook.target}": construct(hook, f"hooks[{index}]", Hook, config.trust)
        for index, hook in enumerate(config.hooks)
    }
    screen, labels = Screen(folder), config.wandb.model_dump(exclude={"mode"})
    for message in () if loaded is None else loaded.messages:
        screen.warn(message)
    wandb = WandbMirror(
        config.wandb.mode,
        folder,
        to_plain(config),
        screen.warn,
        labels={**labels, "name": config.name},
    )
    return RunReporter(
        folder,
        screen,
        log_every=config.log.every,
        resumed_step=None if loaded is None else loaded.step,
        keep_samples=config.log.samples,
        hooks=hooks,
        wandb=wandb,
    )


def _record_begin(folder: Path, plan: Record, components: Components) -> None:
    """Record how the run goes on, now that nothing refuses it."""
    parts = {name: each.loader.dataset for name, each in components.held_out.items()}
    publish(folder)
    write_record(folder / PLAN_FILE, plan)
    write_record(folder / SPLITS_FILE, components.split.to_json(components.train_set, parts))

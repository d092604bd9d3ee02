"""Name what a person may look at or type once a run has ended."""

from __future__ import annotations

from pathlib import Path

from trainer.assemble.run import Run
from trainer.config.command_words import READING_COMMANDS
from trainer.core.format import shown_path
from trainer.report.run_status import to_go_on, trusting
from trainer.report.views import views


def next_lines(run: Run, folder: Path, *, stopped_early: bool) -> list[str]:
    """Give the pages of a run, then the commands that use it or go on with it."""
    config, shown = run.config, shown_path(folder)
    trust = " ".join(["", *trusting(config, folder)])
    more = f"steps={2 * run.data.total_steps}"
    if config.total_epochs is not None:
        more = f"epochs={2 * config.total_epochs}"
    if stopped_early:
        more = "stop.metric=null"
    lines = [f"{shown_path(folder / view.file)}  ({view.about})" for view in views().values()]
    lines.append(f"train evaluate run={shown}{trust}")
    writes_text = run.model.objective.predicts_next
    for word, command in READING_COMMANDS.items():
        suits = True
        if command.text is not None:
            suits = writes_text and run.data.train.facts.prompt is not None
        elif command.reads_other_data:
            suits = not writes_text and "path" in config.data.params
        if suits:
            lines.append(f"train {word} run={shown} {command.example}{trust}")
    lines.append(f"train export run={shown} export.to=exported{trust}")
    return [*lines, f"{to_go_on(config, folder)} {more}"]

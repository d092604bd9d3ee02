"""Run each command of `train`.

All take the run's config, composed and checked; the run folder, locked by this process where they
write into it; all ranks; and `stop`, which says whether a signal asked to stop, and which those
that take seconds do not ask. They give the exit code.
"""

import pkgutil
from collections.abc import Callable

from trainer.commands.evaluate import evaluate_run
from trainer.commands.export import export_run
from trainer.commands.plan import plan_run
from trainer.commands.train import train_run
from trainer.commands.verify import verify_run
from trainer.config.command_words import READING_COMMANDS

COMMANDS: dict[str, Callable[..., int]] = {
    "train": train_run,
    "plan": plan_run,
    "verify": verify_run,
    "evaluate": evaluate_run,
    "export": export_run,
}


def function_of(command: str) -> Callable[..., int]:
    """Give the function that runs a command; those of features are imported here."""
    if (found := READING_COMMANDS.get(command)) is None:
        return COMMANDS[command]
    function: Callable[..., int] = pkgutil.resolve_name(found.target)
    return function

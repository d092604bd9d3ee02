"""Run each command of `train`.

All take the run's config, composed and checked; the run folder, locked by this process where they
write into it; all ranks; and `stop`, which says whether a signal asked to stop, and which those
that take seconds do not ask. They give the exit code.
"""

from trainer.commands.evaluate import evaluate_run
from trainer.commands.export import export_run
from trainer.commands.plan import plan_run
from trainer.commands.predict import predict_run
from trainer.commands.train import train_run
from trainer.commands.verify import verify_run

COMMANDS = {
    "train": train_run,
    "plan": plan_run,
    "verify": verify_run,
    "evaluate": evaluate_run,
    "predict": predict_run,
    "export": export_run,
}

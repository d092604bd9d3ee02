"""Define every way a run can end, each with its exit code and the one line that a user sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GO_ON = "go on with: "  # stands before the command by which a run goes on
INTERRUPTED = 130  # exit code after Ctrl-C where there is nothing to save


class TrainError(Exception):
    """An end of the run that a user can act on: one line on stderr, no traceback."""

    exit_code: int = 1  # the process's exit status
    is_own: bool = False  # whether this process prints it, though not the first of several ranks


class ConfigError(TrainError):
    """The command line or a recipe asks for what does not exist or cannot be; a line per fault."""

    exit_code = 2

    def __init__(self, *faults: str) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class DataError(TrainError):
    """A file, record or sample cannot be used; the text names file and record."""

    exit_code = 3


class NoCheckpointError(TrainError):
    """No such run, or no checkpoint in it that is intact."""

    exit_code = 4


class DoesNotFitError(TrainError):
    """Even one sample exceeds the memory; the text names its id and length."""

    exit_code = 5


class NonFiniteError(TrainError):
    """Loss or gradient stayed non-finite for too many steps in a row."""

    exit_code = 6


class RankFailedError(TrainError):
    """A rank died, hung or fell out of step."""

    exit_code = 7


class SaveError(TrainError):
    """A checkpoint could not be written."""

    exit_code = 8


class NotExactError(TrainError):
    """`train verify` found that the planned step is not, or may not be, the whole-batch step."""

    exit_code = 9


class Preempted(TrainError):  # noqa: N818 - not a failure: saved, and to be continued
    """A signal asked the run to stop; it saved at a step boundary."""

    exit_code = 75


def error_to_dict(error: TrainError) -> dict[str, Any]:
    """Write an end of the run as JSON, for another process to raise."""
    return {"error": type(error).__name__, "text": str(error), "code": error.exit_code}


def error_from_dict(content: Mapping[str, Any]) -> TrainError:
    """Turn what `error_to_dict` wrote back into an error of the same class, text and exit code."""
    # A class of another module is not known here: its text and exit code are kept.
    kind, text = globals().get(content["error"], TrainError), content["text"]
    error: TrainError = kind(*(text.splitlines() if kind is ConfigError else [text]))
    error.exit_code = content["code"]
    return error

"""Count the files that a value, and a sample, pass on their way."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from tests.lib.support import Bench
from trainer.core.micro_batch import MicroBatch
from trainer.plan.cuts import Fixed
from trainer.training.batches import PlannedBatch
from trainer.training.step import train_step

PACKAGE = Path(sys.modules["trainer"].__path__[0])
ASIDE = ("report", "verify", "commands", "features/page")
"""What is not between a config and the optimizer: they show, or compare, what there was."""


def files_naming(value: str) -> set[str]:
    """List the files between config and optimizer in which code names a value."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        name = file.relative_to(PACKAGE).as_posix()
        if not name.startswith(ASIDE) and re.search(rf"\b{value}\b", file.read_text()):
            found.add(name)
    return found


def files_of_a_sample() -> set[str]:
    """List the files with a function that is handed samples in one step, or gives them."""
    bench, found = Bench(Fixed(micro=4)), set[str]()

    def note(frame: FrameType, event: str, given: object) -> None:
        code, file = frame.f_code, Path(frame.f_code.co_filename)
        if event in ("call", "return") and file.is_relative_to(PACKAGE):
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            values = [frame.f_locals.get(name) for name in names if event == "call"]
            if any(map(_holds_sample, (*values, given))):
                found.add(file.relative_to(PACKAGE).as_posix())

    sys.setprofile(note)
    try:
        train_step(bench.context, bench.feed.next(), bench.feed)
    finally:
        sys.setprofile(None)
    return found


def _holds_sample(value: Any) -> bool:
    """Whether a value is samples: their fields, a micro-batch, a batch, or a list of any."""
    if isinstance(value, Mapping):
        return "input_ids" in value
    if isinstance(value, list | tuple):
        return any(_holds_sample(each) for each in value)
    return isinstance(value, MicroBatch | PlannedBatch)

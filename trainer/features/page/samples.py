"""Gather samples for a page: those with the largest loss, and what followed prompts over time."""

from __future__ import annotations

import math
import os
import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import suppress

from trainer.config.messages import show
from trainer.config.secrets import without_secrets
from trainer.core.format import plural
from trainer.features.page.saved_run import SavedRun
from trainer.report.journal import is_number

_MOST_CELL = 2000  # letters of a text
_MOST_STEPS = 12  # at which a prompt is shown
_MOST_BYTES = 1 << 20  # of a picture
_PNG = b"\x89PNG\r\n\x1a\n"
_PICTURE = re.compile(r"worst(-\w+)?/\d+\.png")


def worst(run: SavedRun) -> list[tuple[list[str], str, str]]:
    """List the samples with the largest loss: facts, text, and picture as base64, if any."""
    items = []
    for line in run.worst:
        known = list[str]()
        for key, word in (("label", "label"), ("prediction", "predicted")):
            if text := cell_text(line.get(key)):
                known.append(f"{word} {text}")
        known.append(f"loss {cell_text(line['loss']) or 'not finite'}")
        known.append(f"id {cell_text(line.get('id'))}")
        if line.get("set"):
            known.append(f"in {line['set']}")
        if is_number(line.get("terms")) and line["terms"] != 1:
            known.append(plural(line["terms"], "loss term"))
        items.append((known, cell_text(line.get("text")), _picture(run, line.get("picture"))))
    return items


def _picture(run: SavedRun, name: object) -> str:
    """Read a picture of the run's own, not of whatever its record, perhaps a stranger's, names."""
    if not isinstance(name, str) or not _PICTURE.fullmatch(name):
        return ""
    file = run.folder / name
    with suppress(OSError):
        if file.is_symlink() or file.parent.is_symlink() or not file.is_file():
            return ""
        with file.open("rb") as opened:
            content = opened.read(_MOST_BYTES)
        if content.startswith(_PNG):
            return b64encode(content).decode()
    return ""


def texts(run: SavedRun) -> Iterator[tuple[str, Sequence[tuple[int, str]]]]:
    """Give what followed each prompt, by step, at a few steps from the last on."""
    by_prompt = dict[str, list[tuple[int, str]]]()
    for entry in run.generated:
        prompt = cell_text(entry.get("prompt"))
        by_prompt.setdefault(prompt, []).append((entry["step"], cell_text(entry.get("text"))))
    for prompt, found in by_prompt.items():
        apart = math.ceil(len(found) / _MOST_STEPS)
        yield prompt, found[::-apart]


def cell_text(value: object) -> str:
    """Write any value of a record, without secrets, and not at any length."""
    if value is None:
        return ""
    if isinstance(value, str):
        text = value
    elif isinstance(value, float):
        text = f"{value:.4g}"
    else:
        text = show(value)
    # Before it is cut: a part of a secret is no longer known as one.
    return without_secrets(text, os.environ)[:_MOST_CELL]

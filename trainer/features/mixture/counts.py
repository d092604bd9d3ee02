"""Count the samples of each source that a run has trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from trainer.assemble.features import EndOfRun, Feature
from trainer.core.format import number, percent
from trainer.core.rows import Row, row
from trainer.core.run_folder import RunFolder
from trainer.core.stateful import DRAWN
from trainer.report.journal import stream


@final
class SourceCounts(Feature):
    """Says how much of each source was trained on, at the end and where a run goes on."""

    def __init__(self) -> None:
        self._counts = Counter[str]()

    def remark(self, entry: Mapping[str, Any], ids: Sequence[int], folder: Path) -> str | None:
        """See the base class."""
        is_first = not self._counts
        self._add(entry)
        if not is_first or not self._counts or entry["step"] == 1:
            return None
        before = Counter(self._counts)
        for each in stream(folder / RunFolder.METRICS):
            if each["step"] < entry["step"]:
                self._add(each)
        earlier = self._counts - before
        return (earlier and f"samples before this step, by source: {self._text(earlier)}") or None

    def end_rows(self, end: EndOfRun) -> Sequence[Row]:
        """See the base class."""
        if not self._counts:
            return ()
        return [row("sources", self._text(self._counts), sources=dict(self._counts))]

    def _add(self, entry: Mapping[str, Any]) -> None:
        for name, count in entry.items():
            if name.startswith(DRAWN):
                self._counts[name.removeprefix(DRAWN)] += count

    @staticmethod
    def _text(counts: Mapping[str, int]) -> str:
        whole = sum(counts.values())
        shown = (f"{name} {number(n)} ({percent(n / whole)})" for name, n in counts.items())
        return ", ".join(shown)

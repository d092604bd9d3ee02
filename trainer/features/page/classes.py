"""Count predictions by class, as `train evaluate eval.predictions=true` wrote them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, final

from trainer.core.durable import parsed
from trainer.core.format import percent
from trainer.core.run_folder import RunFolder
from trainer.features.page.saved_run import SavedRun, as_list, as_mapping

MOST_SHOWN = 20  # that are shown
_MOST_BYTES = 1 << 20  # of a line
_STEM = "predictions"

LabelPair = tuple[str, str]  # the class of a sample, and the one that was predicted


@final
@dataclass(frozen=True)
class Classes:
    """What was predicted for the samples of each class, one label per sample."""

    names: Sequence[str]
    counts: Counter[LabelPair]
    set_name: str  # of what was held out; empty for the run's own

    @property
    def note(self) -> str:
        """Say how many samples there are, and which share is right."""
        right, total = 0, self.counts.total()
        for name in self.names:
            right += self.counts[name, name]
        return f"{total:,} samples, {percent(right / total)} right"

    def matrix(self) -> Iterator[tuple[str, list[tuple[int, float, str]]]]:
        """Give for each class how often each was predicted, how dark that is, and words."""
        labels, _ = self._totals()
        for true in self.names:
            cells = list[tuple[int, float, str]]()
            for predicted in self.names:
                count, total = self.counts[true, predicted], labels[true]
                words = f"{count} of {total} {true!r} were predicted {predicted!r}"
                shade = 0.0
                if count:
                    # What is rare is to be seen, too.
                    shade = 0.2 + 0.8 * count / total
                cells.append((count, shade, words))
            yield true, cells

    def rows(self) -> Iterator[Sequence[str]]:
        """Give of each class its precision, its recall and the number of its samples."""
        labels, predicted = self._totals()
        for name in self.names:
            right = self.counts[name, name]
            shares = _share(right, predicted[name]), _share(right, labels[name])
            yield name, *shares, f"{labels[name]:,}"

    def _totals(self) -> tuple[Counter[str], Counter[str]]:
        """Count the samples of each class, and those for which each was predicted."""
        labels, predictions = Counter[str](), Counter[str]()
        for (label, prediction), count in self.counts.items():
            labels[label] += count
            predictions[prediction] += count
        return labels, predictions


def classes(run: SavedRun) -> list[Classes]:
    """Count the predictions of each held-out set; none where there are more classes, or others."""
    sets = as_mapping(run.files.record(RunFolder.EVALUATION).get("sets"))
    found = list[Classes]()
    for set_name in ("", *sets):
        name = f"{_STEM}-{set_name}.jsonl" if set_name else f"{_STEM}.jsonl"
        # Another's record may name any file.
        if "/" not in name and (counts := _counted(run.folder / name)):
            found.append(Classes(_ordered(run, counts), counts, set_name))
    return found


def _counted(file: Path) -> Counter[LabelPair] | None:
    """Count pairs of label and prediction; None where a sample has another number of labels."""
    counts, names = Counter[LabelPair](), set[str]()
    for line in _lines(file):
        label, prediction = line.get("label"), line.get("prediction")
        # A sample without a label has no loss term.
        if label is None or label == -100:  # noqa: PLR2004 - as PyTorch has it
            continue
        if type(label) not in (str, int) or type(prediction) not in (str, int):
            return None
        counts[str(label), str(prediction)] += 1
        names |= {str(label), str(prediction)}
        if len(names) > MOST_SHOWN:
            return None
    return counts


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with suppress(OSError):
        # A pipe would never end.
        if file.is_file():
            with file.open("rb") as lines:
                while line := lines.readline(_MOST_BYTES):
                    yield as_mapping(parsed(line))


def _ordered(run: SavedRun, counts: Counter[LabelPair]) -> list[str]:
    """Order classes as the data number them; numbers without names by their size."""
    seen = {*chain.from_iterable(counts)}
    known = [*map(str, as_list(run.plan.get("label_names")))]
    if seen <= set(known):
        if len(known) <= MOST_SHOWN:
            return known
        return [*filter(seen.__contains__, known)]
    if all(map(str.isdecimal, seen)):
        return sorted(seen, key=int)
    return sorted(seen)


def _share(part: int, whole: int) -> str:
    if not whole:
        return "-"
    return percent(part / whole)

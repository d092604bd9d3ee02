"""Name runs so that a reader tells them apart."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.core.format import shown_path
from trainer.features.page.saved_run import SavedRun

_MOST_LETTERS = 100


def names_of(runs: Sequence[SavedRun]) -> list[str]:
    """Name runs so that they differ; jobs of a sweep by what they were given."""
    names = [str(run.config.get("name") or "") for run in runs]
    if all(names) and len(set(names)) == len(names):
        return names
    # The first word is `train`; of words that stand twice, one is enough.
    typed = [dict.fromkeys(run.typed.split()[1:]) for run in runs]
    common = set.intersection(*map(set, typed))
    labels = []
    for run, words in zip(runs, typed, strict=True):
        own = [word for word in words if word not in common]
        label = f"{run.folder.name}: {' '.join(own)}"[:_MOST_LETTERS]
        # Of a run that was given nothing of its own, the folder's name is left.
        labels.append(label.removesuffix(": "))
    if len(set(labels)) == len(labels):
        return labels
    return [shown_path(run.folder) for run in runs]

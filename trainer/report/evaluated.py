"""Show and write what `train evaluate` found."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.checkpoint.store import Loaded
from trainer.core.durable import as_save_error, strict, write_file_atomic, write_record
from trainer.core.format import METRIC_TITLES, figure_texts, named_means, plural, shown_path
from trainer.core.run_folder import RunFolder
from trainer.report.console import show_read
from trainer.report.metrics import Means
from trainer.report.views import write_views

Facts = Mapping[str, Any]
Lines = Sequence[Mapping[str, Any]]


def report_evaluation(
    loaded: Loaded,
    file: Path,
    means: Means,
    facts: Mapping[str, tuple[str, Facts]],
    predictions: Mapping[str, Lines],
    worst: Callable[[], Lines] = tuple,
) -> None:
    """Print the figures of a checkpoint, and write them and the predictions into the run.

    `facts` say of each part what it is, in words and for the record. `worst`, the predictions with
    the largest loss, is called once the rest is written, since the user's `decode` may raise.
    """
    texts, record, sets = list[str](), dict[str, Any](), dict[str, Facts]()
    titles = RunFolder(file.parent).record(RunFolder.PLAN).get(METRIC_TITLES, {})
    for part, metrics in means.items():
        text, about = facts[part]
        figures = ", ".join(figure_texts(metrics, titles))
        texts.append(f"{text}: {figures}")
        if part:
            sets[part] = about
        else:
            # The one set without a name has its facts at the top.
            record |= about
    if file.name != RunFolder.EVALUATION:
        texts[-1] += f" (written to {shown_path(file)})"
    for part, lines in predictions.items():
        texts.append(_write(file, part, lines))
    show_read(loaded, *texts)
    if sets:
        record["sets"] = sets
    if loaded.is_average:
        record["weights"] = "ema"
    names = {f"eval_{name}": value for name, value in named_means(means).items()}
    record = {"step": loaded.step, **names, **record}
    write_record(file, record)
    if found := worst():
        write_record(file, record | {"worst": found})
        write_views(file.parent)


def _write(file: Path, part: str, lines: Lines) -> str:
    """Write the predictions of a part beside the figures, and say so."""
    stem = file.stem.replace("evaluate", "predictions")
    if part:
        stem += f"-{part}"
    place = file.with_name(f"{stem}.jsonl")
    with as_save_error(place):
        content = "".join(f"{json.dumps(strict(line))}\n" for line in lines)
        write_file_atomic(place, content.encode())
    return f"{plural(len(lines), 'prediction')} written to {shown_path(place)}"

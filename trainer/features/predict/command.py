"""`train predict`: write what a checkpoint predicts of data that need no labels."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.assemble.instantiate import run_features
from trainer.assemble.saved import Saved
from trainer.checkpoint.store import Loaded
from trainer.checkpoint.weights import load_step
from trainer.config.messages import first_of
from trainer.config.run_config import RunConfig, config_hash, to_plain
from trainer.core.format import figure_texts, plural, shown_path
from trainer.core.rows import Noun, RunFacts
from trainer.core.world import World
from trainer.features.predict.files import WrittenLines, shown_line, write_lines, write_table
from trainer.features.predict.opening import open_predictor
from trainer.features.predict.predictor import RecordPredictor
from trainer.report.console import Screen

_OF_FIGURES = ("data", "model", "transforms", "adapter", "tokenizer", "objective", "precision")
"""Sections of a config that figures depend on, beside weights and the length of answers."""


def predict_run(config: RunConfig, folder: Path, world: World, stop: Callable[[], bool]) -> int:
    """Predict every record of the data, and write a line for each into the run.

    Of records in a file of CSV that file is written, too, with a column for the predictions.
    """
    loaded = load_step(folder, config.step, world)
    saved = Saved.read(config, loaded, world)
    predictor = world.unless_stopped(lambda: open_predictor(config, saved, world))
    lines = predictor.lines()
    # Every rank computes its share as the first one writes.
    if not world.is_main:
        deque(lines, maxlen=0)
        return 0
    step = f"step{loaded.step}"
    if loaded.is_average:
        step += "-ema"
    file = folder / predictions_file(config, step)
    earlier = ""
    if file.exists():
        earlier = ", in place of earlier ones"
    written = write_lines(file, lines)
    files = [file]
    if (table := predictor.loader.dataset.facts.predicted_table) is not None:
        files.append(write_table(table, file, written))
    figures = dict[str, float]()
    for feature in run_features(config):
        figures.update(feature.scores(written.labelled))
    _show(loaded, predictor, written, files, earlier, figures)
    return 0


def predictions_file(config: RunConfig, step: str) -> str:
    """Name the file after its data, the step of the weights, and what else changes figures."""
    plain = to_plain(config)
    settings = {key: plain[key] for key in _OF_FIGURES}
    settings["generate_tokens"] = config.log.generate_tokens
    parts, path = ["predictions"], config.data.params.get("path")
    if isinstance(path, str):
        parts.append(re.sub(r"[^\w.-]+", "_", Path(path).stem)[:50])
    parts += [step, config_hash(settings)[:8]]
    return f"{'-'.join(filter(None, parts))}.jsonl"


def written_file(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Give Python the file that was written: of those of these settings the newest."""
    files = folder.glob(predictions_file(config, "step*"))
    return {"file": str(max(files, key=lambda file: file.stat().st_mtime_ns))}


def _show(
    loaded: Loaded,
    predictor: RecordPredictor,
    written: WrittenLines,
    files: Sequence[Path],
    earlier: str,
    figures: Mapping[str, float],
) -> None:
    """Say what was read, as what, where the predictions are, and of what there are none."""
    data, screen = predictor.loader.dataset, Screen()
    screen.name_checkpoint(loaded)
    noun: Noun = "token"
    if data.lengths.is_constant:
        noun = "sample"
    about = RunFacts(total_steps=0, world_size=predictor.world.size, noun=noun)
    texts = [row.text for row in data.facts.describe_records(about) if row.text]
    if texts:
        screen.line(f"data: {', '.join(texts)}")
    num_missing = sum(written.missing.values())
    if num_missing:
        reasons = first_of([f"{why} ({count:,})" for why, count in written.missing.items()])
        text = f"no prediction for {plural(num_missing, 'record')}: {reasons}"
        screen.warn(f"{text}; the first is {written.first_missing}")
    shown = " and ".join(map(shown_path, files))
    what = "prediction"
    if "loss" in written.names:
        what = "loss figure"
    count = plural(written.count - num_missing, what)
    screen.line(f"{loaded.short}: {count} written to {shown}{earlier}")
    if figures:
        texts = figure_texts(figures, {})
        count = plural(len(written.labelled), "record")
        screen.line(f"against the references of {count}: {', '.join(texts)}")
    for line in written.first:
        screen.line(f"  {shown_line(line)}")
    if written.count > len(written.first):
        screen.line("  ...")
    screen.close()

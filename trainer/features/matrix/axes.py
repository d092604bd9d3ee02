"""Give what each way of execution makes of a step, one change at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer.config.messages import clip
from trainer.core.durable import read_json
from trainer.core.errors import ConfigError, Preempted, TrainError
from trainer.core.out_of_memory import is_out_of_memory, release_memory
from trainer.core.run_folder import RunFolder
from trainer.features.matrix.compared import Reference, proven_word
from trainer.features.matrix.execution import compile_axis, packing_axis, recomputation_axis
from trainer.features.matrix.matrix import AxisFound
from trainer.features.matrix.numerics import kernel_axis, precision_axis
from trainer.training.batches import Feed, PlannedBatch
from trainer.training.context import StepContext
from trainer.verify.case import Case, copied
from trainer.verify.find_module import examine
from trainer.verify.report import VerifyReport


def compare_axes(
    context: StepContext, batch: PlannedBatch, feed: Feed, report: VerifyReport, folder: Path
) -> Mapping[str, AxisFound]:
    """Give what each way makes of the step, by its name."""
    dtype = getattr(torch, report.dtype)
    case, _ = examine(Case(context=copied(context, dtype), dtype=dtype, batch=batch, feed=feed))
    own = Reference.of(case)
    as_planned = f"{report.global_batch} samples as planned, with: {report.reference}"
    ways: Mapping[str, Callable[[], AxisFound]] = {
        "cut": partial(_reported, report.to_json(), as_planned),
        "ranks": partial(_ranks, folder),
        "packing": partial(packing_axis, context, own),
        "recomputation": partial(recomputation_axis, context, own),
        "kernel": partial(kernel_axis, own),
        "compile": partial(compile_axis, own),
        "precision": partial(precision_axis, context, own),
    }
    return {name: _tried(way) for name, way in ways.items()}


def _tried(way: Callable[[], AxisFound]) -> AxisFound:
    try:
        return way()
    except Preempted:
        raise
    except TrainError as error:
        text = str(error)
    except Exception as error:  # what is not made for it may raise anything
        text = clip(f"{type(error).__name__}: {error}")
        if is_out_of_memory(error):
            text = "memory ran out"
    release_memory()
    return AxisFound(verdict="not_there", reason=text)


def _ranks(folder: Path) -> AxisFound:
    """Read what two ranks have found, in processes of their own."""
    path = folder / RunFolder.VERIFY
    if not path.exists():
        raise ConfigError("a launcher began, or the model runs neither in float64 nor in float32")
    found = read_json(path)
    text = f"{found['global_batch']} samples over two ranks with one process, in one piece"
    return _reported(found, text)


def _reported(report: Mapping[str, Any], what: str) -> AxisFound:
    """Repeat what verify found, as verify.json has it."""
    error, dtype = report["max_relative_error"], report["dtype"]
    if report["error_without_draws"] is not None:
        error, what = report["error_without_draws"], f"{what}; without random draws"
    found = AxisFound(verdict=proven_word(getattr(torch, dtype)), reason=what)
    if report["verdict"] in {"not_exact", "not_proven"}:
        found = AxisFound(verdict="not_exact", **report["culprits"][0])
    return replace(found, measured=error, bound=report["limit"], dtype=dtype)

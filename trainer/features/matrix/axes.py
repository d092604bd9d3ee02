"""Give what each way of execution makes of a step, one change at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from trainer.config.messages import clip
from trainer.core.durable import read_json
from trainer.core.errors import ConfigError, TrainError
from trainer.core.out_of_memory import is_out_of_memory, release_memory
from trainer.core.run_folder import RunFolder
from trainer.features.matrix.compared import NotThere, Reference, proven_word
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
    ways: Mapping[str, Callable[[], AxisFound]] = {
        "cut": partial(_cut, report),
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
    except NotThere as reason:
        text = str(reason)
    except Exception as error:  # what is not made for it may raise anything
        if isinstance(error, TrainError) and not isinstance(error, ConfigError):
            raise
        text = clip(f"{type(error).__name__}: {error}")
        if is_out_of_memory(error):
            text = "memory ran out"
    release_memory()
    return AxisFound(verdict="not_there", reason=text)


def _cut(report: VerifyReport) -> AxisFound:
    """Repeat what verify found."""
    error, what = report.max_relative_error, f"{report.global_batch} samples as planned, with: "
    what += report.reference
    if report.error_without_draws is not None:
        error, what = report.error_without_draws, f"{what}; without random draws"
    if report.verdict in {"not_exact", "not_proven"}:
        module, reason = report.culprits[0]
        found = AxisFound(verdict="not_exact", reason=reason, module=module)
    else:
        found = AxisFound(verdict=proven_word(getattr(torch, report.dtype)), reason=what)
    return replace(found, measured=error, bound=report.limit, dtype=report.dtype)


def _ranks(folder: Path) -> AxisFound:
    """Read what two ranks have found, in processes of their own."""
    path = folder / RunFolder.VERIFY
    if not path.exists():
        raise NotThere("the model runs in neither float64 nor float32 there, or a launcher began")
    found = read_json(path)
    text = f"{found['global_batch']} samples over two ranks with one process, in one piece"
    axis = AxisFound(verdict=proven_word(getattr(torch, found["dtype"])), reason=text)
    if found["verdict"] != "exact":
        module = found["culprits"][0]
        axis = AxisFound(verdict="not_exact", **module)
    error, limit = found["max_relative_error"], found["limit"]
    return replace(axis, measured=error, bound=limit, dtype=found["dtype"])

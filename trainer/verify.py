"""Proof on the user's own model and data: the planned step equals the whole-batch step.

The gradient of one planned step is compared with that of the whole global batch in one piece, in
float64, where a wrong normalizer or a coupled layer stands out by ten orders of magnitude.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch

from trainer.culprits.case import Case, Errors
from trainer.culprits.find import Culprits
from trainer.culprits.scratch import Gradient, Groups, Scratch
from trainer.culprits.suspects import low_precision, suspects
from trainer.data.loader import Loader
from trainer.errors import DoesNotFitError
from trainer.feed import PlannedBatch
from trainer.report.records import VerifyReport
from trainer.step import Kit

PRECISIONS = ((torch.float64, True), (torch.float64, False), (torch.float32, False))
"""What is tried in turn: dtype, and whether hand-written casts to fewer bits are undone."""

MAX_WORST = 10


def verify(kit: Kit, batch: PlannedBatch, loader: Loader, *, whole_fits: bool) -> VerifyReport:
    """Compare the gradient of a planned step with the whole batch's.

    A step planned as one micro-batch is compared with its samples one by one, which proves more.
    Where they differ through its modules alone, it is the whole batch's step all the same.

    Args:
        kit: the run's; its model is copied, and the generators are put back.
        batch: the planned step.
        loader: gives the same samples in other groups.
        whole_fits: whether the whole batch in one piece fits into memory; if not, the reference
            is one sample per pass, summed, or the smallest groups that the model runs on.

    Returns:
        The largest relative error over parameters, the worst of them, and the culprits.

    Raises:
        DoesNotFitError: no reference fits in the precision of the comparison.
    """
    devices = [kit.world.device] if kit.world.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        scratch, planned = _highest(kit, batch)
        groups = Groups(batch, loader, kit.objective)
        num_samples = len(groups.positions)
        is_one_piece = batch.plan.num_micro_batches == 1
        case = Case(scratch=scratch, batch=batch, groups=groups, size=num_samples)
        case, expected = _referred(case, whole_first=whole_fits and not is_one_piece)
        errors = case.errors(planned, expected)
        if low_precision(kit) is not None:
            as_is = replace(case, scratch=Scratch.of(kit, None))
            errors = case.errors(as_is.planned(), expected)
        if errors.is_exact:
            return _report(case, errors, [])
        verdict = suspects(case, kit, planned, expected, traces_whole=whole_fits)
        if is_one_piece and verdict.is_modular:
            untouched = Scratch.of(kit, scratch.dtype, widens=scratch.widens)
            whole = replace(case, scratch=untouched, size=num_samples)
            whole_errors = whole.errors(planned, whole.expected())
            if whole_errors.is_exact:
                return _report(whole, whole_errors, [])
        return _report(case, errors, verdict.culprits)


def _highest(kit: Kit, batch: PlannedBatch) -> tuple[Scratch, Gradient]:
    """Compute the planned gradient in float64, or in fp32 where the model fixes its precision."""
    for dtype, widens in PRECISIONS[:-1]:
        scratch = Scratch.of(kit, dtype, widens=widens)
        # A model that fixes its precision may fail with any of these; fp32 tells the rest.
        with suppress(RuntimeError, TypeError, ValueError):
            return scratch, scratch.gradient(batch.micro_batches, kit.normalizer)
    scratch = Scratch.of(kit, PRECISIONS[-1][0])
    return scratch, scratch.gradient(batch.micro_batches, kit.normalizer)


def _referred(case: Case, *, whole_first: bool) -> tuple[Case, Gradient]:
    """Compute the best reference that the model runs on and the memory holds.

    Raises:
        DoesNotFitError: in none of them.
    """
    num_samples = case.size
    sizes = [2**power for power in range(num_samples.bit_length()) if 2**power < num_samples]
    for size in [num_samples, *sizes] if whole_first else [*sizes, num_samples]:
        sized = replace(case, size=size)
        # BatchNorm, for one, refuses a single value per channel; running out of memory is a
        # RuntimeError too.
        with suppress(RuntimeError, ValueError, AssertionError, IndexError):
            return sized, sized.expected()
    raise DoesNotFitError(
        "train verify: the model runs, or fits into memory in "
        f"{str(case.scratch.dtype).removeprefix('torch.')}, on no group of samples but the planned"
    )


def _report(case: Case, errors: Errors, culprits: Culprits) -> VerifyReport:
    return VerifyReport(
        exact=errors.is_exact,
        max_relative_error=errors.largest,
        reference=case.reference,
        dtype=str(case.scratch.dtype).removeprefix("torch."),
        worst=tuple(errors.worst[:MAX_WORST]),
        culprits=tuple(culprits),
        num_parameters=len(errors.by_name),
        micro_batches=case.batch.plan.num_micro_batches,
        global_batch=len(case.groups.positions),
    )

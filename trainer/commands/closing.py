"""How a run ended: the held-out loss beside baselines, where the time went, a generated sample."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from trainer.build.parts import Parts
from trainer.build.prepare import Prepared, workload
from trainer.commands.diagnosis import Facts, diagnose, overlap
from trainer.config.secrets import without_secrets
from trainer.data.samples import described
from trainer.models.sample import generate
from trainer.objectives.base import logits_of
from trainer.plan.memory import Shape
from trainer.plan.stats import describe
from trainer.report.breakdown import Breakdown, Effort, heard
from trainer.report.records import RunSummary, is_raw
from trainer.report.run_status import to_go_on, trusting
from trainer.training.loop import Trained
from trainer.tune.memory_limit import peak_bytes
from trainer.tune.overhead import fixed_share

_log = logging.getLogger(__name__)

SAMPLE_TOKENS = 160

MANY = 2
"""Micro-batches of a rank in a step, from which their size can be a matter of time."""

LONG_S = 0.25
"""A micro-batch that takes longer is not small."""


def summarize_end(
    prepared: Prepared,
    trained: Trained,
    folder: Path,
    seconds: float,
    ranks: Sequence[Mapping[str, Any]],
) -> RunSummary:
    """Gather what a person wants to know at the end.

    Args:
        prepared: what the run is made of, and how it is cut.
        trained: where the loop ended.
        folder: the run folder.
        seconds: wall time of the command so far.
        ranks: what each of them told of its time.
    """
    parts = prepared.parts
    facts = _facts(prepared, *heard(ranks)) if trained.effort.steps else None
    simple, lengths = baselines(parts), parts.source.lengths
    is_noise = is_raw(trained.evaluation.get("loss"), simple)
    return RunSummary(
        step=trained.step,
        steps=parts.total_steps,
        epochs=parts.config.total_epochs,
        loss=None if trained.loss is None else float(trained.loss),
        metrics=trained.evaluation,
        seconds=seconds,
        tokens_per_second=trained.tokens / trained.seconds if trained.seconds else None,
        folder=folder,
        goes_on=to_go_on(parts.config, folder),
        taken=trained.effort.steps,
        noun="sample" if int(lengths.sum()) == len(lengths) else "token",
        baselines=simple,
        sample=None if is_noise else sample_text(parts),
        peak_bytes=peak_bytes(parts.world.device),
        peak_of="tensors" if parts.world.device.type == "cuda" else "the whole process",
        skipped_steps=trained.skipped_steps,
        replays=trained.replays,
        trust=tuple(trusting(parts.config, folder)),
        unit="nats" if parts.config.objective.target.startswith("trainer.") else None,
        time=None if facts is None else facts.breakdown,
        advice=() if facts is None else diagnose(facts),
    )


def _facts(prepared: Prepared, breakdown: Breakdown, efforts: tuple[Effort, ...]) -> Facts:
    parts, plans = prepared.parts, prepared.plans
    cost = prepared.tuning.cost if prepared.tuning is not None else parts.layout.cost
    layout = replace(parts.layout, cost=cost)
    return Facts(
        breakdown=replace(breakdown, overlap=overlap(parts.parallel.sync, parts.world.device.type)),
        efforts=efforts,
        cost=cost,
        imbalance=fmean(1.0 - 1.0 / describe(plan, layout).imbalance for plan in plans),
        num_workers=parts.num_workers,
        parallel=parts.parallel,
        fixed_share=_fixed_share(prepared, breakdown, efforts[0]),
        cut=parts.config.accum.name or "",
        is_tight=prepared.predicted is None
        or prepared.limit_bytes is None
        or 2 * prepared.predicted.peak_bytes > prepared.limit_bytes,
        device_type=parts.world.device.type,
    )


def _fixed_share(prepared: Prepared, breakdown: Breakdown, effort: Effort) -> float | None:
    """Find what share of computing does not depend on the size of micro-batches.

    It is measured where tuning has not. Where micro-batches are few or take long it cannot
    matter, and is not asked.
    """
    tuning, count = prepared.tuning, effort.micro_batches
    if tuning is not None and tuning.cost.seconds_per_token is not None:
        return tuning.cost.fixed * count / effort.steps / effort.cost(tuning.cost)
    each = breakdown.ranks[0].compute * effort.steps / max(1, count)
    if count < MANY * effort.steps or each > LONG_S:
        return None
    shapes = prepared.plans[0]
    rank, slot = next(shapes.slots())
    samples = max(1, len(shapes.ranks[rank][slot]))
    return fixed_share(
        workload(prepared.parts), Shape(samples, -(-shapes.positions(rank, slot) // samples))
    )


def baselines(parts: Parts) -> Mapping[str, float]:
    """Ask the data for held-out losses of simple models, in nats per token."""
    entropies = getattr(parts.train_set, "byte_entropies", None)
    if entropies is None or parts.held_out is None:
        return {}
    return {f"byte {name}": value for name, value in asdict(entropies()).items()}


def sample_text(parts: Parts) -> str | None:
    """Let the model write a little, where the data can read it back; None where it fails.

    A run that ended well ends well: its weights may give no probabilities, the data's `decode` is
    the user's, and memory may be short.
    """
    decode = getattr(parts.train_set, "decode", None)
    start = getattr(parts.train_set, "start_id", None)
    if decode is None or start is None:
        return None

    def call(ids: Tensor) -> Tensor:
        return logits_of(parts.call({"input_ids": ids}))

    was_training = parts.module.training
    parts.module.eval()
    try:
        ids = generate(
            call,
            [start],
            SAMPLE_TOKENS,
            context=int(parts.source.lengths.max()),
            seed=parts.config.seed,
            stop_id=getattr(parts.train_set, "stop_id", None),
            device=parts.world.device,
        )
        return str(decode(ids))
    except Exception as error:
        _log.warning("no sample: %s", without_secrets(described(error), os.environ))
        return None
    finally:
        parts.module.train(was_training)

"""Say what the BatchNorm layers of a run normalise over, and what differs from the whole batch."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.assemble.run_plan import RunPlan
from trainer.config.messages import first_of
from trainer.core.format import number, plural
from trainer.core.rows import Row, row
from trainer.features.batch_norm.layers import layers_of
from trainer.plan.cut import Plan


def batch_norm_rows(run_plan: RunPlan, precise: int | None) -> Sequence[Row]:
    """Say what is normalised over what; of a model without BatchNorm there is nothing to say."""
    run = run_plan.run
    if not (layers := layers_of(run.model.module)):
        return [row(batchnorm=None)]
    scope = layers[0].mode.scope(_samples(run_plan.plans[0]), run.world.size)
    again = f"; for evaluations estimated again over {number(precise)} samples" if precise else ""
    text = f"{plural(len(layers), 'layer')}, {scope}{again}"
    return [row("BatchNorm", text, batchnorm=scope)]


def batch_norm_notes(run_plan: RunPlan) -> list[str]:
    """Name the layers for `train verify`, and say what the mode has them normalise over."""
    module = run_plan.run.model.module
    if not (layers := layers_of(module)):
        return []
    names = [name for name, part in module.named_modules() if part in layers]
    scope = layers[0].mode.scope(_samples(run_plan.plans[0]), run_plan.run.world.size)
    return [f"BatchNorm normalises {scope}: {first_of(names)}"]


def batch_norm_warnings(run_plan: RunPlan, default_group: int) -> list[str]:
    """Warn of statistics of micro-batches that nobody has asked for."""
    run, plan = run_plan.run, run_plan.plans[0]
    layers = layers_of(run.model.module)
    if not layers or not layers[0].coupling.fixes_cut or plan.num_micro_batches == 1:
        return []
    most = max(len(ids) for own in plan.ranks for ids in own)
    group = f" batchnorm.group={most}" * (most > 1 and most % default_group > 0)
    each = f"{plural(plan.accum_steps, 'time')} a step"
    whose = ", by those of rank 0 alone" * (run.world.size > 1)
    return [
        f"BatchNorm normalises over {_samples(plan)} samples, the micro-batches of one rank, and "
        f"not over the {number(plan.num_samples)} of the step, and its running statistics move "
        f"{each}{whose}: so the step depends on accum.micro; batchnorm=ghost{group} depends on no "
        "cut, batchnorm=pooled moves them once a step, and batchnorm=micro accepts this"
    ]


def _samples(plan: Plan) -> str:
    """Write the samples of a micro-batch: `8`, or `6 to 12`."""
    counts = [len(ids) for own in plan.ranks for ids in own if len(ids)]
    low, high = min(counts), max(counts)
    return number(low) if low == high else f"{number(low)} to {number(high)}"

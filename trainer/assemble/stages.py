"""Check and describe the stages of a run: the steps in a row that have the same size."""

from __future__ import annotations

from typing import Any

from trainer.assemble.run import Run
from trainer.core.errors import ConfigError
from trainer.core.format import number, plural
from trainer.core.rows import Row, join_parts, row
from trainer.objectives.coupled import CoupledObjective
from trainer.optim.described import changes
from trainer.plan.order import Stage

MOST_SHOWN = 16


def check_stages(run: Run) -> None:
    """Refuse a stage that leaves a rank, or a group of samples, without its share."""
    shares = {
        run.world.size: "ranks, each of which needs a sample",
        run.model.coupling.size: "samples of a group, which is normalised together",
    }
    objective = run.model.objective
    if isinstance(objective, CoupledObjective):
        shares[objective.min_samples] = f"samples that {type(objective).__name__} compares"
    for stage in run.data.stages if run.config.batch.unit == "samples" else ():
        for least, of_what in shares.items():
            if stage.size < least:
                text = f"a stage of {stage.size} samples is below the {least} {of_what}"
                raise ConfigError(f"batch: {text}; type {least} or more")


def stage_rows(run: Run) -> list[Row]:
    """Give a row for each stage; none where all steps have one size, or sizes are no stages."""
    stages, found = run.data.stages, list[Row]()
    if len(stages) > MOST_SHOWN:
        return []
    known = [_values(run, stage) for stage in stages]
    for each in known:
        lr, unit = each["lr"], run.config.batch.unit.rstrip("s")
        before, schedule = run.model.spec.lr, run.model.schedule
        by = f"{each['size']}/{schedule.reference_batch}"
        by = {"linear": by, "sqrt": f"sqrt({by})"}.get(schedule.scale, f"{lr / before:.3g}")
        rate = f"lr {lr:.3g}" + f" ({before:.3g} x {by})" * (lr != before)
        begin = f"from step {number(each['step'])} (sample {number(each['samples'])})"
        text = join_parts(
            f"{begin}: {plural(each['size'], unit)}",
            plural(each["steps"], "step"),
            plural(each["accum_steps"], "accumulation step"),
            rate,
            each.pop("half_lives"),
        )
        found.append(row("" if found else "stages", text))
    return [*found, row(stages=known)]


def _values(run: Run, stage: Stage) -> dict[str, Any]:
    """Give what plan.json has of a stage; the cut is that of one of its steps, of epoch 1."""
    order, lengths = run.data.order, run.data.lengths
    plan = run.cut.cut(lengths[order.batch_of(stage.size)], run.layout)
    at, schedule, spec = order.position(stage.first), run.model.schedule, run.model.spec
    scale, now = run.model.lr_scale(run.data.order, stage.first), spec
    if schedule.keep_half_life and schedule.reference_batch:
        now = spec.for_batch(stage.size / schedule.reference_batch, scale)
    changed, text = changes(spec, now)
    return {
        "step": at.step + 1,
        "samples": at.samples,
        "epoch": at.epochs,
        "size": stage.size,
        "steps": stage.num_steps,
        "accum_steps": plan.accum_steps,
        "micro_batches": plan.num_micro_batches,
        "lr": spec.lr * scale,
        "followed_batch": changed,
        "half_lives": text,
    }

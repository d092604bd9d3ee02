"""Describe a run in rows, before anything is trained: the start block and plan.json."""

from __future__ import annotations

from itertools import chain
from statistics import fmean
from typing import Any

from trainer.assemble.run import MOST_STAGES, Run
from trainer.assemble.run_plan import RunPlan
from trainer.assemble.summary_model import dtypes_of, model_rows, model_warnings, tokenizer_rows
from trainer.config.amounts import cadence_steps, warmup_steps
from trainer.config.run_config import RunConfig
from trainer.config.validate import defaults_row
from trainer.core import gpu
from trainer.core.format import duration, number, percent, plural
from trainer.core.rows import Noun, Row, RunFacts, join_parts, row
from trainer.data.described import data_rows
from trainer.data.split import OWN_PART
from trainer.optim.described import changes, default_row, optimizer_rows
from trainer.tune.flops import time_note
from trainer.tune.peak_bytes import memory_rows

_LOSSES = {
    "tokens": "one mean over all labels of the batch",
    "samples": "the sum of its losses over its samples",
    "micro_batches": "the mean of the micro-batches' means",
}
"""What the loss of a step is, by `batch.normalizer`."""


def describe_run(run_plan: RunPlan) -> list[Row]:
    """Describe a run in rows, in the order in which a person reads them.

    Numbers of micro-batches and the padding are those of step 1, sizes are those of one rank, and
    None is what is not known.
    """
    run, config, order = run_plan.run, run_plan.run.config, run_plan.run.data.order
    lengths = run.data.lengths
    noun: Noun = "token"
    # Samples of one token each, such as images, have nothing else to count.
    if int(lengths.sum()) == len(lengths):
        noun = "sample"
    ranks, steps = run.world.size, run.data.total_steps
    facts = RunFacts(total_steps=steps, world_size=ranks, noun=noun)
    setup, objective = run.model.setup, run.model.objective
    others = run.model.strategy, run.model.schedule, run.model.spec, setup.sync, setup
    chosen, limit, tuning = run.chosen.text, run_plan.limit_bytes, run_plan.tuning
    candidates = list[dict[str, Any]]()
    if tuning is not None:
        candidates = [each.to_json(limit) for each in tuning.candidates]
    over = config.batch.normalizer
    # Classes that were named by their path, and stand in no other row.
    named = list[str]()
    for each in (config.batch, config.accum.gradient, config.sync):
        if not each.name:
            named.append(each.target)
    named += [each.target for each in (*config.transforms, *config.parts, *config.hooks)]
    # Of what is held out, only what comes from other data is described.
    elsewhere = [OWN_PART] * (config.data.eval_path is not None) + [*config.eval.sets]
    held_out = {name: part.loader.dataset for name, part in run.data.held_out.items()}
    return [
        *_batch(run_plan, facts),
        *model_rows(run_plan),
        *tokenizer_rows(run),
        *data_rows(config.data, run.data.train, held_out, elsewhere, facts),
        row("objective", chosen, group="asked", objective=chosen),
        *objective.describe(facts),
        row("loss", _LOSSES[over], normalizer=over),
        *_length(run),
        *optimizer_rows(run.model.spec, run.model.module, run.model.lr_scale(order, order.start)),
        defaults_row(config, run.chosen_optimizer.by_job),
        row("with", join_parts(*named), named_classes=named),
        *_cut(run_plan, facts),
        *memory_rows(run_plan.predicted, limit, ranks, is_here=run_plan.is_here),
        *_time(run_plan),
        *chain.from_iterable(feature.rows(run_plan) for feature in run.features),
        *_epoch(run_plan, facts),
        *chain.from_iterable(part.describe(facts) for part in others),
        row(shapes=run_plan.plans[0].shapes, candidates=candidates),
        row(warnings=_warnings(run_plan)),
    ]


def _batch(run_plan: RunPlan, facts: RunFacts) -> list[Row]:
    """Say how large the global batch is, and what becomes of an epoch's last samples."""
    run = run_plan.run
    batch, order = run.config.batch, run.data.order
    size, few, left = order.size_of(order.start), "the last few samples", 0
    # Of tokens, and where sizes vary, which samples are left depends on the epoch.
    if batch.unit == "samples" and order.sizes.is_constant:
        left = len(run.data.lengths) % size
    if left:
        few = f"the last {plural(left, 'sample')}"
    text = f"{plural(size, batch.unit.rstrip('s'))} a step"
    if batch.unit == "tokens":
        text += ", or just above"
    elif size > len(run.data.lengths):
        text = f"{plural(len(run.data.lengths), 'sample')} a step: there are fewer than {size:,}"
    if not order.sizes.is_constant:
        text += f" at first, {number(order.sizes.largest)} at most"
    # Another loss than one mean over all that the batch holds is another step.
    if batch.normalizer != "tokens":
        text += f"; {_LOSSES[batch.normalizer]}"
    ends = "in a step with a normaliser of its own"
    if batch.tail == "drop":
        ends = "left out"
    tail = f"{batch.tail}: {few} of an epoch, {ends}"
    return [
        row("batch", text, group="asked", global_batch=size, unit=batch.unit),
        *order.sizes.describe(facts),
        *_stages(run),
        row("tail", tail, tail=batch.tail, tail_size=left),
    ]


def _cut(run_plan: RunPlan, facts: RunFacts) -> list[Row]:
    """Say what the global batch is cut into, and how large a micro-batch may be."""
    run, plan, how = run_plan.run, run_plan.plans[0], run_plan.how
    counts = {"accum_steps": plan.accum_steps, "micro_batches": plan.num_micro_batches}
    label, largest = "", None
    if run.cut.hard_cap:
        noun = "padded token" if facts.noun == "token" else facts.noun
        label = "largest"
        largest = f"micro-batch of {plural(run.cut.hard_cap, noun)}, {how}"
    return [
        row("cut", plan.product, group="computed", world_size=run.world.size, **counts),
        row(label, largest, group="computed", cap_source=run_plan.details),
        row("", run_plan.details),
        *run.cut.describe(facts),
        row(lockstep=run.layout.lockstep),
    ]


def _stages(run: Run) -> list[Row]:
    """Give a row for each stage; none where all steps have one size, or sizes are no stages.

    The cut is that of one of its steps, of epoch 1.
    """
    order, lengths, schedule = run.data.order, run.data.lengths, run.model.schedule
    base, reference = run.model.spec, schedule.reference_batch
    unit = run.config.batch.unit.rstrip("s")
    if len(run.data.stages) > MOST_STAGES:
        return []
    rows, records = list[Row](), list[dict[str, Any]]()
    for stage in run.data.stages:
        plan = run.cut.cut(lengths[order.batch_of(stage.size)], run.layout)
        at, scale = order.position(stage.first), run.model.lr_scale(order, stage.first)
        spec, lr = base, base.lr * scale
        if schedule.keep_half_life and reference:
            spec = base.for_batch(stage.size / reference, scale)
        changed, half_lives = changes(base, spec)
        records.append(
            {
                "step": stage.first.step + 1,
                "samples": at.samples,
                "epoch": at.epochs,
                "size": stage.size,
                "steps": stage.num_steps,
                "accum_steps": plan.accum_steps,
                "micro_batches": plan.num_micro_batches,
                "lr": lr,
                "followed_batch": changed,
            }
        )
        ratio = f"{stage.size}/{reference}"
        factors = {"linear": ratio, "sqrt": f"sqrt({ratio})"}
        factor = factors.get(schedule.scale, f"{lr / base.lr:.3g}")
        rate = f"lr {lr:.3g}" + f" ({base.lr:.3g} x {factor})" * (lr != base.lr)
        first = number(stage.first.step + 1)
        begin = f"from step {first} (sample {number(at.samples)})"
        text = join_parts(
            f"{begin}: {plural(stage.size, unit)}",
            plural(stage.num_steps, "step"),
            plural(plan.accum_steps, "accumulation step"),
            rate,
            half_lives,
        )
        rows.append(row("" if rows else "stages", text))
    return [*rows, row(stages=records)]


def _length(run: Run) -> list[Row]:
    """Express the length of the run in steps and epochs, and give its learning rate."""
    steps, per_epoch = run.data.total_steps, run.data.order.steps_per_epoch
    epochs, config = steps / per_epoch, run.config
    if stages := run.data.stages:
        epochs = run.data.order.fractional_epoch(stages[-1].end)
    length = f"{epochs:.2f} epochs"
    if float(epochs).is_integer():
        length = plural(epochs, "epoch")
    text = f"{number(steps)} = {length}, {plural(per_epoch, 'step')} per epoch"
    lr = run.model.spec.lr * run.model.lr_scale(run.data.order, run.data.order.start)
    optimizer, scheduler = config.optimizer.label, config.scheduler.label
    warmup = warmup_steps(run.model.schedule.warmup, steps)
    share = f"{plural(warmup, 'step')} of warm-up ({percent(warmup / steps)})"
    is_default = " (default)" * ("optimizer.lr" in config.unset)
    rate = join_parts(f"{lr:g}{is_default}", optimizer, scheduler, warmup and share)
    chosen = run.chosen_optimizer
    typed = chosen.reference or chosen.spec  # before the global batch changed it
    followed, changed = changes(typed, chosen.spec)
    return [
        row("steps", text, group="asked", steps=steps, steps_per_epoch=per_epoch, epochs=epochs),
        row(
            "learning rate",
            rate,
            group="asked",
            lr=lr,
            optimizer=optimizer,
            scheduler=scheduler,
            warmup_steps=warmup,
        ),
        default_row(optimizer, typed, chosen.by_job, chosen.why),
        row("half-life", changed, followed_batch=followed),
    ]


def _time(run_plan: RunPlan) -> list[Row]:
    """Give the time of a step, and what it is computed on."""
    run, seconds = run_plan.run, run_plan.step_seconds
    config, here = run.config, run.world.device
    note = time_note(
        *(config.device, run.model.product_word, seconds),
        is_tuned=run_plan.tuning is not None,
        is_here=run_plan.is_here,
    )
    total = seconds and not run.data.stages and duration(seconds * run.data.total_steps)
    each = seconds and f"about {duration(seconds)} per step"
    text = join_parts(each, total and f"{total} in all", note)
    device = str(here)
    if run.planned_device.type != here.type:
        device = f"{config.device} (not here)"
    workers = run.data.loader.num_workers
    loading = plural(workers, "loading process") + " each" * (run.world.size > 1)
    mode = run.world.size > 1 and run.model.setup.mode
    means = join_parts(device, dtypes_of(run)["compute"], mode, workers and loading)
    values = {"device": device, "precision": run.model.precision, "num_workers": workers}
    return [
        row("time", text, group="computed", step_seconds=seconds, time_note=note),
        row("device", means, group="computed", **values),
    ]


def _epoch(run_plan: RunPlan, facts: RunFacts) -> list[Row]:
    """Give means over the steps that were sampled, as cuts vary, and how often what is done."""
    plans, run = run_plan.plans, run_plan.run
    means = {
        "micro_batches": fmean(plan.num_micro_batches for plan in plans),
        "accum_steps": fmean(plan.accum_steps for plan in plans),
        "padding": fmean(plan.padding for plan in plans),
        "tokens": fmean(int(plan.lengths.sum()) for plan in plans),
        "steps": float(len(plans)),
    }
    text = join_parts(
        f"mean of {number(len(plans))} steps: {plural(round(means['tokens']), facts.noun)}",
        plural(round(means["micro_batches"], 1), "micro-batch"),
        f"{percent(means['padding'])} padding",
    )
    shown: str | None = text
    # The rows of stages say it of each of them.
    if len(plans) == 1 or run.data.stages:
        shown = None
    padding = plans[0].padding
    first = f"{percent(padding)} of the computed positions in step 1"
    return [
        row("padding", first, padding=padding),
        row("epoch", shown, epoch_means=means),
        _cadence(run.config, facts.total_steps, evaluates=bool(run.data.held_out)),
    ]


def _cadence(config: RunConfig, total_steps: int, *, evaluates: bool) -> Row:
    """Say how often something is done: after so many steps, in a time such as `10min`, or once."""
    often: dict[str, float | str | None] = {"log": config.log.every}
    if evaluates:
        often["evaluate"] = config.eval.every
    often["checkpoint"] = config.checkpoint.every
    times = list[str]()
    for name, every in often.items():
        text = "at the end"
        if isinstance(every, str):
            text = f"every {every}"
        elif every is not None:
            steps = often[name] = cadence_steps(every, total_steps)
            if steps <= total_steps:
                text = f"every {plural(steps, 'step')}"
        times.append(f"{name} {text}")
    return row("cadence", join_parts(*times), cadences=often)


def _warnings(run_plan: RunPlan) -> list[str]:
    """Name what makes the step another one than a user may think it is."""
    run, unit = run_plan.run, run_plan.run.config.batch.unit
    warnings, order = [*run.split.warnings, *run_plan.warnings], run.data.order
    if stages := run.data.stages:
        begins = [order.position(stage.first) for stage in stages]
        warnings += order.sizes.warnings(begins, order.position(stages[-1].end))
    lengths, asked = run.data.lengths, order.sizes.largest
    device = run.planned_device
    named = "batch.global=" if order.sizes.is_constant else "a stage of "
    is_open = run.config.precision == "auto"
    if is_open and run.model.precision == "bf16" and not gpu.has_fast_bf16(device):
        warnings.append(
            f"precision=bf16, in which the run began, is slow on this {device.type}; to go on in "
            "fp32: precision=fp32 resume_allow=[precision]"
        )
    there = len(lengths)
    if unit == "tokens":
        there = int(lengths.sum())
    if asked > there:
        # The largest power of two that leaves ten steps an epoch.
        tenth = 1 << max(1, there // 10).bit_length() - 1
        warnings.append(
            f"{named}{asked} is more than the {there:,} {unit} of an epoch, so each step uses the "
            f"whole epoch; set {named}{tenth} for {plural(there // tenth, 'step')} an epoch"
        )
    if idle := min(plan.ranks.count(()) for plan in run_plan.plans):
        text = f"no sample in a step for {number(idle)} of {plural(run.world.size, 'rank')}"
        warnings.append(f"{named}{asked}: {text}; type a larger one, or fewer ranks")
    pieces = max(p.num_micro_batches for p in run_plan.plans)
    warnings += model_warnings(run_plan, pieces)
    if run.model.coupling.warning and pieces > 1:
        warnings.append(run.model.coupling.warning)
    objective = run.model.objective
    if objective.coupling.kind == "batch" and run.data.held_out and not objective.gives_rows:
        warnings.append(
            f"objective: {type(objective).__name__} couples all samples of a step, but "
            "an evaluation sums over its own micro-batches, so held-out losses depend on the cut"
        )
    return warnings

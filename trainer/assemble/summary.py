"""Describe a run in rows, before anything is trained: the start block and plan.json."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from statistics import fmean
from typing import Any

from trainer.assemble.hardware import has_fast_bf16
from trainer.assemble.run import Run
from trainer.assemble.run_plan import RunPlan
from trainer.assemble.stages import stage_rows, stage_warnings
from trainer.assemble.summary_data import data_rows
from trainer.assemble.summary_model import dtypes_of, model_rows, model_warnings, tokenizer_rows
from trainer.assemble.summary_rates import by_job_row, defaults_row, group_rows, half_life_row
from trainer.config.amounts import cadence_steps, warmup_steps
from trainer.config.cards import card_of
from trainer.config.run_config import RunConfig
from trainer.core.format import duration, number, percent, plural, size
from trainer.core.rows import Noun, Row, RunFacts, join_parts, row
from trainer.tune.flops import PEAK_SHARE

MEMORY_PARTS = ("parameters", "gradients", "optimizer_state", "average", "activations", "buffers")


def describe_run(run_plan: RunPlan) -> list[Row]:
    """Describe a run in rows, in the order in which a person reads them.

    Numbers of micro-batches and the padding are those of step 1, sizes are those of one rank, and
    None is what is not known.
    """
    run, lengths = run_plan.run, run_plan.run.data.lengths
    noun: Noun = "sample" if int(lengths.sum()) == len(lengths) else "token"
    ranks, steps = run.world.size, run.data.total_steps
    facts = RunFacts(total_steps=steps, world_size=ranks, noun=noun)
    setup, objective, how = run.model.setup, run.model.objective, run_plan.how
    others = run.model.strategy, run.model.schedule, run.model.spec, setup.sync, setup
    chosen, has_cap = run.chosen.text, bool(run.cut.hard_cap)
    return [
        *_batch(run_plan, facts),
        *run.cut.describe(facts),
        row("" if has_cap else "cut", how, is_dim=has_cap, cap_source=how),
        row("objective", chosen, objective=chosen),
        *objective.describe(facts),
        _loss(run.config.batch.normalizer),
        *model_rows(run_plan),
        *group_rows(run),
        _named(run.config),
        *tokenizer_rows(run),
        *data_rows(run, facts),
        *_memory(run_plan, facts),
        *_length(run),
        defaults_row(run),
        *_time(run_plan),
        *_epoch(run_plan, facts),
        *chain.from_iterable(part.describe(facts) for part in others),
        row(shapes=_shapes(run_plan), candidates=_candidates(run_plan)),
        row(warnings=_warnings(run_plan)),
    ]


def _batch(run_plan: RunPlan, facts: RunFacts) -> list[Row]:
    """Say what the global batch is cut into, and what becomes of an epoch's last samples."""
    run, plan = run_plan.run, run_plan.plans[0]
    batch, order = run.config.batch, run.data.order
    num_samples = len(run.data.lengths)
    ranks, size = run.world.size, order.size_of(order.start)
    # Of tokens, and where sizes vary, which samples are left depends on the epoch.
    is_known = batch.unit == "samples" and order.sizes.is_constant
    left = num_samples % size if is_known else 0
    few = f"the last {plural(left, 'sample')}" if left else "the last few samples"
    end = "left out" if batch.tail == "drop" else "in a step with a normaliser of its own"
    counts = [len(plan.ranks[rank][slot]) for rank, slot in plan.slots()]
    whole = f"{plural(size, 'token')} or just above" if batch.unit == "tokens" else None
    equation = batch_equation(counts, ranks, plan.accum_steps, whole)
    return [
        row("batch", equation, global_batch=size, unit=batch.unit, world_size=ranks),
        *order.sizes.describe(facts),
        *stage_rows(run),
        row(accum_steps=plan.accum_steps, micro_batches=plan.num_micro_batches),
        row(lockstep=run.layout.lockstep),
        row("tail", f"{batch.tail}: {few} of an epoch, {end}", in_plan=True, tail=batch.tail),
        row(tail_size=left),
    ]


def _loss(normalizer: str) -> Row:
    """Say what the sum of the losses is divided by."""
    text = "mean of the micro-batches' means (not the whole-batch step)"
    if normalizer != "micro_batches":
        over = "loss terms" if normalizer == "tokens" else normalizer
        text = f"sum over the whole global batch / its {over}"
    return row("loss", text, normalizer=normalizer)


def batch_equation(
    counts: Sequence[int], world_size: int, accum_steps: int, whole: str | None = None
) -> str:
    """Write the global batch as what it is cut into: `512 samples = 1 rank x 11 micro-batches`.

    `counts` are the samples of every micro-batch of all ranks; `whole` is the global batch in
    words.
    """
    low, high, ranks = min(counts), max(counts), plural(world_size, "rank")
    right = f"{ranks} x {plural(accum_steps, 'micro-batch')}"
    if world_size * accum_steps != len(counts):
        right = f"{plural(len(counts), 'micro-batch')} over {ranks}, at most {accum_steps} each"
    each = f"{number(low)} to {number(high)} samples" if low < high else plural(low, "sample")
    times = "x" if low == high and whole is None else "of"
    return f"{whole or plural(sum(counts), 'sample')} = {right} {times} {each}"


def _named(config: RunConfig) -> Row:
    """Name the classes that were named by their path and stand in no other row."""
    typed = [each for each in (config.batch, config.accum.gradient, config.sync) if not each.name]
    names = [each.target for each in (*typed, *config.transforms, *config.parts, *config.hooks)]
    return row("with", join_parts(*names), named_classes=names)


def _memory(run_plan: RunPlan, facts: RunFacts) -> list[Row]:
    """Set the predicted need beside the limit; either may be unknown."""
    predicted, limit = run_plan.predicted, run_plan.limit_bytes
    peak = predicted and predicted.peak_bytes
    text = limit and f"limit {size(limit)}, usage not predicted"
    if peak is not None:
        share = f"{percent(peak / limit)} of {size(limit)}" if limit else "limit unknown"
        text = f"{size(peak)} of tensors predicted, {share}"
    note = None if run_plan.is_here else "an estimate for a machine that is not here"
    shown = text and join_parts(text + " per rank" * (facts.world_size > 1), note)
    names = MEMORY_PARTS if predicted else ()
    parts = {name.replace("_", " "): getattr(predicted, name) for name in names}
    terms = " + ".join(f"{name} {size(count)}" for name, count in parts.items() if count)
    return [
        row("memory", shown or None, predicted_peak_bytes=peak, memory_limit_bytes=limit),
        row("peak", terms or None, in_plan=True, is_dim=True, memory_parts=parts, memory_note=note),
    ]


def _length(run: Run) -> list[Row]:
    """Express the length of the run in steps and epochs, and give its learning rate."""
    steps, per_epoch = run.data.total_steps, run.data.order.steps_per_epoch
    epochs, config = steps / per_epoch, run.config
    if stages := run.data.stages:
        epochs = run.data.order.fractional_epoch(stages[-1].end)
    text = plural(epochs, "epoch") if float(epochs).is_integer() else f"{epochs:.2f} epochs"
    text = f"{number(steps)} = {text}, {plural(per_epoch, 'step')} per epoch"
    lr = run.model.spec.lr * run.model.lr_scale(run.data.order, run.data.order.start)
    optimizer, scheduler = (c.name or c.target for c in (config.optimizer, config.scheduler))
    warmup = warmup_steps(run.model.schedule.warmup, steps)
    share = f"{plural(warmup, 'step')} of warm-up ({percent(warmup / steps)} of the run)"
    rate = join_parts(f"{lr:g}", optimizer, scheduler, warmup and share)
    return [
        row("steps", text, steps=steps, steps_per_epoch=per_epoch, epochs=epochs),
        row("lr", rate, lr=lr, optimizer=optimizer, scheduler=scheduler, warmup_steps=warmup),
        by_job_row(run, optimizer),
        half_life_row(run),
    ]


def _time(run_plan: RunPlan) -> list[Row]:
    """Give the time of a step, and what it is computed on."""
    run, seconds, note = run_plan.run, run_plan.step_seconds, _time_note(run_plan)
    total = seconds and not run.data.stages and duration(seconds * run.data.total_steps)
    each = seconds and f"about {duration(seconds)} per step"
    text = join_parts(each, total and f"{total} in all", note)
    config, here = run.config, run.world.device
    is_away = run.planned_device.type != here.type
    device = f"{config.device} (not here)" if is_away else str(here)
    workers = run.data.loader.num_workers
    loading = plural(workers, "loading process") + " each" * (run.world.size > 1)
    means = join_parts(device, dtypes_of(run)["compute"], workers and loading)
    return [
        row("time", text, step_seconds=seconds, time_note=note),
        row("compute", means, device=device, precision=run.model.precision, num_workers=workers),
    ]


def _epoch(run_plan: RunPlan, facts: RunFacts) -> list[Row]:
    """Give means over the steps that were sampled, since cuts vary, and how often what is done."""
    plans, run, config = run_plan.plans, run_plan.run, run_plan.run.config
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
    padding = plans[0].padding
    first = f"{percent(padding)} of the computed positions in step 1"
    often: dict[str, float | str | None] = {"log": config.log.every}
    if run.data.held_out:
        often["evaluate"] = config.eval.every
    often["checkpoint"] = config.checkpoint.every
    cadences = {
        name: e if e is None or isinstance(e, str) else cadence_steps(e, facts.total_steps)
        for name, e in often.items()
    }
    times = (f"{name} {_cadence(e, facts.total_steps)}" for name, e in cadences.items())
    return [
        row("padding", first, in_plan=True, padding=padding),
        row(
            "epoch",
            text if len(plans) > 1 and not run.data.stages else None,
            in_plan=True,
            epoch_means=means,
        ),
        row("cadence", join_parts(*times), in_plan=True, cadences=cadences),
    ]


def _cadence(every: int | str | None, steps: int) -> str:
    """Say when something is done: after so many steps, in a time such as `10min`, or once."""
    if every is None or (isinstance(every, int) and every > steps):
        return "at the end"
    return f"every {plural(every, 'step') if isinstance(every, int) else every}"


def _shapes(run_plan: RunPlan) -> list[dict[str, Any]]:
    """List the micro-batches of step 1; under packing a length is that of the row."""
    plan = run_plan.plans[0]
    return [
        {
            "rank": rank,
            "num_samples": len(plan.ranks[rank][slot]),
            "length": plan.padded_lengths[rank][slot],
            "packed": plan.packed,
            "num_tokens": plan.num_tokens(rank, slot),
        }
        for rank, slot in plan.slots()
    ]


def _candidates(run_plan: RunPlan) -> list[dict[str, Any]]:
    """List the caps that tuning weighed."""
    limit, tuning = run_plan.limit_bytes, run_plan.tuning
    return [
        {
            "max_tokens": each.max_tokens,
            "micro_batches": round(each.micro_batches),
            "padding": each.padding,
            "predicted_bytes": each.predicted_bytes,
            "predicted_seconds": each.seconds_per_step,
            "fits": limit is None or each.predicted_bytes <= limit,
            "is_chosen": each.chosen,
            "recomputes": each.activation_checkpointing,
        }
        for each in (() if tuning is None else tuning.candidates)
    ]


def _time_note(run_plan: RunPlan) -> str | None:
    """Say how the time of a step is known, or why it is not; None where it was timed."""
    config, card = run_plan.run.config, card_of(run_plan.run.config.device)
    if card is not None and run_plan.step_seconds:
        peak = card.peak(run_plan.run.model.precision) / 1e12
        return f"estimated at {PEAK_SHARE:.0%} of the {peak:,.0f} TFLOP/s of {config.device}"
    if run_plan.tuning is None or run_plan.step_seconds:
        return None
    remedy = ": nothing can be timed for another machine; device=h100 estimates it"
    return "unknown" + remedy * (not run_plan.is_here)


def _warnings(run_plan: RunPlan) -> list[str]:
    """Name what makes the step another one than a user may think it is."""
    run, unit = run_plan.run, run_plan.run.config.batch.unit
    warnings = [*run.split.warnings, *run_plan.warnings, *stage_warnings(run)]
    lengths, asked = run.data.lengths, run.data.order.sizes.largest
    device = run.planned_device
    named = "batch.global=" if run.data.order.sizes.is_constant else "a stage of "
    is_open = run.config.precision == "auto"
    if is_open and run.model.precision == "bf16" and not has_fast_bf16(device):
        warnings.append(
            f"precision=bf16, in which the run began, is slow on this {device.type}; to go on in "
            "fp32: precision=fp32 resume_allow=[precision]"
        )
    if asked > (there := int(lengths.sum()) if unit == "tokens" else len(lengths)):
        tenth = 1 << max(1, there // 10).bit_length() - 1
        warnings.append(
            f"{named}{asked} is more than the {there} {unit} of an epoch, so each step uses the "
            f"whole epoch; set {named}{tenth} for {plural(there // tenth, 'step')} an epoch"
        )
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

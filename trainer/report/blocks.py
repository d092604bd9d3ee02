"""The blocks a person sees at once: start, plan, verify. Pure: a summary in, text out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainer.core.format import (
    clock,
    duration,
    loss,
    number,
    percent,
    plural,
    rate,
    short,
    shown_path,
    size,
)
from trainer.report.grids import Row, grid, heading, indented, joined, plain_table, title
from trainer.report.journal import Entry
from trainer.report.metrics import metrics_of
from trainer.report.records import (
    Candidate,
    MicroBatchShape,
    Noun,
    PlanSummary,
    StartSummary,
    Verdict,
    VerifyReport,
)

MAX_SHAPE_ROWS = 12
MAX_WORST = 8


def start_block(start: StartSummary) -> RenderableType:
    """Lay out what is about to happen."""
    plan = start.plan
    rows: list[Row] = [
        ("batch", batch_equation(plan)),
        *_cap(plan),
        ("loss", _normalizer(plan)),
        *_model(plan),
        ("data", _data(plan)),
        ("memory", _memory(plan)),
        ("steps", _steps(plan)),
        ("lr", _learning_rate(plan)),
        ("defaults", ", ".join(plan.defaults) or None),
        ("time", _time(plan)),
        ("compute", _compute(plan, start.threads)),
        ("output", shown_path(start.folder)),
    ]
    if start.resumed_step is not None:
        rows.append(("resumed", f"after step {number(start.resumed_step)}, in the same folder"))
    return Group(title(f"train {start.name or ''}"), grid(rows), _warnings(plan.warnings))


def plan_block(plan: PlanSummary, file: Path | None = None) -> RenderableType:
    """Lay out the whole arithmetic of a run, for `train plan`.

    Args:
        plan: the arithmetic.
        file: holds all of it.
    """
    rows: list[Row] = [
        ("batch", batch_equation(plan)),
        ("loss", _normalizer(plan)),
        *_model(plan),
        ("data", _data(plan)),
        ("steps", _steps(plan)),
        ("tail", _tail(plan)),
        ("lr", _learning_rate(plan)),
        ("memory", _memory(plan)),
        *_memory_parts(plan),
        ("defaults", ", ".join(plan.defaults) or None),
        ("time", _time(plan)),
        ("padding", _padding(plan)),
        ("epoch", _epoch_means(plan)),
        *_cap(plan),
        ("parallel", plan.parallel_why),
        ("sync", _sync(plan)),
        ("compute", _compute(plan, None)),
    ]
    tables: list[RenderableType] = []
    if plan.cadences:
        tables += [heading("cadences"), _cadences(plan)]
    if plan.shapes:
        tables += [heading("micro-batches of step 1"), _shapes(plan, file)]
    if plan.candidates:
        tables += [heading("caps weighed"), _candidates(plan.candidates, plan.noun)]
    return Group(title("plan"), grid(rows), *tables, _warnings(plan.warnings))


VERDICTS: Mapping[Verdict, str] = {
    "exact": "exact: the planned step is the whole-batch step",
    "exact_without_dropout": "exact without dropout, whose masks follow the micro-batches: the "
    "planned step is the whole-batch step otherwise",
    "not_exact": "not exact: this plan computes another step than the whole batch",
    "not_proven": "not proven: something cannot be compared",
}


def verify_block(report: VerifyReport) -> RenderableType:
    """Lay out whether the planned step is the whole-batch step, and what breaks it."""
    is_exact = report.verdict in {"exact", "exact_without_dropout"}
    colour = "green" if is_exact else "red"
    proven = "" if report.dtype == "float64" else f", as far as {report.dtype} tells"
    verdict = Text(VERDICTS[report.verdict] + proven * is_exact, f"bold {colour}")
    compared = plural(report.num_parameters, "parameter tensor") if report.num_parameters else None
    step = plural(report.micro_batches, "micro-batch") if report.micro_batches else "planned step"
    if report.global_batch:
        step += f" ({plural(report.global_batch, 'sample')})"
    largest = f"{report.max_relative_error:.2e}, the largest of any parameter, relative"
    largest += "" if report.limit is None else f"; up to {report.limit:.0e} is rounding"
    rows: list[Row] = [
        ("verdict", verdict),
        ("error", largest),
        ("compared", f"the gradient of {step} against: {report.reference}"),
        ("over", compared),
        ("dtype", report.dtype),
        *(("note", note) for note in report.notes),
    ]
    blocks: list[RenderableType] = [title("verify"), grid(rows)]
    if report.culprits and not is_exact:
        culprits = plain_table("culprit", "why the step depends on the cut, and what to change")
        for name, reason in report.culprits:
            culprits.add_row(Text(name, "bold red"), reason)
        blocks += [heading("culprits"), indented(culprits)]
    if report.worst and report.verdict != "exact_without_dropout":
        worst = plain_table("parameter", ">error")
        for name, error in report.worst[:MAX_WORST]:
            worst.add_row(name, f"{error:.2e}")
        blocks += [heading("worst parameters"), indented(worst)]
    return Group(*blocks)


def batch_equation(plan: PlanSummary) -> str:
    """Write the global batch as what it is cut into: `512 samples = 1 rank x 11 micro-batches`."""
    ranks = plural(plan.world_size, "rank")
    held = sum(shape.num_samples for shape in plan.shapes)
    is_short = plan.unit == "samples" and 0 < held < plan.global_batch
    left = plural(held if is_short else plan.global_batch, plan.unit.removesuffix("s"))
    left += f" (all there are; batch.global={plan.global_batch})" if is_short else ""
    of_ranks = Counter(shape.rank for shape in plan.shapes).values()
    if plan.world_size * plan.accum_steps == plan.micro_batches:
        right = f"{ranks} x {plural(plan.accum_steps, 'micro-batch')}"
    elif len(of_ranks) == plan.world_size:
        right = f"{ranks} x {_span(of_ranks)} micro-batches"
    else:
        right = f"{plural(plan.micro_batches, 'micro-batch')} over {ranks}"
        right += f", at most {plan.accum_steps} each"
    counts = {shape.num_samples for shape in plan.shapes}
    is_even = len(counts) == 1 and plan.unit == "samples"
    if is_even and sum(shape.num_samples for shape in plan.shapes) == plan.global_batch:
        right += f" x {plural(counts.pop(), 'sample')}"
    elif counts:
        right += f" of {_span(counts)} {'sample' if counts == {1} else 'samples'}"
    at_least = " or just above" if plan.unit == "tokens" else ""
    return f"{left}{at_least} = {right}"


def _warnings(warnings: Sequence[str]) -> RenderableType:
    lines = [Text.assemble(("warning: ", "bold yellow"), text) for text in warnings]
    return Padding(Group(*lines), (1, 0, 0, 2), expand=False) if lines else Group()


def _span(values: Iterable[int]) -> str:
    low, high = min(values := set(values)), max(values)
    return number(low) if low == high else f"{number(low)} to {number(high)}"


def _normalizer(plan: PlanSummary) -> str:
    if plan.normalizer == "micro_batches":
        return "mean of the micro-batches' means (not the whole-batch step)"
    over = "loss terms" if plan.normalizer == "tokens" else plan.normalizer
    return f"sum over the whole global batch / its {over}"


def _model(plan: PlanSummary) -> list[Row]:
    """Write how large the model is, what of it is frozen, and what each optimizer group matched."""
    count, frozen = plan.num_parameters, plan.num_frozen
    text = joined(
        plan.model,
        plural(count + frozen, "parameter") if count is not None else None,
        f"{number(frozen)} frozen" if frozen else None,
    )
    labels = ["groups", *[""] * len(plan.groups)]
    return [("model", text), *zip(labels, plan.groups, strict=False)]


def _data(plan: PlanSummary) -> str | None:
    has_tokens = plan.noun == "token"
    cut = f" ({short(plan.num_cut_tokens)} more are left out)" if plan.num_cut_tokens else ""
    counts = joined(
        plural(plan.num_samples, "sample") if plan.num_samples is not None else None,
        f"{short(plan.num_tokens)} tokens{cut}" if plan.num_tokens and has_tokens else None,
        f"{number(plan.num_held_out)} held out" if plan.num_held_out is not None else None,
    )
    return ": ".join(part for part in (plan.data, counts) if part) or None


def _memory(plan: PlanSummary) -> str | None:
    peak, limit = plan.predicted_peak_bytes, plan.memory_limit_bytes
    if peak is None and limit is None:
        return None
    if peak is None:
        predicted = f"limit {size(limit)}, need not predicted"
    elif limit is None:
        predicted = f"{size(peak)} of tensors predicted, limit unknown"
    else:
        share = percent(peak / limit) if limit else "more"
        predicted = f"{size(peak)} of tensors predicted, {share} of {size(limit)}"
    return joined(f"{predicted} per rank" if plan.world_size > 1 else predicted, plan.memory_note)


def _memory_parts(plan: PlanSummary) -> list[Row]:
    parts = [f"{name} {size(count)}" for name, count in plan.memory_parts.items() if count]
    return [("", Text(f"at the peak: {' + '.join(parts)}", "dim"))] if parts else []


def _steps(plan: PlanSummary) -> str:
    epochs = f" = {plural(round(plan.epochs, 2), 'epoch')}" if plan.epochs is not None else ""
    if plan.epochs is not None and not float(plan.epochs).is_integer():
        epochs = f" = {plan.epochs:.2f} epochs"
    return f"{number(plan.steps)}{epochs}, {plural(plan.steps_per_epoch, 'step')} per epoch"


def _tail(plan: PlanSummary) -> str:
    if plan.unit == "tokens":
        end = "left out of it" if plan.tail == "drop" else "a step with a normaliser of its own"
        return f"{plan.tail}: the last samples of an epoch, where they are too few, are {end}"
    if not plan.tail_size:
        return f"{plan.tail}: every epoch ends with a whole global batch"
    left = plural(plan.tail_size, "sample")
    verb = "is" if plan.tail_size == 1 else "are"
    if plan.tail == "drop":
        return f"drop: the last {left} of an epoch {verb} left out of it"
    if plan.steps_per_epoch == 1:
        return "keep: the whole epoch is one step"
    return f"keep: the last {left} of an epoch {verb} a step with a normaliser of its own"


def _learning_rate(plan: PlanSummary) -> str | None:
    if plan.lr is None:
        return None
    warmup = plan.warmup_steps
    share = f" ({percent(warmup / plan.steps)} of the run)" if plan.steps else ""
    return joined(
        f"{plan.lr:g}",
        plan.optimizer,
        plan.scheduler,
        f"{plural(warmup, 'step')} of warm-up{share}" if warmup else None,
    )


def _time(plan: PlanSummary) -> str | None:
    if plan.step_seconds is None:
        return plan.time_note
    total = plan.step_seconds * plan.steps
    text = f"about {duration(plan.step_seconds)} per step, {duration(total)} in all"
    return joined(text, plan.time_note)


def _padding(plan: PlanSummary) -> str:
    return f"{percent(plan.padding)} of the computed positions in step 1"


def _epoch_means(plan: PlanSummary) -> str | None:
    """Write what varies from step to step, as the mean over those that were sampled."""
    means, steps = plan.epoch_means, plan.epoch_means.get("steps", 1)
    if steps == 1:
        return None
    return joined(
        f"mean of {number(steps)} steps: {plural(round(means['tokens']), plan.noun)}",
        plural(round(means["micro_batches"], 1), "micro-batch"),
        f"{percent(means['padding'])} padding",
    )


def _cap(plan: PlanSummary) -> list[Row]:
    most, padded = plan.max_tokens, "padded " * (plan.noun == "token")
    cap = f"{plural(most, f'{padded}{plan.noun}')} per micro-batch" if most else None
    if cap is None:
        return [("cut", plan.cap_source)]
    return [("cap", cap), ("", plan.cap_source and Text(plan.cap_source, "dim"))]


def _compute(plan: PlanSummary, threads: int | None) -> str | None:
    workers = f"{plural(plan.num_workers, 'loading process')}{' each' * (plan.world_size > 1)}"
    return joined(
        plan.device,
        plural(threads, "thread") if threads else None,
        plan.precision,
        workers if plan.num_workers else None,
    )


def _sync(plan: PlanSummary) -> str:
    if plan.world_size == 1:
        return "one rank, which sends nothing"
    return plan.sync_why or f"{plan.sync}, parallel {plan.parallel}"


def _cadences(plan: PlanSummary) -> RenderableType:
    rows: list[Row] = []
    for name, every in plan.cadences.items():
        if isinstance(every, str):
            rows.append((name, f"every {every}, and at the end"))
            continue
        if every is None or every > plan.steps:
            rows.append((name, "step 1 and the last" if name == "log" else "once, at the end"))
            continue
        times = plural(plan.steps // every, "time")
        times += " and at the end" if plan.steps % every else ""
        steps = "step" if every == 1 else plural(every, "step")
        rows.append((name, f"every {steps} = {_amount(plan, every)}, {times}"))
    return grid(rows)


def _amount(plan: PlanSummary, steps: int) -> str:
    """Write what some steps in a row consume; the tail of an epoch is smaller than the rest."""
    if plan.unit == "tokens":
        return f"about {plural(steps * plan.global_batch, 'token')}"
    is_whole = plan.steps_per_epoch == 1 and plan.num_samples is not None
    each = min(plan.global_batch, plan.num_samples or 1) if is_whole else plan.global_batch
    meets_tail = plan.tail == "keep" and plan.tail_size and plan.steps >= plan.steps_per_epoch > 1
    return f"{'up to ' if meets_tail else ''}{plural(steps * each, 'sample')}"


def _shapes(plan: PlanSummary, file: Path | None) -> RenderableType:
    """List the shapes, the first to run first; those that are alike share a row.

    Of several ranks with too many shapes for the screen, the work of each is listed instead.
    """
    groups = [*Counter(plan.shapes).items()]
    if plan.world_size > 1 and len(groups) > MAX_SHAPE_ROWS:
        return _ranks(plan, file)
    table = plain_table(">rank", ">count", ">samples", f">length, {plan.noun}s", ">positions")
    for shape, count in groups[:MAX_SHAPE_ROWS]:
        figures = (shape.rank, count, shape.num_samples, shape.length, shape.positions)
        table.add_row(*map(number, figures))
    return _continued(table, len(groups), file)


def _ranks(plan: PlanSummary, file: Path | None) -> RenderableType:
    """List what each rank computes; the shares are even where the positions are."""
    of_ranks: dict[int, list[MicroBatchShape]] = {}
    for shape in plan.shapes:
        of_ranks.setdefault(shape.rank, []).append(shape)
    table = plain_table(">rank", ">micro-batches", ">samples", ">positions", ">largest")
    for rank, shapes in sorted(of_ranks.items())[:MAX_SHAPE_ROWS]:
        samples = sum(shape.num_samples for shape in shapes)
        positions = [shape.positions for shape in shapes]
        table.add_row(*map(number, (rank, len(shapes), samples, sum(positions), max(positions))))
    return _continued(table, len(of_ranks), file)


def _continued(table: Table, num_rows: int, file: Path | None) -> RenderableType:
    """Say below a table where the rows are that it leaves out."""
    left = num_rows - MAX_SHAPE_ROWS
    place = "plan.json" if file is None else shown_path(file)
    more = [Text(f"and {number(left)} more; all are in {place}", "dim")] if left > 0 else []
    return indented(Group(table, *more))


def _candidates(candidates: Sequence[Candidate], noun: Noun) -> RenderableType:
    table = plain_table(f">cap, {noun}s", ">micro-batches", ">padding", ">memory", ">step time", "")
    for row in candidates:
        note = "recomputing" if row.recomputes else ""
        note = note if row.fits else "does not fit"
        table.add_row(
            number(row.max_tokens),
            number(row.micro_batches),
            percent(row.padding),
            size(row.predicted_bytes),
            duration(row.predicted_seconds),
            f"<- chosen {note}".strip() if row.is_chosen else note,
            style="bold green" if row.is_chosen else ("" if row.fits else "dim"),
        )
    return indented(table)


def step_of(step: int, steps: int) -> str:
    """Write a step so that those of a run are equally wide: `step  7/60`."""
    return f"step {step:>{len(str(steps))}}/{steps}"


def step_line(entry: Entry, steps: int, left_s: float | None, noun: Noun = "token") -> str:
    """Write one step's figures on one line, aligned with those of other steps."""
    return "  ".join(
        (
            step_of(entry["step"], steps),
            f"loss {loss(entry['loss']):>8}",
            *(f"{name} {loss(value)}" for name, value in metrics_of(entry).items()),
            f"{short(entry['tokens_per_second']):>5} {noun}s/s",
            f"padding {percent(entry['padding']):>5}",
            f"grad norm {rate(entry['grad_norm']):>5}",
            f"lr {entry['lr']:.2e}",
            f"{clock(left_s):>5} left",
        )
    )

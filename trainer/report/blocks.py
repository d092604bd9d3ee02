"""The blocks a person sees at once: start, plan, verify, end. Pure: a summary in, text out.

Every block is a grid of a dim label and its text, so it reads alike at 80 columns, at 120, without
colour and in a file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from trainer.report.breakdown import Breakdown
from trainer.report.figures import (
    clock,
    duration,
    loss,
    number,
    percent,
    plural,
    printable,
    rate,
    short,
    shown_path,
    size,
)
from trainer.report.journal import Entry
from trainer.report.records import Candidate, PlanSummary, RunSummary, StartSummary, VerifyReport

LABEL_WIDTH = 10
SAMPLE_CHARACTERS = 240
MAX_SHAPE_ROWS = 12
MAX_WORST = 8
LOSSES = {"loss", "eval_loss"}
Row = tuple[str, str | Text | None]


def start_block(start: StartSummary) -> RenderableType:
    """Lay out what is about to happen."""
    plan = start.plan
    rows: list[Row] = [
        ("batch", batch_equation(plan)),
        *_cap(plan),
        ("loss", _normalizer(plan)),
        ("model", _model(plan)),
        ("data", _data(plan)),
        ("memory", _memory(plan)),
        ("steps", _steps(plan)),
        ("lr", _learning_rate(plan)),
        ("time", _time(plan)),
        ("compute", _compute(plan, start.threads)),
        ("output", shown_path(start.folder)),
    ]
    if start.resumed_step is not None:
        rows.append(("resumed", f"after step {number(start.resumed_step)}, in the same folder"))
    return Group(_title(f"train {start.name or ''}"), _grid(rows), _warnings(plan.warnings))


def plan_block(plan: PlanSummary) -> RenderableType:
    """Lay out the whole arithmetic of a run, for `train plan`."""
    rows: list[Row] = [
        ("batch", batch_equation(plan)),
        ("loss", _normalizer(plan)),
        ("model", _model(plan)),
        ("data", _data(plan)),
        ("steps", _steps(plan)),
        ("tail", _tail(plan)),
        ("lr", _learning_rate(plan)),
        ("memory", _memory(plan)),
        *_memory_parts(plan),
        ("time", _time(plan)),
        ("padding", _padding(plan)),
        ("epoch", _epoch_means(plan)),
        *_cap(plan),
        ("sync", plan.sync_why or f"{plan.sync}, parallel {plan.parallel}"),
        ("compute", _compute(plan, None)),
    ]
    tables: list[RenderableType] = []
    if plan.cadences:
        tables += [_heading("cadences"), _cadences(plan)]
    if plan.shapes:
        tables += [_heading("micro-batches of step 1"), _shapes(plan)]
    if plan.candidates:
        tables += [_heading("caps weighed"), _candidates(plan.candidates)]
    return Group(_title("plan"), _grid(rows), *tables, _warnings(plan.warnings))


def verify_block(report: VerifyReport) -> RenderableType:
    """Lay out whether the planned step is the whole-batch step, and what breaks it."""
    verdict = Text("not exact: this plan computes another step than the whole batch", "bold red")
    if report.exact:
        proven = "" if report.dtype == "float64" else f", as far as {report.dtype} tells"
        verdict = Text(f"exact: the planned step is the whole-batch step{proven}", "bold green")
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
    blocks: list[RenderableType] = [_title("verify"), _grid(rows)]
    if report.culprits:
        culprits = _table("culprit", "why the step depends on the cut, and what to change")
        for name, reason in report.culprits:
            culprits.add_row(Text(name, "bold red"), reason)
        blocks += [_heading("culprits"), _indented(culprits)]
    if report.worst:
        worst = _table("parameter", ">error")
        for name, error in report.worst[:MAX_WORST]:
            worst.add_row(name, f"{error:.2e}")
        blocks += [_heading("worst parameters"), _indented(worst)]
    return Group(*blocks)


def end_block(end: RunSummary) -> RenderableType:
    """Lay out how a run ended and what it is worth; the lines of `further` follow it."""
    is_done = end.state == "completed"
    blocks: list[RenderableType] = [_title("done" if is_done else "stopped"), _grid(_outcome(end))]
    if end.eval_loss is not None:
        blocks += [_heading("held-out loss, nats"), _indented(_losses(end, end.eval_loss))]
    if end.time is not None:
        blocks += [_heading("where the time of a step went"), _time_split(end.time)]
        blocks += [_indented(Text.assemble(("-> ", "bold yellow"), line)) for line in end.advice]
    if end.sample:
        shown = printable(end.sample[:SAMPLE_CHARACTERS])
        blocks += [_heading("a generated sample"), _indented(Text(shown, "green"))]
    return Group(*blocks, _heading("look further"))


def batch_equation(plan: PlanSummary) -> str:
    """Write the global batch as what it is cut into: `512 samples = 1 rank x 11 micro-batches`."""
    ranks = plural(plan.world_size, "rank")
    held = sum(shape.num_samples for shape in plan.shapes)
    is_short = plan.unit == "samples" and 0 < held < plan.global_batch
    left = f"{number(held if is_short else plan.global_batch)} {plan.unit}"
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


def _title(text: str) -> RenderableType:
    return Rule(Text(text.strip(), "bold"), align="left", style="cyan", characters="─")


def _heading(text: str) -> RenderableType:
    return Padding(Text(text, "bold"), (1, 0, 0, 2), expand=False)


def _indented(block: RenderableType) -> RenderableType:
    return Padding(block, (0, 0, 0, 2), expand=False)


def _grid(rows: Iterable[Row]) -> RenderableType:
    """Lay out labels and texts; a row without text is left out."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=LABEL_WIDTH, style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows:
        if text is not None:
            grid.add_row(label, Text(text) if isinstance(text, str) else text)
    return _indented(grid)


def _table(*columns: str) -> Table:
    """Make a plain table; a column whose name begins with `>` is set to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim")
    for column in columns:
        name = column.removeprefix(">")
        table.add_column(name, justify="left" if name == column else "right", overflow="fold")
    return table


def _warnings(warnings: Sequence[str]) -> RenderableType:
    lines = [Text.assemble(("warning: ", "bold yellow"), text) for text in warnings]
    return Padding(Group(*lines), (1, 0, 0, 2), expand=False) if lines else Group()


def _joined(*parts: str | None) -> str | None:
    return ", ".join(part for part in parts if part) or None


def _span(values: Iterable[int]) -> str:
    low, high = min(values := set(values)), max(values)
    return number(low) if low == high else f"{number(low)} to {number(high)}"


def _normalizer(plan: PlanSummary) -> str:
    if plan.normalizer == "micro_batches":
        return "mean of the micro-batches' means (not the whole-batch step)"
    over = "loss terms" if plan.normalizer == "tokens" else plan.normalizer
    return f"sum over the whole global batch / its {over}"


def _model(plan: PlanSummary) -> str | None:
    count = plan.num_parameters
    return _joined(plan.model, f"{number(count)} parameters" if count is not None else None)


def _data(plan: PlanSummary) -> str | None:
    cut = f" ({short(plan.num_cut_tokens)} more are cut off)" if plan.num_cut_tokens else ""
    counts = _joined(
        plural(plan.num_samples, "sample") if plan.num_samples is not None else None,
        f"{short(plan.num_tokens)} tokens{cut}" if plan.num_tokens is not None else None,
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
    return _joined(f"{predicted} per rank" if plan.world_size > 1 else predicted, plan.memory_note)


def _memory_parts(plan: PlanSummary) -> list[Row]:
    parts = [f"{name} {size(count)}" for name, count in plan.memory_parts.items()]
    return [("", Text(" + ".join(parts), "dim"))] if parts else []


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
    return _joined(
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
    return _joined(text, plan.time_note)


def _padding(plan: PlanSummary) -> str:
    return f"{percent(plan.padding)} of the computed positions in step 1"


def _epoch_means(plan: PlanSummary) -> str | None:
    """Write what varies from step to step, as the mean over those that were sampled."""
    means, steps = plan.epoch_means, plan.epoch_means.get("steps", 1)
    if steps == 1:
        return None
    return _joined(
        f"mean of {number(steps)} steps: {number(round(means['tokens']))} tokens",
        plural(round(means["micro_batches"], 1), "micro-batch"),
        f"{percent(means['padding'])} padding",
    )


def _cap(plan: PlanSummary) -> list[Row]:
    cap = f"{number(plan.max_tokens)} padded tokens per micro-batch" if plan.max_tokens else None
    if cap is None:
        return [("cap", plan.cap_source)]
    return [("cap", cap), ("", plan.cap_source and Text(plan.cap_source, "dim"))]


def _compute(plan: PlanSummary, threads: int | None) -> str | None:
    workers = f"{plural(plan.num_workers, 'loading process')}{' each' * (plan.world_size > 1)}"
    return _joined(
        plan.device,
        plural(threads, "thread") if threads else None,
        plan.precision,
        workers if plan.num_workers else None,
    )


def _cadences(plan: PlanSummary) -> RenderableType:
    rows: list[Row] = []
    for name, every in plan.cadences.items():
        if every is None or every > plan.steps:
            rows.append((name, "once, at the end"))
            continue
        batch = f"{number(every * plan.global_batch)} {plan.unit}"
        times = plural(plan.steps // every, "time")
        steps = "step" if every == 1 else plural(every, "step")
        rows.append((name, f"every {steps} = {batch}, {times}"))
    return _grid(rows)


def _shapes(plan: PlanSummary) -> RenderableType:
    """List the shapes, the first to run first; those that are alike share a row."""
    groups = [*Counter(plan.shapes).items()]
    table = _table(">rank", ">count", ">samples", ">length", ">positions")
    for shape, count in groups[:MAX_SHAPE_ROWS]:
        figures = (shape.rank, count, shape.num_samples, shape.length, shape.positions)
        table.add_row(*map(number, figures))
    left = len(groups) - MAX_SHAPE_ROWS
    more = [Text(f"and {left} more (plan.json holds all)", "dim")] if left > 0 else []
    return _indented(Group(table, *more))


def _candidates(candidates: Sequence[Candidate]) -> RenderableType:
    table = _table(">cap, tokens", ">micro-batches", ">padding", ">memory", ">step time", "")
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
    return _indented(table)


def _time_split(time: Breakdown) -> RenderableType:
    """Set every part of the mean step beside its share; a part that took nothing is left out."""
    rows: list[Row] = [
        (name, f"{percent(time.share(seconds)):>6}  {duration(seconds)}")
        for name, seconds in time.parts.items()
        if seconds > 0
    ]
    return _grid(rows)


def _losses(end: RunSummary, held_out: float) -> Table:
    """Set the held-out loss beside each baseline, with the difference."""
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    table.add_row("this model", Text(loss(held_out), "bold green"), "")
    for name, baseline in end.baselines.items():
        gain = baseline - held_out
        word = "better" if gain >= 0 else "worse"
        style = "green" if gain >= 0 else "yellow"
        table.add_row(name, loss(baseline), Text(f"this model is {abs(gain):.4f} {word}", style))
    return table


def _outcome(end: RunSummary) -> list[Row]:
    done = f"{plural(end.step, 'step')} in {duration(end.seconds)}"
    saved = f"after step {number(end.step)} of {number(end.steps)}, saved"
    others = [f"{name} {mean:.4f}" for name, mean in end.metrics.items() if name not in LOSSES]
    speed, peak = end.tokens_per_second, end.peak_bytes
    skipped, replays = end.skipped_steps, end.replays
    return [
        ("completed", done) if end.state == "completed" else ("stopped", saved),
        ("speed", f"{number(round(speed))} tokens/s" if speed else None),
        ("memory", f"{size(peak)} at the peak of {end.peak_of}" if peak else None),
        ("skipped", f"{plural(skipped, 'step')} without an update" if skipped else None),
        ("replayed", f"{plural(replays, 'time')}, for want of memory" if replays else None),
        ("held out", _joined(*others)),
    ]


def further(end: RunSummary) -> list[str]:
    """Give the commands a person types next; print them unwrapped, so that they can be copied."""
    folder = shown_path(end.folder)
    commands = [f"train evaluate run={folder}", f"train export run={folder} export.to=exported"]
    commands.append(f"train resume={folder} steps={2 * end.steps}")
    if end.state != "completed":
        commands[-1:] = [f"train resume={folder}"]
    again = trusting(end.packages, end.config_dir)
    return ["  " + " ".join([command, *again]) for command in commands]


def trusting(packages: Sequence[str], config_dir: str | None = None) -> list[str]:
    """Give what has to be typed for classes and options of one's own that a run folder names."""
    flag = [] if config_dir is None else [f"--config-dir={shown_path(Path(config_dir))}"]
    return [*flag, *([f"'trust=[{','.join(packages)}]'"] if packages else [])]


def step_of(step: int, steps: int) -> str:
    """Write a step so that those of a run are equally wide: `step  7/60`."""
    return f"step {step:>{len(str(steps))}}/{steps}"


def step_line(entry: Entry, steps: int, left_s: float | None) -> str:
    """Write one step's figures on one line, aligned with those of other steps."""
    return "  ".join(
        (
            step_of(entry["step"], steps),
            f"loss {loss(entry['loss']):>8}",
            f"{short(entry['tokens_per_second']):>5} tokens/s",
            f"padding {percent(entry['padding']):>5}",
            f"grad norm {rate(entry['grad_norm']):>5}",
            f"lr {entry['lr']:.2e}",
            f"{clock(left_s):>5} left",
        )
    )

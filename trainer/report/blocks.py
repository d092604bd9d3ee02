"""Lay out the blocks a person sees at once: start, plan, verify. Pure: a record in, text out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from trainer.core.format import duration, number, percent, plural, short, shown_path, size
from trainer.report.grids import Row, grid, heading, indented, joined, plain_table, title
from trainer.report.records import Noun, Record, Verdict, VerifyReport

MAX_SHAPE_ROWS = 12
MAX_WORST = 8

VERDICTS: Mapping[Verdict, str] = {
    "exact": "exact: the planned step is the whole-batch step",
    "exact_without_dropout": "exact without dropout, whose masks follow the micro-batches: the "
    "planned step is the whole-batch step otherwise",
    "not_exact": "not exact: this plan computes another step than the whole batch",
    "not_proven": "not proven: something cannot be compared",
}


def start_block(
    plan: Record,
    folder: Path,
    *,
    name: str | None = None,
    threads: int | None = None,
    resumed_step: int | None = None,
) -> RenderableType:
    """Lay out what is about to happen: the plan, the user's word for the run, where output goes.

    The threads of a rank are shown on a CPU, where they matter; the resumed step is None in a
    fresh run.
    """
    rows = [*_arithmetic(plan, threads), ("output", shown_path(folder))]
    if resumed_step is not None:
        rows.append(("resumed", f"after step {number(resumed_step)}, in the same folder"))
    return Group(title(f"train {name or ''}"), grid(rows), _warnings(plan["warnings"]))


def plan_block(plan: Record, file: Path | None = None) -> RenderableType:
    """Lay out the whole arithmetic of a run, for `train plan`; the file holds all of it."""
    parts = [f"{name} {size(count)}" for name, count in plan["memory_parts"].items() if count]
    means = plan["epoch_means"]
    sync = plan["sync_why"] or f"{plan['sync']}, parallel {plan['parallel']}"
    epoch = joined(  # what varies from step to step, as the mean over those that were sampled
        f"mean of {number(means['steps'])} steps: {plural(round(means['tokens']), noun_of(plan))}",
        plural(round(means["micro_batches"], 1), "micro-batch"),
        f"{percent(means['padding'])} padding",
    )
    rows: list[Row] = [
        *_arithmetic(plan),
        ("tail", _tail(plan)),
        ("peak", Text(" + ".join(parts), "dim") if parts else None),
        ("padding", f"{percent(plan['padding'])} of the computed positions in step 1"),
        ("epoch", None if means["steps"] == 1 else epoch),
        ("parallel", plan["parallel_why"]),
        ("sync", sync if plan["world_size"] > 1 else "one rank, which sends nothing"),
    ]
    tables = [heading("cadences"), grid(_cadences(plan))]
    tables += [heading("micro-batches of step 1"), _shapes(plan, file)]
    if plan["candidates"]:
        tables += [heading("caps weighed"), _candidates(plan["candidates"], noun_of(plan))]
    return Group(title("plan"), grid(rows), *tables, _warnings(plan["warnings"]))


def verify_block(report: VerifyReport) -> RenderableType:
    """Lay out whether the planned step is the whole-batch step, and what breaks it."""
    is_exact = report.verdict in {"exact", "exact_without_dropout"}
    proven = "" if report.dtype == "float64" else f", as far as {report.dtype} tells"
    colour = "green" if is_exact else "red"
    verdict = Text(VERDICTS[report.verdict] + proven * is_exact, f"bold {colour}")
    step = plural(report.micro_batches, "micro-batch") if report.micro_batches else "planned step"
    step += f" ({plural(report.global_batch, 'sample')})" if report.global_batch else ""
    largest = f"{report.max_relative_error:.2e}, the largest of any parameter, relative"
    largest += "" if report.limit is None else f"; up to {report.limit:.0e} is rounding"
    count = report.num_parameters
    rows: list[Row] = [
        ("verdict", verdict),
        ("error", largest),
        ("compared", f"the gradient of {step} against: {report.reference}"),
        ("over", plural(count, "parameter tensor") if count else None),
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


def noun_of(plan: Record) -> Noun:
    """Say what lengths count, for a person: samples where each is one token of length one."""
    return "sample" if plan["num_tokens"] == plan["num_samples"] else "token"


def batch_equation(plan: Record) -> str:
    """Write the global batch as what it is cut into: `512 samples = 1 rank x 11 micro-batches`."""
    whole, unit, world_size = plan["global_batch"], plan["unit"], plan["world_size"]
    accum_steps, micro_batches = plan["accum_steps"], plan["micro_batches"]
    num_samples = [shape["num_samples"] for shape in plan["shapes"]]
    total, ranks = sum(num_samples), plural(world_size, "rank")
    is_short = unit == "samples" and total < whole
    left = plural(total if is_short else whole, unit.removesuffix("s"))
    left += f" (all there are; batch.global={whole})" if is_short else ""
    of_ranks = Counter(shape["rank"] for shape in plan["shapes"]).values()
    if world_size * accum_steps == micro_batches:
        right = f"{ranks} x {plural(accum_steps, 'micro-batch')}"
    elif len(of_ranks) == world_size:
        right = f"{ranks} x {_range(of_ranks)} micro-batches"
    else:
        right = f"{plural(micro_batches, 'micro-batch')} over {ranks}, at most {accum_steps} each"
    counts = set(num_samples)
    if len(counts) == 1 and unit == "samples" and total == whole:
        right += f" x {plural(num_samples[0], 'sample')}"
    else:
        right += f" of {_range(counts)} {'sample' if counts == {1} else 'samples'}"
    return f"{left}{' or just above' if unit == 'tokens' else ''} = {right}"


def _arithmetic(plan: Record, threads: int | None = None) -> list[Row]:
    """Write what the start of a run and a plan have in common."""
    noun, cap, seconds = noun_of(plan), plan["max_tokens"], plan["step_seconds"]
    shown_cap = plural(cap or 0, f"{'padded ' * (noun == 'token')}{noun}") + " per micro-batch"
    source = plan["cap_source"]
    count, frozen, groups = plan["num_parameters"], plan["num_frozen"], plan["groups"]
    cut, warmup, steps = plan["num_cut_tokens"], plan["warmup_steps"], plan["steps"]
    data = joined(
        plural(plan["num_samples"], "sample"),
        f"{short(plan['num_tokens'])} tokens" if noun == "token" else None,
        f"{short(cut)} more are left out" if cut and noun == "token" else None,
        f"{number(plan['num_held_out'])} held out",
    )
    normalizer, epochs = plan["normalizer"], plan["epochs"]
    over = "loss terms" if normalizer == "tokens" else normalizer
    loss = f"sum over the whole global batch / its {over}"
    if normalizer == "micro_batches":
        loss = "mean of the micro-batches' means (not the whole-batch step)"
    model = joined(
        plan["model"],
        plural(count + frozen, "parameter"),
        f"{number(frozen)} frozen" if frozen else None,
    )
    length = plural(epochs, "epoch") if float(epochs).is_integer() else f"{epochs:.2f} epochs"
    share = f" ({percent(warmup / steps)} of the run)" if steps else ""
    lr = joined(
        f"{plan['lr']:g}",
        plan["optimizer"],
        plan["scheduler"],
        f"{plural(warmup, 'step')} of warm-up{share}" if warmup else None,
    )
    time = seconds and f"about {duration(seconds)} per step, {duration(seconds * steps)} in all"
    workers = plural(plan["num_workers"], "loading process") + " each" * (plan["world_size"] > 1)
    compute = joined(
        plan["device"],
        plural(threads, "thread") if threads and plan["device"] == "cpu" else None,
        plan["precision"],
        workers if plan["num_workers"] else None,
    )
    return [
        ("batch", batch_equation(plan)),
        ("cap" if cap else "cut", shown_cap if cap else source),
        ("", Text(source, "dim") if cap and source else None),
        ("loss", loss),
        ("model", model),
        *zip(["groups", *[""] * len(groups)], groups, strict=False),
        ("data", f"{plan['data']}: {data}"),
        ("memory", _memory(plan)),
        (
            "steps",
            f"{number(steps)} = {length}, {plural(plan['steps_per_epoch'], 'step')} per epoch",
        ),
        ("lr", lr),
        ("defaults", joined(*plan["defaults"])),
        ("time", joined(time or None, plan["time_note"])),
        ("compute", compute),
    ]


def _warnings(warnings: Sequence[str]) -> RenderableType:
    lines = [Text.assemble(("warning: ", "bold yellow"), text) for text in warnings]
    return Padding(Group(*lines), (1, 0, 0, 2), expand=False) if lines else Group()


def _range(values: Iterable[int]) -> str:
    low, high = min(values := set(values)), max(values)
    return number(low) if low == high else f"{number(low)} to {number(high)}"


def _memory(plan: Record) -> str | None:
    peak, limit = plan["predicted_peak_bytes"], plan["memory_limit_bytes"]
    if peak is None and limit is None:
        return None
    share = percent(peak / limit) if peak is not None and limit else "more"
    there = "limit unknown" if limit is None else f"{share} of {size(limit)}"
    predicted = f"{size(peak)} of tensors predicted, {there}"
    if peak is None:
        predicted = f"limit {size(limit)}, need not predicted"
    each = " per rank" if plan["world_size"] > 1 else ""
    return joined(f"{predicted}{each}", plan["memory_note"])


def _tail(plan: Record) -> str:
    tail, count = plan["tail"], plan["tail_size"]
    end = "left out of it" if tail == "drop" else "a step with a normaliser of its own"
    if plan["unit"] == "tokens":
        return f"{tail}: the last samples of an epoch, where they are too few, are {end}"
    if not count:
        return f"{tail}: every epoch ends with a whole global batch"
    verb = "is" if count == 1 else "are"
    return f"{tail}: the last {plural(count, 'sample')} of an epoch {verb} {end}"


def _cadences(plan: Record) -> list[Row]:
    rows: list[Row] = []
    for name, every in plan["cadences"].items():
        if isinstance(every, str):
            rows.append((name, f"every {every}, and at the end"))
        elif every is None or every > plan["steps"]:
            rows.append((name, "step 1 and the last" if name == "log" else "once, at the end"))
        else:
            count, left = divmod(plan["steps"], every)
            times = plural(count, "time") + (" and at the end" if left else "")
            steps = "step" if every == 1 else plural(every, "step")
            rows.append((name, f"every {steps}, {times}"))
    return rows


def _shapes(plan: Record, file: Path | None) -> RenderableType:
    """List the shapes, the first to run first; equal ones share a row."""
    groups = Counter(
        (
            shape["rank"],
            shape["num_samples"],
            shape["length"],
            # Computed positions; under packing the micro-batch is one row.
            shape["length"] * (1 if shape["packed"] else shape["num_samples"]),
        )
        for shape in plan["shapes"]
    )
    table = plain_table(">rank", ">count", ">samples", f">length, {noun_of(plan)}s", ">positions")
    for (rank, *figures), count in [*groups.items()][:MAX_SHAPE_ROWS]:
        table.add_row(*map(number, (rank, count, *figures)))
    left = len(groups) - MAX_SHAPE_ROWS
    place = "plan.json" if file is None else shown_path(file)
    more = [Text(f"and {number(left)} more; all are in {place}", "dim")] if left > 0 else []
    return indented(Group(table, *more))


def _candidates(candidates: Sequence[Record], noun: Noun) -> RenderableType:
    table = plain_table(f">cap, {noun}s", ">micro-batches", ">padding", ">memory", ">step time", "")
    for row in candidates:
        note = "recomputing" if row["recomputes"] else ""
        note = note if row["fits"] else "does not fit"
        table.add_row(
            number(row["max_tokens"]),
            number(row["micro_batches"]),
            percent(row["padding"]),
            size(row["predicted_bytes"]),
            duration(row["predicted_seconds"]),
            f"<- chosen {note}".strip() if row["is_chosen"] else note,
            style="bold green" if row["is_chosen"] else ("" if row["fits"] else "dim"),
        )
    return indented(table)

"""Lay out the blocks a person sees at once: start, plan, verify, end. Pure: a record in, text out.

A grid of labels and texts reads the same at 80 columns, at 120, without colour, in a file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from trainer.core.format import duration, loss, number, percent, plural, short, shown_path, size
from trainer.report.records import Noun, Record, Verdict, VerifyReport

LABEL_WIDTH = 10
MAX_SHAPE_ROWS = 12

VERDICTS: Mapping[Verdict, str] = {
    "exact": "exact: the planned step is the whole-batch step",
    "exact_without_dropout": "exact without dropout, whose masks depend on the micro-batches: "
    "apart from them the planned step is the whole-batch step",
    "not_exact": "not exact: the planned step differs from the whole-batch step",
    "not_proven": "not proven: something cannot be compared",
}

Row = tuple[str, str | Text | None]


def start_block(
    plan: Record, folder: Path, *, name: str | None = None, resumed_step: int | None = None
) -> RenderableType:
    """Lay out what is about to happen, from what plan.json holds.

    Args:
        plan: of the run.
        folder: where its output goes.
        name: the user's word for the run.
        resumed_step: the last step of an earlier start; None in a fresh run.
    """
    rows = [*_arithmetic(plan), ("output", shown_path(folder))]
    if resumed_step is not None:
        rows.append(("resumed", f"after step {number(resumed_step)}, in the same folder"))
    return Group(_title(f"train {name or ''}"), _grid(rows), _warnings(plan["warnings"]))


def plan_block(plan: Record, file: Path) -> RenderableType:
    """Lay out the whole arithmetic of a run, from what plan.json, at `file`, holds."""
    parts = [f"{name} {size(count)}" for name, count in plan["memory_parts"].items() if count]
    means, steps = plan["epoch_means"], plan["steps"]
    sync = plan["sync_why"] or f"{plan['sync']}, parallel {plan['parallel']}"
    epoch = _joined(  # what varies from step to step, as the mean over those that were sampled
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
        ("cadence", _joined(*(f"{n} {_cadence(e, steps)}" for n, e in plan["cadences"].items()))),
        ("parallel", plan["parallel_why"]),
        ("sync", sync if plan["world_size"] > 1 else "one rank, which sends nothing"),
    ]
    tables = [_section("micro-batches of step 1", _shapes(plan, file))]
    if plan["candidates"]:
        tables.append(_section("caps weighed", _candidates(plan["candidates"], noun_of(plan))))
    return Group(_title("plan"), _grid(rows), *tables, _warnings(plan["warnings"]))


def verify_block(report: VerifyReport) -> RenderableType:
    """Lay out whether the planned step is the whole-batch step, and what breaks it."""
    is_exact, dtype = report.verdict in {"exact", "exact_without_dropout"}, report.dtype
    step = plural(report.micro_batches, "micro-batch")
    tensors = plural(report.num_parameters, "parameter tensor")
    worst = f" ({report.worst[0][0]})" if report.worst else ""
    largest = f"{report.max_relative_error:.2e}, the largest of any parameter{worst}, relative"
    limit = f"up to {report.limit:.0e} is rounding"
    if report.error_without_draws is not None:
        off = f"{report.error_without_draws:.2e} without random draws, the largest of any parameter"
        largest, limit = f"{off}, relative; {limit}", f"with them {report.max_relative_error:.2e}"
    rows: list[Row] = [
        ("verdict", Text(VERDICTS[report.verdict], "bold green" if is_exact else "bold red")),
        ("error", f"{largest}; {limit}"),
        ("compared", f"{step} ({plural(report.global_batch, 'sample')}) with: {report.reference}"),
        ("over", f"the gradient of {tensors}, in {dtype}"),
        *(("note", note) for note in report.notes),
    ]
    blocks = [_title("verify"), _grid(rows)]
    if not is_exact:
        culprits = _table(
            "culprit", "why the step depends on the micro-batches, and what to change"
        )
        for name, reason in report.culprits:
            culprits.add_row(Text(name, "bold red"), reason)
        blocks.append(_section("culprits", culprits))
    return Group(*blocks)


def end_block(plan: Record, result: Record) -> RenderableType:
    """Lay out how a run ended and what it is worth, from what plan.json and result.json hold."""
    blocks: list[RenderableType] = [_title("done"), _outcome(plan, result)]
    if result["eval_loss"] is not None:
        blocks.append(_section("held-out loss", _losses(result)))
    if result["advice"]:
        blocks.append(_section("bottlenecks", *map(Text, result["advice"])))
    return Group(*blocks, _section("look further"))


def noun_of(plan: Record) -> Noun:
    """Say what lengths count, for a person: samples where each is one token of length one."""
    return "sample" if plan["num_tokens"] == plan["num_samples"] else "token"


def batch_equation(plan: Record) -> str:
    """Write the global batch as what it is cut into: `512 samples = 1 rank x 11 micro-batches`."""
    ranks, accum_steps = plural(plan["world_size"], "rank"), plan["accum_steps"]
    num_samples = [shape["num_samples"] for shape in plan["shapes"]]
    low, high = min(num_samples), max(num_samples)
    left, times = plural(sum(num_samples), "sample"), "x" if low == high else "of"
    if plan["unit"] == "tokens":
        left, times = f"{plural(plan['global_batch'], 'token')} or just above", "of"
    right = f"{ranks} x {plural(accum_steps, 'micro-batch')}"
    if plan["world_size"] * accum_steps != plan["micro_batches"]:
        count = plural(plan["micro_batches"], "micro-batch")
        right = f"{count} over {ranks}, at most {accum_steps} each"
    each = f"{number(low)} to {number(high)} samples" if low < high else plural(low, "sample")
    return f"{left} = {right} {times} {each}"


def _arithmetic(plan: Record) -> list[Row]:
    """Write what the start of a run and a plan have in common."""
    noun, cap, source = noun_of(plan), plan["max_tokens"], plan["cap_source"]
    padded = "padded token" if noun == "token" else noun
    steps, epochs, warmup = plan["steps"], plan["epochs"], plan["warmup_steps"]
    loss = "mean of the micro-batches' means (not the whole-batch step)"
    if plan["normalizer"] != "micro_batches":
        over = "loss terms" if plan["normalizer"] == "tokens" else plan["normalizer"]
        loss = f"sum over the whole global batch / its {over}"
    count, frozen = plan["num_parameters"], plan["num_frozen"]
    model = _joined(
        plan["model"], plural(count + frozen, "parameter"), frozen and f"{number(frozen)} frozen"
    )
    (disk, memory), cut = (plan["dtypes"][k] for k in ("disk", "memory")), plan["num_cut_tokens"]
    data = _joined(
        plural(plan["num_samples"], "sample"),
        noun == "token" and f"{short(plan['num_tokens'])} tokens",
        cut and f"{short(cut)} more are left out",
        f"{number(plan['num_held_out'])} held out",
    )
    length = plural(epochs, "epoch") if float(epochs).is_integer() else f"{epochs:.2f} epochs"
    length += f", {plural(plan['steps_per_epoch'], 'step')} per epoch"
    first = warmup and f"{plural(warmup, 'step')} of warm-up ({percent(warmup / steps)} of the run)"
    seconds, workers = plan["step_seconds"], plan["num_workers"]
    time = seconds and f"about {duration(seconds)} per step, {duration(seconds * steps)} in all"
    loading = plural(workers, "loading process") + " each" * (plan["world_size"] > 1)
    return [
        ("batch", batch_equation(plan)),
        ("cap", f"{plural(cap, padded)} per micro-batch" if cap else None),
        ("" if cap else "cut", Text(source, "dim" if cap else "") if source else None),
        ("objective", plan["objective"]),
        ("loss", loss),
        ("model", model),
        ("init", _joined(plan["init"], disk and f"{disk} on disk", f"{memory} in memory")),
        *zip(["groups", *[""] * len(plan["groups"])], plan["groups"], strict=False),
        ("data", f"{plan['data']}: {data}"),
        ("memory", _memory(plan)),
        ("steps", f"{number(steps)} = {length}"),
        ("lr", _joined(f"{plan['lr']:g}", plan["optimizer"], plan["scheduler"], first)),
        ("defaults", _joined(*plan["defaults"])),
        ("time", _joined(time, plan["time_note"])),
        ("compute", _joined(plan["device"], plan["dtypes"]["compute"], workers and loading)),
    ]


def _memory(plan: Record) -> str | None:
    """Set the predicted need beside the limit; either may be unknown."""
    peak, limit = plan["predicted_peak_bytes"], plan["memory_limit_bytes"]
    text = limit and f"limit {size(limit)}, usage not predicted"
    if peak is not None:
        share = f"{percent(peak / limit)} of {size(limit)}" if limit else "limit unknown"
        text = f"{size(peak)} of tensors predicted, {share}"
    each = " per rank" if plan["world_size"] > 1 else ""
    return text and _joined(text + each, plan["memory_note"])


def _tail(plan: Record) -> str:
    """Say what becomes of an epoch's last samples; by tokens, how many they are varies."""
    count = plan["tail_size"]
    last = (
        f"the last {plural(count, 'sample')} of an epoch"
        if count
        else "an epoch's last few samples"
    )
    end = "left out" if plan["tail"] == "drop" else "in a step with a normaliser of its own"
    return f"{plan['tail']}: {last}, {end}"


def _cadence(every: int | str | None, steps: int) -> str:
    """Say when something is done: after so many steps, in a time such as `10min`, or once."""
    if every is None or (isinstance(every, int) and every > steps):
        return "at the end"
    return f"every {plural(every, 'step') if isinstance(every, int) else every}"


def _shapes(plan: Record, file: Path) -> RenderableType:
    """List the shapes, the first to run first; equal ones share a row."""
    keys = ("rank", "num_samples", "length", "packed")
    groups = Counter(tuple(shape[key] for key in keys) for shape in plan["shapes"])
    table = _table(">rank", ">count", ">samples", f">length, {noun_of(plan)}s", ">positions")
    for (rank, samples, length, packed), count in [*groups.items()][:MAX_SHAPE_ROWS]:
        positions = length * (1 if packed else samples)  # a packed micro-batch is one row
        table.add_row(*map(number, (rank, count, samples, length, positions)))
    left = len(groups) - MAX_SHAPE_ROWS
    more = f"and {number(left)} more; all are in {shown_path(file)}"
    return Group(table, *([Text(more, "dim")] if left > 0 else []))


def _candidates(candidates: Sequence[Record], noun: Noun) -> RenderableType:
    table = _table(f">cap, {noun}s", ">micro-batches", ">padding", ">memory", ">step time", "")
    for row in candidates:
        style = "bold green" if row["is_chosen"] else "" if row["fits"] else "dim"
        notes = (
            row["is_chosen"] and "<- chosen",
            row["recomputes"] and "recomputing",
            not row["fits"] and "does not fit",
        )
        counts = number(row["max_tokens"]), number(row["micro_batches"]), percent(row["padding"])
        costs = size(row["predicted_bytes"]), duration(row["predicted_seconds"])
        table.add_row(*counts, *costs, _joined(*notes), style=style)
    return table


def _outcome(plan: Record, result: Record) -> RenderableType:
    """Set the length of the run beside its speed, its memory, and what went wrong on the way."""
    speed, peak = result["tokens_per_second"], result["peak_bytes"]
    skipped, replays, metrics = result["skipped_steps"], result["replays"], result["metrics"]
    shares = result["time"]["share"].items() if result["time"] else ()
    peak_of = "the whole process" if plan["device"] == "cpu" else "tensors"
    took = duration(result["seconds"])  # of this start, where the run was resumed
    others = [f"{n} {mean:.4f}" for n, mean in metrics.items() if n not in {"loss", "eval_loss"}]
    return _grid(
        [
            ("completed", f"{plural(result['step'], 'step')}, {took} after the start"),
            ("time", _joined(*(f"{name} {percent(part)}" for name, part in shares if part))),
            ("speed", f"{number(round(speed))} {noun_of(plan)}s/s" if speed else None),
            ("memory", f"{size(peak)} at the peak of {peak_of}" if peak else None),
            ("skipped", f"{plural(skipped, 'step')} without an update" if skipped else None),
            ("replayed", f"{plural(replays, 'time')}, after memory ran out" if replays else None),
            ("held out", _joined(*others)),
        ]
    )


def _losses(result: Record) -> Table:
    """Set the held-out loss beside each baseline, with the difference."""
    table = Table.grid(*(Column(no_wrap=True) for _ in range(3)), padding=(0, 3, 0, 0))
    table.add_row("this model", Text(loss(result["eval_loss"]), "bold green"), "")
    for name, baseline in result["baselines"].items():
        gain = baseline - result["eval_loss"]
        word = "better" if gain >= 0 else f"worse, after {plural(result['step'], 'step')}"
        style = "green" if gain >= 0 else "yellow"
        table.add_row(name, loss(baseline), Text(f"this model is {abs(gain):.4f} {word}", style))
    return table


def _warnings(warnings: Sequence[str]) -> RenderableType:
    lines = [Text.assemble(("warning: ", "bold yellow"), text) for text in warnings]
    return Padding(Group(*lines), (1 if lines else 0, 0, 0, 2), expand=False)


def _title(text: str) -> RenderableType:
    return Rule(Text(text.strip(), "bold"), align="left", style="cyan", characters="─")


def _section(heading: str, *blocks: RenderableType) -> RenderableType:
    """Set blocks below a heading."""
    return Padding(Group(Text(heading, "bold"), *blocks), (1, 0, 0, 2), expand=False)


def _grid(rows: Iterable[Row]) -> RenderableType:
    return Padding(_rows(rows), (0, 0, 0, 2), expand=False)


def _rows(rows: Iterable[Row]) -> Table:
    """Lay out labels and texts; a row without text is left out."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=LABEL_WIDTH, style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows:
        if text is not None:
            grid.add_row(label, Text(text) if isinstance(text, str) else text)
    return grid


def _table(*columns: str) -> Table:
    """Make a plain table; a column whose name begins with `>` is set to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim")
    for column in columns:
        name = column.removeprefix(">")
        table.add_column(name, justify="left" if name == column else "right", overflow="fold")
    return table


def _joined(*parts: object) -> str | None:
    """Join what there is to say; a part may come of `count and text`."""
    return ", ".join(str(part) for part in parts if part) or None

"""Lay out the blocks a person sees at once: start, plan, end. Pure: rows in, text out.

A grid of labels and texts reads the same at 80 columns, at 120, without colour, in a file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from trainer.core.format import (
    METRIC_TITLES,
    duration,
    figure_texts,
    loss,
    number,
    percent,
    plural,
    shown_path,
    size,
)
from trainer.core.rows import Noun, Row, RowGroup, join_parts
from trainer.core.run_folder import RunFolder
from trainer.report.records import PlanRecord

LABEL_WIDTH = 13  # characters, of `learning rate`
MAX_SHAPE_ROWS = 12
COMPUTED = "how it is computed (in full: train plan)"

# A label, and the text beside it
LabelledLine = tuple[str, str | Text | None]


def start_block(
    rows: Iterable[Row],
    warnings: Sequence[str],
    folder: Path,
    *,
    name: str = "",
    resumed_step: int | None = None,
) -> RenderableType:
    """Lay out what is about to happen; `resumed_step` is None in a fresh run.

    What was asked for comes first, then in short how that is computed.
    """
    title = f"train {name}"
    if resumed_step is not None:
        verb = "goes on"
        if (folder / RunFolder.FORK).is_file():
            verb = "forked"
        title = f"{title.strip()}: {verb} after step {number(resumed_step)}"
    asked = [*_lines(rows, "asked"), ("output", shown_path(folder))]
    blocks = [title_line(title), labelled_lines(asked)]
    if computed := _lines(rows, "computed"):
        blocks += [_heading(COMPUTED, "dim"), labelled_lines(computed, "dim")]
    return Group(*blocks, _warnings(warnings))


def plan_block(rows: Sequence[Row], plan: PlanRecord, file: Path) -> RenderableType:
    """Lay out the whole arithmetic of a run: its rows, and the tables of plan.json, at `file`."""
    blocks = [title_line("plan"), labelled_lines(_lines(rows, "asked"))]
    blocks += [_heading("how it is computed"), labelled_lines(_lines(rows, "computed"))]
    blocks += [_heading("in detail"), labelled_lines(_lines(rows, "plan"))]
    blocks.append(section("micro-batches of step 1", _shapes(plan, file)))
    if plan["candidates"]:
        table = _candidates(plan["candidates"], noun_of(plan))
        blocks.append(section("sizes of the largest micro-batch, compared", table))
    return Group(*blocks, _warnings(plan["warnings"]))


def end_block(plan: PlanRecord, result: PlanRecord, rows: Sequence[Row] = ()) -> RenderableType:
    """Lay out how a run ended and what it is worth, from what plan.json and result.json hold."""
    blocks: list[RenderableType] = [title_line("done"), _outcome(plan, result, rows)]
    ours = result["eval_loss"]
    if ours is not None and result["baselines"]:
        table = Table.grid(*(Column(no_wrap=True) for _ in range(3)), padding=(0, 3, 0, 0))
        table.add_row("this model", Text(loss(ours), "bold green"), "")
        for name, baseline in result["baselines"].items():
            word, style = f"worse, after {plural(result['step'], 'step')}", "yellow"
            if baseline >= ours:
                word, style = "better", "green"
            difference = f"this model is {abs(baseline - ours):.4f} {word}"
            table.add_row(name, loss(baseline), Text(difference, style))
        blocks.append(section("held-out loss", table))
    for row in rows:
        if row.group == "below" and row.text is not None:
            blocks.append(section(row.label, Text(row.text)))
    return Group(*blocks, section("look further"))


def noun_of(plan: PlanRecord) -> Noun:
    """Say what lengths count, for a person: samples where each is one token of length one."""
    return "sample" if plan["num_tokens"] == plan["num_samples"] else "token"


def _shapes(plan: PlanRecord, file: Path) -> RenderableType:
    """List the shapes, the first to run first; equal ones share a row."""
    values_of = itemgetter("rank", "num_samples", "length", "packed")
    groups = Counter(map(values_of, plan["shapes"]))
    table = plain_table(">rank", ">count", ">samples", f">length, {noun_of(plan)}s", ">positions")
    for (rank, samples, length, packed), count in [*groups.items()][:MAX_SHAPE_ROWS]:
        # A packed micro-batch is one row; in others each sample is padded to the length.
        positions = length
        if not packed:
            positions *= samples
        table.add_row(*map(number, (rank, count, samples, length, positions)))
    left = len(groups) - MAX_SHAPE_ROWS
    if left <= 0:
        return table
    return Group(table, Text(f"and {number(left)} more; all are in {shown_path(file)}", "dim"))


def _candidates(candidates: Sequence[PlanRecord], noun: Noun) -> RenderableType:
    table = plain_table(f">{noun}s", ">micro-batches", ">padding", ">memory", ">step time", "")
    for row in candidates:
        style = ""
        if row["is_chosen"]:
            style = "bold green"
        elif not row["fits"]:
            style = "dim"
        chosen, recomputes = row["is_chosen"] and "<- chosen", row["recomputes"] and "recomputing"
        notes = chosen, recomputes, not row["fits"] and "does not fit"
        counts = number(row["max_tokens"]), number(row["micro_batches"]), percent(row["padding"])
        costs = size(row["predicted_bytes"]), duration(row["predicted_seconds"])
        table.add_row(*counts, *costs, join_parts(*notes), style=style)
    return table


def _outcome(plan: PlanRecord, result: PlanRecord, rows: Sequence[Row]) -> RenderableType:
    """Set the length of the run beside its speed, its memory, and what went wrong on the way."""
    speed, peak = result["tokens_per_second"], result["peak_bytes"]
    skipped, replays, metrics = result["skipped_steps"], result["replays"], result["metrics"]
    # Only a GPU's allocator counts tensors alone.
    peak_of = {"cpu": "the whole process"}.get(plan["device"], "tensors")
    # Of this start, where the run was resumed: those before it have ended.
    took = duration(result["seconds"])
    ended, lines = dict[str, str | None](), dict[str, str | None]()
    ended["completed"] = f"{plural(result['step'], 'step')}, {took} after the start"
    ended["stopped"] = result.get("stopped")
    best = result.get("best")
    if best and best["value"] is not None:
        ended["best"] = f"{best['metric']} {best['value']:.4f} at step {best['step']}"
    if speed:
        lines["speed"] = f"{number(round(speed))} {noun_of(plan)}s/s"
    if peak:
        lines["memory"] = f"{size(peak)} at the peak of {peak_of}"
    if skipped:
        lines["skipped"] = f"{plural(skipped, 'step')} without an update"
    if replays:
        lines["replayed"] = f"{plural(replays, 'time')}, after memory ran out"
    # Losses have their own place: a table beside the baselines, or the line below.
    own_means = dict(metrics)
    own_means.pop("loss", None)
    own_means.pop("eval_loss", None)
    own = figure_texts(own_means, plan.get(METRIC_TITLES, {}))
    if result["eval_loss"] is not None and not result["baselines"]:
        own.insert(0, f"loss {loss(result['eval_loss'])}")
    lines["held out"] = join_parts(*own)
    costs = [*_lines(rows, "computed"), *lines.items()]
    return labelled_lines([*ended.items(), *costs, *_lines(rows, "plan")])


def _warnings(warnings: Sequence[str]) -> RenderableType:
    lines = [Text.assemble(("warning: ", "bold yellow"), text) for text in warnings]
    return Padding(Group(*lines), (min(1, len(lines)), 0, 0, 2), expand=False)


def title_line(text: str) -> RenderableType:
    """Draw a line across the screen with a title in it."""
    return Rule(Text(text.strip(), "bold"), align="left", style="cyan", characters="─")


def section(heading: str, *blocks: RenderableType) -> RenderableType:
    """Set blocks below a heading."""
    return Padding(Group(Text(heading, "bold"), *blocks), (1, 0, 0, 2), expand=False)


def _heading(text: str, style: str = "") -> RenderableType:
    """Set a heading over lines that are as far to the right as those above it."""
    return Padding(Text(text, f"bold {style}"), (1, 0, 0, 2), expand=False)


def _lines(rows: Iterable[Row], group: RowGroup) -> list[LabelledLine]:
    """Give the lines of a group: label and text of every row that has a text."""
    lines = list[LabelledLine]()
    label = above = ""
    for row in rows:
        label = row.label or label
        if row.text is None or row.group != group:
            continue
        shown = label
        # Where the row that it continues is in another group, its label is said again.
        if not row.label and label == above:
            shown = ""
        lines.append((shown, row.text))
        above = label
    return lines


def labelled_lines(lines: Iterable[LabelledLine], style: str = "") -> RenderableType:
    """Lay out labels and texts; a label without text is left out."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=LABEL_WIDTH, style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in lines:
        if text is not None:
            row_text = text
            # Rich would read square brackets in a string as its own markup.
            if isinstance(text, str):
                row_text = Text(text)
            grid.add_row(label, row_text, style=style)
    return Padding(grid, (0, 0, 0, 2), expand=False)


def plain_table(*columns: str) -> Table:
    """Make a plain table; a column whose name begins with `>` is set to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim")
    for column in columns:
        if column.startswith(">"):
            table.add_column(column[1:], justify="right", overflow="fold")
        else:
            table.add_column(column, overflow="fold")
    return table

"""The end of a run on the screen: what it came to, where the time went, and what to type next."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainer.core.format import (
    alike,
    duration,
    loss,
    number,
    percent,
    plural,
    printable,
    shown_path,
    size,
)
from trainer.report.breakdown import Breakdown
from trainer.report.grids import Row, grid, heading, indented, joined, title
from trainer.report.records import RunSummary

SAMPLE_CHARACTERS = 240
LOSSES = {"loss", "eval_loss"}


def end_block(end: RunSummary) -> RenderableType:
    """Lay out how a run ended and what it is worth; the lines of `further` follow it."""
    is_done = end.state == "completed"
    blocks: list[RenderableType] = [title("done" if is_done else "stopped"), grid(_outcome(end))]
    if end.eval_loss is not None:
        unit = f", {end.unit}" if end.unit else ""
        blocks += [heading(f"held-out loss{unit}"), indented(_losses(end, end.eval_loss))]
    if end.time is not None:
        blocks += [heading("where the time of a step went"), _time_split(end.time)]
        blocks += [indented(Text.assemble(("-> ", "bold yellow"), line)) for line in end.advice]
    if end.is_raw:
        why = "not shown: counting bytes alone predicts better, the model needs more training"
        blocks += [heading("a generated sample"), indented(Text(why, "dim"))]
    elif end.sample:
        shown = printable(end.sample[:SAMPLE_CHARACTERS])
        blocks += [heading("a generated sample"), indented(Text(shown, "green"))]
    return Group(*blocks, heading("look further"))


def _time_split(time: Breakdown) -> RenderableType:
    """Set every part of the mean step beside its share; a part that took nothing is left out."""
    parts = {name: seconds for name, seconds in time.parts.items() if seconds > 0}
    times = alike(list(parts.values()))
    width = max(map(len, times), default=0)
    rows: list[Row] = [
        (name, f"{percent(time.share(seconds)):>6}  {shown:>{width}}")
        for (name, seconds), shown in zip(parts.items(), times, strict=True)
    ]
    if time.hidden is not None:
        hidden = f"of {duration(time.in_flight)} on the network hidden by other work"
        why = "" if time.overlap is None else f": {time.overlap}"
        rows.append(("overlap", f"{percent(time.hidden):>6}  {hidden}{why}"))
    return grid(rows)


def _losses(end: RunSummary, held_out: float) -> Table:
    """Set the held-out loss beside each baseline, with the difference."""
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    table.add_row("this model", Text(loss(held_out), "bold green"), "")
    for name, baseline in end.baselines.items():
        gain = baseline - held_out
        word = "better" if gain >= 0 else f"worse, after {plural(end.step, 'step')}"
        style = "green" if gain >= 0 else "yellow"
        table.add_row(name, loss(baseline), Text(f"this model is {abs(gain):.4f} {word}", style))
    return table


def _outcome(end: RunSummary) -> list[Row]:
    is_part = end.taken is not None and end.taken != end.step
    here = f", {number(end.taken or 0)} of them in this start," if is_part else ""
    done = f"{plural(end.step, 'step')}{here} in {duration(end.seconds)}"
    saved = f"after step {number(end.step)} of {number(end.steps)}, saved"
    others = [f"{name} {mean:.4f}" for name, mean in end.metrics.items() if name not in LOSSES]
    speed, peak = end.tokens_per_second, end.peak_bytes
    skipped, replays = end.skipped_steps, end.replays
    return [
        ("completed", done) if end.state == "completed" else ("stopped", saved),
        ("speed", f"{number(round(speed))} {end.noun}s/s" if speed else None),
        ("memory", f"{size(peak)} at the peak of {end.peak_of}" if peak else None),
        ("skipped", f"{plural(skipped, 'step')} without an update" if skipped else None),
        ("replayed", f"{plural(replays, 'time')}, for want of memory" if replays else None),
        ("held out", joined(*others)),
    ]


def further(end: RunSummary) -> list[str]:
    """Give the commands a person types next; print them unwrapped, so that they can be copied."""
    folder = shown_path(end.folder)
    looks = f"train evaluate run={folder}", f"train export run={folder} export.to=exported"
    longer = f" steps={2 * end.steps}" if end.epochs is None else f" epochs={2 * end.epochs}"
    more = longer if end.state == "completed" else ""
    return [*("  " + " ".join([look, *end.trust]) for look in looks), f"  {end.goes_on}{more}"]

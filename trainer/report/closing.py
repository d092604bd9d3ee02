"""Lay out the end of a run: what it came to, where the time went, and what to type next."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainer.core.format import duration, durations, loss, number, percent, plural, printable, size
from trainer.report.grids import Row, grid, heading, indented, joined, title
from trainer.report.records import Record, RunEnd, is_noise

SAMPLE_CHARACTERS = 240


def end_block(end: RunEnd) -> RenderableType:
    """Lay out how a run ended and what it is worth; its commands follow it."""
    result = end.result
    blocks: list[RenderableType] = [title("done"), _outcome(end)]
    if result["eval_loss"] is not None:
        unit = f", {end.unit}" if end.unit else ""
        blocks += [heading(f"held-out loss{unit}"), indented(_losses(result))]
    if result["time"] is not None:
        blocks += [heading("where the time of a step went"), _time_table(result["time"])]
        blocks += [indented(Text.assemble(("-> ", "bold yellow"), x)) for x in result["advice"]]
    sample = None if end.sample is None else printable(end.sample[:SAMPLE_CHARACTERS])
    shown = Text(sample or "", "green")
    if is_noise(result["eval_loss"], result["baselines"]):
        why = "not shown: counting bytes alone predicts better, the model needs more training"
        shown = Text(why, "dim")
    if shown:
        blocks += [heading("a generated sample"), indented(shown)]
    return Group(*blocks, heading("look further"))


def _time_table(time: Record) -> RenderableType:
    """Set every part of the mean step beside its share; a part that took nothing is left out."""
    parts = {name: seconds for name, seconds in time["seconds"].items() if seconds > 0}
    times = durations(list(parts.values()))
    width = max(map(len, times), default=0)
    rows: list[Row] = [
        (name, f"{percent(time['share'][name]):>6}  {shown:>{width}}")
        for name, shown in zip(parts, times, strict=True)
    ]
    if time["hidden_share"] is not None:
        in_flight = duration(time["in_flight_seconds"])
        hidden = f"of {in_flight} on the network hidden by other work: {time['overlap']}"
        rows.append(("overlap", f"{percent(time['hidden_share']):>6}  {hidden}"))
    return grid(rows)


def _losses(result: Record) -> Table:
    """Set the held-out loss beside each baseline, with the difference."""
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    table.add_row("this model", Text(loss(result["eval_loss"]), "bold green"), "")
    for name, baseline in result["baselines"].items():
        gain = baseline - result["eval_loss"]
        word = "better" if gain >= 0 else f"worse, after {plural(result['step'], 'step')}"
        style = "green" if gain >= 0 else "yellow"
        table.add_row(name, loss(baseline), Text(f"this model is {abs(gain):.4f} {word}", style))
    return table


def _outcome(end: RunEnd) -> RenderableType:
    result = end.result
    step, speed, peak = result["step"], result["tokens_per_second"], result["peak_bytes"]
    skipped, replays, metrics = result["skipped_steps"], result["replays"], result["metrics"]
    here = f", {number(end.taken)} of them in this start," if end.taken != step else ""
    others = [f"{n} {mean:.4f}" for n, mean in metrics.items() if n not in {"loss", "eval_loss"}]
    return grid(
        [
            ("completed", f"{plural(step, 'step')}{here} in {duration(result['seconds'])}"),
            ("speed", f"{number(round(speed))} {end.noun}s/s" if speed else None),
            ("memory", f"{size(peak)} at the peak of {end.peak_of}" if peak else None),
            ("skipped", f"{plural(skipped, 'step')} without an update" if skipped else None),
            ("replayed", f"{plural(replays, 'time')}, for want of memory" if replays else None),
            ("held out", joined(*others)),
        ]
    )

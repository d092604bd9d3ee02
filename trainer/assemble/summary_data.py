"""Describe what is trained and evaluated on in rows, as `summary` does the rest of a run."""

from __future__ import annotations

from trainer.assemble.run import Run
from trainer.core.format import number, plural, short
from trainer.core.rows import Row, RunFacts, join_parts, row
from trainer.data.split import OWN_PART
from trainer.data.view import DataView

MOST_CLASSES = 10


def data_rows(run: Run, facts: RunFacts) -> list[Row]:
    """Count what is trained and evaluated on, and let the data say what they are."""
    config, lengths, parts = run.config, run.data.lengths, run.data.held_out
    name, cut = config.data.name or config.data.target, run.data.train.facts.num_cut
    num_tokens = int(lengths.sum())
    counts = {"": 0, **{name: len(part.lengths) for name, part in parts.items()}}
    text = join_parts(
        plural(len(lengths), "sample"),
        facts.noun == "token" and f"{short(num_tokens)} tokens",
        cut and f"{short(cut)} more are left out",
        *(f"{number(count)} {part or 'held out'}" for part, count in counts.items()),
    )
    counted = row(
        *("data", f"{name}: {text}"),
        data=name,
        num_samples=len(lengths),
        num_held_out=counts.pop(""),
        eval_sets=counts,
        num_tokens=num_tokens,
        num_cut_tokens=int(cut or 0),
    )
    view, config = run.data.train, run.config
    rows = [counted, *view.describe_records(facts)]
    # The same of what is evaluated on and comes from elsewhere than what is trained on.
    names = [OWN_PART] * (config.data.eval_path is not None) + [*config.eval.sets]
    for part in (part for part in names if part in run.data.held_out):
        for each in run.data.held_out[part].loader.dataset.describe_records(facts):
            if each.text:
                rows.append(row("", f"{part or 'held out'}: {each.text}"))
    return [*rows, _classes(view)]


def _classes(view: DataView) -> Row:
    """Number the classes that are words, as class weights and predictions number them."""
    names = view.facts.label_names or ()
    shown = [f"{i} {name}" for i, name in enumerate(names) if name != str(i)]
    if len(shown) > MOST_CLASSES:
        shown[MOST_CLASSES - 1 : -1] = ["..."]
    return row("classes", join_parts(*shown), label_names=[*names])

"""Describe what is trained and evaluated on in rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from trainer.config.components import Component
from trainer.config.messages import show
from trainer.core.format import number, plural, short
from trainer.core.rows import Row, RunFacts, join_parts, row
from trainer.data.split import OWN_PART
from trainer.data.view import DataView

MOST_CLASSES = 10


def data_rows(
    component: Component,
    train: DataView,
    held_out: Mapping[str, DataView],
    elsewhere: Collection[str],
    facts: RunFacts,
) -> list[Row]:
    """Count what is trained and evaluated on, and let the data say what they are.

    What is held out is by name; some of it may come from elsewhere than what is trained on.
    """
    cut, num_tokens = train.facts.num_cut, int(train.lengths.sum())
    counts = {OWN_PART: 0, **{part: len(view) for part, view in held_out.items()}}
    names = train.facts.label_names or ()
    num_classes = train.facts.num_classes or len(names)
    kind = {"flags": "label", "numbers": "number"}.get(str(train.facts.label_kind), "class")
    shares = list[str]()
    for part, count in counts.items():
        shares.append(f"{number(count)} {f'in {part}' if part else 'held out'}")
    text = join_parts(
        plural(len(train), "sample"),
        facts.noun == "token" and f"{short(num_tokens)} tokens",
        cut and f"{short(cut)} more are left out",
        *shares,
        num_classes and plural(num_classes, kind),
    )
    counted = row(
        "data",
        f"{_name_of(component)}: {text}",
        group="asked",
        data=component.label,
        num_samples=len(train),
        num_held_out=counts.pop(OWN_PART),
        eval_sets=counts,
        num_tokens=num_tokens,
        num_cut_tokens=cut,
    )
    rows = [counted, *train.facts.describe_records(facts)]
    for part, view in held_out.items():
        if part not in elsewhere:
            continue
        for each in view.facts.describe_records(facts):
            if each.text:
                rows.append(row("", f"{part or 'held out'}: {each.text}"))
    # Class weights and predictions number the classes so.
    shown = [f"{i} {label}" for i, label in enumerate(names) if label != str(i)]  # the words
    if len(shown) > MOST_CLASSES:
        shown[MOST_CLASSES - 1 : -1] = ["..."]
    # Data that count them have named them, too.
    called = None if train.facts.class_counts else join_parts(*shown)
    return [*rows, row(kind, called, label_names=[*names])]


def _name_of(data: Component) -> str:
    """Name data by their file, folder or name on the hub; by their option where they have none."""
    path = data.params.get("path")
    if not isinstance(path, str):
        return data.label
    # Whatever is here has its whole path by now.
    if Path(path).is_absolute():
        path = Path(path).name
    return show(path)

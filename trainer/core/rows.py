"""Describe the parts of a run in rows: what a person reads, and what plan.json has of it.

The start block, `train plan` and plan.json are made of these rows, so that a fact and the words
for it stand in one place. A part of one's own adds rows by a `describe` of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

Noun = Literal["token", "sample"]
RowGroup = Literal["asked", "computed", "plan", "below"]
"""Where a row is shown: beside what was asked for, or how that is computed; or by `train plan`.

`below` is for the end of a run: the label is a heading, and the text stands under it."""


@final
@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a part may need to know of the run to describe itself."""

    total_steps: int
    world_size: int
    noun: Noun  # what lengths count: samples where each is one token of length one


@final
@dataclass(frozen=True)
class Row:
    """One line that describes a run."""

    label: str = ""  # the left column; empty continues the row above
    text: str | None = None  # for a person; None shows nothing
    values: Mapping[str, Any] = field(default_factory=dict)  # plain, by their keys in plan.json
    group: RowGroup = "plan"  # those of `plan` are shown by `train plan` alone


def row(
    label: str = "",
    text: str | None = None,
    /,
    *,
    group: RowGroup = "plan",
    **values: Any,  # noqa: ANN401 - any plain value
) -> Row:
    """Make a row, with the values of plan.json by name."""
    return Row(label, text, values, group)


class Described:
    """A part of a run that may describe itself."""

    def describe(self, facts: RunFacts) -> Sequence[Row]:
        """Give the rows of this part; none says nothing."""
        return ()


def record_of(rows: Iterable[Row]) -> dict[str, Any]:
    """Put the values of rows together: what plan.json holds."""
    record: dict[str, Any] = {}
    for row in rows:
        assert record.keys().isdisjoint(row.values), f"two rows give {[*row.values]}"
        record |= row.values
    return record


def join_parts(*parts: object) -> str | None:
    """Join what there is to say; a part may come of `count and text`."""
    return ", ".join(map(str, filter(None, parts))) or None

"""Recognise what records hold by the names of their columns, for the model that is trained."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from trainer.config.components import Task
from trainer.core.errors import ConfigError, DataError
from trainer.features.hugging_face.task import TASKS, WORDS

_FORMATS: Mapping[str, Mapping[str, Any]] = WORDS["formats"]
_WEIGHTS = ("weight", "weights", "sample_weight", "loss_weight")


@final
@dataclass(frozen=True)
class Format:
    """What the records of a data set hold."""

    name: str
    columns: Mapping[str, str]  # by role
    unread: Sequence[str] = ()  # the other columns

    def take(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Give the values of a record by role; a ValueError where a column is missing."""
        for role, column in self.columns.items():
            if column not in record and role not in _optional(self.name):
                has = ", ".join(map(repr, record)) or "none"
                raise ValueError(f"no column {column!r}; it has {has}")
        return {role: record.get(column) for role, column in self.columns.items()}


def recognise(
    place: str,
    columns: Collection[str],
    task: Task,
    typed: Mapping[str, str | None] | None = None,
) -> Format:
    """Find the format of records by their columns, for a model that is made for a task.

    Columns are `typed` by role in place of the usual ones; None under the name of a column leaves
    it out. One that nothing reads, and that changes what a record means, is refused.
    """
    left_out = {column for column, name in (typed or {}).items() if name is None}
    named = {role: column for role, column in (typed or {}).items() if column is not None}
    for column in left_out.difference(columns):
        raise ConfigError(f"data.columns={{{column}:null}}: {_no_column(columns)}")
    if {"chosen", "rejected"} <= {*columns} and not named:
        roles = "{prompt: prompt, completion: chosen}"
        roles = roles if "prompt" in columns else "{messages: chosen}"
        raise DataError(
            f"{place}: preference pairs (chosen, rejected) are not trained on; to learn the chosen "
            f"answers alone, type data.columns={roles}"
        )
    _check_typed(named, columns, task)
    readable = [column for column in columns if column not in left_out]
    for name, usual in _usual(task):
        names = {**usual, **{role: named[role] for role in named if role in usual}}
        found = {role: column for role, column in names.items() if column in readable}
        needed = usual.keys() - _optional(name).keys()
        if found.keys() >= needed | named.keys():
            for column in (*_FORMATS[name].get("decisive", ()), *_WEIGHTS):
                if column in readable and column not in found.values():
                    raise DataError(
                        f"{place}: column {column!r} changes what a record means, and is not read "
                        f"from records of {name}; to train without it, type "
                        f"data.columns={{{column}:null}}"
                    )
            return Format(name, found, [c for c in columns if c not in found.values()])
    wanted = dict.fromkeys(" and ".join(usual) for _, usual in _usual(task))
    if not wanted:
        raise DataError(f"{place}: data=hf reads nothing for {task}; type data._target_=mine.Class")
    role = "text" if "text" in wanted else next(iter(wanted)).split()[0]
    raise DataError(
        f"{place}: its columns are {', '.join(columns) or 'none'}, and {task} takes "
        f"{' or '.join(wanted)}; say which they are, e.g. "
        f"data.columns={{{role}: {next(iter(columns), 'NAME')}}}"
    )


def _optional(name: str) -> Mapping[str, str]:
    """Give the columns that a format uses where they are there, by role."""
    return _FORMATS[name].get("optional", {}) if name in _FORMATS else {}


def _usual(task: Task) -> Iterator[tuple[str, Mapping[str, str]]]:
    for name in TASKS[task].formats:
        for usual in _FORMATS[name]["columns"]:
            yield name, {**usual, **_optional(name)}


def _check_typed(typed: Mapping[str, str], columns: Collection[str], task: Task) -> None:
    roles = dict.fromkeys(role for _, usual in _usual(task) for role in usual)
    for role, column in typed.items():
        text = f"data.columns={{{role}: {column}}}"
        if role not in roles:
            raise ConfigError(f"{text}: no such role; for {task} there are {', '.join(roles)}")
        if column not in columns:
            raise ConfigError(f"{text}: {_no_column(columns)}")


def _no_column(columns: Collection[str]) -> str:
    return f"no such column; there are {', '.join(columns)}"

"""Recognise what records hold by the names of their columns, for the model that is trained."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

from trainer.config.components import Task
from trainer.config.messages import did_you_mean_name, near_names
from trainer.core.errors import ConfigError, DataError
from trainer.data.collate import WEIGHT
from trainer.features.hugging_face.task import TASKS, WORDS

_FORMATS: Mapping[str, Mapping[str, Any]] = WORDS["formats"]
Column = str | Sequence[str] | None
Columns = Mapping[str, str | Sequence[str]]
"""Columns by role; of labels several, maybe."""
_WEIGHTS: Sequence[str] = WORDS["weights"]


@final
@dataclass(frozen=True)
class Format:
    """What the records of a data set hold."""

    name: str
    columns: Columns
    unread: Sequence[str] = ()  # the other columns

    def take(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Give the values of a record by role; a ValueError where a column is missing."""
        for role, column in self.columns.items():
            may_lack = role in _optional(self.name) or _is_repeated(self.name, role)
            for each in columns_in(column):
                if each not in record and not may_lack:
                    has = ", ".join(map(repr, record)) or "none"
                    raise ValueError(f"no column {each!r}; it has {has}")
        return {role: column_value(record, column) for role, column in self.columns.items()}


def columns_in(column: str | Sequence[str]) -> Sequence[str]:
    """Give the names of a column, or of several."""
    return [column] if isinstance(column, str) else column


def column_value(record: Mapping[str, Any], column: str | Sequence[str]) -> Any:  # noqa: ANN401
    """Give what a record has in a column, or a list of what it has in several."""
    if isinstance(column, str):
        return record.get(column)
    return [*map(record.get, column)]


def recognise(
    place: str,
    columns: Collection[str],
    task: Task,
    typed: Mapping[str, Column] | None = None,
    filtered: Collection[str] = (),
    *,
    learns: bool = True,
    of_pairs: bool = True,
) -> Format:
    """Find the format of records by their columns, for a model that is made for a task.

    Columns are `typed` by role in place of the usual ones; None under the name of a column leaves
    it out. One that nothing reads, and that changes what a record means, is refused, unless it is
    `filtered` by. Without `learns` what is learned is not read, and need not be there. Unless
    `of_pairs`, a format of pairs of answers is the last that is tried.
    """
    formats = [*_usual(task, learns=learns)]
    if not of_pairs:
        formats.sort(key=lambda each: "rejected" in each[1])
    readable, named = _typed_roles(typed or {}, columns, task, formats)
    for name, usual in formats:
        found = _roles_in(readable, name, usual, named, learns=learns)
        # All that the format cannot do without, and all that was typed: a role of another
        # format that is typed says that this is not the one.
        needed = usual.keys() - _optional(name).keys()
        if needed and found.keys() >= needed | named.keys():
            unread = {*_unread(readable, found)} - {*filtered}
            _refuse_unread(place, name, unread, learns=learns)
            return Format(name, found, _unread(columns, found))
    wanted = _wanted(formats)
    if not wanted:
        raise DataError(f"{place}: data=hf reads nothing for {task}; type data._target_=mine.Class")
    takes = " or ".join(map(" and ".join, wanted))
    raise DataError(
        f"{place}: its columns are {', '.join(columns) or 'none'}, and {task} takes {takes}; say "
        f"which they are, e.g. {_as_typed(_example(wanted, columns, named))}"
    )


def _roles_in(
    readable: Collection[str], name: str, usual: Columns, named: Columns, *, learns: bool
) -> dict[str, str | Sequence[str]]:
    """Give the columns that are there by role."""
    found, optional = dict[str, str | Sequence[str]](), _optional(name)
    for role, usual_column in usual.items():
        column = named.get(role, usual_column)
        # What is typed as another role, as `score: label`, is no role beside that.
        is_other = role in optional and role not in named and column in named.values()
        if {*columns_in(column)} <= {*readable} and not is_other:
            found[role] = column
    others: Mapping[str, str] = _FORMATS[name].get("other_names", {})
    for column in readable if learns else ():
        # One more of a role, or a role by another name
        role = column if _is_repeated(name, column) else others.get(column, "")
        if role not in {"", *found, *named} and column not in named.values():
            found[role] = column
    return found


def _wanted(formats: Iterable[tuple[str, Columns]]) -> list[list[str]]:
    """Give the columns that each format cannot do without, once each."""
    found = list[list[str]]()
    for name, usual in formats:
        needs = [each for each in usual if each not in _optional(name)]
        if needs not in found:
            found.append(needs)
    return found


def as_trained(
    place: str,
    columns: Collection[str],
    trained: Mapping[str, Any],
    typed: Mapping[str, Column],
    filtered: Collection[str] = (),
) -> Format:
    """Find in other records the columns that a run read, but for those of what it learned.

    `trained` has the `name` of the run's format and its `columns`; those that are `typed` by role
    stand in their place.
    """
    name, found = str(trained["name"]), dict[str, str | Sequence[str]]()
    learned, words = _learned(name, trained["columns"]), _FORMATS[name]
    optional = {*_optional(name), *words.get("asked_beside", ()), *words.get("spared", ())}
    roles = dict.fromkeys((*trained["columns"], *optional))
    for role in learned:
        roles.pop(role, None)
    for role in roles:
        usual = trained["columns"].get(role)
        column = typed.get(role) or usual
        if column is not None and {*columns_in(column)} <= {*columns}:
            found[role] = column
        elif role not in optional or typed.get(role) not in {None, usual}:
            near = did_you_mean_name(str(column), columns)
            example = next(iter(near_names(str(column), columns)), "NAME")
            raise DataError(
                f"{place}: {role} is read from column {column!r}, and there are "
                f"{', '.join(columns) or 'none'}.{near} Type {_as_typed({role: example})}"
            )
    for role, column in typed.items():
        if column is not None and role not in {*roles, *learned}:
            text = f"no such role; the run read {', '.join(roles)}"
            raise ConfigError(f"data.columns={{{role}: {column}}}: {text}")
    unread = _unread(columns, found)
    _refuse_unread(place, name, {*unread} - {*typed, *filtered}, learns=False)
    return Format(name, found, unread)


def _example(
    wanted: Sequence[Sequence[str]], columns: Collection[str], named: Columns
) -> dict[str, str | Sequence[str]]:
    """Give a mapping of the fewest roles to columns, a text among them where there may be one."""
    roles = min(wanted, key=lambda needed: ("text" not in needed, len(needed)))
    left, found = _unread(columns, named), {**named}
    for role in roles:
        if role in named:
            continue
        near = [*near_names(role, left), *left, "NAME"]
        if near[0] in left:
            left.remove(near[0])
        found[role] = near[0]
    return found


def _as_typed(roles: Columns) -> str:
    """Write columns by role as they are typed in a shell."""
    pairs = list[str]()
    for role, column in roles.items():
        words = list[str]()
        for each in columns_in(column):
            # Within braces Hydra takes words alone without quotes.
            is_word = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", each)
            words.append(each if is_word else json.dumps(each, ensure_ascii=False))
        name = words[0] if isinstance(column, str) else f"[{', '.join(words)}]"
        pairs.append(f"{role}: {name}")
    return shlex.quote(f"data.columns={{{', '.join(pairs)}}}")


def _typed_roles(
    typed: Mapping[str, Column],
    columns: Collection[str],
    task: Task,
    formats: Iterable[tuple[str, Columns]],
) -> tuple[Collection[str], Columns]:
    """Part what was typed: gives the columns that are not left out, and columns by role."""
    readable, named = [*columns], dict[str, str | Sequence[str]]()
    roles = dict.fromkeys(chain.from_iterable(usual for _, usual in formats))
    for role, column in typed.items():
        if column is None:  # the key is a column, and no role
            text, names = f"data.columns={{{role}:null}}", columns_in(role)
            readable = [each for each in readable if each != role]
        else:
            shown, names = column if isinstance(column, str) else [*column], columns_in(column)
            text, named[role] = f"data.columns={{{role}: {shown}}}", column
            if role not in roles:
                near, known = did_you_mean_name(role, roles), ", ".join(roles)
                raise ConfigError(f"{text}: no such role.{near} For {task} there are {known}")
            takes_several = role == "label" and "label" in dict(formats)
            if not isinstance(column, str) and not takes_several:
                raise ConfigError(f"{text}: {role} is read from one column; name one")
        for name in names:
            if name not in columns:
                near = did_you_mean_name(name, columns)
                known = ", ".join(columns)
                raise ConfigError(f"{text}: no such column.{near} There are {known}")
    return readable, named


def _unread(columns: Collection[str], found: Columns) -> list[str]:
    """List the columns that no role is read from."""
    read = {*chain.from_iterable(map(columns_in, found.values()))}
    return [column for column in columns if column not in read]


def _refuse_unread(place: str, name: str, unread: Collection[str], *, learns: bool) -> None:
    """Refuse a column that nothing reads, and that changes what a record means."""
    decisive = [*_FORMATS[name].get("asks", ())]
    if learns:
        decisive += [*_FORMATS[name].get("decisive", ()), *_WEIGHTS]
    for column in unread:
        if any(re.fullmatch(pattern, column) for pattern in decisive):
            reads_it = ""
            if column in _WEIGHTS and WEIGHT in _optional(name):
                reads_it = f"; for how often each counts, type {_as_typed({WEIGHT: column})}"
            elif column not in _WEIGHTS and "score" in _optional(name):
                reads_it = f"; to learn it, type {_as_typed({'score': column})}, or label for score"
            raise DataError(
                f"{place}: column {column!r} changes what a record means, and is not read "
                f"from records of {name}{reads_it}; to train without it, type "
                f"'data.columns={{{column}:null}}'"
            )


def _learned(name: str, trained: Collection[str] = ()) -> Collection[str]:
    """Name the roles of what is learned, by a run that read those that are `trained`."""
    words = _FORMATS[name]
    found = [role for role in trained if _is_repeated(name, role)]
    for role in words.get("learned", ()):
        if words.get("asked_beside", {}).get(role) not in {*trained}:
            found.append(role)
    return found


def _is_repeated(name: str, column: str) -> bool:
    """Whether a column is one more of a role that may have several, as `negative_1`."""
    role: str | None = _FORMATS[name].get("repeated")
    return role is not None and re.fullmatch(rf"{role}_\d+", column) is not None


def _optional(name: str) -> Mapping[str, str]:
    """Give the columns that a format uses where they are there, by role."""
    found: Mapping[str, str] = _FORMATS[name].get("optional", {})
    return found


def _usual(task: Task, *, learns: bool) -> Iterator[tuple[str, Columns]]:
    for name in TASKS[task].formats:
        for usual in _FORMATS[name]["columns"]:
            every = {**usual, **_optional(name)}
            if not learns:
                for role in _learned(name):
                    every.pop(role, None)
            yield name, every

"""Find the classes of labels, or that they are numbers, and read labels by them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, final

import numpy as np
import numpy.typing as npt

from trainer.core.micro_batch import IGNORED
from trainer.data.samples import LabelKind
from trainer.features.hugging_face.encode import WHOLE, DroppedError, number_in


@final
@dataclass(frozen=True)
class Labels:
    """The labels of a data set."""

    # Of the classes, where labels are words
    names: tuple[str, ...] | None = None
    # None where they are real numbers
    num_classes: int | None = None
    # Of classes by what stands for one
    numbers: Mapping[object, int] = field(default_factory=dict)
    # Whether a record has several: `flags`, each 0 or 1, or `numbers`; else it has one
    several: Literal["flags", "numbers"] | None = None
    # Whether several are in a list of all classes, and not a list of those that apply
    by_place: bool = False
    # Whether real numbers are whole ones, such as 5.0, which may be meant for classes
    are_whole: bool = False

    @property
    def kind(self) -> LabelKind:
        """Say what labels are to an objective."""
        return self.several or ("numbers" if self.num_classes is None else "classes")

    def value(self, value: Any) -> int | float | npt.NDArray[np.float32]:  # noqa: ANN401 - any JSON
        """Give the labels of a record, as numbers; a ValueError where they are none."""
        if self.several is None:
            return self.number(value)
        if not isinstance(value, list):
            raise ValueError(f"the label {value!r} is no list, as other records have it")
        found = np.zeros(self.num_classes or 0, dtype=np.float32)
        if not self.by_place:
            for each in value:
                found[int(self.number(each))] = 1.0
            return found
        if len(value) != len(found):
            raise ValueError(f"{len(value)} labels, and other records have {len(found)}")
        found[:] = [*map(self._placed, value)]
        if (found == IGNORED).all():
            raise DroppedError("without a label")
        return found

    def _placed(self, value: Any) -> float:  # noqa: ANN401 - any JSON
        """Give one of several numbers; an empty one is no loss term."""
        if value is None or value == "":
            return IGNORED
        number = number_in(value)
        if self.several == "flags" and number not in (0, 1):
            raise ValueError(f"the label {value!r} is neither 0 nor 1, as those of other records")
        return float(Labels().number(number))

    def number(self, value: Any) -> int | float:  # noqa: ANN401 - any JSON
        """Give the number of a label; a ValueError where it is none, or no class."""
        if isinstance(value, list):
            raise ValueError(f"the label {value!r} is a list, and other records have one label")
        if isinstance(value, str) and value not in self.numbers:
            value = number_in(value)
        if isinstance(value, Hashable) and value in self.numbers:
            return self.numbers[value]
        if self.num_classes is None and value == IGNORED:
            raise ValueError(f"the label {value!r} means none here; scale the labels")
        if self.num_classes is None and isinstance(value, int | float) and np.isfinite(value):
            return float(value)
        is_class = self.names is None and isinstance(value, int) and self.num_classes is not None
        if is_class and 0 <= value < self.num_classes:
            return int(value)
        classes = "a number from 0"
        if self.names:
            classes = f"one of {', '.join(self.names)}"
        raise ValueError(f"the label {value!r} is not {classes}")


def labels_in(cells: Iterable[object], names: Collection[str]) -> Iterator[object]:
    """Give the labels that cells of CSV stand for: numbers where all are, and none if empty.

    They stay words where all of them are `names` of classes that are known.
    """
    found = {*map(str, filter(None, cells))}
    numbers = {*map(number_in, found)}
    if found <= {*names} or any(isinstance(number, str) for number in numbers):
        return iter(found)
    return iter(numbers)


def find_labels(
    values: Iterable[object],
    stated: Sequence[str] | None = None,
    model: Sequence[str] = (),
    fixed: Sequence[str] | None = None,
) -> Labels:
    """Find the classes of all labels: words in their order, or numbers from 0.

    Names of numbers are `stated` by some data. Those of the model's head count where they are all
    of the data's; `fixed` ones in any case, and none at all where labels are to be numbers.
    """
    # An object or a list is a bad record, and named where that is encoded.
    found = {each for each in values if not isinstance(each, dict | list)}
    distinct = found - {None}
    kinds = {*map(type, distinct)}
    if kinds == {str} and fixed is not None and not fixed:
        raise ValueError("labels are words here, but numbers in the data that are trained on")
    if stated is not None or kinds == {str}:
        words = [*map(str, stated or sorted(map(str, distinct)))]
        return _named_labels(words, stated or (), model, fixed)
    # A column of whole numbers with a gap is read as one of real numbers.
    has_gap = kinds == {float} and None in found
    are_natural = all(isinstance(n, float) and n.is_integer() and n >= 0 for n in distinct)
    if kinds <= {int, bool} or (has_gap and are_natural):
        whole = {value: int(value) for value in distinct}  # type: ignore[call-overload] # see `kinds`
        return _whole_labels(whole, model, fixed)
    if kinds <= {int, float}:
        return Labels(are_whole=all(float(each).is_integer() for each in distinct))  # type: ignore[arg-type] # see `kinds`
    raise ValueError(f"labels are of the types {', '.join(sorted(k.__name__ for k in kinds))}")


def _whole_labels(
    values: Mapping[object, int], model: Sequence[str], fixed: Sequence[str] | None
) -> Labels:
    """Take whole numbers from 0 on for classes as they are, and others for their names."""
    whole = sorted({*values.values()} - {IGNORED})
    words, given = [*map(str, whole)], fixed or model
    is_known = {*words} <= {*given} or bool(fixed and all(map(WHOLE.fullmatch, fixed)))
    is_unknown = -1 in whole and (fixed is not None or whole[:3] == [-1, 0, 1])
    if is_unknown and not is_known:
        text = "leave its records out by data.filter, or write classes as words"
        raise ValueError(f"the label -1 mostly stands for one that is not known; {text}")
    are_places = whole == [*range(len(whole))] or 0 <= whole[0] <= whole[-1] < len(model)
    if not is_known and (are_places or fixed is not None):
        return Labels(None, max(1 + max(whole, default=0), len(model)), values)
    names = tuple(given if is_known else words)
    numbers: dict[object, int] = {name: number for number, name in enumerate(names)}
    for value, number in values.items():
        if str(number) in numbers:
            numbers[value] = numbers[str(number)]
    return Labels(names, len(names), numbers)


def find_several(
    rows: Iterable[Any],
    stated: Sequence[str] | None = None,
    model: Sequence[str] = (),
    fixed: Sequence[str] | None = None,
    columns: Sequence[str] = (),
    *,
    of_flags: bool = False,
) -> Labels:
    """Find what the labels of records are that have several each, in a list or in `columns`.

    Lists of one length are a place for each number: 0 or 1 where the label applies, or any numbers
    unless classes of another count are known. Others have the names or numbers of those that apply,
    and so have whole numbers above 1 where labels are to be flags.
    """
    lengths, distinct = set[int](), set[object]()
    for row in rows:
        if isinstance(row, list):
            lengths.add(len(row))
            distinct.update(each for each in row if not isinstance(each, dict | list))
    distinct -= {None, ""}
    numbers: set[Any] = {*distinct}
    if columns:
        numbers = {*map(number_in, distinct)}
    count, kinds, names = max(lengths, default=0), {*map(type, numbers)}, columns or fixed or model
    is_even = len(lengths) == 1 and (count > 1 or bool(columns))
    are_flags = is_even and numbers <= {0, 1}
    is_open = stated is None and len(names) in {0, count} and not of_flags
    are_plain, shares = kinds <= {bool, int, float}, numbers - {IGNORED}
    are_numbers = is_even and is_open and are_plain
    if are_flags or are_numbers or columns or float in kinds:
        is_share = not are_plain or 0 <= min(shares, default=0) <= max(shares, default=0) <= 1
        if of_flags and not is_share:
            raise ValueError("a label is not from 0 to 1: type objective=regression for numbers")
        return Labels(
            tuple(names) if len(names) == count else None,
            count,
            several="flags" if are_flags else "numbers",
            by_place=True,
        )
    found = find_labels(distinct, stated, model, fixed)
    return replace(found, several="flags")


def _named_labels(
    words: Sequence[str], stated: Sequence[str], model: Sequence[str], fixed: Sequence[str] | None
) -> Labels:
    """Number classes that are words; see `find_labels`."""
    given = fixed or model
    # Heads often spell their classes otherwise, such as POSITIVE.
    place = {name.casefold(): number for number, name in enumerate(given)}
    folded = {*map(str.casefold, words)}
    # Two words of the data that differ in case alone are two classes, and no spelling of one.
    is_respelt = folded <= place.keys() and len(folded) == len({*words})
    is_known = {*words} <= {*given} or is_respelt
    names = given if fixed or is_known else words
    numbers = dict[object, int]()
    if is_known:
        for word in words:
            numbers[word] = place[word.casefold()]
    # Later ones count: of names that differ in case alone `place` has the last.
    numbers |= {word: number for number, word in enumerate(names)}
    for i, word in enumerate(stated):
        if word in numbers:
            numbers[i] = numbers[word]
    return Labels(tuple(names), len(names), numbers)

"""Name the types of a config's values: range, unit, and the words that an error says them with."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, final, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from trainer.config.durations import parse_time

_BYTES = re.compile(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(i?))?B")


@final
@dataclass(frozen=True)
class Kind:
    """What a value must be, in the words of an error and of the help."""

    text: str


HIDDEN = Kind("")
"""Marks a field that is no key of its own."""


def whole(value: object) -> object:
    """Turn a float without a fraction, such as 1e3, into the int it is; leave all else alone."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def parse_bytes(value: object) -> object:
    """Turn `"80GiB"`, `"512 MB"` or `"100B"` into bytes; leave all else alone."""
    match = _BYTES.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return whole(value)
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix or " "))


def _cadence(value: Any) -> object:  # noqa: ANN401 - checked here
    """Refuse what is neither a number of steps nor a share of the run.

    Raises:
        ValueError: it is not.
    """
    number: Any = whole(value)
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not number > 0 or (isinstance(number, float) and number > 1):
        raise ValueError("no number of steps, and no share of the run")
    return number


def _cadence_or_time(value: object) -> object:
    return value if isinstance(value, str) and parse_time(value) else _cadence(value)


def _warmup(value: object) -> object:
    return value if whole(value) == 0 and not isinstance(value, bool) else _cadence(value)


def _finite(value: object) -> object:
    """Refuse a boolean, which Python takes for a number, and infinity.

    Raises:
        ValueError: it is one.
    """
    if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError("no number")
    return value


def _as_text(value: object) -> object:
    return str(value) if type(value) is int else value


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Whole = Annotated[int, BeforeValidator(whole), Kind("a whole number")]
Natural = Annotated[int, BeforeValidator(whole), Field(ge=0), Kind("a whole number, 0 or more")]
Count = Annotated[int, BeforeValidator(whole), Field(ge=1), Kind("a whole number of at least 1")]
Pair = Annotated[
    int,
    BeforeValidator(whole),
    Field(ge=2),
    Kind("a whole number of at least 2: a token and the next"),
]
Seed = Annotated[
    int, BeforeValidator(whole), Field(ge=0, lt=2**63), Kind("a whole number from 0 to 2**63 - 1")
]
Cadence = Annotated[
    int | float,
    BeforeValidator(_cadence),
    Kind("a whole number of steps, 1 or more, or a share below 1"),
]
CadenceOrTime = Annotated[
    int | float | str,
    BeforeValidator(_cadence_or_time),
    Kind("a time, a number of steps or a share of the run below 1"),
]
Warmup = Annotated[
    int | float,
    BeforeValidator(_warmup),
    Kind("a whole number of steps, 0 or more, or a share below 1"),
]
Number = Annotated[float, BeforeValidator(_finite), Kind("a number")]
Positive = Annotated[Number, Field(gt=0), Kind("a number above 0")]
NonNegative = Annotated[Number, Field(ge=0), Kind("a number, 0 or more")]
Share = Annotated[Number, Field(ge=0, lt=1), Kind("a share of at least 0 and below 1")]
Part = Annotated[Number, Field(ge=0, le=1), Kind("a share from 0 to 1")]
Betas = Annotated[
    list[Share],
    Field(min_length=2, max_length=2),
    Kind("two shares of at least 0 and below 1"),
]
Weights = Annotated[list[NonNegative], Kind("a list of numbers, 0 or more, one per class")]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1), Kind("a size such as 80GiB")]
Text = Annotated[str, Field(min_length=1), Kind("text")]
Word = Annotated[
    str,
    BeforeValidator(_as_text),
    Field(pattern=r"^\w[\w.-]{0,99}$"),
    Kind("one word of letters, digits, -, _ and ."),
]
Words = Annotated[
    tuple[str, ...], BeforeValidator(_as_list), Field(strict=False), Kind("a list, e.g. [a,b]")
]
Auto = Literal["auto"]


class Section(BaseModel):
    """Keys that belong together; frozen, and strict about types and names."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def type_like(example: object) -> Any:  # noqa: ANN401 - a type, which has no type of its own
    """Give the type of the values that may stand in place of an option's own; None: any."""
    if isinstance(example, list):
        inner = type_like(example[0]) if example else Any
        return Annotated[list[inner], Kind("a list")]  # type: ignore[valid-type]
    text = Annotated[str, BeforeValidator(_as_text), Kind("text")]
    kinds = ((bool, bool), (int, Whole), (float, Number), (str, text))
    return next((kind for python, kind in kinds if isinstance(example, python)), Any)


def convert(annotation: Any, value: object) -> Any:  # noqa: ANN401 - gives what the type holds
    """Read a value as a type.

    Raises:
        ValidationError: a `ValueError`; it is of another type, or out of range.
    """
    return TypeAdapter(annotation, config=ConfigDict(strict=True)).validate_python(value)


def words_of(annotation: object) -> Iterator[str]:
    """Say in words what a type takes, alternative by alternative.

    Yields:
        One phrase each.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        yield from args
    elif origin is Annotated:
        yield [mark.text for mark in args if isinstance(mark, Kind)][-1]
    elif annotation is bool:
        yield from ("true", "false")
    elif annotation is type(None):
        yield "null"
    elif origin in (dict, tuple):
        yield "a mapping" if origin is dict else "a list"
    else:
        for part in args:
            yield from words_of(part)


def literals_of(annotation: object) -> tuple[str, ...]:
    """Give the words that a type takes; empty where any value of its kind will do."""
    args = get_args(annotation)
    if get_origin(annotation) is Literal:
        return args
    if annotation is bool:
        return ("true", "false")
    if get_origin(annotation) is Annotated:
        args = args[:1]
    return tuple(dict.fromkeys(word for part in args for word in literals_of(part)))

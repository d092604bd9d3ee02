"""Name the types of a config's values: range, unit, and the words that an error says them with.

The words are the description of a type, as pydantic has it; those of a `Literal` are its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter
from pydantic.fields import FieldInfo

_BYTES = re.compile(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(i?))?B")


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


def _as_text(value: object) -> object:
    return str(value) if type(value) is int else value


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Whole = Annotated[int, BeforeValidator(whole), Field(description="a whole number")]
Natural = Annotated[Whole, Field(ge=0, description="a whole number, 0 or more")]
Count = Annotated[Whole, Field(ge=1, description="a whole number of at least 1")]
Pair = Annotated[
    Whole, Field(ge=2, description="a whole number of at least 2: a token and the next")
]
Seed = Annotated[Whole, Field(ge=0, lt=2**63, description="a whole number from 0 to 2**63 - 1")]
Number = Annotated[float, Field(description="a number")]
Positive = Annotated[float, Field(gt=0, description="a number above 0")]
NonNegative = Annotated[float, Field(ge=0, description="a number, 0 or more")]
Share = Annotated[float, Field(ge=0, lt=1, description="a share of at least 0 and below 1")]
Part = Annotated[float, Field(ge=0, le=1, description="a share from 0 to 1")]
Cadence = Count | Annotated[float, Field(gt=0, lt=1, description="a share of the run below 1")]
Time = Annotated[
    str, Field(pattern=r"^\d+(\.\d+)? ?(s|min|h)$", description="a time such as 10min")
]
Warmup = Natural | Share
Betas = Annotated[
    list[Share],
    Field(min_length=2, max_length=2, description="two shares of at least 0 and below 1"),
]
Weights = Annotated[
    list[NonNegative], Field(description="a list of numbers, 0 or more, one per class")
]
Bytes = Annotated[
    int, BeforeValidator(parse_bytes), Field(ge=1, description="a size such as 80GiB")
]
Text = Annotated[str, Field(min_length=1, description="text")]
Word = Annotated[
    str,
    BeforeValidator(_as_text),
    Field(pattern=r"^\w[\w.-]{0,99}$", description="one word of letters, digits, -, _ and ."),
]
Words = Annotated[
    tuple[str, ...],
    BeforeValidator(_as_list),
    Field(strict=False, description="a list, e.g. [a,b]"),
]
ParameterGroups = Annotated[
    dict[str, dict[Literal["lr", "weight_decay", "frozen"], bool | NonNegative]],
    Field(
        description="a mapping of name patterns to lr, weight_decay, frozen, e.g. {a*: {lr: 1e-3}}"
    ),
]
Auto = Literal["auto"]

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)


class Section(BaseModel):
    """Keys that belong together; frozen, and strict about types and names."""

    model_config = ConfigDict(**_STRICT, frozen=True, extra="forbid")


def type_like(example: object) -> Any:  # noqa: ANN401 - a type, which has no type of its own
    """Give the type of the values that may stand in place of an option's own; None: any."""
    if isinstance(example, list):
        inner = type_like(example[0]) if example else Any
        return Annotated[list[inner], Field(description="a list")]  # type: ignore[valid-type]
    text = Annotated[str, BeforeValidator(_as_text), Field(description="text")]
    kinds = ((bool, bool), (int, Whole), (float, Number), (str, text))
    return next((kind for python, kind in kinds if isinstance(example, python)), Any)


def convert(annotation: Any, value: object) -> Any:  # noqa: ANN401 - gives what the type holds
    """Read a value as a type.

    Raises:
        ValidationError: a `ValueError`; it is of another type, or out of range.
    """
    return TypeAdapter(annotation, config=_STRICT).validate_python(value)


def alternatives(annotation: object) -> Iterator[tuple[str, bool]]:
    """Say in words what a type takes.

    Yields:
        A phrase, and whether it is to be typed as it stands.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    described = [each.description for each in args if isinstance(each, FieldInfo)]
    if described and described[-1]:
        yield described[-1], False
    elif origin is Literal or annotation is bool:
        yield from ((word, True) for word in args or ("true", "false"))
    elif annotation is type(None) or origin in (dict, tuple):
        yield {dict: "a mapping", tuple: "a list"}.get(origin, "null"), False  # type: ignore[arg-type]
    else:
        for part in args:
            yield from alternatives(part)

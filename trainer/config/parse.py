"""Turn what is typed for a number into the number: `1e3`, `20k`, `80GiB`."""

from __future__ import annotations

import re

_BYTES = re.compile(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(i?))?B")


def whole(value: object) -> object:
    """Turn a float without a fraction, such as 1e3, into the int it is; leave all else alone."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_LEAST_BYTES = 1024  # no memory is smaller: such a number lacks its unit


def parse_bytes(value: object) -> object:
    """Turn `"80GiB"`, `"512 MB"` or `"100B"` into bytes; refuse a number typed for so many GiB."""
    if isinstance(number := whole(value), int) and number < _LEAST_BYTES:
        raise ValueError("a size needs a unit")
    match = _BYTES.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return whole(value)
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix or " "))


_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kMG])")


def parse_count(value: object) -> object:
    """Turn `"20k"` or `"1.5M"` into the number it is; leave all else alone."""
    match = _COUNT.fullmatch(value) if isinstance(value, str) else None
    return whole(float(match[1]) * 1000 ** " kMG".index(match[2]) if match else value)

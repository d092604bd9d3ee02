"""Say in words what a type of a setting takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo


def alternatives(annotation: object) -> Iterator[tuple[str, bool]]:
    """Say in words what a type takes: phrases, each with whether it is typed as it stands."""
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

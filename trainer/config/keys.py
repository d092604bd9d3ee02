"""Reads the flat list of keys, with doc, kind and default, off the models of the schema."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, final, get_args, get_origin

from pydantic.fields import FieldInfo

from trainer.config.messages import either, flat
from trainer.config.sections import GROUPS, HIDDEN, SHARED_KEYS, Kind, Section


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of the interface, for the help and for messages.

    Attributes:
        doc: one line.
        kind: what its value must be.
        default: of the schema; None for groups and for keys that depend on the option.
        choices: the words it takes; empty where any value of its kind will do.
    """

    doc: str
    kind: str
    default: Any = None
    choices: tuple[str, ...] = ()


def describe(model: type[Section], prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Give every key below a model with its entry, in reading order.

    Args:
        model: the schema of one section.
        prefix: where the section lies: `batch.`, or nothing for the whole config.

    Yields:
        Dotted key and entry.
    """
    for name, info in model.model_fields.items():
        key = prefix + (info.alias or name)
        inner = info.annotation
        if HIDDEN in info.metadata:
            continue
        if isinstance(inner, type) and issubclass(inner, Section):
            if key in GROUPS:
                yield key, Key(doc=_doc(info), kind="the name of an option")
            yield from describe(inner, f"{key}.")
            if key in SHARED_KEYS:
                yield from describe(SHARED_KEYS[key], f"{key}.")
        else:
            yield key, _entry(info)


def _entry(info: FieldInfo) -> Key:
    words = list(dict.fromkeys(words_of(info)))
    return Key(
        doc=_doc(info),
        kind=either(words),
        default=info.get_default(call_default_factory=True, validated_data={}),
        choices=tuple(_literals(info.annotation)),
    )


def words_of(info: FieldInfo) -> Iterator[str]:
    """Say in words what a field takes, alternative by alternative.

    Yields:
        One phrase each.
    """
    marks = [mark.text for mark in info.metadata if isinstance(mark, Kind)]
    yield from marks or _words(info.annotation)


def digests(plain: Mapping[str, Any]) -> dict[str, str]:
    """Hash every key's value that must be the same for all processes of a run."""
    return {
        key: hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
        for key, value in flat(plain).items()
        if key != "parallel.node"
    }


def _doc(info: FieldInfo) -> str:
    if info.description is None:
        raise TypeError(f"a key without a description: {info.annotation}")
    return info.description


def _words(annotation: object) -> Iterator[str]:
    """Say in words what a type takes, alternative by alternative.

    Yields:
        One phrase each.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        yield from args
    elif origin is Annotated:
        yield next(mark.text for mark in args if isinstance(mark, Kind))
    elif annotation is bool:
        yield from ("true", "false")
    elif annotation is type(None):
        yield "null"
    elif origin in (dict, tuple):
        yield "a mapping" if origin is dict else "a list"
    else:
        for part in args:
            yield from _words(part)


def _literals(annotation: object) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif annotation is bool:
        yield from ("true", "false")
    else:
        for part in get_args(annotation):
            yield from _literals(part)

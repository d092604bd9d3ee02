"""Word what is wrong with a config, one line per fault, and walk through its nested mappings.

Knows no key of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from trainer.config.secrets import without_secrets

LINE_LIMIT = 200
MISSING = "???"
"""What OmegaConf writes for a value that has to be given."""

NEAR = 0.65
"""Share of common letters from which one word may be meant by another: two letters in the wrong
order leave 2/3 of a short word, and `depth` and `width`, which differ, share 0.6."""

_VALUE_LIMIT = 60
_FEW = 3


def line(key: str, value: object, text: str) -> str:
    """Write one fault: `key=value: text`, at most `LINE_LIMIT` characters, no line break."""
    return clip(f"{key}={show(value)}: {text}")


def clip(text: str) -> str:
    """Bring a text into one printable line of at most `LINE_LIMIT` characters, without secrets.

    Where it is too long its longest words, which are paths, lose their middle first: what to do
    stands at the end of a line.
    """
    text = without_secrets(text, os.environ)
    words = "".join(c if c.isprintable() else "?" for c in " ".join(text.split())).split(" ")
    excess = len(" ".join(words)) - LINE_LIMIT
    while excess > 0 and len(longest := max(words, key=len)) > _VALUE_LIMIT:
        length = max(len(longest) - excess - 3, _VALUE_LIMIT - 3)
        shortened = f"{longest[: length // 3]}...{longest[length // 3 - length :]}"
        words[words.index(longest)] = shortened
        excess -= len(longest) - len(shortened)
    text = " ".join(words)
    return text if len(text) <= LINE_LIMIT else text[: LINE_LIMIT - 3] + "..."


def show(value: object) -> str:
    """Write a value as one would type it, without secrets, cut where it gets long."""
    if isinstance(value, str):
        text = value
    else:
        text = json.dumps(value, default=str, separators=(",", ":"))
    text = without_secrets(text, os.environ)  # of one that is cut a part would be left
    return text if len(text) <= _VALUE_LIMIT else text[: _VALUE_LIMIT - 3] + "..."


def either(values: Iterable[object]) -> str:
    """List alternatives: `a, b or c`."""
    words = [show(value) for value in values]
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def first_of(texts: Sequence[str], between: str = ", ") -> str:
    """List the first few of many: `a, b, c and 4 more`."""
    more = f" and {len(texts) - _FEW} more" if len(texts) > _FEW else ""
    return between.join(texts[:_FEW]) + more


def named(noun: str) -> str:
    """Put the article before a name: `a Module`, `an Objective`."""
    return f"an {noun}" if noun[:1].lower() in "aeio" else f"a {noun}"


def did_you_mean(word: str, choices: Collection[str]) -> str:
    """Offer the nearest choice: ` Did you mean batch.global?`, or nothing where none is near.

    Of dotted keys those of the same section come first, then those with the same last part, so that
    `lr` finds `optimizer.lr`.
    """
    section, _, leaf = word.rpartition(".")
    beside, elsewhere = {}, []
    for key in dict.fromkeys(choices):
        its_section, _, its_leaf = key.rpartition(".")
        if its_section == section:
            beside[its_leaf] = key
        elif key not in set(ancestors(word)):
            elsewhere.append(key)
    near = [beside[name] for name in get_close_matches(leaf, beside, n=1, cutoff=NEAR)]
    near = near or [key for key in elsewhere if key.rpartition(".")[2] == leaf]
    near = near or get_close_matches(word, elsewhere, n=1, cutoff=NEAR)
    if not near and word != word.lower():
        return did_you_mean(word.lower(), choices)
    return f" Did you mean {near[0]}?" if near else ""


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested mappings into dotted keys; lists and empty mappings are values."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            values |= flat(value, f"{path}.")
        else:
            values[path] = value
    return values


def ancestors(key: str) -> Iterator[str]:
    """Give the sections a dotted key lies in, nearest first.

    Yields:
        Dotted keys.
    """
    while "." in key:
        key = key.rsplit(".", 1)[0]
        yield key


def lookup(tree: Mapping[str, Any], key: str) -> Any:  # noqa: ANN401 - a config holds any value
    """Read a dotted key; None where it is absent."""
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def assign(tree: dict[str, Any], key: str, value: object) -> None:
    """Set a dotted key whose sections are there."""
    *sections, leaf = key.split(".")
    for section in sections:
        tree = tree[section]
    tree[leaf] = value


def prune(tree: Mapping[str, Any], keys: Container[str], prefix: str = "") -> dict[str, Any]:
    """Copy a tree without some dotted keys, and without the sections that this empties."""
    copied: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            inner = prune(value, keys, f"{path}.")
            if inner:
                copied[key] = inner
        elif path not in keys:
            copied[key] = value
    return copied

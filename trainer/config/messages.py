"""Word what is wrong with a config, one line per fault, and walk through its nested mappings."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from trainer.config.cards import CARDS, CardName
from trainer.config.components import Stages
from trainer.config.declared import alternatives
from trainer.config.metric_names import METRIC_NAMES, Metrics
from trainer.config.secrets import without_secrets
from trainer.core.errors import ConfigError
from trainer.core.format import DTYPE_WORDS, expanded, shown_path

Tree = Mapping[str, Any]  # a config as it is composed

LINE_LIMIT = 200
MISSING = "???"  # what OmegaConf writes for a value that has to be given

MIN_SIMILARITY = 0.65
"""Common letters of words that may be meant: a swap leaves 2/3, `depth` and `width` share 0.6."""

_ALSO_CALLED = {"gpu": "cuda", "nvidia": "cuda", "half": "fp16", **DTYPE_WORDS}
"""Words that other programs have for ours."""

_UNFINISHED_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)i?")
_VALUE_LIMIT = 60
_FEW = 3


NO_CLASS = "must be the import path of a class: package.Class"


def line(key: str, value: object, text: str) -> str:
    """Write one fault: `key=value: text`. The text is whole, and the value is not where long."""
    return one_line(f"{key}={show(value)}: {text}")


def value_fault(
    key: str,
    annotation: object,
    value: object,
    example: object = None,
    entry: Sequence[object] = (),
) -> str:
    """Say what a value must be, with an example and the nearest word, where there are any.

    Descriptions of the `annotation` are the words; no `example` is shown for None. Of a mapping of
    stages, `entry` is the name that is wrong, with `[key]` behind it where its value is.
    """
    if annotation is Stages and entry:
        return line(key, value, _stage_fault(value, entry))
    words = dict(alternatives(annotation))
    choices = _choices(annotation, words)
    has_example = not isinstance(example, bool) and example not in (None, [], MISSING, *choices)
    instance, near = "", ""
    if has_example and "e.g." not in either(words):
        instance = f", e.g. {show(example)}"
    meant, size = _ALSO_CALLED.get(str(value).lower()), _UNFINISHED_SIZE.fullmatch(str(value))
    if meant in choices:
        near = f" Did you mean {meant}?"
    for each in value if isinstance(value, list | tuple) else [value]:
        if isinstance(each, str) and each not in choices and not near:
            near = did_you_mean(each, choices)
    # A number alone is meant in GiB.
    if size and "GiB" in either(words):
        near = f" Did you mean {size[1]}{size[2] or 'G'}iB?"
    return line(key, value, f"must be {either(words)}{instance}{near and f'.{near}'}")


def _choices(annotation: object, words: Mapping[str, bool]) -> list[str]:
    """List what may be typed as it stands; `words` are the alternatives of the type."""
    if annotation == Metrics:
        return [*METRIC_NAMES]
    choices = list[str]()
    for word, is_typed in words.items():
        if is_typed:
            choices.append(word)
    if CardName in get_args(annotation):
        choices += CARDS
    return choices


def _stage_fault(stages: Any, entry: Sequence[object]) -> str:  # noqa: ANN401 - a mapping
    """Say which entry of stages is wrong."""
    if "[key]" in entry:
        return f"the beginning {entry[0]} must be a number, 0 or more, such as 500, 20k or 1M"
    size = next(size for begin, size in stages.items() if str(begin) == str(entry[0]))
    return f"the size {show(size)} at {entry[0]} must be a whole number of at least 1, such as 64"


def one_line(text: str) -> str:
    """Bring a text of ours into one printable line without secrets.

    In a long one, long words such as paths lose their middle. Lists of choices stay whole.
    """
    words = " ".join(without_secrets(text, os.environ).split())
    text = "".join(c if c.isprintable() else "?" for c in words)
    if len(text) > LINE_LIMIT:
        text = re.sub(rf"\S{{{_VALUE_LIMIT},}}", lambda m: f"{m[0][:20]}...{m[0][-37:]}", text)
    return text


def clip(text: str) -> str:
    """Bring a text that others wrote into one line, and cut it after `LINE_LIMIT` characters."""
    text = one_line(text)
    if len(text) > LINE_LIMIT:
        text = text[: LINE_LIMIT - 3] + "..."
    return text


def show(value: object) -> str:
    """Write a value as one would type it, without secrets, cut where it gets long."""
    text = str(value)
    if isinstance(value, Mapping):
        pairs = [f"{name}: {show(each)}" for name, each in value.items()]
        text = f"{{{', '.join(pairs)}}}"
    elif isinstance(value, list | tuple):
        text = f"[{','.join(map(show, value))}]"
    elif not isinstance(value, str):
        text = json.dumps(value, default=str, separators=(",", ":"))
    elif value.startswith(os.sep):
        text = shown_path(Path(value))
    # Before it is cut: of a secret a part would be left.
    text = without_secrets(text, os.environ)
    if len(text) > _VALUE_LIMIT:
        text = text[: _VALUE_LIMIT - 3] + "..."
    return text


def either(words: Iterable[object]) -> str:
    """List alternatives, each whole: `a, b or c`."""
    *others, last = map(str, words)
    return last if not others else f"{', '.join(others)} or {last}"


def first_of(texts: Sequence[str], between: str = ", ") -> str:
    """List the first few of many: `a, b, c and 4 more`."""
    listed = between.join(texts[:_FEW])
    if len(texts) > _FEW:
        listed += f" and {len(texts) - _FEW} more"
    return listed


def did_you_mean(word: str, choices: Collection[str]) -> str:
    """Offer the nearest choice: ` Did you mean batch.global?`, or nothing where none is near.

    Keys of the same section come first, then the one with the same last part.
    """
    section, _, last = word.lower().rpartition(".")
    above = {*ancestors(word)}
    # Keys of the same section by their last part, and all others
    beside, elsewhere = dict[str, str](), list[str]()
    for key in choices:
        owner, _, name = key.rpartition(".")
        if owner == section and key not in above:
            beside[name] = key
        elif key not in above:
            elsewhere.append(key)
    near = [beside[name] for name in near_names(last, beside)]
    same = [key for key in elsewhere if key.rpartition(".")[2] == last]
    # Of several that are called so in other sections, none is nearer than what this one has.
    if not (same[1:] and beside and section):
        near += [*same, *near_names(word, elsewhere)]
    return f" Did you mean {near[0]}?" if near else ""


def section_hint(key: str, offers: Iterable[str]) -> str:
    """List what the section of a key has, and where else there is one called so."""
    section, _, name = key.rpartition(".")
    names, others = list[str](), list[str]()
    for each in dict.fromkeys(offers):
        owner, _, last = each.rpartition(".")
        if owner == section:
            names.append(last)
        elif last == name:
            others.append(each)
    if not section or not names:
        return ""
    elsewhere = f"; there is {either(others)}" if others else ""
    return f" {section} has {', '.join(names)}{elsewhere}"


def near_names(word: str, names: Iterable[str]) -> list[str]:
    """Give the names that a word is spelt like, or begins, the nearest first."""
    word, by_small = word.lower(), {name.lower(): name for name in names}
    begun = list[str]()
    for name in sorted(by_small, key=len):
        if name.startswith(word) and len(word) >= _FEW:
            begun.append(name)
    close = get_close_matches(word, by_small, n=_FEW, cutoff=MIN_SIMILARITY)
    return [by_small[name] for name in dict.fromkeys([*begun, *close])]


def did_you_mean_name(word: str, names: Iterable[str]) -> str:
    """Offer the nearest name, such as that of a column, in which a dot is no section."""
    near = near_names(word, names)
    return f" Did you mean {near[0]}?" if near else ""


def did_you_mean_file(path: str) -> str:
    """Offer the nearest file or folder where a path leads nowhere."""
    near = near_file(path)
    return "" if near is None else f" Did you mean {shown_path(Path(near))}?"


def near_file(path: str) -> str | None:
    """Give the nearest name in the folder where a path leads nowhere, with what is before it."""
    typed = expanded(path)
    missing = [typed]
    for folder in typed.parents:
        if os.path.isdir(folder):  # noqa: PTH112 - of pathlib it raises for long names
            break
        missing.append(folder)
    place = missing[-1]
    # Names with the same suffix by what is before it, and the others
    same_suffix, others = dict[str, str](), list[str]()
    with suppress(OSError):
        for each in place.parent.iterdir():
            if each.suffix == place.suffix:
                same_suffix[each.stem] = each.name
            else:
                others.append(each.name)
    names = [same_suffix[stem] for stem in near_names(place.stem, same_suffix)]
    for near in [*names, *near_names(place.name, others)]:
        # What is behind the name that is wrong stays.
        meant = Path(place.parent, near, typed.relative_to(place))
        if os.path.exists(meant):  # noqa: PTH110 - as above
            return str(meant)
    return None


def flat(tree: Tree, prefix: str = "") -> dict[str, Any]:
    """Turn nested mappings into dotted keys; lists and empty mappings are values."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values


def by_key(lines: Iterable[str]) -> dict[str, str]:
    """Give the values of overrides by their keys."""
    words = dict[str, str]()
    for line in lines:
        key, _, value = line.lstrip("+").partition("=")
        # Hydra takes a nested group by either.
        words[key.replace("/", ".")] = value
    return words


def ancestors(key: str) -> Iterator[str]:
    """Give the dotted keys of the sections that a key lies in, nearest first."""
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def lookup(tree: Tree, key: str) -> Any:  # noqa: ANN401 - a config holds any value
    """Read a dotted key; None where it is absent."""
    value: Any = tree
    for part in [key] if key in tree else key.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def refusals(compute: Callable[..., object], *sizes: Any) -> list[str]:  # noqa: ANN401 - any
    """Give what a function refuses its arguments for, a line for each fault."""
    try:
        compute(*sizes)
    except ConfigError as error:
        return [*map(one_line, error.faults)]
    return []

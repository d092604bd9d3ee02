"""Overrides as Hydra reads them: parsed, told apart, checked for what Hydra lets pass.

Hydra accepts a misspelt key behind a `+`, keeps the last of two values for one key, and answers a
number where an option's name is due with a traceback. Here each of these is a line of text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, final

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, QuotedString
from hydra.core.override_parser.types import Quote as QuoteMark
from hydra.errors import HydraException

from trainer.config.components import COMPONENTS, OWN
from trainer.config.keys import KEYS
from trainer.config.messages import clip, did_you_mean, show
from trainer.config.validate import secret_fault

TARGET = "_target_"
RECIPE = "recipe"

_QUOTED_KEY = re.compile(r"""(?<=[{,])\s*(["'])([\w./*?+@-]+)\1\s*:""")
_KEY = re.compile(r"[~+]*[\w./@-]+", re.ASCII)
_QUOTE = "quote special characters: '{}=\"...\"'"
_PLAIN = re.compile(r"[A-Za-z/][\w./-]*", re.ASCII)
NOT_TEXT = frozenset({"null", "true", "false", "nan", "inf"})
"""Words that are something else without quotes."""

_PATHS = frozenset(
    {"data.path", "init", "resume", "run", "recipe", "outputs", "export.to"}
    | {"hydra.run.dir", "hydra.sweep.dir"}
)
_NAME_ENDS = re.compile(r"[/,\[\]'\"]")
_NAME_LIMIT = 255
_PATH_LIMIT = 3000  # of the 4096 bytes that Linux takes, some are the current folder's
_NESTING = {"[": 1, "{": 1, "]": -1, "}": -1}
_DEPTH_LIMIT = 50

# What somebody who writes accum=8 probably means.
_NUMBER_KEYS: Mapping[str, tuple[str, ...]] = {
    "accum": ("accum.steps", "accum.micro"),
    "batch": ("batch.global",),
    "data": ("data.max_length",),
    "optimizer": ("optimizer.lr",),
    "parallel": ("parallel.ranks",),
    "scheduler": ("scheduler.warmup",),
}


@final
@dataclass(frozen=True)
class Groups:
    """The config groups on the search path.

    Attributes:
        options: names of the options, by path (`accum/gradient`).
    """

    options: Mapping[str, Sequence[str]]

    @cached_property
    def paths(self) -> Mapping[str, str]:
        """Group paths by their dotted keys (`accum.gradient`)."""
        return {path.replace("/", "."): path for path in self.options}

    def of(self, key: str) -> str | None:
        """The innermost group whose option holds a dotted value key, as a dotted key."""
        owners = [group for group in self.paths if key.startswith(f"{group}.")]
        return max(owners, key=len, default=None)


@final
@dataclass(frozen=True, kw_only=True)
class Told:
    """Overrides told apart.

    Attributes:
        hydra: settings of Hydra itself, as typed.
        choices: options of groups, as `group/path=option`.
        values: everything else.
        faults: what is wrong with them so far.
    """

    hydra: tuple[str, ...]
    choices: tuple[str, ...]
    values: tuple[Override, ...]
    faults: tuple[str, ...]

    @property
    def has_recipe(self) -> bool:
        """Whether a recipe lies over the defaults."""
        return any(line.startswith(f"{RECIPE}=") for line in self.choices)

    def value_lines(self, known: Collection[str]) -> list[str]:
        """Write the values for Hydra, which wants `++` before a key that the options lack.

        It wants it before a mapping as well, whose keys they may lack.

        Args:
            known: dotted keys of the options.
        """
        return [
            line(value)
            if value.is_delete() or (dotted(value) in known and not isinstance(value.value(), dict))
            else f"++{line(value)}"
            for value in self.values
        ]


@lru_cache(maxsize=4096)
def read(line: str) -> Override:
    """Parse one override; about 4 ms.

    Raises:
        HydraException: the line is not in Hydra's override grammar.
    """
    return OverridesParser.create().parse_overrides([line])[0]


def parse(lines: Iterable[str]) -> tuple[list[Override], list[str]]:
    """Parse overrides.

    Returns:
        What could be read, and one fault for each that could not.
    """
    overrides, faults = [], []
    for line in lines:
        try:
            override = _read_typed(line)
        except (HydraException, ValueError, RecursionError) as error:
            faults.append(_grammar_fault(line, error))
            continue
        fault = _size_fault(override)
        if fault is None:
            overrides.append(override)
        else:
            faults.append(fault)
    return overrides, faults


def _read_typed(line: str) -> Override:
    """Parse one override; keys of a mapping may stand in quotes, which Hydra does not take.

    Raises:
        HydraException: the line is not in Hydra's override grammar.
    """
    try:
        return read(line)
    except HydraException:
        bare = _QUOTED_KEY.sub(r"\2:", line)
        if bare == line:
            raise
        return read(bare)


def dotted(override: Override) -> str:
    """The key of an override with dots throughout, so that `accum/gradient` is `accum.gradient`."""
    return override.key_or_group.replace("/", ".")


def text(override: Override) -> str:
    """What stands right of the first `=`; empty for `~key`."""
    return (override.input_line or "").partition("=")[2]


def line(override: Override) -> str:
    """An override without `+` or `++`: what it sets, whether or not the key was there before."""
    return (override.input_line or "").lstrip("+")


def tell_apart(overrides: Sequence[Override], groups: Groups) -> Told:
    """Tell settings of Hydra, choices of options and values apart, and check what can be.

    A class named over an option (`model._target_=pkg.Net`) chooses the group's empty option.
    """
    hydra: list[str] = []
    values: list[Override] = []
    choices: dict[str, str] = {}
    faults = repeated(overrides)
    for override in overrides:
        key = dotted(override)
        fault = _shape_fault(override, groups) or secret_fault(key, text(override))
        if fault is not None:
            faults.append(fault)
        elif override.is_hydra_override():
            hydra.append(override.input_line or "")
        elif key in groups.paths:
            wrong = choice_faults(override, groups)
            faults += wrong
            choices |= {} if wrong else {key: _chosen(override, groups)}
        else:
            values.append(override)
    typed = {dotted(override) for override in overrides}
    choices |= {path: OWN for path in COMPONENTS if f"{path}.{TARGET}" in typed}
    chosen = tuple(f"{groups.paths[key]}={option}" for key, option in choices.items())
    return Told(hydra=tuple(hydra), choices=chosen, values=tuple(values), faults=tuple(faults))


def quote(value: str | Path) -> str:
    """Write a text so that Hydra's grammar reads exactly it; without quotes where it can."""
    shown = str(value)
    if _PLAIN.fullmatch(shown) and shown.lower() not in NOT_TEXT:
        return shown
    return QuotedString(text=shown, quote=QuoteMark.single).with_quotes()


def values(override: Override, groups: Groups) -> list[str]:
    """The values an override stands for, each in Hydra's grammar.

    Of an interval, which no list can hold, its two ends.
    """
    if not override.is_sweep_override():
        return [text(override)]
    swept: object = override._value
    if isinstance(swept, IntervalSweep):
        return [str(swept.start), str(swept.end)]
    if isinstance(swept, Glob):
        known = groups.options.get(groups.paths.get(dotted(override), ""), ())
        found = swept.filter([name for name in known if name != OWN])
        return found or [quote(",".join(swept.include))]
    return list(override.sweep_string_iterator())


def jobs(lines: Sequence[str], groups: Groups) -> list[list[str]]:
    """Expand a sweep: every combination of the values of every swept override.

    Args:
        lines: overrides that can be parsed.
        groups: for `glob(...)`.

    Returns:
        Per job its overrides, written as Hydra's basic sweeper writes them.
    """
    columns = []
    for line in lines:
        override = read(line)
        key = override.get_key_element()
        if override.is_sweep_override():
            columns.append([f"{key}={value}" for value in values(override, groups)])
        else:
            columns.append([f"{key}={override.get_value_element_as_str()}"])
    return [list(job) for job in itertools.product(*columns)]


def is_of(override: Override, key: str) -> bool:
    """Whether an override is of this very key."""
    return override.key_or_group == key and override.package is None


def value_of(overrides: Sequence[Override], key: str) -> Any:  # noqa: ANN401 - settings hold any value
    """Give what a key is set to, the last time; None where it is not, or swept."""
    found = [o.value() for o in overrides if is_of(o, key) and not o.is_sweep_override()]
    return found[-1] if found else None


def renamed(override: Override, old: str, new: str) -> Override:
    """Give an override of one key to another."""
    return read(f"{new}={text(override)}") if is_of(override, old) else override


def without(overrides: Sequence[Override], *keys: str) -> list[Override]:
    """Leave out the overrides of some keys."""
    return [o for o in overrides if not any(is_of(o, key) for key in keys)]


def repeated(overrides: Iterable[Override]) -> list[str]:
    """One fault for every key that is given more than once."""
    seen: dict[str, list[str]] = {}
    for override in overrides:
        key = f"{dotted(override)}@{override.package}" if override.package else dotted(override)
        seen.setdefault(key, []).append(override.input_line or "")
    return [
        clip(f"{key}: given {len(lines)} times ({', '.join(lines)}); keep one")
        for key, lines in seen.items()
        if len(lines) > 1
    ]


def climbs(value: object) -> bool:
    """Whether a path holds `..`."""
    return ".." in re.split(r"[/\\]", str(value))


def _chosen(override: Override, groups: Groups) -> str:
    """Write a choice of option; Hydra's own glob would find the empty one, for classes typed."""
    is_glob = isinstance(override._value, Glob)
    return ",".join(values(override, groups)) if is_glob else text(override)


def choice_faults(override: Override, groups: Groups) -> list[str]:
    """Check a choice of option (`accum=auto`) against the options there are.

    Args:
        override: its key is a group's.
        groups: what is on the search path.

    Returns:
        One fault for every value that is no option of the group.
    """
    key = dotted(override)
    if override.is_delete():
        return [f"~{key}: a run needs this group; choose an option with {key}=NAME"]
    return [
        fault
        for value in values(override, groups)
        for name in _names(value, key)
        if (fault := _choice_fault(key, name, groups)) is not None
    ]


def _names(value: str, key: str) -> list[Any]:
    """The option names in one value: several where recipes are stacked."""
    parsed = read(f"x={value}").value()
    return parsed if isinstance(parsed, list) and key == RECIPE else [parsed]


def _choice_fault(key: str, name: object, groups: Groups) -> str | None:
    options = [option for option in groups.options[groups.paths[key]] if option != OWN]
    listed = f"Choices: {', '.join(options)}"
    if (name is None and key == RECIPE) or (name == OWN and key != RECIPE):
        return None
    if not isinstance(name, str):
        means = [f"{other}={show(name)}" for other in _NUMBER_KEYS.get(key, ())]
        hint = f" Did you mean {' or '.join(means)}?" if means and _is_number(name) else ""
        return clip(f"{key}={show(name)}: takes the name of an option.{hint} {listed}")
    if climbs(name):
        return clip(f"{key}={name}: an option's name may not climb with `..`")
    if name in options or (key == RECIPE and Path(name).is_absolute()):
        return None
    return clip(f"{key}={name}: no such option.{did_you_mean(name, options)} {listed}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _grammar_fault(line: str, error: Exception) -> str:
    reason = str(error).splitlines()[0]
    key, equals, value = line.partition("=")
    if not equals:
        return clip(f"{line}: needs a value, as in {line}=VALUE")
    if len(line) > 1 and line[0] == line[-1] and line[0] in "\"'`":
        return clip(f"{line}: the quotes are part of it; type {line[1:-1]}")
    why = "" if "Exception" in reason or "parsing override" in reason else f" ({reason})"
    is_quoted = value[:1] in {"'", '"'}
    remedy = "look at its quotes" if is_quoted or not _KEY.fullmatch(key) else _QUOTE.format(key)
    return clip(f"{line}: cannot be read{why}; {remedy}")


def _size_fault(override: Override) -> str | None:
    """Say what no program could take: no key, a path or a nesting beyond what systems hold."""
    line, key = override.input_line or "", dotted(override)
    if not key:
        return clip(f"{line}: needs a key, as in batch.global=512")
    names = _NAME_ENDS.split(text(override)) if key in _PATHS else []
    if any(len(name.encode(errors="replace")) > _NAME_LIMIT for name in names):
        return clip(f"{key}: a name of more than {_NAME_LIMIT} bytes is no path: {line}")
    if sum(len(name) + 1 for name in names) > _PATH_LIMIT:
        return clip(f"{key}: more than {_PATH_LIMIT} characters are no path: {line}")
    if max(itertools.accumulate(_NESTING.get(c, 0) for c in line)) > _DEPTH_LIMIT:
        return clip(f"{key}: nested deeper than {_DEPTH_LIMIT} levels: {line}")
    return None


def _shape_fault(override: Override, groups: Groups) -> str | None:
    """Say why an override can be neither a choice nor a value, or `None`."""
    key = dotted(override)
    if override.is_hydra_override() or key in groups.paths:
        package = f"{override.input_line}: a group has one place here; write {key}=NAME"
        return clip(package) if override.package is not None else None
    if "/" in override.key_or_group or override.package is not None:
        return clip(f"{override.key_or_group}: unknown group.{did_you_mean(key, groups.paths)}")
    return _removal_fault(key) if override.is_delete() else None


def _removal_fault(key: str) -> str | None:
    """Only constructor arguments can be left out; the program needs all of its own settings."""
    if key in KEYS:
        return f"~{key}: a setting cannot be removed; write {key}=null or another value"
    if not any(key.startswith(f"{path}.") for path in COMPONENTS):
        return clip(f"~{key}: unknown setting.{did_you_mean(key, KEYS)}")
    return None

"""Parse overrides as Hydra does, sort them by what they set, and refuse what Hydra lets pass.

Hydra accepts a misspelt key behind a `+`, takes the last of two values for one key, and answers a
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
NOT_TEXT = frozenset({"null", "true", "false", "nan", "inf"})
"""Words that are something else without quotes."""

_QUOTED_KEY = re.compile(r"""(?<=[{,])\s*(["'])([\w./*?+@-]+)\1\s*:""")
_PLAIN = re.compile(r"[A-Za-z/][\w./-]*", re.ASCII)

# What somebody who types accum=8 probably means.
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
class ConfigGroups:
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
class Classified:
    """Overrides by what they set.

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

    def value_lines(self, known: Collection[str]) -> list[str]:
        """Write the values for Hydra, which wants `++` before a key that the options lack.

        It wants it before a mapping as well, whose keys they may lack.

        Args:
            known: dotted keys of the options.
        """
        plain = [(value, (value.input_line or "").lstrip("+")) for value in self.values]
        return [
            line
            if value.is_delete() or (dotted(value) in known and not isinstance(value.value(), dict))
            else f"++{line}"
            for value, line in plain
        ]


@lru_cache(maxsize=4096)
def read(line: str) -> Override:
    """Parse one override; about 4 ms.

    Raises:
        HydraException: the line is not in Hydra's override grammar.
    """
    return OverridesParser.create().parse_overrides([line])[0]


def parse(lines: Iterable[str]) -> tuple[list[Override], list[str]]:
    """Parse overrides; keys of a mapping may stand in quotes, which Hydra does not take.

    Returns:
        What could be read, and one fault for each that could not.
    """
    overrides, faults = [], []
    for line in lines:
        try:
            try:
                override = read(line)
            except HydraException:
                override = read(_QUOTED_KEY.sub(r"\2:", line))
        except (HydraException, ValueError, RecursionError) as error:
            faults.append(_grammar_fault(line, error))
            continue
        if override.key_or_group:
            overrides.append(override)
        else:
            faults.append(clip(f"{line}: needs a key, as in batch.global=512"))
    return overrides, faults


def _grammar_fault(line: str, error: Exception) -> str:
    reason = str(error).splitlines()[0]
    key, equals, value = line.partition("=")
    if not equals:
        return clip(f"{line}: needs a value, as in {line}=VALUE")
    if len(line) > 1 and line[0] == line[-1] and line[0] in "\"'`":
        return clip(f"{line}: the quotes are part of it; type {line[1:-1]}")
    why = "" if "Exception" in reason or "parsing override" in reason else f" ({reason})"
    is_quoted = value[:1] in {"'", '"'}
    remedy = "look at its quotes" if is_quoted else f"quote special characters: '{key}=\"...\"'"
    return clip(f"{line}: cannot be read{why}; {remedy}")


def dotted(override: Override) -> str:
    """The key of an override with dots throughout, so that `accum/gradient` is `accum.gradient`."""
    return override.key_or_group.replace("/", ".")


def text(override: Override) -> str:
    """What stands right of the first `=`; empty for `~key`."""
    return (override.input_line or "").partition("=")[2]


def classify(overrides: Sequence[Override], groups: ConfigGroups) -> Classified:
    """Sort overrides into settings of Hydra, choices of options and values; check what can be.

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
            wrong = _choice_faults(override, groups)
            faults += wrong
            # Hydra's own glob would find the empty option, for classes typed.
            is_glob = isinstance(override._value, Glob)
            option = ",".join(values_of(override, groups)) if is_glob else text(override)
            choices |= {} if wrong else {key: option}
        else:
            values.append(override)
    typed = {dotted(override) for override in overrides}
    choices |= {path: OWN for path in COMPONENTS if f"{path}.{TARGET}" in typed}
    chosen = tuple(f"{groups.paths[key]}={option}" for key, option in choices.items())
    return Classified(
        hydra=tuple(hydra), choices=chosen, values=tuple(values), faults=tuple(faults)
    )


def quote(value: str | Path) -> str:
    """Write a text so that Hydra's grammar reads exactly it; without quotes where it can."""
    shown = str(value)
    if _PLAIN.fullmatch(shown) and shown.lower() not in NOT_TEXT:
        return shown
    return QuotedString(text=shown, quote=QuoteMark.single).with_quotes()


def values_of(override: Override, groups: ConfigGroups) -> list[str]:
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


def expand(lines: Sequence[str], groups: ConfigGroups) -> list[list[str]]:
    """Expand a sweep: every combination of the values of every swept override.

    Args:
        lines: overrides that can be parsed.
        groups: for `glob(...)`.

    Returns:
        Per job its overrides, written as Hydra's basic sweeper writes them.
    """
    columns = []
    for override in map(read, lines):
        is_swept = override.is_sweep_override()
        values = values_of(override, groups) if is_swept else [override.get_value_element_as_str()]
        columns.append([f"{override.get_key_element()}={value}" for value in values])
    return [list(job) for job in itertools.product(*columns)]


def is_of(override: Override, *keys: str) -> bool:
    """Whether an override is of one of these very keys."""
    return override.key_or_group in keys and override.package is None


def value_of(overrides: Sequence[Override], key: str) -> Any:  # noqa: ANN401 - settings hold any value
    """Give what a key is set to, the last time; None where it is not, or swept."""
    found = [o.value() for o in overrides if is_of(o, key) and not o.is_sweep_override()]
    return found[-1] if found else None


def without(overrides: Sequence[Override], *keys: str) -> list[Override]:
    """Leave out the overrides of some keys."""
    return [override for override in overrides if not is_of(override, *keys)]


def repeated(overrides: Iterable[Override]) -> list[str]:
    """One fault for every key that is given more than once."""
    seen: dict[str, list[str]] = {}
    for override in overrides:
        key = f"{dotted(override)}@{override.package}" if override.package else dotted(override)
        seen.setdefault(key, []).append(override.input_line or "")
    return [
        clip(f"{key}: given {len(lines)} times ({', '.join(lines)}); type one")
        for key, lines in seen.items()
        if len(lines) > 1
    ]


def _choice_faults(override: Override, groups: ConfigGroups) -> list[str]:
    """Check a choice of option (`accum=auto`) against the options there are."""
    key = dotted(override)
    if override.is_delete():
        return [f"~{key}: a run needs this group; choose an option with {key}=NAME"]
    names: list[Any] = []
    for value in values_of(override, groups):
        parsed = read(f"x={value}").value()
        names += parsed if isinstance(parsed, list) and key == RECIPE else [parsed]
    return [fault for name in names if (fault := _choice_fault(key, name, groups)) is not None]


def _choice_fault(key: str, name: object, groups: ConfigGroups) -> str | None:
    options = [option for option in groups.options[groups.paths[key]] if option != OWN]
    listed = f"Choices: {', '.join(options)}"
    if (name is None and key == RECIPE) or (name == OWN and key != RECIPE):
        return None
    if not isinstance(name, str):
        is_number = type(name) in (int, float)
        means = [f"{other}={show(name)}" for other in _NUMBER_KEYS.get(key, ()) if is_number]
        hint = f" Did you mean {' or '.join(means)}?" if means else ""
        return clip(f"{key}={show(name)}: takes the name of an option.{hint} {listed}")
    if ".." in re.split(r"[/\\]", name):
        return clip(f"{key}={name}: an option's name may not climb with `..`")
    if name in options or (key == RECIPE and Path(name).is_absolute()):
        return None
    return clip(f"{key}={name}: no such option.{did_you_mean(name, options)} {listed}")


def _shape_fault(override: Override, groups: ConfigGroups) -> str | None:
    """Say why an override can be neither a choice nor a value, or `None`."""
    key, line = dotted(override), override.input_line
    if override.is_hydra_override() or key in groups.paths:
        has_package = override.package is not None
        return clip(f"{line}: takes no @; type {key}=NAME") if has_package else None
    if "/" in override.key_or_group or override.package is not None:
        return clip(f"{override.key_or_group}: unknown group.{did_you_mean(key, groups.paths)}")
    # Only constructor arguments can be left out; the program needs all of its own settings.
    if override.is_delete() and key in KEYS:
        return f"~{key}: a setting cannot be removed; type {key}=null or another value"
    if override.is_delete() and not any(key.startswith(f"{path}.") for path in COMPONENTS):
        return clip(f"~{key}: unknown setting.{did_you_mean(key, KEYS)}")
    return None

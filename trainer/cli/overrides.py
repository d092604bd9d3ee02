"""Parse overrides with Hydra's grammar, sort them by what they set, and check what can be.

Hydra accepts a misspelt key behind a `+`, takes the last of two values for one key in silence, and
answers a number where an option's name is due with a traceback. Here each of these is a line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, final

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, Quote, QuotedString
from hydra.errors import HydraException

from trainer.cli.exit_messages import print_notes
from trainer.config import recipes
from trainer.config.components import COMPONENTS
from trainer.config.consent import TARGET
from trainer.config.keys import KEYS
from trainer.config.messages import clip, did_you_mean, flat, one_line, show
from trainer.config.option_files import OWN
from trainer.config.other_trainers import REFUSED_CLASSES
from trainer.config.validate import secret_fault
from trainer.core.errors import ConfigError
from trainer.core.format import expanded

ConfigGroups = Mapping[str, Sequence[str]]
"""Names of the options of every config group, by dotted key (`accum.gradient`)."""

_ARGUMENTS = tuple(f"{path}." for path in COMPONENTS)
_QUOTED_KEY = re.compile(r"""(?<=[{,])\s*(["'])([\w./*?+@-]+)\1\s*:""")
_TAG = re.compile(r"(?<=[\[,=])\s*(<[^<>\[\]{}'\",]+>)(?=\s*(?:[,\]]|$))")
# In quotes or not
_HOME = re.compile(r""""[^"]*"|'[^']*'|(?<=[=\[,:({\s])~[^,\]})]*""")
# Of a mapping whose braces a shell has taken
_PAIR = re.compile(r"[\w.*-]+:(?!//).+")
_UNREAD = "cannot be read"
_NOT_READ = (HydraException, ValueError, RecursionError, OSError)
_NO_VALUE = re.compile(r",+(?=[,\]})]|$)")
_BRACKETS = {"[": "]", "{": "}", "(": ")"}
_OPENERS = {closer: opener for opener, closer in _BRACKETS.items()}
# One of several names, in quotes or not
_WORD = re.compile(r""""[^"]*"|'[^']*'|[^\[\](),"']+""")


@final
@dataclass
class Classified:
    """Settings of Hydra as typed, choices as `group/path=option`, values, and what is wrong."""

    hydra: list[str] = field(default_factory=list)
    choices: list[str] = field(default_factory=list)
    values: list[Override] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """Choices and values as Hydra takes them: `++` before whatever the options may lack."""
        lines = [*self.choices]
        for value in self.values:
            line = (value.input_line or "").lstrip("+")
            if not value.is_delete():
                line = f"++{line}"
            lines.append(line)
        return lines


@lru_cache(maxsize=4096)
def read_override(line: str) -> Override:
    """Parse one override; about 4 ms. A `HydraException` where its grammar does not know it."""
    return OverridesParser.create().parse_overrides([line])[0]


def parse(lines: Iterable[str], *, is_typed: bool = False) -> tuple[list[Override], list[str]]:
    """Parse overrides; give what could be read, and one fault for each line that could not.

    Of a key that is given twice, the last counts; where the lines were just typed, a line on stderr
    says so. Keys of a mapping may stand in quotes, which Hydra does not take. Paths of recipes
    become absolute, so that they mean the same later.
    """
    typed: dict[str, list[Override]] = {}
    faults, notes = list[str](), list[str]()
    for line in lines:
        try:
            override = _read_typed(line)
        except ConfigError as error:
            faults += error.faults
            continue
        except _NOT_READ:
            faults.append(_unread_fault(line))
            continue
        key = dotted(override)
        # The option of a group may go to several packages of Hydra's.
        if override.package:
            key += f"@{override.package}"
        if not key:
            faults.append(clip(f"{line}: needs a key, as in batch.global=512"))
        else:
            typed.setdefault(key, []).append(override)
    for key, same in typed.items():
        count = f"{key}: typed {len(same)} times"
        if same[1:] and all(_PAIR.fullmatch(right_side(each)) for each in same):
            remedy = f"type '{key}={{...}}' with its quotes"
            faults.append(clip(f"{count}, as a shell reads braces; {remedy}"))
        elif same[1:]:
            notes.append(clip(f"{count}; the last one counts"))
    print_notes(notes if is_typed else ())
    return [same[-1] for same in typed.values()], faults


def distinct(faults: Sequence[str]) -> list[str]:
    """Give each fault once, and nothing more of a key whose value could not be read."""
    unread, found = set[str](), list[str]()
    for fault in faults:
        if f": {_UNREAD}" in fault:
            unread.add(fault.partition("=")[0].lstrip("+"))
    for fault in dict.fromkeys(faults):
        if fault.partition(": ")[0] not in unread:
            found.append(fault)
    return found


def _unread_fault(line: str) -> str:
    """Say what in a setting the grammar does not take, and how it is typed."""
    key, equals, value = line.partition("=")
    if not equals:
        return clip(f"{line}: needs a value, as in {line}=VALUE")
    begin, end = value[:1], value[-1:]
    why, meant = "", value
    if _NO_VALUE.search(value):
        why, meant = "a comma has no value behind it", _NO_VALUE.sub("", value)
    elif begin in _BRACKETS and value.count(begin) > value.count(_BRACKETS[begin]):
        why, meant = f"{begin} is not closed", f"{value}{_BRACKETS[begin]}"
    elif end in _OPENERS and value.count(end) > value.count(_OPENERS[end]):
        why, meant = f"{end} closes nothing", f"{_OPENERS[end]}{value}"
    with suppress(*_NOT_READ):
        if why:
            read_override(f"{key}={meant}")
            return clip(f"{line}: {_UNREAD}: {why}; type {shlex.quote(f'{key}={meant}')}")
    example = f"'{key}=\"...\"'"
    # Of a mapping the names stand in quotes, and not the whole.
    if begin == "{":
        example = f"'{key}={{NAME: \"...\"}}'"
    return clip(f"{line}: {_UNREAD}; quote special characters: {example}")


def _read_typed(line: str) -> Override:
    if "\0" in line:
        raise ConfigError(clip(f"{line}: holds a NUL character; leave it out"))
    key, equals, value = line.partition("=")
    if key.lstrip("+") == recipes.RECIPE_GROUP:
        line = f"{key}{equals}{_WORD.sub(partial(_in_full, recipes.locate), value)}"
    # A shell expands it behind a blank alone.
    elif "~" in value:
        line = f"{key}{_HOME.sub(partial(_in_full, expanded), equals + value)}"
    try:
        return read_override(line)
    except HydraException:
        # Perhaps only keys in quotes, as JSON has them, are in the way, or tags such as `<tool>`.
        return read_override(_QUOTED_KEY.sub(r"\2:", _TAG.sub(r"'\1'", line)))


def _in_full(to_path: Callable[[str], object], word: re.Match[str]) -> str:
    name = word[0].strip(" '\"")
    path = str(to_path(name))
    return word[0] if path == name else quote(path)


def dotted(override: Override) -> str:
    """The key of an override with dots throughout, so that `accum/gradient` is `accum.gradient`."""
    return str(override.key_or_group.replace("/", "."))


def right_side(override: Override) -> str:
    """What stands right of the first `=`; empty for `~key`."""
    return (override.input_line or "").partition("=")[2]


def quote(value: object) -> str:
    """Write a text so that Hydra's grammar reads exactly it."""
    return QuotedString(text=str(value), quote=Quote.single).with_quotes()


def word_of(overrides: Iterable[Override], key: str) -> str | None:
    """Give what a key is set to, as text; None where it is not, or null, or swept."""
    for override in overrides:
        if override.key_or_group == key and not override.is_sweep_override():
            value = override.value()
            return None if value is None else str(value)
    return None


def without(overrides: Iterable[Override], *keys: str) -> list[Override]:
    """Leave out the overrides of some keys."""
    return [override for override in overrides if override.key_or_group not in keys]


def values_in(overrides: Iterable[Override]) -> dict[str, Any]:
    """Give what overrides set by dotted key, what is inside a mapping one by one."""
    found = dict[str, Any]()
    for override in overrides:
        if not override.is_delete():
            found |= flat({dotted(override): override.value()})
    return found


def classify(overrides: Sequence[Override], groups: ConfigGroups) -> Classified:
    """Sort overrides into settings of Hydra, choices of options and values; check what can be.

    A class named over an option (`model._target_=pkg.Net`) chooses the group's empty option.
    """
    parts = Classified()
    typed = set(map(dotted, overrides))
    own = [path for path in COMPONENTS if f"{path}.{TARGET}" in typed]
    for override in overrides:
        key = dotted(override)
        if faults := [*_faults(override, groups)]:
            parts.faults += faults
        elif key in groups and key not in own:
            option = ",".join(values_of(override, groups[key]))
            parts.choices.append(f"{key.replace('.', '/')}={option}")
        elif override.is_hydra_override():
            parts.hydra.append(override.input_line or "")
        elif key not in groups:
            parts.values.append(override)
    parts.choices += [f"{path.replace('.', '/')}={OWN}" for path in own]
    return parts


def refuse_twice(override: Override) -> None:
    """Refuse a flat mapping that gives a name twice, of which Hydra takes the last."""
    names = re.findall(r"[{,]\s*([^\s{}\[\],:]+)\s*:", override.input_line or "")
    is_flat = isinstance(override.value(), dict) and (override.input_line or "").count("{") == 1
    for name in names:
        if is_flat and names.count(name) > 1:
            raise ValueError(f"{name} stands in it twice; leave one out")


def values_of(override: Override, options: Sequence[str] = ()) -> list[str]:
    """The values an override stands for, each in Hydra's grammar.

    Of an interval, which no list can hold, its two ends; of a glob, which Hydra would also match
    with the empty option for classes typed, those of `options`. Their names may be in any case.
    """
    swept: object = override.value()
    if isinstance(swept, IntervalSweep):
        return [str(swept.start), str(swept.end)]
    if isinstance(swept, Glob):
        return swept.filter(list(options)) or [quote(",".join(swept.include))]
    values = [right_side(override)]
    if override.is_sweep_override():
        values = list(override.sweep_string_iterator())
    # Options that are not typed as they are called, but perhaps in another case
    others, found = set(options) - set(values), list[str]()
    for value in values:
        if value.lower() in others:
            found.append(value.lower())
        else:
            found.append(value)
    return found


def _faults(override: Override, groups: ConfigGroups) -> Iterator[str]:
    """Say in a line each why an override can be neither a choice of option nor a value."""
    key = dotted(override)
    is_group = key in groups or override.is_hydra_override()
    if override.package is not None or ("/" in override.key_or_group and not is_group):
        name = (override.input_line or "").partition("=")[0]
        yield clip(f"{name}: unknown group.{did_you_mean(key, groups)}")
    elif secret := secret_fault(key, right_side(override)):
        yield secret
    elif override.is_delete() and (key in groups or key in KEYS):
        yield f"~{key}: cannot be removed; type {key}= and another option or value"
    # Only constructor arguments can be left out; the program needs all of its own settings.
    elif override.is_delete() and not is_group and not key.startswith(_ARGUMENTS):
        yield clip(f"~{key}: unknown setting.{did_you_mean(key, KEYS)}")
    elif key in groups:
        yield from _choice_faults(override, groups[key])


def _choice_faults(override: Override, options: Sequence[str]) -> Iterator[str]:
    """Check a choice of option (`accum=auto`) against the options there are; a line per fault."""
    key = dotted(override)
    is_recipe = key == recipes.RECIPE_GROUP
    names: list[Any] = []
    for value in values_of(override, options):
        parsed = read_override(f"x={value}").value()
        # Several recipes may be chosen at once; of any other group one option.
        if isinstance(parsed, list) and is_recipe:
            names += parsed
        else:
            names.append(parsed)
    for name in names:
        is_file = is_recipe and (name is None or Path(str(name)).is_absolute())
        if isinstance(name, str) and name not in (*options, OWN) and not is_file:
            yield no_such_option(key, name, options)
        elif not isinstance(name, str) and not is_file:
            remedy = f"takes the name of an option; set a value with {key}.KEY=VALUE"
            yield one_line(f"{key}={show(name)}: {remedy}. Choices: {', '.join(options)}")


def no_such_option(group: str, name: str, options: Sequence[str]) -> str:
    """Say in a line which options there are."""
    if group == "optimizer" and (why := REFUSED_CLASSES.get(f"torch.optim.{name}".lower())):
        return one_line(f"{group}={show(name)}: {why}")
    near = did_you_mean(name, options)
    if "." in name and group in COMPONENTS:
        near = f" For a class of your own: {group}.{TARGET}={name}."
    choices = ", ".join(options)
    return one_line(f"{group}={show(name)}: no such option.{near} Choices: {choices}")

"""Write Python objects as overrides, so that a run from a notebook is the run of a command line.

The overrides are what the run folder records; a run from Python is thus resumed and evaluated like
any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from trainer.cli.argv import split_argv
from trainer.cli.compose import Composer, plain_of
from trainer.cli.overrides import quote
from trainer.config.components import COMPONENTS
from trainer.config.consent import TARGET
from trainer.config.messages import flat, lookup
from trainer.config.option_files import options_of
from trainer.core.errors import ConfigError

_WORD = re.compile(r"[A-Za-z_]\w*")  # what may stand between the dots of a key


def overrides_of(config: Mapping[str, Any] | Sequence[str], composer: Composer) -> list[str]:
    """Write a config as overrides.

    It may be overrides as they are typed; a config that Hydra composed, whole; or nested mappings,
    where a word chooses an option of a group (`{"accum": "fixed", "batch": {"global": 64}}`).
    """
    if OmegaConf.is_config(config):
        config = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    if isinstance(config, str) or not isinstance(config, Mapping | Sequence):
        raise ConfigError("train(...): takes a config, a mapping, or a list of overrides")
    if not isinstance(config, Mapping):
        request = split_argv([str(line) for line in config])
        if request.faults:
            raise ConfigError(*request.faults)
        if request.flags:
            name = next(iter(request.flags))
            raise ConfigError(f"train(...): {name} is a flag: pass it as a keyword argument")
        return request.lines
    tree = {str(key): value for key, value in config.items() if key not in ("hydra", "unset")}
    # Hydra notes the options in its own node, if that is there.
    noted = tree.pop("choices", None) or lookup(config, "hydra.runtime.choices")
    chosen = {g.replace("/", "."): name for g, name in (noted or _recognised(tree)).items()}
    with composer.open():
        groups = composer.groups
        typed = {group: word for group in groups if isinstance(word := lookup(tree, group), str)}
        lines = [
            f"{group.replace('.', '/')}={quote(option)}"
            for group, option in (chosen | typed).items()
            if group in groups and isinstance(option, str)
        ]
        known = flat(plain_of(composer.compose(lines)))
    return [*lines, *_value_lines(tree, "", {*chosen, *typed}, known)]


def _recognised(tree: Mapping[str, Any]) -> dict[str, str]:
    """The options that whole components of a composed config were read from."""
    chosen = {}
    for path in COMPONENTS:
        section = lookup(tree, path)
        if not isinstance(section, Mapping) or TARGET not in section:
            continue
        num_equal = {
            name: sum(section.get(key) == value for key, value in option.items())
            for name, option in options_of(path).items()
            if option.get(TARGET) == section[TARGET] and option.keys() <= section.keys()
        }
        if num_equal:
            chosen[path] = max(num_equal, key=lambda name: num_equal[name])
    return chosen


def _value_lines(
    section: Mapping[Any, Any], prefix: str, chosen: set[str], known: Mapping[str, Any]
) -> Iterator[str]:
    """Give `++key=value` for every value that the chosen options do not have already."""
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and all(map(_WORD.fullmatch, map(str, value))):
            yield from _value_lines(value, f"{key}.", chosen, known)
        elif (key not in known or known[key] != value) and key not in chosen:
            yield f"++{key}={literal(value)}"


def literal(value: object) -> str:
    """Write a value in Hydra's override grammar."""
    if isinstance(value, str):
        return quote(value)
    if value is None or isinstance(value, bool | int | float):
        return "null" if value is None else str(value)
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{literal(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, Sequence):
        return f"[{','.join(map(literal, value))}]"
    raise ConfigError(f"train(...): a config cannot hold a {type(value).__name__}: {value!r}")

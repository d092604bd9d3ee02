"""Write Python objects as overrides, so that a run from a notebook is the run of a command line.

The overrides are what the run folder keeps; a run from Python is thus resumed and evaluated like
any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from trainer.cli.argv import split
from trainer.cli.compose import Composer, plain_of
from trainer.cli.overrides import NOT_TEXT, TARGET, quote
from trainer.config.components import COMPONENTS
from trainer.config.keys import options_of
from trainer.config.messages import flat, lookup
from trainer.core.errors import ConfigError

_WORD = re.compile(r"[A-Za-z_]\w*")  # what may stand between the dots of a key
_PATTERN = re.compile(r"[A-Za-z_*?][\w./*?+@-]*", re.ASCII)


def overrides_of(config: Mapping[str, Any] | Sequence[str], composer: Composer) -> list[str]:
    """Write a config as overrides.

    Args:
        config: overrides as they are typed; or nested mappings, where a word that stands for a
            group chooses its option (`{"accum": "fixed", "batch": {"global": 64}}`); or a config
            that Hydra composed, whole.
        composer: knows the groups.

    Raises:
        ConfigError: it is none of these.
    """
    if OmegaConf.is_config(config):
        config = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    if isinstance(config, str) or not isinstance(config, Mapping | Sequence):
        raise ConfigError("train(...): takes a config, a mapping, or a list of overrides")
    if not isinstance(config, Mapping):
        request = split([str(line) for line in config])
        if request.flags:
            name = next(iter(request.flags))
            raise ConfigError(f"train(...): {name} is for the command line, or an argument by name")
        return request.lines
    tree = {str(key): value for key, value in config.items() if key not in ("hydra", "unset")}
    # Hydra notes the options in its own node, if that is there.
    chosen = dict(tree.pop("choices", None) or lookup(config, "hydra.runtime.choices") or ())
    chosen = chosen or _recognised(tree)
    with composer.open():
        groups = composer.groups()
        lines = [
            f"{path}={quote(option)}"
            for path, option in chosen.items()
            if path in groups.options and isinstance(option, str)
        ]
        named_options = ((path, lookup(tree, key)) for key, path in groups.paths.items())
        lines += [f"{path}={quote(o)}" for path, o in named_options if isinstance(o, str)]
        known = flat(plain_of(composer.compose(lines)))
    named = {line.partition("=")[0].replace("/", ".") for line in lines}
    return [*lines, *_value_lines(tree, "", named, known)]


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
            chosen[path.replace(".", "/")] = max(num_equal, key=lambda name: num_equal[name])
    return chosen


def _value_lines(
    section: Mapping[Any, Any], prefix: str, named: set[str], known: Mapping[str, Any]
) -> Iterator[str]:
    """Give one override for every value that the chosen options do not have already.

    Yields:
        `++key=value`.
    """
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and all(map(_WORD.fullmatch, map(str, value))):
            yield from _value_lines(value, f"{key}.", named, known)
        elif not (key in named or (key in known and known[key] == value)):
            yield f"++{key}={literal(value)}"


def literal(value: object) -> str:
    """Write a value in Hydra's override grammar.

    Raises:
        ConfigError: it is of a kind that a config cannot hold.
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_key(k)}:{literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(map(literal, value)) + "]"
    raise ConfigError(f"train(...): a config cannot hold a {type(value).__name__}: {value!r}")


def _key(key: object) -> str:
    """Write a key of a mapping, which Hydra's grammar takes without quotes only.

    Raises:
        ConfigError: it cannot be written.
    """
    if not isinstance(key, str) or not _PATTERN.fullmatch(key) or key.lower() in NOT_TEXT:
        raise ConfigError(f"train(...): {key!r} cannot be a key; letters, digits and _./*?-+@ can")
    return key

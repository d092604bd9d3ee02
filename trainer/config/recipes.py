"""Find and vet recipes: data from anybody, values and choices of options.

Hydra would instantiate what a recipe puts under `hydra:`, resolve what it writes as `${...:...}`,
and load what it names in its defaults list; so every recipe is read here, and refused where it
could do more than set values. The classes it may name are checked against the trust list later.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.components import COMPONENTS, GROUPS, OWN
from trainer.config.consent import asked, reason_to_type
from trainer.config.keys import data_dir
from trainer.config.messages import clip, lookup, prune
from trainer.core.errors import ConfigError

GROUP = "recipe"
SCHEME = "recipes"
FOLDERS_VARIABLE = "TRAIN_RECIPES"
"""Environment variable: folders of recipes, separated as in PATH."""

SIZE_LIMIT = 64 * 1024
"""Bytes. A recipe is a page of values; what is larger is none."""

META = ("purpose", "cost", "expected")
"""What a recipe's `meta` block says to its reader; it is no setting."""

_PLAIN_REFERENCE = re.compile(r"\$\{[\w.\[\]]+\}")
_HYDRA_KEY = re.compile(r"_\w*_")
_ENTRY = re.compile(r"(?:(?:override|optional) +)*/?(?!hydra(?:/|$))(\w+(?:/\w+)*)")
_OPTION = re.compile(r"(?!hydra(?:/|$))(?!.*\.\.)\w[\w.-]*(/\w[\w.-]*)*")


def folders() -> list[Path]:
    """List the folders that recipes are looked for in, first one first."""
    typed = os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep)
    own = (Path(folder).expanduser().absolute() for folder in typed if folder)
    return [*own, data_dir("recipes")]


def available() -> list[str]:
    """Name every recipe that can be typed as `recipe=NAME`."""
    return sorted({path.stem for folder in folders() for path in folder.glob("*.yaml")})


def locate(typed: str) -> str:
    """Turn what was typed behind `recipe=` into the name Hydra gets.

    A text that ends in `.yaml` or holds a separator is a path to a file, and becomes absolute, so
    that it means the same in every process; anything else is a name.

    Raises:
        ConfigError: there is no such file.
    """
    if not typed.endswith((".yaml", ".yml")) and os.sep not in typed:
        return typed
    path = Path(typed).expanduser().absolute()
    path = path if path.suffix else path.with_suffix(".yaml")
    if path.suffix != ".yaml":
        raise ConfigError(clip(f"recipe={typed}: the name of a recipe ends in .yaml"))
    if not path.is_file():
        raise ConfigError(clip(f"recipe={typed}: no such file"))
    return str(path)


def register() -> None:
    """Make Hydra read recipes, and `${or:a,b}` and `${unless:a,b}` in our own `conf/`.

    Repeating it changes nothing.
    """
    Plugins.instance().register(RecipeSource)
    Plugins.instance().register(RecipeSearchPath)
    OmegaConf.register_new_resolver("or", lambda a, b: b if a is None else a, replace=True)
    OmegaConf.register_new_resolver("unless", lambda a, b: b if a is None else None, replace=True)


def read(path: Path) -> dict[str, Any]:
    """Read and vet one recipe.

    Returns:
        Its content without `meta`; `defaults` is still in it.

    Raises:
        ConfigError: one line per fault, file first.
    """
    try:
        text = path.read_bytes()[: SIZE_LIMIT + 1].decode()
        if len(text) > SIZE_LIMIT:
            raise ConfigError(clip(f"{path}: more than {SIZE_LIMIT // 1024} KiB; not a recipe"))
        tree = _with_choices(_parse(text))
    except UnicodeDecodeError:
        raise ConfigError(clip(f"{path}: not UTF-8 text")) from None
    except yaml.MarkedYAMLError as error:
        place = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(clip(f"{path}{place}: {error.problem}")) from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(clip(f"{path}: {error}")) from None
    faults = [clip(f"{path}: {fault}") for fault in vet(tree)]
    if faults:
        raise ConfigError(*faults)
    return {key: value for key, value in tree.items() if key != "meta"}


def _parse(text: str) -> dict[str, Any]:
    # An alias that is written ten times in ten levels is ten billion values.
    if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
        raise ValueError("`*alias` is not for a recipe; write the value out")
    tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    if not isinstance(tree, dict):
        raise ValueError("a recipe is a mapping: key: value")
    return {str(key): value for key, value in tree.items()}


def _with_choices(tree: dict[str, Any]) -> dict[str, Any]:
    """Let a word behind a group choose its option, and `_target_` that of a class of one's own."""
    words = {g: option for g in GROUPS if isinstance(option := lookup(tree, g), str)}
    chosen = {group.replace(".", "/"): option for group, option in words.items()}
    for path in COMPONENTS:
        section = lookup(tree, path)
        if isinstance(section, Mapping) and "_target_" in section:
            chosen[path.replace(".", "/")] = OWN
    defaults = tree.get("defaults", [])
    if not chosen or not isinstance(defaults, list):
        return tree
    choices = [{f"override /{group}": option} for group, option in chosen.items()]
    others = [item for item in defaults if chosen.keys().isdisjoint(_groups_of(item))]
    return {**prune(tree, words), "defaults": [*others, *choices]}


def _groups_of(item: object) -> set[str]:
    """Name the groups that an entry of a defaults list chooses for."""
    entries = map(str, item) if isinstance(item, Mapping) else ()
    return {match[1] for entry in entries if (match := _ENTRY.fullmatch(entry))}


def vet(tree: Mapping[str, Any]) -> Iterator[str]:
    """Name everything in a recipe that could do more than set values.

    Args:
        tree: its content.

    Yields:
        One line per fault, the key first.
    """
    meta = tree.get("meta", {})
    if not isinstance(meta, Mapping) or not meta.keys() <= set(META):
        yield "meta: is a mapping of purpose, cost and expected"
    yield from _defaults_faults(tree.get("defaults", []))
    body = {key: value for key, value in tree.items() if key not in ("defaults", "meta")}
    for key in (found for name, value in body.items() for found in asked(name, value)):
        yield f"{key}: not for a recipe; type it yourself: {reason_to_type(key)}"
    for group in GROUPS:
        section, _, name = group.rpartition(".")
        parent = lookup(body, section) if section else body
        if isinstance(parent, Mapping) and not isinstance(parent.get(name, {}), Mapping):
            yield f"{group}: takes the name of an option, or settings as a mapping"
    yield from _value_faults(body, "")


def _defaults_faults(defaults: object) -> Iterator[str]:
    """Refuse what would load anything but an option of a group or another recipe.

    Yields:
        One line per fault.
    """
    if not isinstance(defaults, list):
        yield "defaults: is a list"
        return
    for item in defaults:
        pairs = item.items() if isinstance(item, dict) else [(None, item)]
        for entry, option in pairs:
            if entry is not None and not _ENTRY.fullmatch(str(entry)):
                yield f"defaults: {entry}: names no group that a recipe may choose for"
            for name in option if isinstance(option, list) else [option]:
                is_name = isinstance(name, str) and _OPTION.fullmatch(name)
                if name is not None and not is_name:
                    yield f"defaults: {name}: is not the name of an option"


def _value_faults(value: object, path: str) -> Iterator[str]:
    """Walk through the values; keys that act and resolvers are refused at any depth.

    Yields:
        One line per fault.
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _key_faults(str(name), inner, path)
            yield from _value_faults(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _value_faults(inner, path)
    elif isinstance(value, str):
        text = value
        while (shorter := _PLAIN_REFERENCE.sub("", text)) != text:  # nested ones, inside first
            text = shorter
        if "${" in text:
            yield f"{path}: {value}: a recipe may refer to a key as ${{batch.global}}, to no more"


def _key_faults(name: str, value: object, path: str) -> Iterator[str]:
    key = f"{path}.{name}" if path else name
    is_ours = name in ("_target_", "_partial_") and path
    if "${" in name or (_HYDRA_KEY.fullmatch(name) and not is_ours):
        yield f"{key}: not a key for a recipe; _target_ and _partial_ of a component are"
    elif name == "_target_" and not isinstance(value, str):
        yield f"{key}: is the import path of a class"


@final
class RecipeSource(ConfigSource):
    """Shows a flat folder of recipes to Hydra as the config group `recipe`."""

    @staticmethod
    def scheme() -> str:
        """See the base class."""
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        """See the base class; refuses what is more than values.

        Raises:
            ConfigError: see `read`.
        """
        return ConfigResult(
            provider=self.provider,
            path=self.full_path(),
            config=OmegaConf.create(read(self._file(config_path))),
            header={"package": "_global_"},  # whatever `# @package` the file has
        )

    def available(self) -> bool:
        """See the base class."""
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        """See the base class."""
        return config_path in ("", GROUP)

    def is_config(self, config_path: str) -> bool:
        """See the base class."""
        return config_path.startswith(f"{GROUP}/") and self._file(config_path).is_file()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """See the base class."""
        if config_path == "" and results_filter in (None, ObjectType.GROUP):
            return [GROUP]
        if config_path == GROUP and results_filter in (None, ObjectType.CONFIG):
            return sorted(path.stem for path in Path(self.path).glob("*.yaml"))
        return []

    def _file(self, config_path: str) -> Path:
        """Find the file of `recipe/NAME`, or of `recipe//absolute/path.yaml` (see `locate`)."""
        name = config_path.removeprefix(f"{GROUP}/").removesuffix(".yaml")
        return Path(self.path) / f"{name}.yaml"


@final
class RecipeSearchPath(SearchPathPlugin):
    """Puts the folders of recipes on Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """See the base class."""
        for folder in folders():
            provider = "trainer" if folder == data_dir("recipes") else FOLDERS_VARIABLE
            search_path.append(provider, f"{SCHEME}://{folder}")

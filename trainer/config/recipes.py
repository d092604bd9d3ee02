"""Where recipes come from, and why they are safe.

A recipe is data from anybody: values, and choices of options. Hydra would instantiate what a
recipe puts under `hydra:`, resolve what it writes as `${...:...}`, and load what it names in its
defaults list; so every recipe is read here, and refused where it could do more than set values.
What classes it may name is settled by `build`, behind the trust list.
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

from trainer.config.consent import asked, reason_to_type
from trainer.config.messages import clip, lookup, prune
from trainer.config.sections import COMPONENT_PATHS, GROUPS, OWN
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
_OPTION = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*")
_ENTRY = re.compile(r"(override +|optional +)*/?\w+(/\w+)*")


def data_dir(name: str) -> Path:
    """Find `conf` or `recipes`: beside the package in a checkout, inside it in a wheel.

    Raises:
        FileNotFoundError: the installation is damaged.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"{name}/ is neither in {package} nor beside it")


def folders() -> list[Path]:
    """List the folders that recipes are looked for in, first one first."""
    typed = os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep)
    return [*(Path(folder).expanduser().absolute() for folder in typed if folder), _shipped()]


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
    if not typed.endswith((".yaml", ".yml")) and "/" not in typed and os.sep not in typed:
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
        raise ConfigError(clip(f"{path}{_place(error)}: {error.problem}")) from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(clip(f"{path}: {error}")) from None
    faults = [*_header_faults(text), *vet(tree)]
    if faults:
        raise ConfigError(*(clip(f"{path}: {fault}") for fault in faults))
    return {key: value for key, value in tree.items() if key != "meta"}


def vet(tree: Mapping[str, Any]) -> Iterator[str]:
    """Name everything in a recipe that could do more than set values.

    Args:
        tree: its content.

    Yields:
        One line per fault, the key first.
    """
    yield from _meta_faults(tree.get("meta", {}))
    yield from _defaults_faults(tree.get("defaults", []))
    body = {key: value for key, value in tree.items() if key not in ("defaults", "meta")}
    for key in (found for name, value in body.items() for found in asked(name, value)):
        yield f"{key}: not for a recipe; type it yourself: {reason_to_type(key)}"
    yield from _group_faults(body)
    yield from _value_faults(body, "")


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
            header={"package": "_global_"},
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
            provider = "trainer" if folder == _shipped() else FOLDERS_VARIABLE
            search_path.append(provider, f"{SCHEME}://{folder}")


def _shipped() -> Path:
    return data_dir("recipes")


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
    found = {group: lookup(tree, group) for group in GROUPS}
    words = {group: value for group, value in found.items() if isinstance(value, str)}
    named = [path for path in COMPONENT_PATHS if _names_class(found[path])]
    chosen = {group.replace(".", "/"): option for group, option in words.items()}
    chosen |= {path.replace(".", "/"): OWN for path in named}
    defaults = tree.get("defaults", [])
    if not chosen or not isinstance(defaults, list):
        return tree
    others = [item for item in defaults if _group_of(item) not in chosen]
    choices = [{f"override /{group}": option} for group, option in chosen.items()]
    return {**prune(tree, words), "defaults": [*others, *choices]}


def _names_class(section: object) -> bool:
    return isinstance(section, Mapping) and "_target_" in section


def _group_of(item: object) -> str | None:
    """The group that an entry of a defaults list chooses for; `None` for one of another form."""
    entry = str(next(iter(item))) if isinstance(item, Mapping) and len(item) == 1 else ""
    return entry.split()[-1].lstrip("/") if entry.split() else None


def _place(error: yaml.MarkedYAMLError) -> str:
    return f":{error.problem_mark.line + 1}" if error.problem_mark else ""


def _header_faults(text: str) -> Iterator[str]:
    """Refuse a package that would move the values elsewhere, into `hydra` say.

    Yields:
        At most one line.
    """
    for line in text.splitlines():
        words = line.strip().lstrip("#").split()
        if not line.strip().startswith("#") and line.strip():
            return
        if words[:1] == ["@package"] and words[1:] != ["_global_"]:
            yield "# @package: a recipe's values are `_global_`; leave the line out"


def _meta_faults(meta: object) -> Iterator[str]:
    if not isinstance(meta, Mapping):
        yield "meta: is a mapping of purpose, cost and expected"
        return
    for key, value in meta.items():
        if key not in META:
            yield f"meta.{key}: unknown; meta has {', '.join(META)}"
        elif isinstance(value, dict | list):
            yield f"meta.{key}: is a line of text"


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
            if entry is not None and not _is_group(str(entry)):
                yield f"defaults: {entry}: names no group that a recipe may choose for"
            options = option if isinstance(option, list) else [option]
            for name in options:
                if name is not None and name != "_self_" and not _is_option(name):
                    yield f"defaults: {name}: is not the name of an option"


def _is_group(entry: str) -> bool:
    group = entry.rsplit(maxsplit=1)[-1].lstrip("/") if entry.split() else ""
    return bool(_ENTRY.fullmatch(entry)) and group.partition("/")[0] != "hydra"


def _is_option(name: object) -> bool:
    return (
        isinstance(name, str)
        and bool(_OPTION.fullmatch(name))
        and ".." not in name
        and name.partition("/")[0] != "hydra"
    )


def _group_faults(body: Mapping[str, Any]) -> Iterator[str]:
    """Refuse what is neither an option of a group nor settings of it.

    Yields:
        One line per group.
    """
    for group in GROUPS:
        section, _, name = group.rpartition(".")
        parent = lookup(body, section) if section else body
        if isinstance(parent, Mapping) and not isinstance(parent.get(name, {}), Mapping):
            yield f"{group}: takes the name of an option, or settings as a mapping"


def _value_faults(value: object, path: str) -> Iterator[str]:
    """Walk through the values; keys that act and resolvers are refused at any depth.

    Yields:
        One line per fault.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            inner_path = f"{path}.{key}" if path else str(key)
            yield from _key_faults(str(key), inner, inner_path)
            yield from _value_faults(inner, inner_path)
    elif isinstance(value, list):
        for inner in value:
            yield from _value_faults(inner, path)
    elif isinstance(value, str) and "${" in _without_references(value):
        yield f"{path}: {value}: a recipe may refer to a key as ${{batch.global}}, and to no more"


def _key_faults(key: str, value: object, path: str) -> Iterator[str]:
    if _HYDRA_KEY.fullmatch(key) and (key not in ("_target_", "_partial_") or "." not in path):
        yield f"{path}: not for a recipe; only _target_ and _partial_ of a component are read"
    elif key == "_target_" and not isinstance(value, str):
        yield f"{path}: is the import path of a class"
    if "${" in key:
        yield f"{path}: a key is plain text"


def _without_references(text: str) -> str:
    """Take plain references out of a text, nested ones from the inside."""
    while (shorter := _PLAIN_REFERENCE.sub("", text)) != text:
        text = shorter
    return text

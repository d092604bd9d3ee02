"""Find recipes, and refuse in them what would act while Hydra composes it.

Hydra would instantiate what a recipe puts under `hydra:`, resolve what it writes as `${...:...}`,
and load what it names in its defaults list; so every recipe is read here, and refused where it
could do more than set values. Which values are its user's to give is decided in `consent`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, final

import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from packaging.version import InvalidVersion, Version

from trainer.config.components import COMPONENTS, GROUPS
from trainer.config.consent import ONLY_TYPED, TARGET
from trainer.config.messages import clip, did_you_mean_file, line, lookup, one_line
from trainer.config.option_files import OWN, data_dir
from trainer.core.errors import ConfigError
from trainer.core.format import expanded

RECIPE_GROUP = "recipe"
FOLDERS_VARIABLE = "TRAIN_RECIPES"
"""Environment variable: folders of recipes, separated as in PATH."""

SIZE_LIMIT = 64 * 1024
"""Bytes. A recipe is a page of values; what is larger is none."""

_REFERENCE = re.compile(r"\$\{[\w.\[\]]+\}")
_ENTRY = re.compile(r"(?:(?:override|optional) +)*/?(?!hydra(?:/|$))(\w+(?:/\w+)*)")
_OPTION = re.compile(r"(?!hydra(?:/|$))(?!.*\.\.)\w[\w.-]*(/\w[\w.-]*)*")


def folders() -> list[Path]:
    """List the folders that recipes are looked for in, first one first."""
    found = []
    for typed in os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep):
        # An empty word would be the current folder, which may be gone.
        if typed and os.path.isdir(folder := expanded(typed)):  # noqa: PTH112 - see `locate`
            found.append(folder.absolute())
    return [*found, data_dir("recipes")]


def available() -> list[str]:
    """Name every recipe that can be typed as `recipe=NAME`."""
    return sorted({path.stem for folder in folders() for path in folder.glob("*.yaml")})


def path_of(name: str) -> Path | None:
    """Find the file of a recipe by its name or absolute path; None where there is none."""
    for folder in folders():
        if (path := folder / f"{name.removesuffix('.yaml')}.yaml").is_file():
            return path
    return None


def locate(typed: str) -> str:
    """Turn what was typed behind `recipe=` into the name Hydra gets.

    A text that ends in `.yaml` or holds a separator is a path, and becomes absolute, so that it
    means the same in every process.
    """
    if not typed.endswith((".yaml", ".yml")) and os.sep not in typed:
        return typed
    path = expanded(typed).absolute()
    if not path.suffix:
        path = path.with_suffix(".yaml")
    # A name that is too long raises in pathlib.
    if path.suffix != ".yaml" or not os.path.isfile(path):  # noqa: PTH113
        meant = did_you_mean_file(typed)
        text = f"no such file whose name ends in .yaml{meant and f'.{meant}'}"
        raise ConfigError(line("recipe", typed, text))
    return str(path)


def register(own_folder: str | None = None) -> None:
    """Make Hydra read recipes, the user's options, and our resolvers: `${or:a,b}` and others."""
    OptionFolders.own_folder = own_folder
    Plugins.instance().register(RecipeSource)
    Plugins.instance().register(OptionFolders)
    OmegaConf.register_new_resolver("or", lambda a, b: b if a is None else a, replace=True)
    OmegaConf.register_new_resolver("folder", lambda a: str(expanded(str(a))), replace=True)
    OmegaConf.register_new_resolver("unless", lambda a, b: b if a is None else None, replace=True)


def read_recipe(path: Path) -> dict[str, Any]:
    """Read and vet one recipe, and give it without `meta`."""
    faults: list[str] = []
    try:
        text = path.read_bytes()[: SIZE_LIMIT + 1].decode()
        # An alias that is written ten times in ten levels is ten billion values.
        has_alias = any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text))
        tree: object = None
        if not has_alias:
            tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        if len(text) > SIZE_LIMIT or has_alias or not isinstance(tree, dict):
            most = f"at most {SIZE_LIMIT >> 10} KiB"
            faults = [f"a recipe must be `key: value` YAML of {most}, without *alias"]
        else:
            tree.pop("meta", None)
            content = _with_choices({str(key): value for key, value in tree.items()})
            faults = [*vet(content)]
    except yaml.MarkedYAMLError as error:
        fault = clip(str(error.problem))
        if error.problem_mark:
            # YAML counts lines from 0.
            fault = f"line {error.problem_mark.line + 1}: {fault}"
        faults = [fault]
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        faults = [clip(str(error))]
    if faults:
        raise ConfigError(*(one_line(f"{path}: {fault}") for fault in faults))
    return content


def about(path: Path) -> dict[str, str]:
    """Give what a recipe says of itself under `meta`, and which ones it extends."""
    try:
        defaults = read_recipe(path).get("defaults") or []
    except ConfigError as error:
        return {"fault": error.faults[0]}
    # As it is typed: 0.10 is a version, and no number. An empty file is None.
    tree = yaml.BaseLoader(path.read_text(encoding="utf-8")).get_single_data() or {}
    meta = tree.get("meta")
    found = {"purpose": "not said"}
    if isinstance(meta, dict) and meta:
        found = {str(key): clip(str(value)) for key, value in meta.items()}
    bases = list[str]()
    for each in defaults:
        # A mapping chooses the option of a group.
        if isinstance(each, str) and each != "_self_":
            bases.append(each)
    if bases:
        found["extends"] = ", ".join(bases)
    return found


def other_versions(chosen: object, here: str, *, newer: bool = False) -> Iterator[str]:
    """Say of each chosen recipe that it was written for another version, or a newer one, alone."""
    waiting = list[str]()
    if isinstance(chosen, str):
        waiting.append(chosen)
    elif isinstance(chosen, list):
        waiting += map(str, chosen)
    # It grows by the recipes that those in it extend.
    for name in waiting:
        meta = dict[str, str]()
        if (path := path_of(name)) is not None:
            meta = about(path)
        for base in meta.get("extends", "").split(", "):
            if base and base not in waiting:
                waiting.append(base)
        ours, theirs = _version(here), _version(meta.get("version", here))
        if theirs > ours or (theirs < ours and not newer):
            yield clip(f"recipe={name}: written for version {meta['version']}, this is {here}")


def _version(text: str | None) -> Version:
    """Read a version; what is none is older than all."""
    try:
        return Version(text or "0")
    except InvalidVersion:
        return Version("0")


def vet(tree: Mapping[str, Any]) -> Iterator[str]:
    """Name what in a recipe would act while Hydra composes it, one line per fault, key first."""
    if "hydra" in tree:
        yield f"hydra: not for a recipe; type it yourself: {ONLY_TYPED['hydra']}"
    defaults = tree.get("defaults") or []
    # No group is named by an empty text, so that what is no list is refused.
    items = defaults if isinstance(defaults, list) else [{"": defaults}]
    for item in items:
        yield from _entry_faults(item)
    # References to keys are taken away; what is left of `${` would call a resolver.
    values = dict(tree)
    values.pop("defaults", None)
    text = json.dumps(values, default=str)
    # Nested ones go from the inside out.
    while (shorter := _REFERENCE.sub("", text)) != text:
        text = shorter
    if "${" in text:
        what = text[text.index("${") :].partition('"')[0]
        yield f"{what}: a recipe may only contain references to keys, such as ${{batch.global}}"


def _entry_faults(item: object) -> Iterator[str]:
    """Name what is wrong with an entry of a defaults list."""
    # A name alone is a recipe that this one extends.
    choices: Mapping[Any, Any] = {RECIPE_GROUP: item}
    if isinstance(item, dict):
        choices = item
    for entry, options in choices.items():
        if not _ENTRY.fullmatch(str(entry)):
            yield f"defaults: {entry}: is not a group that a recipe may set"
        names = options if isinstance(options, list) else [options]
        for name in names:
            if name is not None and not _OPTION.fullmatch(str(name)):
                yield f"defaults: {name}: is not the name of an option"


def _with_choices(tree: dict[str, Any]) -> dict[str, Any]:
    """Let a word behind a group choose its option, and `_target_` that of a class of one's own."""
    chosen = {}
    for group in GROUPS:
        section, (*parents, name) = lookup(tree, group), group.split(".")
        if isinstance(section, str):
            chosen[group.replace(".", "/")] = section
            # As a value it would take the place of the whole section.
            parent = tree[parents[0]] if parents else tree
            del parent[name]
        elif group in COMPONENTS and isinstance(section, Mapping) and TARGET in section:
            chosen[group.replace(".", "/")] = OWN
    if not chosen:
        return tree
    defaults = []
    for item in tree.get("defaults", []):
        groups = set[str]()
        for entry in item if isinstance(item, Mapping) else ():
            if match := _ENTRY.fullmatch(str(entry)):
                groups.add(match[1])
        # What the recipe says beside its list counts.
        if groups.isdisjoint(chosen):
            defaults.append(item)
    choices = [{f"override /{group}": option} for group, option in chosen.items()]
    return {**tree, "defaults": [*defaults, *choices]}


@final
class RecipeSource(ConfigSource):
    """Shows Hydra the recipes of all folders as the options of one group."""

    @classmethod
    def scheme(cls) -> str:
        """See the base class."""
        return RECIPE_GROUP

    def load_config(self, config_path: str) -> ConfigResult:
        """See the base class, and `read_recipe`, which refuses what is more than values."""
        path = path_of(config_path.removeprefix(f"{RECIPE_GROUP}/")) or Path()
        return ConfigResult(
            provider=self.provider,
            path=self.full_path(),
            config=OmegaConf.create(read_recipe(path)),
            # A recipe sets keys of the whole config, whatever it says.
            header={"package": "_global_"},
        )

    def available(self) -> bool:
        """See the base class."""
        return True

    def is_group(self, config_path: str) -> bool:
        """See the base class."""
        return config_path in ("", RECIPE_GROUP)

    def is_config(self, config_path: str) -> bool:
        """See the base class; `recipe//absolute/path.yaml` is one, too (see `locate`)."""
        group, _, name = config_path.partition("/")
        return group == RECIPE_GROUP and path_of(name) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """See the base class."""
        if config_path == "" and results_filter != ObjectType.CONFIG:
            return [RECIPE_GROUP]
        if config_path == RECIPE_GROUP and results_filter != ObjectType.GROUP:
            return available()
        return []


@final
class OptionFolders(SearchPathPlugin):
    """Puts recipes and the user's `--config-dir` on Hydra's search path."""

    own_folder: ClassVar[str | None] = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """See the base class."""
        # The folders are for those who ask Hydra for them.
        places = os.pathsep.join(map(str, folders()))
        search_path.append("recipes", f"{RECIPE_GROUP}://{places}")
        if self.own_folder is not None:
            search_path.append("command-line", f"file://{self.own_folder}")

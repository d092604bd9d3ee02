"""Decide whose classes may run.

Classes may run that the user typed, has in a folder of options, ran before in the same run
(`core/consent.py`), or trusts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from trainer.cli.overrides import TARGET
from trainer.config.components import COMPONENTS, LISTS, owner_of, targets_in
from trainer.config.data_sets import eval_sets
from trainer.config.messages import line, lookup
from trainer.config.option_files import options_of
from trainer.config.run_config import RunConfig
from trainer.config.trackers import is_name


def consented_components(
    full: DictConfig, tree: Mapping[str, Any], typed: Mapping[str, Any], own: Collection[str]
) -> frozenset[str]:
    """Name the components whose classes, of their arguments too, the user consented to.

    `full` is the composed config with Hydra's own node, `tree` the same resolved; `own` are the
    classes of a run that the user made.
    """
    found, runtime = set(), OmegaConf.to_container(full.hydra.runtime)
    sections = {path: lookup(tree, path) for path in (*COMPONENTS, *LISTS)} | eval_sets(tree)
    for path, section in sections.items():
        named, option = _classes(path, section), _own_option(runtime, owner_of(path) or path)
        consented = {*own, *_typed_classes(typed), *_classes(path, option)}
        rest = named - consented
        if named & consented and (not rest or rest <= _built_in(runtime, path)):
            found.add(path)
    return frozenset(found)


def _built_in(runtime: Any, path: str) -> set[str]:  # noqa: ANN401 - Hydra's own node
    """Name the class of the chosen option that is built in: data of it may be of typed classes."""
    chosen = runtime["choices"].get(path.replace(".", "/"))
    return _classes(path, {TARGET: options_of(path).get(str(chosen), {}).get(TARGET)})


def _typed_classes(typed: Mapping[str, Any]) -> Iterator[str]:
    """List the classes that were typed: `model._target_=net.Net`, and those within a value."""
    for key, value in typed.items():
        if key.endswith(f".{TARGET}"):
            yield str(value)
        else:
            yield from _classes(key, value)


def _classes(path: str, section: object) -> set[str]:
    """Find the classes of a component, without those of a component within it."""
    if path in LISTS and isinstance(section, list):
        classes = [each for each in section if not is_name(each)]  # of options: `validate`
        section = [{TARGET: each} if isinstance(each, str) else each for each in classes]
    pairs = targets_in(path, section)
    return {target for place, target in pairs if place == path or place not in COMPONENTS}


def _own_option(runtime: Any, path: str) -> object:  # noqa: ANN401
    """Read the option of a component from the user's own folder; None where it is not theirs."""
    sources = [s for s in runtime["config_sources"] if s["schema"] == "file"]
    group = path.replace(".", "/")
    name = f"{group}/{runtime['choices'].get(group)}.yaml"
    folders = sorted(sources, key=lambda source: source["provider"] != "main")
    found = next((s for s in folders if (Path(s["path"]) / name).is_file()), None)
    if found is None or found["provider"] == "main":
        return None
    return yaml.safe_load((Path(found["path"]) / name).read_text())


def trust_faults(config: RunConfig) -> list[str]:
    """Say in a line each which classes nobody consented to, before a module could be imported."""
    pairs = config.own_classes(typed=False)
    unknown = [pair for pair in pairs if pair[1].partition(".")[0] not in config.trust]
    packages = ",".join(dict.fromkeys(target.partition(".")[0] for _, target in unknown))
    why = f"comes from a recipe or a saved run; to trust it, type 'trust=[{packages}]'"
    return [line(f"{place}.{TARGET}", target, why) for place, target in unknown]

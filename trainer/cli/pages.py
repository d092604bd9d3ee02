"""Run what starts no run: help, recipes, `train doctor`, views, commands of features."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from trainer.cli.feature_commands import feature_commands
from trainer.config import trackers
from trainer.config.messages import clip
from trainer.config.option_files import LIBRARIES, options_of
from trainer.config.secrets import is_secret
from trainer.core.errors import ConfigError
from trainer.core.format import size

_VARIABLES = ("TRAIN_", "CUDA_", "NCCL_", "OMP_", "PYTORCH_", "TORCH", "HF_", "SLURM_")


def show_page(word: str, settings: Sequence[str], own_folder: str | None) -> None:
    """Print the help, where a view of runs was written, or one of `PAGES`; or run a feature's."""
    if word in feature_commands():
        feature_commands()[word].run(word, settings)
        return
    if word == "help":
        from trainer.cli import help_page  # noqa: PLC0415 - imports Hydra

        help_page.print_help(own_folder)
        return
    if word not in PAGES:
        from trainer.cli.view_command import show_runs  # noqa: PLC0415 - for these alone

        print(show_runs(word, settings))  # noqa: T201 - where the file is
        return
    if settings:
        raise ConfigError(clip(f"{settings[0]}: train {word} takes no settings; leave it out"))
    for line in PAGES[word]():
        print(line)  # noqa: T201 - a page


def _recipes() -> Iterator[str]:
    """Give each recipe with its purpose, its cost and the result to expect."""
    from trainer.config import recipes  # noqa: PLC0415 - imports Hydra

    for name in recipes.available():
        yield f"recipe={name}"
        if path := recipes.path_of(name):
            for key, value in recipes.about(path).items():
                yield f"  {key:<10}{value}"
    variable = recipes.FOLDERS_VARIABLE
    yield f"your own: NAME.yaml in a folder on {variable}, or recipe=path/to/file.yaml"


def _doctor() -> Iterator[str]:
    """Give versions, devices, kernels, limits and folders; no secrets and no host names."""
    from trainer.core.gpu import has_fast_bf16  # noqa: PLC0415 - imports torch
    from trainer.data.index import cache_folder  # noqa: PLC0415 - imports numpy
    from trainer.report.records import (  # noqa: PLC0415 - imports torch
        device_names,
        environment,
        package_version,
    )
    from trainer.tune.memory_limit import memory_limit  # noqa: PLC0415 - imports torch

    found = environment()
    hardware = found["hardware"]
    yield "versions"
    packages = {name: package_version(name) for name in LIBRARIES["reported"]}
    for name, text in (found["versions"] | packages).items():
        yield f"  {name:<14}{text or 'not installed'}"
    yield "machine"
    yield f"  {'system':<14}{hardware['system']}"
    yield f"  {'cpu':<14}{hardware['cpu']}, {hardware['cores']} cores for this process"
    for device, name in device_names().items():
        limit = memory_limit(device)
        bf16 = "no fast bf16" if not has_fast_bf16(device) else "fast bf16"
        yield f"  {name:<14}{size(limit.bytes)} for tensors ({limit.source}), {bf16}"
    yield "folders"
    yield f"  {'tuning cache':<14}{cache_folder()}"
    yield f"  {'program':<14}{Path(__file__).parents[1]}"
    yield "environment"
    # Variables that options of trackers read
    named = re.findall(r"oc\.env:(\w+)", str(options_of(trackers.OPTIONS_FOLDER)))
    for name in sorted(os.environ):
        if name.startswith((*_VARIABLES, *named)) and not is_secret(name, os.environ[name]):
            yield f"  {name}={clip(os.environ[name])}"


PAGES: Mapping[str, Callable[[], Iterator[str]]] = {"recipes": _recipes, "doctor": _doctor}

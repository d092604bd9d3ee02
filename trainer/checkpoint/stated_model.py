"""Say by which settings the model of some weights is typed, as the files beside them have it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config.messages import flat, show
from trainer.config.option_files import data_dir, default_options, options_of
from trainer.core.format import shown_path
from trainer.core.run_folder import RunFolder

_CONFIG = "config.json"  # of a folder of weights


def settings_of_model(source: Path) -> str | None:
    """Give the settings for a checkpoint of a run, an export or a folder of Hugging Face.

    None where no file tells.
    """
    folder = source.parent if source.is_file() else source
    # A checkpoint lies in its run, whose config has the option, too.
    run, config = RunFolder(folder.parent.parent).config(), RunFolder(folder).record(_CONFIG)
    for each in (run, config):
        if isinstance(section := each.get("model"), dict):
            choices = each.get("choices") or default_options(data_dir("conf"))
            return _typed(section, choices.get("model"))
    if config.get("architectures") or config.get("model_type"):
        return f"model=hf model.path={shown_path(folder)}"
    return None


def _typed(section: Mapping[str, Any], usual: str | None) -> str:
    """Write a section of a config as settings of the option that is most like it, or the usual."""
    target, options = section.get("_target_"), options_of("model")
    words, values = [f"model._target_={target}"], _differing(section, {"_target_": target})
    for name in sorted(options, key=lambda name: name != usual):
        option = options[name]
        differing = _differing(section, option)
        if option.get("_target_") == target and len(differing) < len(values):
            words, values = [f"model={name}"], differing
    for key, value in values.items():
        words.append(f"model.{key}={show(value)}")
    return " ".join(words)


def _differing(section: Mapping[str, Any], option: Mapping[str, Any]) -> dict[str, Any]:
    """Give what a section has otherwise than an option; what follows from the data is left out."""
    found, usual = dict[str, Any](), flat(option)
    for key, value in flat(section).items():
        is_derived = str(usual.get(key)).startswith("${")
        if value != usual.get(key) and value is not None and not is_derived:
            found[key] = value
    return found

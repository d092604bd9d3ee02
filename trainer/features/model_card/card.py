"""Write the card of exported weights: README.md, as hubs show it, of what a run's records say."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import yaml

from trainer.assemble.features import ExportedWeights, Feature
from trainer.assemble.saved import Terms, read_terms
from trainer.config.components import Component
from trainer.config.data_sets import source_components
from trainer.config.messages import clip, show
from trainer.config.secrets import without_secrets
from trainer.core.format import AVERAGED, number, plural, printable, shown_path
from trainer.core.hub_cache import hub_name
from trainer.core.run_folder import RunFolder
from trainer.report.console import figure
from trainer.report.journal import Entry, stream

CARD_FILE = "README.md"

_LICENSE = "license: # fill in what the data and the base allow, such as apache-2.0\n"
# What names a run, a machine's folder or a consent, and says nothing of what was trained
_NOT_SHOWN = ("hydra.", "outputs=", "resume=", "resume_allow=", "trust=")
# A quote within quotes has a backslash before it
_QUOTED_PATH = re.compile(r"'(/(?:\\.|[^'\\])*)'")
# Neither the `//` of an address nor a `/` in a sentence
_PLAIN_PATH = re.compile(r"(?:(?<=[=\[,{])|(?<=: ))/(?!/)[^,\]}']*")
_NEEDS_NO_QUOTES = re.compile(r"([^=]+)='([\w./+-]+)'")


@final
class ModelCard(Feature):
    """Writes the card of every export."""

    def exported(self, weights: ExportedWeights, folder: Path) -> Sequence[str]:
        """Write the card beside the weights, in place of any that came with them."""
        card = CardText(weights, RunFolder(weights.run), read_terms(weights.loaded))
        text = without_secrets(card.text(), os.environ)
        (folder / CARD_FILE).write_text(text, encoding="utf-8")
        return [f"{shown_path(weights.to / CARD_FILE)} describes them: fill in the licence"]


@final
@dataclass(frozen=True)
class CardText:
    """Puts what is known of exported weights into words."""

    weights: ExportedWeights
    run: RunFolder
    terms: Terms

    def text(self) -> str:
        """Give the card as Markdown, with the lines that a hub reads at its head."""
        weights, labels = self.weights, dict(self.weights.labels)
        if weights.base is not None and (known := hub_name(weights.base)) is not None:
            labels["base_model"] = known
        head = _LICENSE + (yaml.safe_dump(labels, sort_keys=False) if labels else "")
        load = "It takes its own class: `train init=FOLDER` begins a run from it.\n"
        if weights.lines:
            load = f"```python\n{chr(10).join(weights.lines)}\n```\n"
        name = _cell(weights.config.name or weights.to.name)
        parts = [
            f"---\n{head}---\n\n# {name}\n\n{self._first_sentence()}\n",
            f"## Load it\n\n{load}",
            f"## How it was trained\n\n{_table(self._training())}\n"
            f"```sh\n{printable(self._command())}\n```\n",
        ]
        if figures := self._figures():
            parts.append(f"## Held-out figures\n\n{figures}")
        parts.append(f"## Made with\n\n{_table(self._made_with())}")
        return "\n".join(parts)

    def _first_sentence(self) -> str:
        """Say what the weights are."""
        weights, what, size = self.weights, "Weights", ""
        if weights.loaded.is_average:
            what = "Averaged weights"
        plan = self.run.record(RunFolder.PLAN)
        trained, frozen = plan.get("num_parameters"), plan.get("num_frozen")
        if isinstance(trained, int):
            size = f" ({plural(trained, 'parameter')})"
        if isinstance(trained, int) and isinstance(frozen, int) and frozen:
            size = f" ({plural(trained, 'trained parameter')}, {number(frozen)} frozen)"
        of_all = ""
        if self.terms.total_steps:
            of_all = f" of {number(self.terms.total_steps)}"
        at = f"after step {number(weights.loaded.step)}{of_all}"
        remedy = "Fill in what the model is for, and its licence above."
        return f"{what} of `{_code(weights.model)}`{size} {at}. {remedy}"

    def _training(self) -> dict[str, str]:
        """Describe data, batch, loss and update."""
        terms, base = self.terms.contract, self.weights.base
        plan, rows = self.run.record(RunFolder.PLAN), dict[str, str]()
        if base is not None:
            rows["base"] = f"`{_code(hub_name(base) or Path(base).name)}`"
        rows["data"] = self._data()
        for name, key in (("trained on", "num_samples"), ("held out", "num_held_out")):
            if isinstance(count := plan.get(key), int):
                rows[name] = plural(count, "sample")
        rows["objective"] = self._of_class("objective")
        rows["batch"] = self._of_class("batch")
        if (size := terms.get("batch.global")) is not None:
            unit, there = terms.get("batch.unit"), plan.get("num_samples")
            if unit == "samples" and isinstance(there, int):
                size = min(size, there)
            rows["batch"] = f"{number(size)} {unit} behind each step"
        if "adapter._target_" in terms:
            rows["adapter"] = self._of_class("adapter")
        rows["optimizer"] = self._of_class("optimizer")
        rows["schedule"] = self._of_class("scheduler")
        for name in ("clip_norm", "precision", "seed"):
            rows[name.replace("_", " ")] = show(terms.get(name))
        return {name: self._without_folders(text) for name, text in rows.items()}

    def _of_class(self, key: str) -> str:
        """Name what stands under a key, by its option, and its settings that are anything."""
        component: Component = getattr(self.weights.config, key)
        target = str(self.terms.contract.get(f"{key}._target_"))
        # Where the model chose, the config says `auto`.
        words = [target.rpartition(".")[2]]
        if component.target == target:
            words = [component.label]
        for name, value in self.terms.contract.items():
            owner, _, setting = name.partition(".")
            if owner == key and setting != "_target_" and value not in (None, {}, [], 0, "none"):
                words.append(f"{setting} {show(value)}")
        return ", ".join(words)

    def _data(self) -> str:
        """Name the data, and each source of a mixture."""
        data = self.weights.config.data
        paths = [data.params.get("path")]
        for source, _ in source_components(data).values():
            paths.append(source.params.get("path"))
        named = list[str]()
        for path in paths:
            if isinstance(path, str):
                named.append(self._as_typed(path))
        return ", ".join([*(f"`{_code(each)}`" for each in named), f"`data={data.label}`"])

    def _command(self) -> str:
        """Write what was typed, without the machine's folders."""
        words = ["train"]
        for line in self.run.typed():
            if not line.startswith(_NOT_SHOWN):
                words.append(_NEEDS_NO_QUOTES.sub(r"\1=\2", self._without_folders(line)))
        return shlex.join(words)

    def _as_typed(self, path: str) -> str:
        """Write a path as it was typed where the run was started; of others the name alone."""
        here = self.run.started_in()
        if here is not None and here.parent != here:
            path = path.removeprefix(f"{here}/")
        if Path(path).is_absolute():
            return Path(path).name
        return path

    def _without_folders(self, text: str) -> str:
        """Write paths as they were typed where the run was started; of others the name alone."""
        here = self.run.started_in()
        if here is not None and here.parent != here:
            text = text.replace(f"{here}/", "")
        text = _QUOTED_PATH.sub(lambda found: f"'{Path(found[1]).name}'", text)
        return _PLAIN_PATH.sub(lambda found: Path(found[0]).name, text)

    def _figures(self) -> str:
        """Give the figures of the newest evaluation up to the step; empty without one."""
        newest: Entry | None = None
        for entry in stream(self.run.path / RunFolder.METRICS):
            if "eval_seconds" in entry and entry["step"] <= self.weights.loaded.step:
                newest = entry
        if newest is None:
            return ""
        rows, kind = dict[str, str](), "eval_"
        if self.weights.loaded.is_average and f"{AVERAGED}_loss" in newest:
            kind = f"{AVERAGED}_"
        for name, value in newest.items():
            if name.startswith(kind) and name != "eval_seconds":
                rows[name.removeprefix(kind)] = figure(value)
        note = f"After step {number(newest['step'])}"
        if self.weights.loaded.is_average and kind == "eval_":
            note += ", of the weights themselves and not of their average"
        return f"{note}:\n\n{_table(rows)}"

    def _made_with(self) -> dict[str, str]:
        """Give versions and revision; no host's name."""
        environment = self.terms.environment
        git, versions = environment.get("git"), environment.get("versions")
        rows = dict[str, str]()
        if isinstance(git, Mapping):
            rows["git"] = str(git.get("commit"))
            if isinstance(changed := git.get("changed_files"), int) and changed:
                files = plural(changed, "file")
                rows["git"] += f", with changes in {files} that are not committed"
        if isinstance(versions, Mapping):
            for name, value in versions.items():
                if value is not None:
                    rows[str(name)] = str(value)
        return rows


def _table(rows: Mapping[str, str]) -> str:
    """Write rows of two cells."""
    lines = ["| | |", "|---|---|"]
    for name, text in rows.items():
        lines.append(f"| {_cell(name)} | {_cell(text)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Write a text that may hold anything on one line of a table."""
    return printable(text).replace("|", "\\|").replace("<", "&lt;")


def _code(text: str) -> str:
    """Write a text that stands between backquotes."""
    return clip(text).replace("`", "'")

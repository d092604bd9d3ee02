"""Set runs side by side: the settings that differ, and the figures that can be compared."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import final

from trainer.config.messages import ancestors, show
from trainer.config.metric_mode import mode_of, rank, title_of
from trainer.core.errors import ConfigError
from trainer.core.format import duration, is_held_out, loss, number, plural, short, shown_path
from trainer.core.rows import join_parts
from trainer.features.page.asked import data_name, model_name
from trainer.features.page.saved_run import SavedRun, as_mapping, numbers_of
from trainer.report.journal import EVAL_SECONDS, is_number

_MOST_RUNS = 500  # that are shown
_MOST_KEYS = 6  # in the table; the others are a click away
_NAMES = ("name", "run", "resume", "resume_allow", "outputs", "unset", "command")
_SPEED = "tokens_per_second"


@final
@dataclass(frozen=True)
class Group:
    """Runs that were evaluated on the same samples and tokens."""

    title: str
    runs: Sequence[int]  # the best first


@final
class Comparison:
    """Several runs side by side."""

    def __init__(self, runs: Sequence[SavedRun]) -> None:
        self.runs = runs
        config = runs[0].config
        # What runs are ranked by, and whether more of it is better
        self.metric, self.is_max = str(config.get("sweep.metric", "eval_loss")), False
        mode = config.get("sweep.mode", "auto")
        with suppress(ConfigError):  # of an odd name
            self.is_max = mode_of("", self.metric, mode, "") == "max"
        self._settings = [*map(_settings, runs)]
        # Keys in the order in which they were typed
        self.typed = list[str]()
        # Keys that change the steps, as far as checkpoints know, and what runs were trained on
        self._contract, self._fingerprints = set[str](), set[object]()
        for run in runs:
            self.typed += run.typed_keys
            self._contract |= as_mapping(run.terms.get("contract")).keys()
            self._fingerprints.add(str(run.terms.get("fingerprint")))
        self._fingerprints.discard("None")

    @cached_property
    def groups(self) -> list[Group]:
        """Give the runs that can be compared with one another, most of them first.

        A run whose checkpoints do not tell what it was evaluated on is taken to be of the first.
        """
        by_key, unknown = dict[str, list[int]](), list[int]()
        for n, run in enumerate(self.runs):
            if (held_out := run.terms.get("held_out")) is None:
                unknown.append(n)
            else:
                by_key.setdefault(f"{held_out} {_num_evaluated(run)}", []).append(n)
        found, *others = sorted(by_key.values(), key=len, reverse=True) or [[]]
        groups = list[Group]()
        for members in (sorted(found + unknown), *others):
            best_first = sorted(members, key=self._rank)
            groups.append(Group(_title(self.runs[best_first[0]]), best_first[:_MOST_RUNS]))
        return groups

    def _rank(self, n: int) -> tuple[int, float]:
        run = self.runs[n]
        return rank(run.last(self.metric), run.state, is_max=self.is_max)

    def is_best(self, n: int) -> bool:
        """Whether a run is the best of several that can be compared with it."""
        for group in self.groups:
            if n == group.runs[0]:
                return len(group.runs) > 1 and self._rank(n)[0] == 0
        return False

    @cached_property
    def keys(self) -> list[str]:
        """List the settings that differ: first those that change the step, and were typed."""
        found = list[str]()
        for key in dict.fromkeys([*self.typed, *chain.from_iterable(self._settings)]):
            # What only one of two models, say, can be given is no news beside their names.
            is_lacking = None in self._values(key) and key not in self.typed
            is_of_option = is_lacking and any(map(self._differ, ancestors(key)))
            # A file of another name is named already.
            is_named = key in ("model.path", "data.path") and self._differ(key.partition(".")[0])
            if self._differ(key) and not (key in _NAMES or is_of_option or is_named):
                found.append(key)
        # By what is true of them; False sorts before True.
        return sorted(found, key=lambda key: not self.changes_step(key))

    def changes_step(self, key: str) -> bool:
        """Whether a setting changes the steps of a run, and not how they are computed or shown."""
        return any({key, f"{key}._target_"} & self._contract)

    def _values(self, key: str) -> set[str | None]:
        """Give what the runs have for a setting; None where one has no such setting."""
        return {settings.get(key) for settings in self._settings}

    def _differ(self, key: str) -> bool:
        return len(self._values(key)) > 1

    @property
    def shown_keys(self) -> list[str]:
        """Give the keys that the table has."""
        return self.keys[:_MOST_KEYS]

    @property
    def other_keys(self) -> list[str]:
        """Give the keys that differ, and that the table has no room for."""
        return self.keys[_MOST_KEYS:]

    def word(self, n: int, key: str) -> str:
        """Write a setting of a run as a cell shows it."""
        return self._settings[n].get(key, "")

    @property
    def facts(self) -> list[str]:
        """Say what all of them trained, on what, and where they are."""
        found = list[str]()
        for key in ("model", "data"):
            if not self._differ(key):
                found.append(self.word(0, key))
        place = self.runs[0].folder.parent
        if all(run.folder.parent == place for run in self.runs):
            found.append(shown_path(place))
        return [*filter(None, found)]

    @cached_property
    def figures(self) -> list[str]:
        """Name the figures to compare, that by which runs are ranked first."""
        names, given = dict.fromkeys([self.metric, "eval_loss"]), set[str]()
        for run in self.runs:
            for entry in map(numbers_of, [*run.steps[-1:], *run.evaluations]):
                given |= entry.keys()
        for name in sorted(given):
            if is_held_out(name) and name != EVAL_SECONDS:
                names[name] = None
        # The loss in training is of the data that are trained on.
        if len(self._fingerprints) <= 1:
            names["loss"] = None
        return [*filter(given.__contains__, names)]

    @cached_property
    def head(self) -> list[str]:
        """Give the titles of the columns behind the run and its state."""
        titles = [*self.shown_keys]
        for name in self.figures:
            titles.append("training loss" if name == "loss" else title_of(name))
        return [*titles, "steps done", "time", f"{self.runs[0].noun}s per second"]

    def cells(self, n: int) -> list[str]:
        """Give those of a run, a cell for each title of `head`."""
        run, cells = self.runs[n], [self.word(n, key) for key in self.shown_keys]
        for name in self.figures:
            value = run.last(name)
            cells.append("" if value is None else loss(value))
        speed = numbers_of(run.result).get(_SPEED) or run.last(_SPEED)
        return [*cells, number(run.last_step), duration(run.seconds), short(speed)]

    @property
    def order(self) -> str:
        """Say in which order the runs stand."""
        title = title_of(self.metric)
        if len(self.groups) > 1:
            parts = f"{len(self.groups)} parts of other samples or tokens, that do not compare"
            return f"{parts}; the best {title} of each first"
        return f"the best {title} first"

    @property
    def notes(self) -> Iterator[str]:
        """Say what cannot be compared."""
        if len(self._fingerprints) > 1:
            yield "Training losses are of different data, and left out."
        objectives = [key for key in self.keys if key.partition(".")[0] == "objective"]
        if objectives:
            yield f"Losses are of different objectives ({', '.join(objectives)})."


def _settings(run: SavedRun) -> dict[str, str]:
    """Write each setting of a run as a cell shows it."""
    words = dict[str, str]()
    for key, value in run.config.items():
        if key.startswith("choices."):
            continue
        if key == "optimizer.lr" and value is None:
            value = run.plan.get("lr")  # noqa: PLW2901 - what the job chose
        name, word = key.removesuffix("._target_"), show(value)
        # An option says more than its class, which others may have.
        option = run.config.get(f"choices.{name.replace('.', '/')}")
        if name != key and option not in (None, "own"):
            word = show(option)
        # Of our own classes the last part of the name is enough.
        words[name] = re.sub(r"^trainer\.(.*\.)?", "", word)
    if run.config:
        words |= {"model": model_name(run), "data": data_name(run)}
    return words


def _num_evaluated(run: SavedRun) -> float | None:
    """Count the held-out samples that an evaluation takes."""
    most, count = run.config.get("eval.samples"), numbers_of(run.plan).get("num_held_out")
    if is_number(most) and count is not None:
        return min(most, count)
    return count


def _title(run: SavedRun) -> str:
    """Say what a run was evaluated on."""
    count, data, tokenizer = _num_evaluated(run), data_name(run), run.plan.get("tokenizer")
    text = "held-out samples"
    if count is not None:
        text = plural(count, "held-out sample")
    if data:
        text += f" of {data}"
    return str(join_parts(text, tokenizer and f"tokenizer {tokenizer}"))

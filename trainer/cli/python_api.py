"""Run from Python or a notebook what a command line runs.

A config of Python objects is written as overrides, which are what the run folder records; a run
from Python is thus resumed and evaluated like any other.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from omegaconf import OmegaConf

from trainer.cli.argv import split_argv
from trainer.cli.compose import Composer, plain_of
from trainer.cli.overrides import quote
from trainer.cli.prepare import prepare_run
from trainer.cli.start import start_job
from trainer.config.components import COMPONENTS
from trainer.config.consent import TARGET
from trainer.config.messages import flat, lookup
from trainer.config.option_files import options_of
from trainer.config.run_config import result_of
from trainer.core.errors import ConfigError
from trainer.core.run_folder import RunFolder
from trainer.report.journal import read
from trainer.report.views import views

if TYPE_CHECKING:
    import pandas as pd

# What may stand between the dots of a key
_WORD = re.compile(r"[A-Za-z_]\w*")


@final
@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """How a run from Python ended. A notebook shows its report."""

    folder: Path
    exit_code: int  # as of the command line
    # As in the file that the command writes; of predict `file`, which it wrote; empty for export
    result: Mapping[str, Any]

    @property
    def metrics(self) -> pd.DataFrame:
        """The lines of metrics.jsonl, a row for each step; evaluations are columns `eval_...`.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas as pd  # noqa: PLC0415 - optional
        except ImportError as error:
            raise ConfigError("run.metrics: needs pandas: pip install pandas") from error
        lines = read(self.folder / RunFolder.METRICS)
        # Without a line there is no column `step`.
        if not lines:
            return pd.DataFrame()
        return pd.DataFrame(lines).groupby("step").first()

    @property
    def report(self) -> Path | None:
        """The page with curves, plan and config; None where the command writes none."""
        files = (self.folder / view.file for view in views().values())
        return next(filter(Path.is_file, files), None)

    def _repr_html_(self) -> str | None:
        """Show the report in a notebook."""
        if self.report is None:
            return None
        page = html.escape(self.report.read_text(encoding="utf-8"))
        style = "width:100%;height:720px;border:0"
        how = f'title="report" sandbox="allow-scripts" style="{style}"'
        return f'<iframe {how} srcdoc="{page}"></iframe>'


def train(
    config: Mapping[str, Any] | Sequence[str] = (), *, config_dir: str | None = None
) -> FinishedRun:
    """Run from Python or a notebook what a command line runs.

    Args:
        config: a composed config, nested mappings of some settings, or a command and overrides
            as they are typed: `train(["verify", "batch.global=64", "accum=budget"])`.
        config_dir: a folder of options of one's own.

    Returns:
        Where the run is and how it ended: `result`, `metrics` as a DataFrame, the `report`.

    Raises:
        TrainError: what the command line would print; its `exit_code` is the command line's.
    """
    composer = Composer.of(config_dir)
    job = prepare_run(overrides_of(config, composer), composer)
    code = 0
    if job.done is None:
        code = start_job(job, composer, is_python=True)
    result = result_of(job.config, job.folder)
    return FinishedRun(folder=job.folder, exit_code=code, result=result)


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
        request = split_argv([*map(str, config)])
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
        lines = []
        for group, option in (chosen | typed).items():
            if group in groups and isinstance(option, str):
                lines.append(f"{group.replace('.', '/')}={quote(option)}")
        known = flat(plain_of(composer.compose(lines)))
    return [*lines, *_value_lines(tree, "", {*chosen, *typed}, known)]


def _recognised(tree: Mapping[str, Any]) -> dict[str, str]:
    """The options that whole components of a composed config were read from."""
    chosen = {}
    for path in COMPONENTS:
        section = lookup(tree, path)
        if not isinstance(section, Mapping) or TARGET not in section:
            continue
        num_equal = dict[str, int]()
        for name, option in options_of(path).items():
            if option.get(TARGET) == section[TARGET] and option.keys() <= section.keys():
                num_equal[name] = sum(section.get(key) == option[key] for key in option)
        # Options of one class differ in their values; those that were changed are few.
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
    if value is None:
        return "null"
    if isinstance(value, bool | int | float):
        return str(value)
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{literal(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, Sequence):
        return f"[{','.join(map(literal, value))}]"
    raise ConfigError(f"train(...): a config cannot hold a {type(value).__name__}: {value!r}")

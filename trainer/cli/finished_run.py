"""Give a run that ended to Python: its folder, its figures, its report."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from trainer.config.run_config import RunConfig, evaluation_file
from trainer.core.durable import read_json
from trainer.core.errors import ConfigError
from trainer.core.run_folder import RunFolder
from trainer.report.journal import read
from trainer.report.views import views

if TYPE_CHECKING:
    import pandas as pd


@final
@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """How a run from Python ended. A notebook shows its report."""

    folder: Path
    exit_code: int  # as of the command line
    result: Mapping[str, Any]  # as in the file that the command writes; empty for export

    @classmethod
    def of(cls, config: RunConfig, folder: Path, exit_code: int) -> FinishedRun:
        """Read what a command wrote."""
        files = {"train": RunFolder.RESULT, "plan": RunFolder.PLAN, "verify": RunFolder.VERIFY}
        record = files.get(config.command)
        if config.command == "evaluate":
            record = evaluation_file(config)
        result = {} if record is None else read_json(folder / record)
        return cls(folder=folder, exit_code=exit_code, result=result)

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
        return pd.DataFrame(lines).groupby("step").first() if lines else pd.DataFrame()

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

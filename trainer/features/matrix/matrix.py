"""Add a table to `train verify`: whether the step is the same under every way of execution."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, final

from rich.text import Text

from trainer.assemble.features import Feature
from trainer.report.blocks import plain_table, section
from trainer.training.batches import Feed, PlannedBatch
from trainer.training.context import StepContext
from trainer.verify.report import Added, VerifyReport

if TYPE_CHECKING:
    from trainer.config.run_config import RunConfig

STYLES = {"exact": "green", "to_rounding": "green", "not_exact": "bold red", "not_there": "dim"}


@final
@dataclass(frozen=True, kw_only=True)
class AxisFound:
    """What one way of execution makes of the step's gradient."""

    # `exact` up to 1e-10 in float64; `to_rounding` up to `bound`; `not_there` where it cannot run
    verdict: Literal["exact", "to_rounding", "not_exact", "not_there"]
    reason: str  # what was compared, why it differs, or why it is not there
    module: str | None = None  # the first at fault
    measured: float | None = None  # relative error
    bound: float | None = None  # largest that is rounding
    dtype: str | None = None  # of what was measured


@final
class Matrix(Feature):
    """Compares the step under every way of execution, where `matrix=true` asks for it."""

    def __init__(self, *, is_on: bool = False) -> None:
        self._is_on = is_on

    @classmethod
    def of(cls, config: RunConfig) -> Matrix:
        """See the base class."""
        return cls(is_on=config.matrix)

    def verified(
        self,
        context: StepContext,
        batch: PlannedBatch,
        feed: Feed,
        report: VerifyReport,
        folder: Path,
    ) -> Added | None:
        """See the base class."""
        if not self._is_on:
            return None
        # Every run imports this file.
        from trainer.features.matrix.axes import compare_axes  # noqa: PLC0415

        found = compare_axes(context, batch, feed, report, folder)
        table, faults = plain_table("axis", "verdict", "error", "compared, or why"), ""
        for name, axis in found.items():
            figures, reason = "", axis.reason
            if axis.measured is not None:
                figures = f"{axis.measured:.0e} of {axis.bound:.0e}"
            if axis.module is not None:
                reason = f"{axis.module}: {reason}"
            if axis.verdict == "not_exact":
                faults += f"{', ' * bool(faults)}{name} ({axis.module})"
            verdict = Text(axis.verdict.replace("_", " "), STYLES[axis.verdict])
            table.add_row(name, verdict, figures, Text(reason))
        return Added(
            values={"matrix": {name: asdict(axis) for name, axis in found.items()}},
            block=section("the same step under another execution", table),
            fault=faults and f"matrix: the step is another, or not proven, under {faults}",
        )

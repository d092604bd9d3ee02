"""Say what `train verify` found: verify.json, and the block that a person sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

from rich.console import Group, RenderableType
from rich.text import Text

from trainer.core.format import plural
from trainer.report.blocks import LabelledLine, labelled_lines, plain_table, section, title_line

Verdict = Literal["exact", "exact_without_dropout", "not_exact", "not_proven"]

VERDICTS: Mapping[Verdict, str] = {
    "exact": "exact: the planned step is the whole-batch step",
    "exact_without_dropout": "exact without dropout, whose masks depend on the micro-batches: "
    "apart from them the planned step is the whole-batch step",
    "not_exact": "not exact: the planned step differs from the whole-batch step",
    "not_proven": "not proven: something cannot be compared",
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """What a feature adds to a report."""

    values: Mapping[str, Any]  # of verify.json
    block: RenderableType  # of the screen
    fault: str  # why the command ends with its exit code, in a line; empty where all is well


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `train verify` found: the planned step's gradient against a reference."""

    # `exact` where the error is at most 1e-10, in float64, or within the rounding of float32 where
    # the model runs in nothing else, and every loss is a sum over samples; `exact_without_dropout`;
    # `not_exact`; `not_proven` where something cannot be compared
    verdict: Verdict
    # Over parameters, of max absolute difference / max absolute reference
    max_relative_error: float
    reference: str  # `whole batch`, or `sample by sample, summed` where the whole does not fit
    dtype: str  # both were computed in, e.g. `float64`.
    num_parameters: int  # tensors compared
    micro_batches: int  # of the planned step
    global_batch: int  # samples of the step
    limit: float  # largest error that is rounding: 1e-10 in float64, 1e-4 in float32
    # The same with random draws held, where that is what passes; else None
    error_without_draws: float | None = None
    # Parameters by name with their error, the largest first
    worst: tuple[tuple[str, float], ...] = ()
    # Modules by name, with the reason why they depend on the cut
    culprits: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()  # what a reader of the verdict must know, one line each

    @property
    def exact(self) -> bool:
        """Whether the step is exact as it is."""
        return self.verdict == "exact"

    def to_json(self) -> dict[str, Any]:
        """Give verify.json."""
        return asdict(self) | {
            "exact": self.exact,
            "culprits": [{"module": name, "reason": reason} for name, reason in self.culprits],
            "worst": [{"parameter": name, "error": error} for name, error in self.worst],
        }


def verify_block(report: VerifyReport) -> RenderableType:
    """Lay out whether the planned step is the whole-batch step, and what breaks it."""
    is_exact, dtype = report.verdict in {"exact", "exact_without_dropout"}, report.dtype
    step = plural(report.micro_batches, "micro-batch")
    tensors = plural(report.num_parameters, "parameter tensor")
    worst = ""
    if report.worst:
        name, _ = report.worst[0]
        worst = f" ({name})"
    largest = f"{report.max_relative_error:.2e}, the largest of any parameter{worst}, relative"
    limit = f"up to {report.limit:.0e} is rounding"
    if report.error_without_draws is not None:
        off = f"{report.error_without_draws:.2e} without random draws, the largest of any parameter"
        largest, limit = f"{off}, relative; {limit}", f"with them {report.max_relative_error:.2e}"
    style = "bold green" if is_exact else "bold red"
    verdict = Text(VERDICTS[report.verdict], style)
    rows: list[LabelledLine] = [
        ("verdict", verdict),
        ("error", f"{largest}; {limit}"),
        ("compared", f"{step} ({plural(report.global_batch, 'sample')}) with: {report.reference}"),
        ("over", f"the gradient of {tensors}, in {dtype}"),
        *(("note", note) for note in report.notes),
    ]
    blocks = [title_line("verify"), labelled_lines(rows)]
    if not is_exact:
        why = "why the step depends on the micro-batches, and what to change"
        culprits = plain_table("culprit", why)
        for name, reason in report.culprits:
            culprits.add_row(Text(name, "bold red"), reason)
        blocks.append(section("culprits", culprits))
    return Group(*blocks)

"""Where the time of a step went: data, compute, sync, optimizer, waiting for the slowest rank.

Ranks meet twice a step in a small collective: before gradients are computed, and after. Whoever
comes last pays nothing but the collective; whatever the others spend there beyond the shortest
time ever seen is waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, final

from trainer.core.micro_batch import MicroBatch
from trainer.core.phases import Spending
from trainer.core.rank_progress import Phase
from trainer.plan.cut import Cost

MEETINGS: tuple[Phase, Phase] = ("weigh", "agree")
TRANSFERS: tuple[Phase, Phase] = ("gather", "reduce")


@final
@dataclass(slots=True)
class Effort:
    """What one rank computed, as far as its time depends on it.

    Attributes:
        steps: in which it did.
        micro_batches: of them all.
        positions: computed ones.
        squares: sum over micro-batches of positions times length, for attention.
    """

    steps: int = 0
    micro_batches: int = 0
    positions: int = 0
    squares: float = 0.0

    def add(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Count a step; a packed row counts as documents of their mean length."""
        self.steps += 1
        self.micro_batches += len(micro_batches)
        for each in micro_batches:
            self.positions += each.num_positions
            self.squares += each.num_positions**2 / max(1, len(each.ids))

    def cost(self, cost: Cost) -> float:
        """Predict the time of the mean step, in token equivalents."""
        whole = cost.fixed * self.micro_batches + self.positions + cost.quadratic * self.squares
        return whole / max(1, self.steps)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankSplit:
    """Seconds of one rank's mean step, by part.

    Attributes:
        data: samples were not there yet.
        compute: forward and backward.
        sync: parameters and gradients travelled, and nothing else was done meanwhile.
        optimizer: the norm, clipping and the update.
        waiting_before: a rank was not ready to compute; its data are late.
        waiting_after: a rank still computed.
        in_flight: at least one collective of parameters or gradients travelled.
        unhidden: nothing else was done meanwhile.
        rest: metrics, the screen, and what else lies between two updates.
    """

    data: float = 0.0
    compute: float = 0.0
    sync: float = 0.0
    optimizer: float = 0.0
    waiting_before: float = 0.0
    waiting_after: float = 0.0
    rest: float = 0.0
    in_flight: float = 0.0
    unhidden: float = 0.0

    @property
    def waiting(self) -> float:
        """For the slowest rank, in all."""
        return self.waiting_before + self.waiting_after


@final
@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Where the time of a run's steps went.

    Attributes:
        steps: counted; the first of a process warms up and is not.
        ranks: the mean step of every rank.
        evaluation_seconds: beside the steps, on the first rank.
        saving_seconds: likewise.
        overlap: why as much as was measured of the communication is hidden; None on one rank.
    """

    steps: int
    ranks: tuple[RankSplit, ...]
    evaluation_seconds: float = 0.0
    saving_seconds: float = 0.0
    overlap: str | None = None

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the mean step by part, over all ranks."""
        return {
            name: fmean(getattr(rank, name) for rank in self.ranks)
            for name in ("data", "compute", "sync", "optimizer", "waiting", "rest")
        }

    @property
    def step_seconds(self) -> float:
        """Of the mean step, with what lies between it and the next."""
        return sum(self.parts.values())

    @property
    def in_flight(self) -> float:
        """Seconds of the mean step in which parameters or gradients travelled, over all ranks."""
        return fmean(rank.in_flight for rank in self.ranks)

    @property
    def hidden(self) -> float | None:
        """Share of them in which something else was done; None where nothing was seen to travel."""
        whole = self.in_flight
        return max(0.0, 1 - fmean(r.unhidden for r in self.ranks) / whole) if whole else None

    def share(self, seconds: float) -> float:
        """Give seconds as a share of the mean step."""
        whole = self.step_seconds
        return seconds / whole if whole else 0.0

    def to_json(self) -> dict[str, Any]:
        """Give the entry of result.json."""
        parts = self.parts
        return {
            "steps": self.steps,
            "step_seconds": round(self.step_seconds, 6),
            "seconds": {name: round(seconds, 6) for name, seconds in parts.items()},
            "share": {name: round(self.share(seconds), 4) for name, seconds in parts.items()},
            "in_flight_seconds": round(self.in_flight, 6),
            "hidden_share": None if self.hidden is None else round(self.hidden, 4),
            "overlap": self.overlap,
            "waiting_by_rank": [round(rank.waiting, 6) for rank in self.ranks],
            "evaluation_seconds": round(self.evaluation_seconds, 3),
            "saving_seconds": round(self.saving_seconds, 3),
        }


def split(spendings: Sequence[Spending]) -> Breakdown:
    """Split the mean step of every rank into its parts.

    Args:
        spendings: what the phases took, rank by rank; all counted the same steps.
    """
    first, is_alone = spendings[0], len(spendings) == 1
    meeting = {
        phase: min((s.phases[phase].least for s in spendings if phase in s.phases), default=0.0)
        for phase in MEETINGS
    }
    travelled = min(spending.seconds(*TRANSFERS) for spending in spendings)

    def of(spending: Spending) -> RankSplit:
        seconds = {name: spending.seconds(name) for name in spending.phases}
        parts = {
            "data": spending.seconds("data"),
            "compute": spending.seconds("compute"),
            "optimizer": spending.seconds("update"),
            "rest": spending.seconds("report"),
        }
        if is_alone:
            parts["rest"] += spending.seconds(*MEETINGS, *TRANSFERS)
        else:
            met = {name: meeting[name] * _times(spending, name) for name in MEETINGS}
            late = {name: seconds.get(name, 0.0) - met[name] for name in MEETINGS}
            behind = spending.seconds(*TRANSFERS) - travelled
            parts["sync"] = travelled + sum(met.values())
            parts["waiting_before"] = late["weigh"]
            parts["waiting_after"] = late["agree"] + behind
            parts |= {"in_flight": spending.in_flight, "unhidden": spending.waited}
        return RankSplit(**{name: total / spending.steps for name, total in parts.items()})

    return Breakdown(
        steps=first.steps,
        ranks=tuple(map(of, spendings)),
        evaluation_seconds=first.seconds("evaluation"),
        saving_seconds=first.seconds("saving"),
    )


def _times(spending: Spending, phase: Phase) -> int:
    return spending.phases[phase].times if phase in spending.phases else 0


def told(spending: Spending, effort: Effort) -> dict[str, Any]:
    """Put into JSON what one rank knows."""
    return {"spending": spending.to_json(), "effort": asdict(effort)}


def heard(ranks: Sequence[Mapping[str, Any]]) -> tuple[Breakdown, tuple[Effort, ...]]:
    """Read what every rank told, in order of rank."""
    breakdown = split([Spending.from_json(rank["spending"]) for rank in ranks])
    return breakdown, tuple(Effort(**rank["effort"]) for rank in ranks)

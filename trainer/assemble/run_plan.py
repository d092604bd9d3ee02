"""Make a cut ready: tune it, or restore it from a checkpoint, and predict what memory it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, final

from trainer.assemble.checks import check_loss, check_parts
from trainer.assemble.counts import count_run, unread_fields
from trainer.assemble.run import Run
from trainer.assemble.saved import SavedCut, accum_of
from trainer.assemble.tuning import predict_sampled, tune_run
from trainer.assemble.workload import device_cost, memory_of_rank, sampled_batches, workload_of
from trainer.core.out_of_memory import begin_peak
from trainer.models.recompute import checkpoint_blocks
from trainer.plan.cut import Cut, Plan
from trainer.training.loop import ModelFlops
from trainer.tune.flops import ComputeCounts, peak_flops
from trainer.tune.peak_bytes import MemoryEstimate
from trainer.tune.request import Tuning
from trainer.tune.speed import speed_of


@final
@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run that knows how to cut."""

    run: Run
    plans: tuple[Plan, ...]  # of sampled global batches, that of the first step first
    tuning: Tuning | None  # what `accum=auto` found; None under another cut
    predicted: MemoryEstimate | None  # peak of a step; None where it cannot be predicted
    limit_bytes: int | None  # what is left for tensors on this rank; None where nobody knows
    how: str  # in a few words, why the cap is as it is
    details: str  # how that is known
    is_here: bool  # whether the plan is for this machine; time is unknown for any other
    warnings: tuple[str, ...]  # what showed when the user's own model and objective ran
    # What the longest samples compute; None where the model cannot run fake
    counts: ComputeCounts | None

    @property
    def saved_cut(self) -> SavedCut:
        """What a resumed run needs to cut as this one does."""
        run = self.run
        return SavedCut(
            accum=accum_of(run.config),
            cost=run.layout.cost,
            settings=asdict(run.cut),
            tuning=self.tuning,
            evaluation_tokens=max((h.max_tokens for h in run.data.held_out.values()), default=1),
        )

    @property
    def flops(self) -> ModelFlops | None:
        """What the main rank reports of speed; None where nothing could be counted."""
        run, counts = self.run, self.counts
        if counts is None or not run.world.is_main:
            return None
        peak = peak_flops(run.world.device, run.model.product_word)
        return ModelFlops(
            per_token=counts.products, per_pair=counts.pairs, peak=peak and peak * run.world.size
        )

    @property
    def step_seconds(self) -> float | None:
        """The time of a step that tuning, or a card's data sheet, predicts; None where neither."""
        layout = self.run.layout
        if not self.is_here and layout.cost.seconds_per_token is not None:
            speed = speed_of(layout.cost)
            return fmean(speed.step_seconds(p, lockstep=layout.lockstep) for p in self.plans)
        if self.tuning is not None:
            for row in self.tuning.candidates:
                if row.chosen:
                    return row.seconds_per_step
        return None


def prepare_on_main(run: Run, saved: SavedCut | None = None) -> RunPlan:
    """Find the cut of a run on the main rank, and give every rank the same. Collective."""
    found: list[RunPlan] = []

    def find() -> dict[str, Any]:
        found.append(prepare(run, saved))
        counts = found[0].counts
        return {"cut": found[0].saved_cut.state(), "counts": counts and asdict(counts)}

    answer = run.world.on_main(find)
    if found:
        return found[0]
    return prepare(run, SavedCut(**answer["cut"]), main=answer)


def prepare(
    run: Run, saved: SavedCut | None = None, main: Mapping[str, Any] | None = None
) -> RunPlan:
    """Find the cut of a run.

    `saved` is of a run that is resumed; it counts while `accum` is unchanged, so that a resumed
    `auto` cuts as before, and every evaluation sums in the same order. `main` is what the main
    rank found, which the others take over. Raises `CannotRunFake` where the model was built
    without weights and needs more than shapes, and `Preempted` where a signal ended the tuning.
    """
    check_parts(run)
    warnings = check_loss(run)

    # What a rank computes, and the memory that it has.
    saved = saved or SavedCut()
    work = workload_of(run)
    counts = count_run(run, work, main)
    is_known = saved.accum == accum_of(run.config)
    # Every cut has the time model that the run began with; `accum=auto` times its own if it can.
    cost = saved.cost if is_known else device_cost(run, counts)
    run = replace(run, layout=replace(run.layout, cost=cost))
    limit, is_here = memory_of_rank(run, work.resident_bytes)

    # The cut: as it was, as it is tuned, or as it was typed.
    batches = sampled_batches(run)
    cut, tuning, how, details = run.cut, None, "as set", f"{type(run.cut).__name__}, as set"
    if is_known:
        cut, tuning, how = saved.restored(cut), saved.tuning, "as the run began"
        details = "as the run began, from its checkpoint"
    elif cut.needs_tuning:
        # A machine that is not here has what accum.memory says.
        assert limit is not None
        tuning = tune_run(run, work, counts, limit, batches, is_here=is_here)
        cut = cut.tuned(tuning.max_tokens, tuning.cost, tuning.single_sample_cap)
        how, details = tuning.choice, tuning.method

    # What it makes of a few steps, and the memory that those take.
    plans = tuple(cut.cut(lengths, run.layout) for lengths in batches)
    for plan in plans:
        plan.check(run.layout)
    predicted, limit_bytes = None, limit and limit.bytes
    if tuning is not None:
        predicted, limit_bytes = tuning.predicted, tuning.limit_bytes
        if tuning.activation_checkpointing:
            # Again where it was typed, which changes nothing.
            checkpoint_blocks(run.model.module)
    elif run.world.is_main:
        predicted = predict_sampled(run, work, counts, plans, warnings)
    if run.world.is_main:
        warnings += unread_fields(run, counts)
    # What tuning allocated is no part of the peak that the run reports.
    begin_peak(run.world.device)
    # Held-out data have a cap of their own: what training's largest micro-batch fits in.
    tokens = max(plan.max_positions for plan in plans)
    if is_known:
        tokens = saved.evaluation_tokens
    run_plan = RunPlan(
        run=with_plans(run, cut, plans, tokens),
        plans=plans,
        tuning=tuning,
        predicted=predicted,
        limit_bytes=limit_bytes,
        how=how,
        details=details,
        is_here=is_here,
        warnings=tuple(warnings),
        counts=counts,
    )
    features = run.features.planned(run_plan)
    return replace(run_plan, run=replace(run_plan.run, features=features))


def with_plans(run: Run, cut: Cut, plans: Sequence[Plan], tokens: int) -> Run:
    """Give a run its cut, and its evaluations the most tokens of a micro-batch of their own."""
    held_out = {n: replace(each, max_tokens=tokens) for n, each in run.data.held_out.items()}
    setup = run.model.setup.counted(fmean(plan.accum_steps for plan in plans))
    return replace(
        run,
        cut=cut,
        data=replace(run.data, held_out=held_out),
        model=replace(run.model, setup=setup),
    )

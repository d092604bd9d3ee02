"""What the rooms above tell the report: plain frozen records, numbers and words only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from torch import Tensor

from trainer.plan.traffic import Network, Traffic
from trainer.report.breakdown import Breakdown

Value = Tensor | float
Noun = Literal["token", "sample"]
Verdict = Literal["exact", "exact_without_dropout", "not_exact", "not_proven"]

EVAL_SECONDS = "eval_seconds"
"""What tells an evaluation in metrics.jsonl from a step: its wall time."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one optimizer step did.

    Attributes:
        step: from 1.
        epoch: fractional, after the step.
        samples: consumed since the start of training, over all ranks.
        tokens: likewise, padding not counted.
        loss: of the whole global batch, as optimized; nats; may be a 0-d tensor on any device.
        lr: learning rate of the step.
        grad_norm: before clipping; None where nothing measures it.
        accum_steps: micro-batches of the busiest rank.
        micro_batches: over all ranks.
        padding: share of computed positions that hold no token.
        seconds: wall time of the step.
        step_tokens: tokens of this step alone; the rate is theirs.
        memory_bytes: peak so far; None where it is not counted.
        skipped: why nothing was updated, or None.
        replays: how often memory ran out and the step was computed again.
        metrics: more numbers of the step by name, such as `noise_scale`.
    """

    step: int
    epoch: float
    samples: int
    tokens: int
    loss: Value
    lr: float
    grad_norm: Value | None
    accum_steps: int
    micro_batches: int
    padding: float
    seconds: float
    step_tokens: int
    memory_bytes: int | None = None
    skipped: str | None = None
    replays: int = 0
    metrics: Mapping[str, Value] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord:
    """One pass over the held-out data.

    Attributes:
        step: after which it was made; 0 is before the first.
        metrics: means by name as the objective names them, `loss` among them; nats.
        seconds: wall time.
    """

    step: int
    metrics: Mapping[str, float]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Name every metric `eval_...`, as metrics.jsonl holds it."""
        names = {name: f"eval_{name.removeprefix('eval_')}" for name in self.metrics}
        entry: dict[str, Any] = {"step": self.step}
        entry |= {names[name]: float(value) for name, value in self.metrics.items()}
        return entry | {EVAL_SECONDS: round(self.seconds, 6)}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchShape:
    """One micro-batch of the first step.

    Attributes:
        rank: where it is computed.
        num_samples: samples in it.
        length: positions each sample is padded to; under packing, positions of the row.
        packed: whether the samples lie end to end in one row.
    """

    rank: int
    num_samples: int
    length: int
    packed: bool = False

    @property
    def positions(self) -> int:
        """Computed positions."""
        return self.length if self.packed else self.num_samples * self.length


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One cap the planner weighed: a row of the table that `train plan` prints.

    Attributes:
        max_tokens: the cap, in padded tokens of a micro-batch.
        micro_batches: of one step, over all ranks.
        padding: share of computed positions that hold no token.
        predicted_bytes: peak of tensor memory on one rank; None when not predicted.
        predicted_seconds: of one step; None when nothing was timed.
        fits: whether the peak is within the limit.
        is_chosen: whether the run uses it.
        recomputes: whether activation checkpointing is on.
    """

    max_tokens: int
    micro_batches: int
    padding: float
    predicted_bytes: int | None = None
    predicted_seconds: float | None = None
    fits: bool = True
    is_chosen: bool = False
    recomputes: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """The whole arithmetic of a run: what plan.json holds and `train plan` prints.

    Numbers of micro-batches and the padding are those of step 1.

    Attributes:
        global_batch: samples or tokens behind one optimizer step, over all ranks.
        unit: what `global_batch` counts.
        world_size: data-parallel ranks.
        accum_steps: micro-batches of the busiest rank.
        micro_batches: per step, over all ranks.
        max_tokens: largest micro-batch allowed, in padded tokens; None without a cap.
        padding: share of computed positions that hold no token.
        predicted_peak_bytes: tensors of one rank; None when not predicted.
        memory_limit_bytes: what one rank has left for tensors; None when not known.
        sync: policy.
        parallel: mechanism.
        steps: optimizer steps of the run.
        steps_per_epoch: of the first epoch.
        normalizer: what the summed loss is divided by.
        tail: what becomes of the short last global batch of an epoch.
        tail_size: its samples; 0 when there is none.
        epochs: passes over the data in all, fractional.
        model: its name.
        num_parameters: trained ones.
        num_frozen: parameters that are not.
        groups: what each of `optimizer.groups` matched, one line each; empty without them.
        data: its name.
        num_samples: to train on.
        num_held_out: to evaluate on.
        num_tokens: of the training samples, once each; None when not known.
        num_cut_tokens: of documents that are too long, left out; not among `num_tokens`.
        optimizer: its name.
        lr: peak learning rate.
        scheduler: its name.
        warmup_steps: of the learning rate.
        device: e.g. `cpu`, or `cuda (not here)` in a plan for another machine.
        precision: e.g. `fp32`.
        num_workers: loading processes per rank.
        shapes: micro-batches of step 1 in the order they run.
        epoch_means: of a sampled epoch, where cuts vary: `micro_batches`, `padding`, ...
        memory_parts: predicted bytes by part (`parameters`, `gradients`, ...).
        memory_note: what the prediction is worth, where it is for another machine; None for this.
        candidates: caps that were weighed.
        cap_source: how the cap was found, in words.
        step_seconds: predicted time of one step; None when not known.
        time_note: how it was predicted, or why it is not known.
        cadences: every how many optimizer steps something happens, by name, or after what time;
            None is never.
        defaults: `key=value` of what nobody set, where it matters most.
        warnings: what the user should know, one line each.
        parallel_why: what `parallel=auto` weighed, in a line; None where it was not asked.
        sync_why: what `sync=auto` weighed, in a line; None where it was not asked.
        sync_table: what every sync policy would cost; empty on one rank.
        network: between the ranks; None where it was not measured.
    """

    global_batch: int
    unit: Literal["samples", "tokens"]
    world_size: int
    accum_steps: int
    micro_batches: int
    max_tokens: int | None
    padding: float
    predicted_peak_bytes: int | None
    memory_limit_bytes: int | None
    sync: str
    parallel: str
    steps: int
    steps_per_epoch: int
    normalizer: str = "tokens"
    tail: str = "keep"
    tail_size: int = 0
    epochs: float | None = None
    model: str | None = None
    num_parameters: int | None = None
    num_frozen: int = 0
    groups: tuple[str, ...] = ()
    data: str | None = None
    num_samples: int | None = None
    num_held_out: int | None = None
    num_tokens: int | None = None
    num_cut_tokens: int = 0
    optimizer: str | None = None
    lr: float | None = None
    scheduler: str | None = None
    warmup_steps: int = 0
    device: str | None = None
    precision: str | None = None
    num_workers: int = 0
    shapes: tuple[MicroBatchShape, ...] = ()
    epoch_means: Mapping[str, float] = field(default_factory=dict)
    memory_parts: Mapping[str, int] = field(default_factory=dict)
    memory_note: str | None = None
    candidates: tuple[Candidate, ...] = ()
    cap_source: str | None = None
    step_seconds: float | None = None
    time_note: str | None = None
    cadences: Mapping[str, int | str | None] = field(default_factory=dict)
    defaults: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    parallel_why: str | None = None
    sync_why: str | None = None
    sync_table: tuple[Traffic, ...] = ()
    network: Network | None = None

    @property
    def noun(self) -> Noun:
        """What lengths count, for a person: samples where each is one token of length one."""
        is_one_each = self.num_tokens is not None and self.num_tokens == self.num_samples
        return "sample" if is_one_each else "token"

    def to_json(self) -> dict[str, Any]:
        """Give plan.json: the agreed keys first, then everything else that is known."""
        return asdict(self)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StartSummary:
    """What is known when training begins.

    Attributes:
        plan: the arithmetic.
        folder: where the output goes.
        name: the user's word for the run.
        threads: of one rank on a CPU; None where they do not matter.
        resumed_step: the checkpoint's step, or None in a fresh run.
    """

    plan: PlanSummary
    folder: Path
    name: str | None = None
    threads: int | None = None
    resumed_step: int | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """How a run ended.

    Attributes:
        step: the last one done.
        steps: that were asked for.
        epochs: that were asked for; None where it was steps.
        taken: steps taken by this process; None where it took all.
        noun: what speed counts, for a person.
        loss: of the last step; nats; None when no step was done.
        metrics: of the last evaluation by name, `loss` among them; empty when there was none.
        seconds: wall time of this process, from its start.
        tokens_per_second: over the steps of this process, evaluation not counted.
        folder: where the output is.
        state: `preempted` saved before it was done and can be resumed.
        baselines: held-out losses of simple models by name, in nats (`byte unigram`, ...).
        sample: text the model generated, any characters; None where it `is_raw`, too.
        peak_bytes: measured peak of memory on rank 0.
        peak_of: what was measured: `tensors`, or `the whole process`.
        skipped_steps: steps without an update.
        replays: times a step ran out of memory and was computed again.
        trust: what has to be typed for classes and options of the user's own.
        goes_on: the command that goes on with the run.
        unit: of the held-out loss; None where an objective of the user's own does not say.
        time: where it went; None where no step was taken.
        advice: what cost more than it should have, one line each.
    """

    step: int
    steps: int
    loss: float | None
    metrics: Mapping[str, float]
    seconds: float
    tokens_per_second: float | None
    folder: Path
    goes_on: str
    epochs: int | None = None
    state: Literal["completed", "preempted"] = "completed"
    taken: int | None = None
    noun: Noun = "token"
    baselines: Mapping[str, float] = field(default_factory=dict)
    sample: str | None = None
    peak_bytes: int | None = None
    peak_of: str = "tensors"
    skipped_steps: int = 0
    replays: int = 0
    trust: tuple[str, ...] = ()
    unit: str | None = "nats"
    time: Breakdown | None = None
    advice: tuple[str, ...] = ()

    @property
    def eval_loss(self) -> float | None:
        """The held-out loss of the last evaluation."""
        return self.metrics.get("loss", self.metrics.get("eval_loss"))

    @property
    def is_raw(self) -> bool:
        """Whether every simple model is better: what it generates is noise."""
        return is_raw(self.eval_loss, self.baselines)

    def to_json(self) -> dict[str, Any]:
        """Give result.json."""
        return {
            "step": self.step,
            "loss": self.loss,
            "eval_loss": self.eval_loss,
            "tokens_per_second": self.tokens_per_second,
            "seconds": round(self.seconds, 3),
            "metrics": dict(self.metrics),
            "baselines": dict(self.baselines),
            "peak_bytes": self.peak_bytes,
            "skipped_steps": self.skipped_steps,
            "replays": self.replays,
            "time": None if self.time is None else self.time.to_json(),
            "advice": list(self.advice),
        }


def is_raw(eval_loss: float | None, baselines: Mapping[str, float]) -> bool:
    """Whether a held-out loss is worse than that of every simple model there is."""
    return eval_loss is not None and any(baselines) and eval_loss > max(baselines.values())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `train verify` found: the planned step's gradient against a reference.

    Attributes:
        verdict: `exact` where the error is at most 1e-10, in float64, or within the rounding of
            float32 where the model runs in nothing else, and every loss is a sum over samples;
            `exact_without_dropout`; `not_exact`; `not_proven` where something cannot be compared.
        max_relative_error: over parameters, of max absolute difference / max absolute reference.
        reference: `whole batch`, or `sample by sample, summed` where the whole does not fit.
        dtype: both were computed in, e.g. `float64`.
        worst: parameters by name with their error, the largest first.
        culprits: modules by name with the reason why they depend on the cut.
        num_parameters: tensors compared.
        micro_batches: of the planned step.
        global_batch: samples of the step.
        limit: largest error that is rounding: 1e-10 in float64; in float32 as measured, for the
            worst parameter.
        notes: what a reader of the verdict must know, one line each.
    """

    verdict: Verdict
    max_relative_error: float
    reference: str
    dtype: str
    worst: tuple[tuple[str, float], ...] = ()
    culprits: tuple[tuple[str, str], ...] = ()
    num_parameters: int | None = None
    micro_batches: int | None = None
    global_batch: int | None = None
    limit: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the step is exact as it is."""
        return self.verdict == "exact"

    def to_json(self) -> dict[str, Any]:
        """Give verify.json."""
        return {
            "verdict": self.verdict,
            "exact": self.exact,
            "max_relative_error": self.max_relative_error,
            "reference": self.reference,
            "dtype": self.dtype,
            "culprits": [{"module": name, "reason": reason} for name, reason in self.culprits],
            "worst": [{"parameter": name, "error": error} for name, error in self.worst],
            "limit": self.limit,
            "notes": list(self.notes),
        }

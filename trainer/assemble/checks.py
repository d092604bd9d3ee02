"""Check, before training, what a run is made of.

That no part makes the step inexact, and that a loss nobody has tested is a sum.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise

import torch

from trainer.accumulate.two_pass import too_few
from trainer.assemble.run import Run
from trainer.core.errors import ConfigError, DataError
from trainer.core.format import plural
from trainer.core.micro_batch import IGNORED, output_part, to_device
from trainer.core.stateful import Stateful
from trainer.core.user_code import described, quiet
from trainer.data.collate import LABELS, WEIGHT
from trainer.data.samples import INPUT_IDS
from trainer.models.bind import bind
from trainer.models.first_weights import is_on_meta
from trainer.objectives.base import Objective, sums_of, weights_of
from trainer.objectives.coupled import CoupledObjective
from trainer.tune.packed_documents import unpacked
from trainer.tune.workload import restoring

# Relative; sums over different shapes differ by less, and a mean by a half
ROUNDING = {"fp32": 1e-4, "tf32": 0.005, "bf16": 0.02, "fp16": 0.005}
# Relative error from which on a loss is no sum, rather than one with a little beside it
LARGE = 0.02
_TARGETS = {"labels", "start_positions"}  # what a model computes its own loss from


def check_parts(run: Run) -> None:
    """Refuse what no cut can make exact, and a schedule that does not fit into the run."""
    run.model.schedule.factor(run.data.total_steps - 1, run.data.total_steps)
    _check_stages(run)
    for feature in run.features:
        feature.check(run)
    config = run.config
    coupling, strategy, cut = run.model.coupling, run.model.strategy, run.cut
    objective, module = run.model.objective, run.model.module
    kind = objective.coupling.kind
    for each, part in ((objective.coupling, objective), (coupling, module)):
        # What a micro-batch's own samples share is the same under every strategy.
        if each.kind not in {*strategy.couplings, "micro_batch"}:
            text = _unfit(part, each.kind)
            raise ConfigError(f"accum.gradient: {type(strategy).__name__} {text}")
    if run.model.setup.sync.overlaps and strategy.before and run.world.size > 1:
        # Ranks that fail, and that do not, in an earlier pass would send in another order.
        raise ConfigError(
            f"sync={run.model.setup.sync.name}: sends gradients during a backward, and "
            f"{type(strategy).__name__} has several passes: type sync=deferred"
        )
    if kind == "batch" and config.batch.normalizer == "micro_batches":
        text = "a loss over the whole batch has no means of micro-batches"
        raise ConfigError(f"batch.normalizer=micro_batches: {text}: type batch.normalizer=tokens")
    _check_groups(run)
    _check_samples(run)
    # The longest of all samples is refused now, and not in its step.
    if cut.hard_cap is not None:
        cut.cut(run.data.lengths[[run.data.lengths.argmax()]], run.layout)
    if coupling.kind not in cut.couplings:
        raise ConfigError(
            f"{coupling.key or 'accum'}: {coupling.why}, and "
            f"accum={config.accum.label} chooses its size: type "
            f"accum=fixed accum.micro=N{coupling.accepts} "
            f"(N={run.data.order.sizes.largest} is the whole step at once)"
            f"{coupling.remedy and f', or {coupling.remedy}'}"
        )


def _unfit(part: object, kind: str) -> str:
    """Say why a strategy is wrong for an objective or a model, and what to type."""
    name = type(part).__name__
    if isinstance(part, CoupledObjective):
        return f"is wrong for {name}, whose coupling is {kind}: type accum.gradient=auto"
    remedy = f"use a strategy that lists {kind} in its `couplings`"
    if isinstance(part, Objective) and kind == "batch":
        return (
            f"is wrong for {name}, which couples all samples of a step: derive it from "
            f"CoupledObjective (docs/how-to/own/coupled-objective.md), or {remedy}"
        )
    return f"is wrong for {name}, whose coupling is {kind}: {remedy}"


def _check_stages(run: Run) -> None:
    """Refuse a stage that leaves a rank, or a group of samples, without its share."""
    # How many samples a step of so many tokens has is not known before it is filled.
    if run.config.batch.unit != "samples":
        return
    shares = {
        run.world.size: "ranks, each of which needs a sample",
        run.model.coupling.size: "samples of a group, which is normalised together",
    }
    objective = run.model.objective
    if isinstance(objective, CoupledObjective):
        shares[objective.min_samples] = f"samples that {type(objective).__name__} compares"
    for stage in run.data.stages:
        for least, of_what in shares.items():
            if stage.size < least:
                text = f"a stage of {stage.size} samples is below the {least} {of_what}"
                raise ConfigError(f"batch: {text}; type {least} or more")


def _check_groups(run: Run) -> None:
    """Refuse fixed micro-batches that would divide a group, and say what makes one."""
    coupling, size = run.model.coupling, run.model.coupling.size
    micro = run.config.accum.params.get("micro")
    if not run.cut.chooses_sizes and micro and micro % size and coupling.why:
        # Rounded up, to whole groups.
        remedy = f"type accum.micro={-(-micro // size) * size}"
        if micro > 1 and coupling.remedy:
            remedy += f", or {coupling.remedy.replace('=N', f'={micro}')}"
        raise ConfigError(f"accum.micro={micro}: {coupling.why}: {remedy}")


def _check_samples(run: Run) -> None:
    """Refuse steps with too few samples for an objective that compares them."""
    objective, order, config = run.model.objective, run.data.order, run.config
    if not isinstance(objective, CoupledObjective) or isinstance(order.sizes, Stateful):
        return
    size, least = order.size_of(order.start), objective.min_samples
    if config.batch.unit == "samples" and min(size, order.num_samples) < least:
        raise ConfigError(too_few(objective, f"batch.global={size}: a step of 1 sample"))
    steps = run.data.total_steps
    # Of steps of one size all but the last of an epoch have as many samples.
    if order.sizes.is_constant:
        steps = min(steps, order.steps_per_epoch)
    for begin, end in pairwise(order.walk(steps)):
        count = end.samples - begin.samples
        if count < least:
            key = "batch.tail=keep" if order.keeps_tail else "batch"
            what = f"{key}: step {begin.step + 1} has {plural(count, 'sample')}"
            text = "type batch.tail=drop, or a larger batch.global or stage"
            raise ConfigError(f"{too_few(objective, what)}: {text}")


def check_loss(run: Run) -> list[str]:
    """Try the loss on one sample, in evaluation mode, on the main rank; gives a warning.

    Compared are the losses of objective and model, where the model says which objective it is made
    for, and the loss of the sample with that of the same sample twice, where an objective does not
    declare that it adds samples up: at most two forwards each. The model is put back.
    """
    objective, module = run.model.objective, run.model.module
    has_loss = not _TARGETS.isdisjoint(inspect.signature(module.forward).parameters)
    compares = run.chosen.is_like_models and has_loss and not objective.is_of_model
    is_sum = _declares_sum(objective) or objective.coupling.kind != "none"
    # `train verify` says more of sums: also what padding and other samples change.
    tries = not is_sum and run.config.command != "verify"
    # Before values are lent, which may be those of a model in shards.
    if not (run.world.is_main and (compares or tries)):
        return []
    with run.model.trial_values(run.world):
        if is_on_meta(module):
            return []
        if compares:
            _compare_with_model(run)
        if tries:
            return _check_sum(run)
    return []


def _declares_sum(objective: Objective) -> bool:
    """Whether samples are said to add up by the class that has `sums`, and not by one before it."""
    for kind in type(objective).__mro__:
        if "sums_samples" in vars(kind):
            return objective.sums_samples
        if "sums" in vars(kind):
            return False
    return False


def _compare_with_model(run: Run) -> None:
    """Refuse an objective that gives another loss than the model, which knows its labels best.

    Those of Bart as a causal model, for one, are not shifted; a router adds to its loss. No other
    check sees that, as both are sums. Image tokens that are more, or fewer, than the parts of the
    image are refused by the model itself.
    """
    objective, module, own = run.model.objective, run.model.module, math.nan
    parameter = next(module.parameters(), None)
    if parameter is None:
        return
    given, call = to_device(unpacked(run.example), parameter.device), bind(module)
    given = {name: field for name, field in given.items() if name != WEIGHT}
    labels = given.get(LABELS)
    if labels is not None and labels.is_floating_point() and (labels == IGNORED).any():
        return
    if labels is not None and labels.dim() == 3 and INPUT_IDS in given:  # noqa: PLR2004
        return  # pairs of answers, of whose tokens a model computes another loss
    with _trial(run):
        try:
            weights = weights_of(objective, given)
            losses = sums_of(objective, call, given, weights).losses
        except ValueError as error:  # a library's own check of what it is given
            keys = ", ".join(f"data.{name}" for name in run.config.data.params)
            raise DataError(
                f"data: {type(module).__name__} does not take the longest sample: "
                f"{described(error)}; change what makes its {', '.join(given)} ({keys}), or the "
                "model"
            ) from error
        except Exception:
            # What fails here fails again, in full, where it is needed.
            return
        ours = sum(float(loss) / weights[name] for name, loss in losses.items())
        with suppress(Exception):
            own = float(output_part(call(given), "loss"))
    # Heads of Hugging Face turn logits into float32, whatever the weights are.
    eps = max(torch.finfo(dtype).eps for dtype in (parameter.dtype, torch.float32))
    if abs(own - ours) > math.sqrt(eps) * abs(own):
        option = run.chosen.component.name
        raise ConfigError(
            f"objective: {type(module).__name__} computes a loss of {own:.5g} for the longest "
            f"sample, {option} one of {ours:.5g}: type objective=model_loss for the model's own, "
            f"or objective={option}"
        )


def _check_sum(run: Run) -> list[str]:
    """Compare the loss of one sample with that of the same sample twice, which must be twice it."""
    objective, module = run.model.objective, run.model.module
    once = unpacked(run.example)
    twice = {name: torch.cat([field, field]) for name, field in once.items()}
    losses = list[float]()
    # What fails on one sample fails again, in full, in the step.
    with suppress(RuntimeError, ValueError, IndexError), _trial(run):
        for fields in (once, twice):
            given = to_device(fields, run.world.device)
            sums = sums_of(objective, run.model.call, given, weights_of(objective, fields))
            losses.append(float(sum(map(float, sums.losses.values()))))
    if len(losses) < 2:  # noqa: PLR2004 - one, or none
        return []
    single, double = losses
    error = abs(double - 2 * single) / (abs(2 * single) or 1.0)
    # Written so that an error that is not a number passes: the step itself reports such losses.
    if not error > ROUNDING[run.model.precision]:
        return []
    whose: object = objective
    if objective.is_of_model:
        whose = module
    name = type(whose).__name__
    what = (
        f"objective: the loss of {name} is not a sum over samples ({single:.5g} for one, "
        f"{double:.5g} for the same twice), so the step depends on the micro-batches"
    )
    if objective.is_of_model and error > LARGE:
        raise ConfigError(
            f"{what}: type objective.reduction=mean if it ignores num_items_in_batch, and "
            "objective.causal=false if it does not shift labels, or use an objective that sums, "
            "such as next_token or classify"
        )
    remedy = "sum over samples and divide by nothing; " * (not objective.is_of_model)
    return [f"{what}: {remedy}train verify measures by how much"]


@contextmanager
def _trial(run: Run) -> Iterator[None]:
    """Run the model in evaluation mode inside the block, and leave it as it was."""
    with quiet(), restoring(run.model.module, run.model.objective), torch.no_grad():
        run.model.module.eval()
        yield

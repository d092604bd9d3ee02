"""Work the arithmetic of a run out, before anything is trained: what plan.json holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from statistics import fmean
from typing import Any

from trainer.build.advice import advice
from trainer.build.choose_sync import step_seconds
from trainer.build.parallel import planned_device
from trainer.build.parts import Parts
from trainer.build.prepare import Prepared
from trainer.config.durations import warmup_steps
from trainer.config.messages import flat, show
from trainer.config.run_config import RunConfig, to_plain
from trainer.core.format import plural, size
from trainer.optim.optimizers import match_groups
from trainer.plan.cut import Plan
from trainer.plan.cuts import Auto
from trainer.tune.memory_limit import memory_limit


def summarize(prepared: Prepared) -> dict[str, Any]:
    """Work the whole arithmetic of a run out: the keys of plan.json, with plain values.

    Numbers of micro-batches and the padding are those of step 1, sizes are those of one rank, and
    None is what is not known.
    """
    parts, plan, cut = prepared.parts, prepared.plans[0], prepared.cut
    config, order = parts.config, parts.source.order
    lengths, parallel, every = parts.source.lengths, parts.parallel, config.checkpoint.every
    planned, device = planned_device(config, parts.world), parts.world.device
    seconds = step_seconds(prepared)
    unknown = "unknown" if prepared.is_here else "unknown: nothing can be timed for another machine"
    sizes = [(p.requires_grad, p.numel()) for p in parts.module.parameters()]
    return {
        "global_batch": parts.global_batch,
        "unit": config.batch.unit,
        "world_size": parts.world.size,
        "accum_steps": plan.accum_steps,
        "micro_batches": plan.num_micro_batches,
        # One longer sample's alone included.
        "max_tokens": cut.hard_cap if isinstance(cut, Auto) else getattr(cut, "max_tokens", None),
        "padding": plan.padding,
        "predicted_peak_bytes": prepared.predicted and prepared.predicted.peak_bytes,
        "memory_limit_bytes": prepared.limit_bytes,
        "sync": parallel.sync.name,
        "parallel": parallel.mode,
        "steps": parts.total_steps,
        "steps_per_epoch": order.steps_per_epoch,
        "normalizer": config.batch.normalizer,
        "tail": config.batch.tail,
        # Of tokens, which samples are left depends on the epoch.
        "tail_size": 0 if config.batch.unit == "tokens" else len(lengths) % parts.global_batch,
        "epochs": parts.total_steps / order.steps_per_epoch,
        "model": config.model.name or config.model.target,
        "num_parameters": sum(count for is_trained, count in sizes if is_trained),
        "num_frozen": sum(count for is_trained, count in sizes if not is_trained),
        "groups": list(_groups(parts)),
        "data": config.data.name or config.data.target,
        "num_samples": len(lengths),
        "num_held_out": 0 if parts.held_out is None else len(parts.held_out.lengths),
        "num_tokens": int(lengths.sum()),
        "num_cut_tokens": int(parts.train_set.optional("num_cut") or 0),
        "optimizer": config.optimizer.name or config.optimizer.target,
        "lr": parts.spec.lr * parts.lr_scale,
        "scheduler": config.scheduler.name or config.scheduler.target,
        "warmup_steps": warmup_steps(getattr(parts.schedule, "warmup", 0) or 0, parts.total_steps),
        "device": f"{planned.type} (not here)" if planned.type != device.type else str(device),
        "precision": config.precision,
        "num_workers": parts.num_workers,
        "shapes": [_shape(plan, rank, slot) for rank, slot in plan.slots()],
        "epoch_means": _means(prepared.plans),
        "memory_parts": _memory_parts(prepared),
        "memory_note": None if prepared.is_here else "an estimate for a machine that is not here",
        "candidates": list(_candidates(prepared)),
        "cap_source": prepared.how,
        "step_seconds": seconds,
        "time_note": None if prepared.tuning is None or seconds else unknown,
        "cadences": {
            "log": config.log.every,
            **({} if parts.held_out is None else {"evaluate": parts.every(config.eval.every)}),
            "checkpoint": every if isinstance(every, str) else parts.every(every),
        },
        "defaults": list(_defaults(config)),
        "warnings": [*advice(prepared), *_more_memory(prepared)],
        "parallel_why": parallel.why_mode,
        "sync_why": parallel.why,
        "sync_table": [asdict(row) for row in parallel.rows],
        "network": parallel.network and asdict(parallel.network),
    }


def _defaults(config: RunConfig) -> Iterator[str]:
    """Write the defaults that are in force, each as it would be typed.

    Yields:
        `key=value`; of `steps` and `epochs` the one that says how long the run is.
    """
    plain = flat({**to_plain(config), "epochs": config.total_epochs})
    for key in config.unset:
        value = plain.get(key)
        if value is not None or key not in {"steps", "epochs"}:
            yield f"{key}={show(value)}"


def _groups(parts: Parts) -> Iterator[str]:
    """Tell what every pattern of `optimizer.groups` took, and what is left to the others.

    Yields:
        One line each; none where there are no patterns.
    """
    spec = parts.spec
    matched = match_groups(parts.module, spec.groups)
    taken = {id(p) for members in matched.values() for p in members}
    rest = [p for p in parts.module.parameters() if id(p) not in taken]
    for pattern, members in [*matched.items(), ("others", rest)] if matched else ():
        settings = spec.groups.get(pattern, {})
        lr = settings.get("lr", spec.lr) * parts.lr_scale
        rate = "frozen" if settings.get("frozen") else f"lr {lr:g}"
        count = plural(sum(p.numel() for p in members), "parameter")
        yield f"{pattern}: {plural(len(members), 'tensor')}, {count}, {rate}"


def _more_memory(prepared: Prepared) -> Iterator[str]:
    """Tell who asked a run to use memory that is not there.

    Yields:
        One line.
    """
    parts = prepared.parts
    asked = parts.cut.memory if isinstance(parts.cut, Auto) else None
    if asked is None or not prepared.is_here:
        return
    there = memory_limit(parts.world.device, local_ranks=parts.world.local_size)
    has = there.bytes / (1 - there.reserve)
    if asked > has:
        yield (
            f"accum.memory={size(asked)} is more than the {size(has)} that a rank has here, which "
            "is used; planning for another machine is `train plan`"
        )


def _shape(plan: Plan, rank: int, slot: int) -> dict[str, Any]:
    """Describe a micro-batch; under packing `length` is that of the row its samples lie in."""
    return {
        "rank": rank,
        "num_samples": len(plan.ranks[rank][slot]),
        "length": plan.padded_lengths[rank][slot],
        "packed": plan.packed,
    }


def _means(plans: tuple[Plan, ...]) -> dict[str, float]:
    """Average what varies from step to step, over those of an epoch that were sampled."""
    return {
        "micro_batches": fmean(plan.num_micro_batches for plan in plans),
        "accum_steps": fmean(plan.accum_steps for plan in plans),
        "padding": fmean(plan.padding for plan in plans),
        "tokens": fmean(int(plan.lengths.sum()) for plan in plans),
        "steps": float(len(plans)),
    }


def _memory_parts(prepared: Prepared) -> dict[str, int]:
    estimate = prepared.predicted
    if estimate is None:
        return {}
    names = ("parameters", "gradients", "optimizer_state", "activations", "buffers")
    return {name.replace("_", " "): getattr(estimate, name) for name in names}


def _candidates(prepared: Prepared) -> Iterator[dict[str, Any]]:
    """Describe the caps that tuning weighed: the rows of the table that `train plan` prints.

    Yields:
        One row each.
    """
    limit = prepared.limit_bytes
    for row in () if prepared.tuning is None else prepared.tuning.candidates:
        yield {
            "max_tokens": row.max_tokens,
            "micro_batches": round(row.micro_batches),
            "padding": row.padding,
            "predicted_bytes": row.predicted_bytes,
            "predicted_seconds": row.seconds_per_step,
            "fits": limit is None or row.predicted_bytes <= limit,
            "is_chosen": row.chosen,
            "recomputes": row.activation_checkpointing,
        }

"""Work the arithmetic of a run out, before anything is trained: what plan.json holds."""

from __future__ import annotations

from dataclasses import asdict
from statistics import fmean
from typing import Any

import torch

from trainer.assemble.components import Components
from trainer.assemble.parallel import planned_device
from trainer.assemble.precision import has_fast_bf16
from trainer.assemble.run_plan import RunPlan
from trainer.config.cards import card_of
from trainer.config.messages import flat, show
from trainer.config.rules import warmup_steps
from trainer.config.run_config import RunConfig, to_plain
from trainer.core.format import plural
from trainer.models.check import vocabulary_of
from trainer.models.hf import pretrained_of, stored_dtypes
from trainer.optim.optimizers import match_groups
from trainer.tune.forward import PEAK_SHARE
from trainer.verify.diagnose import low_precision

SHORT = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
MEMORY_PARTS = ("parameters", "gradients", "optimizer_state", "activations", "buffers")


def summarize(run_plan: RunPlan) -> dict[str, Any]:
    """Work the whole arithmetic of a run out: the keys of plan.json, with plain values.

    Numbers of micro-batches and the padding are those of step 1, sizes are those of one rank, and
    None is what is not known.
    """
    components, plan, cut = run_plan.components, run_plan.plans[0], run_plan.cut
    config, order, plans = components.config, components.source.order, run_plan.plans
    lengths, parallel, every = (
        components.source.lengths,
        components.parallel,
        config.checkpoint.every,
    )
    planned, device = planned_device(config, components.world), components.world.device
    predicted, limit, tuning = run_plan.predicted, run_plan.limit_bytes, run_plan.tuning
    sizes = [(p.requires_grad, p.numel()) for p in components.module.parameters()]
    num_held_out = 0 if components.held_out is None else len(components.held_out.loader.dataset)
    return {
        "global_batch": order.global_batch,
        "unit": config.batch.unit,
        "world_size": components.world.size,
        "accum_steps": plan.accum_steps,
        "micro_batches": plan.num_micro_batches,
        # One longer sample's alone included.
        "max_tokens": cut.hard_cap,
        "padding": plan.padding,
        "predicted_peak_bytes": predicted and predicted.peak_bytes,
        "memory_limit_bytes": limit,
        "sync": parallel.sync.name,
        "lockstep": components.layout.lockstep,
        "parallel": parallel.mode,
        "steps": components.total_steps,
        "steps_per_epoch": order.steps_per_epoch,
        "normalizer": config.batch.normalizer,
        "tail": config.batch.tail,
        # Of tokens, which samples are left depends on the epoch.
        "tail_size": 0 if config.batch.unit == "tokens" else len(lengths) % order.global_batch,
        "epochs": components.total_steps / order.steps_per_epoch,
        "model": config.model.name or config.model.target,
        "init": _init(config),
        "dtypes": _dtypes(components),
        "num_parameters": sum(count for is_trained, count in sizes if is_trained),
        "num_frozen": sum(count for is_trained, count in sizes if not is_trained),
        "groups": _groups(components),
        "objective": components.chosen.text,
        "data": config.data.name or config.data.target,
        "num_samples": len(lengths),
        "num_held_out": num_held_out,
        "num_tokens": int(lengths.sum()),
        "num_cut_tokens": int(components.train_set.optional("num_cut") or 0),
        "optimizer": config.optimizer.name or config.optimizer.target,
        "lr": components.spec.lr * components.lr_scale,
        "scheduler": config.scheduler.name or config.scheduler.target,
        "warmup_steps": warmup_steps(
            getattr(components.schedule, "warmup", 0) or 0, components.total_steps
        ),
        "device": f"{config.device} (not here)" if planned.type != device.type else str(device),
        "precision": components.precision,
        "num_workers": components.source.loader.num_workers,
        "shapes": [
            {
                "rank": rank,
                "num_samples": len(plan.ranks[rank][slot]),
                # Under packing that of the row its samples lie in.
                "length": plan.padded_lengths[rank][slot],
                "packed": plan.packed,
            }
            for rank, slot in plan.slots()
        ],
        "epoch_means": {
            "micro_batches": fmean(plan.num_micro_batches for plan in plans),
            "accum_steps": fmean(plan.accum_steps for plan in plans),
            "padding": fmean(plan.padding for plan in plans),
            "tokens": fmean(int(plan.lengths.sum()) for plan in plans),
            "steps": float(len(plans)),
        },
        "memory_parts": {
            name.replace("_", " "): getattr(predicted, name)
            for name in (MEMORY_PARTS if predicted else ())
        },
        "memory_note": None if run_plan.is_here else "an estimate for a machine that is not here",
        "candidates": [
            {
                "max_tokens": row.max_tokens,
                "micro_batches": round(row.micro_batches),
                "padding": row.padding,
                "predicted_bytes": row.predicted_bytes,
                "predicted_seconds": row.seconds_per_step,
                "fits": limit is None or row.predicted_bytes <= limit,
                "is_chosen": row.chosen,
                "recomputes": row.activation_checkpointing,
            }
            for row in (() if tuning is None else tuning.candidates)
        ],
        "cap_source": run_plan.how,
        "step_seconds": run_plan.step_seconds,
        "time_note": _time_note(run_plan),
        "cadences": {
            "log": config.log.every,
            **({"evaluate": components.every(config.eval.every)} if num_held_out else {}),
            "checkpoint": every if isinstance(every, str) else components.every(every),
        },
        "defaults": _defaults(config),
        "warnings": _warnings(run_plan),
        "parallel_why": parallel.why_mode,
        "sync_why": parallel.why,
        "sync_table": [asdict(row) for row in parallel.rows],
        "network": parallel.network and asdict(parallel.network),
    }


def _time_note(run_plan: RunPlan) -> str | None:
    """Say how the time of a step is known, or why it is not; None where it was timed."""
    config, card = run_plan.components.config, card_of(run_plan.components.config.device)
    if card is not None and run_plan.step_seconds:
        peak = card.peak(run_plan.components.precision) / 1e12
        return f"estimated at {PEAK_SHARE:.0%} of the {peak:,.0f} TFLOP/s of {config.device}"
    if run_plan.tuning is None or run_plan.step_seconds:
        return None
    remedy = ": nothing can be timed for another machine; device=h100 estimates it"
    return "unknown" + remedy * (not run_plan.is_here)


def _warnings(run_plan: RunPlan) -> list[str]:
    """Name what makes the step another one than a user may think it is."""
    components, unit = run_plan.components, run_plan.components.config.batch.unit
    warnings = [*components.split.warnings, *run_plan.warnings]
    lengths, asked = components.source.lengths, components.source.order.global_batch
    device, is_open = (
        planned_device(components.config, components.world),
        components.config.precision == "auto",
    )
    if is_open and components.precision == "bf16" and not has_fast_bf16(device):
        warnings.append(
            f"precision=bf16, in which the run began, is slow on this {device.type}; to go on in "
            "fp32: precision=fp32 resume_allow=[precision]"
        )
    if asked > (there := int(lengths.sum()) if unit == "tokens" else len(lengths)):
        warnings.append(
            f"batch.global={asked} is more than the {there} {unit} of an epoch, so each step uses "
            f"the whole epoch; set batch.global={there}"
        )
    low, pieces = low_precision(components.module), max(p.num_micro_batches for p in run_plan.plans)
    if low is not None and pieces > 1:
        warnings.append(
            f"model: {low} weights: their gradients lose bits as {pieces} micro-batches are added "
            "up, some percent over hundreds, and small updates are lost; keep weights in fp32, as "
            "model.dtype=float32 does where the class takes it, and type precision=bf16"
        )
    if components.coupling.warning and pieces > 1:
        warnings.append(components.coupling.warning)
    known, rows = components.train_set.optional("vocab_size"), vocabulary_of(components.module)
    is_loaded = pretrained_of(components.config.model.params) is not None
    # Tables are padded, but not to the double.
    if is_loaded and known and rows and rows >= 2 * known:
        warnings.append(
            f"data: {known} different ids, such as bytes, but the model was loaded with a "
            f"vocabulary of {rows}, in which they mean something else: give ids of the model's "
            "own tokenizer, e.g. data._target_=datasets.load_from_disk"
        )
    return warnings


def _init(config: RunConfig) -> str:
    """Say where the first weights come from."""
    if config.init is not None:
        step = "" if config.checkpoint_step is None else f", step {config.checkpoint_step}"
        return f"weights of {show(config.init)}{step}"
    loaded = pretrained_of(config.model.params)
    return f"weights of {show(loaded)}" if loaded else f"as the model is built, seed {config.seed}"


def _dtypes(components: Components) -> dict[str, str | None]:
    """Name the dtypes of weights in their files and in memory, and of matrix products."""
    weights = [p for p in components.module.parameters() if p.is_floating_point()]
    memory = ", ".join(sorted({SHORT.get(p.dtype, str(p.dtype)) for p in weights}))
    follows = memory not in {"", "fp32"} and components.precision in {"fp32", "tf32"}
    return {
        "disk": ", ".join(stored_dtypes(components.config.model.params)) or None,
        "memory": memory,
        # Without autocast products are computed in what the weights are in.
        "compute": memory if follows else components.precision,
    }


def _defaults(config: RunConfig) -> list[str]:
    """Write the defaults that are in force as they would be typed; the length of the run once."""
    plain = flat({**to_plain(config), "epochs": config.total_epochs})
    values = {key: plain.get(key) for key in config.unset}
    clock = {"steps", "epochs"}
    return [f"{k}={show(v)}" for k, v in values.items() if v is not None or k not in clock]


def _groups(components: Components) -> list[str]:
    """List what every pattern of `optimizer.groups` took, and what is left to the others."""
    spec, lines = components.spec, list[str]()
    matched = match_groups(components.module, spec.groups)
    taken = {id(p) for members in matched.values() for p in members}
    rest = [p for p in components.module.parameters() if id(p) not in taken]
    for pattern, members in [*matched.items(), ("others", rest)] if matched else ():
        settings = spec.groups.get(pattern, {})
        lr = settings.get("lr", spec.lr) * components.lr_scale
        rate = "frozen" if settings.get("frozen") else f"lr {lr:g}"
        count = plural(sum(p.numel() for p in members), "parameter")
        lines.append(f"{pattern}: {plural(len(members), 'tensor')}, {count}, {rate}")
    return lines

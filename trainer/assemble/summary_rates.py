"""Describe learning rates and parameter groups in rows, as `summary` does the rest of a run."""

from __future__ import annotations

from typing import Any

from trainer.assemble.data_sets import FINE_TUNING
from trainer.assemble.run import Run
from trainer.config.keys import KEYS
from trainer.config.messages import first_of, flat, show
from trainer.config.run_config import to_plain
from trainer.core.format import plural
from trainer.core.rows import Row, join_parts, row
from trainer.optim.depth import depth_scales
from trainer.optim.optimizers import OptimizerSpec, match_groups


def by_job_row(run: Run, optimizer: str) -> Row:
    """Give the settings of the optimizer that nobody typed, and why they are those."""
    chosen = run.chosen_optimizer
    words = {"lr": "lr", "betas": "betas", "weight_decay": "decay"}
    texts = [f"{words.get(name, name)} {_spaced(value)}" for name, value in chosen.by_job.items()]
    text = join_parts(*texts, chosen.why) if texts else None
    settings = {name: getattr(chosen.reference or chosen.spec, name) for name in chosen.by_job}
    return row(
        *("optimizer", text and f"{optimizer} {text}"),
        optimizer_defaults=settings,
        optimizer_reason=chosen.why if texts else None,
    )


def half_life_row(run: Run) -> Row:
    """Set what follows the global batch, as it is at the reference batch, beside what it is now."""
    chosen = run.chosen_optimizer
    changed, text = changes(chosen.reference or chosen.spec, chosen.spec)
    return row("half-life", text, followed_batch=changed)


def changes(first: OptimizerSpec, second: OptimizerSpec) -> tuple[dict[str, Any], str | None]:
    """Give what differs between two settings of an optimizer, and the same in words."""
    before, now = (vars(s) | {"options": {}} | vars(s).get("options", {}) for s in (first, second))
    changed = {name: (before.get(name), v) for name, v in now.items() if before.get(name) != v}
    texts = [
        f"{name} {_spaced(old or 'default')} -> {_spaced(new)}"
        for name, (old, new) in changed.items()
    ]
    return changed, join_parts(*texts)


def _spaced(value: object) -> str:
    """Write a number, or several, for a person."""
    several = value if isinstance(value, list | tuple) else [value]
    return " ".join(f"{each:g}" if isinstance(each, float) else str(each) for each in several)


def group_rows(run: Run) -> list[Row]:
    """List what every pattern of `optimizer.groups` took, and what is left to the others."""
    spec, lines = run.model.spec, list[str]()
    matched = match_groups(run.model.module, spec.groups)
    taken = {id(p) for members in matched.values() for p in members}
    rest = [p for p in run.model.module.parameters() if id(p) not in taken]
    for pattern, members in [*matched.items(), ("others", rest)] if matched else ():
        settings = spec.groups.get(pattern, {})
        lr = settings.get("lr", spec.lr) * run.model.lr_scale(run.data.order, run.data.order.start)
        rate = "frozen" if settings.get("frozen") else f"lr {lr:g}"
        count = plural(sum(p.numel() for p in members), "parameter")
        lines.append(f"{pattern}: {plural(len(members), 'tensor')}, {count}, {rate}")
    labels = ["groups", *[""] * len(lines)]
    rows = [row(label, line) for label, line in zip(labels, lines, strict=False)]
    return [row(groups=lines), *rows, *_depth_row(run), *spec.rows(run.model.module)]


def _depth_row(run: Run) -> list[Row]:
    """Give the rates that fall with the depth of a weight, from the lowest to the highest."""
    spec = run.model.spec
    if spec.layer_decay is None:
        return []
    by_id = depth_scales(run.model.module, spec.layer_decay)
    scales, named = {*by_id.values()}, run.model.module.named_parameters()
    first = {name.rpartition(".")[0] or name for name, p in named if by_id[id(p)] == min(scales)}
    lr = spec.lr * run.model.lr_scale(run.data.order, run.data.order.start)
    rates = [lr * scale for scale in sorted(scales)]
    shown = " ".join(f"{rate:.3g}" for rate in rates)
    text = f"lr {shown}, from input to output; the lowest: {first_of(sorted(first))}"
    return [row("layers", text, layer_rates=rates)]


def defaults_row(run: Run) -> Row:
    """Write the defaults that are in force as they would be typed; the length of the run once."""
    config, by_job = run.config, run.chosen_optimizer.by_job
    plain = flat({**to_plain(config), "epochs": config.total_epochs})
    plain |= flat({"optimizer": by_job})
    values = {key: plain.get(key) for key in config.unset}
    clock = {"steps", "epochs"}
    if (
        values.get("batch.global") == KEYS["batch.global"].default
    ):  # conf has it, and nothing chose another
        del values["batch.global"]
    typed = [f"{k}={show(v)}" for k, v in values.items() if v is not None or k not in clock]
    _, largest, least = FINE_TUNING
    why = f"batch.global at most {largest}, for {least} steps an epoch, as weights are loaded"
    return row("defaults", join_parts(*typed, "batch.global" in values and why), defaults=typed)

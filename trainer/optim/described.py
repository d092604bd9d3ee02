"""Describe learning rates, parameter groups and settings of an optimizer in rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from trainer.config.messages import first_of
from trainer.core.format import plural
from trainer.core.rows import Row, join_parts, row
from trainer.optim.depth import depth_scales
from trainer.optim.optimizers import OptimizerSpec, match_groups


def optimizer_rows(spec: OptimizerSpec, model: nn.Module, factor: float) -> list[Row]:
    """List what every pattern of `optimizer.groups` took, and what is left to the others.

    The schedule and the size of the first step multiply every rate by `factor`.
    """
    lines = list[str]()
    matched = match_groups(model, spec.groups)
    taken = {id(p) for members in matched.values() for p in members}
    rest = [p for p in model.parameters() if id(p) not in taken]
    for pattern, members in [*matched.items(), ("others", rest)] if matched else ():
        settings = spec.groups.get(pattern, {})
        rate = f"lr {settings.get('lr', spec.lr) * factor:g}"
        if settings.get("frozen"):
            rate = "frozen"
        count = plural(sum(p.numel() for p in members), "parameter")
        lines.append(f"{pattern}: {plural(len(members), 'tensor')}, {count}, {rate}")
    rows = [row("" if place else "groups", line) for place, line in enumerate(lines)]
    if spec.layer_decay is not None:
        rows.append(_depth_row(model, spec.layer_decay, spec.lr * factor))
    return [row(groups=lines), *rows, *spec.rows(model)]


def _depth_row(model: nn.Module, decay: float, lr: float) -> Row:
    """Give the rates that fall with the depth of a weight, from the lowest to the highest."""
    by_id = depth_scales(model, decay)
    scales = sorted({*by_id.values()})
    first = set[str]()  # modules with the lowest rate
    for name, parameter in model.named_parameters():
        if by_id[id(parameter)] == scales[0]:
            first.add(name.rpartition(".")[0] or name)
    rates = [lr * scale for scale in scales]
    shown = " ".join(f"{rate:.3g}" for rate in rates)
    text = f"lr {shown}, from input to output; the lowest: {first_of(sorted(first))}"
    return row("layers", text, layer_rates=rates)


def default_row(name: str, spec: OptimizerSpec, by_job: Mapping[str, Any], why: str) -> Row:
    """Give the settings of an optimizer that nobody typed, and why they are those."""
    settings = {key: getattr(spec, key) for key in by_job}
    if not settings:
        return row(optimizer_defaults=settings, optimizer_reason=None)
    texts = [f"{key.removeprefix('weight_')} {_spaced(value)}" for key, value in by_job.items()]
    text = join_parts(f"{name} {texts[0]}", *texts[1:], why)
    return row("optimizer", text, optimizer_defaults=settings, optimizer_reason=why)


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

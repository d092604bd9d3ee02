"""Describe learning rates, parameter groups and settings of an optimizer in rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from trainer.config.messages import first_of
from trainer.core.format import plural
from trainer.core.rows import Row, join_parts, row
from trainer.models.frozen import own_parameters
from trainer.optim.depth import depth_scales
from trainer.optim.optimizers import OptimizerSpec, match_groups


def optimizer_rows(spec: OptimizerSpec, model: nn.Module, factor: float) -> list[Row]:
    """List what every pattern of `optimizer.groups` took, and what is left to the others.

    The schedule and the size of the first step multiply every rate by `factor`.
    """
    matched = [*match_groups(model, spec.groups).items()]
    if matched:
        taken = set[int]()
        for _, members in matched:
            taken.update(map(id, members))
        rest = {id(p): p for _, p in own_parameters(model) if id(p) not in taken}
        matched.append(("others", [*rest.values()]))
    lines, rows = list[str](), list[Row]()
    for pattern, members in matched:
        settings = spec.groups.get(pattern, {})
        rate = f"lr {settings.get('lr', spec.lr) * factor:g}"
        if settings.get("frozen"):
            rate = "frozen"
        count = plural(sum(p.numel() for p in members), "parameter")
        lines.append(f"{pattern}: {plural(len(members), 'tensor')}, {count}, {rate}")
        rows.append(row("" if rows else "groups", lines[-1]))
    if spec.layer_decay is not None:
        by_id = depth_scales(model, spec.layer_decay)
        scales = sorted({*by_id.values()})
        lowest = set[str]()  # modules
        for name, parameter in model.named_parameters():
            if by_id[id(parameter)] == scales[0]:
                lowest.add(name.rpartition(".")[0] or name)
        rates = [spec.lr * factor * scale for scale in scales]
        text = f"lr {_spaced(rates, '.3g')}, from input to output; the lowest: "
        rows.append(row("layers", text + first_of(sorted(lowest)), layer_rates=rates))
    return [row(groups=lines), *rows, *spec.rows(model)]


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
    changed, texts = dict[str, Any](), list[str]()
    for name, new in now.items():
        if (old := before.get(name)) != new:
            changed[name] = old, new
            texts.append(f"{name} {_spaced(old or 'default')} -> {_spaced(new)}")
    return changed, join_parts(*texts)


def _spaced(value: object, form: str = "g") -> str:
    """Write a number, or several, for a person."""
    if isinstance(value, list | tuple):
        return " ".join(_spaced(each, form) for each in value)
    return format(value, form) if isinstance(value, float) else str(value)

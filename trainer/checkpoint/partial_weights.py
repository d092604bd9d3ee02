"""Take of stored weights what fits a model by name and shape; list what is new and left over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from trainer.checkpoint.tensor_files import StoredTensor
from trainer.checkpoint.weights import StoredWeights
from trainer.config.messages import first_of
from trainer.core.errors import ConfigError
from trainer.core.format import plural
from trainer.core.rows import Row, join_parts, row

TAKEN = "taken_weights"
"""Attribute of a model that began with a part of other weights: the row that lists them."""


def fitting(stored: StoredWeights, model: nn.Module) -> StoredWeights:
    """Leave out what does not fit a model, and note on that what it takes. Collective."""
    values, new = dict[str, StoredTensor](), dict[str, str]()
    expected, found = stored.in_model(model)
    # Frozen weights are not stored where the run could build them again.
    frozen = {n: t for n, t in expected.items() if n in stored.frozen and not t.is_meta}
    changed = stored.changed(frozen)
    by_id = dict[int, StoredTensor | None]()
    for name, tensor in expected.items():
        one = by_id.setdefault(id(tensor), found.get(name))
        # Of two that are one tensor here, the second is left over.
        if found.get(name) is one:
            found.pop(name, None)
        is_given = stored.is_adapter and not tensor.requires_grad
        if one is not None and one.shape == tensor.shape:
            values[name] = replace(one, dtype=tensor.dtype)
        elif one is not None:
            new[name] = f"{[*one.shape]} there, {[*tensor.shape]} here"
        elif name in changed:
            new[name] = "frozen, with other values here"
        elif name not in stored.frozen and not is_given:
            new[name] = "not there"
    if not values:
        here, there = [f"{name} ({why})" for name, why in new.items()], ""
        if found:
            there = f"; there are {first_of([*found])}"
        raise ConfigError(
            f"init={stored.source}: none of its tensors fits this model by name and shape: "
            f"{first_of(here)}{there}: name other weights, or leave init out"
        )
    setattr(model, TAKEN, _row([*values], new, [*found]))
    given = {name: digest for name, digest in stored.frozen.items() if name not in new}
    return replace(stored, values=values, new=new, frozen=given)


def taken_rows(model: nn.Module) -> list[Row]:
    """List what a model took, where it began with a part of other weights."""
    # A transform may have put the model into another.
    return [vars(part)[TAKEN] for part in model.modules() if TAKEN in vars(part)]


def _row(taken: Sequence[str], new: Mapping[str, str], left_over: Sequence[str]) -> Row:
    """Count what was taken, with the modules of what was not; plan.json has every name."""
    parts = [f"{len(taken)} of {plural(len(taken) + len(new), 'tensor')}"]
    for what, names in (("new", [*new]), ("left over", left_over)):
        modules = dict.fromkeys(name.rpartition(".")[0] or name for name in names)
        parts += [f"{len(names)} {what} ({first_of([*modules])})"] * bool(names)
    for name, why in new.items():
        if why.startswith("["):
            parts.append(f"{name} is {why}")
            break
    lists = {"init_taken": taken, "init_new": dict(new), "init_left_over": left_over}
    return row("taken", join_parts(*parts), group="asked", **lists)

"""Match tensors in files with those of a model, by name, shape and dtype."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from torch import Tensor

from trainer.checkpoint.state import plain_name
from trainer.checkpoint.tensor_files import StoredTensor
from trainer.config.messages import clip, first_of
from trainer.core.tensors import dtype_name


def state_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Take the tensors of a `state_dict`, which may hold what `get_extra_state` gave, too."""
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def by_own_names(own: Iterable[str], by_plain_name: Mapping[str, Any]) -> dict[str, Any]:
    """Give what there is of a model's own names, which compilation and recomputation change."""
    found = dict[str, Any]()
    for name in own:
        plain = plain_name(name)
        if plain in by_plain_name:
            found[name] = by_plain_name[plain]
    return found


def with_prefix(
    found: Mapping[str, StoredTensor], expected: Mapping[str, Tensor]
) -> dict[str, StoredTensor]:
    """Put on, or take off, the prefix by which all names differ from the model's, if one does."""
    if found.keys().isdisjoint(expected):
        for stored, name in product(found, expected):
            if name.endswith(f".{stored}"):
                return {f"{name.removesuffix(stored)}{n}": t for n, t in found.items()}
            if stored.endswith(f".{name}"):
                prefix = stored.removesuffix(name)
                return {n.removeprefix(prefix): t for n, t in found.items()}
    return dict(found)


def differences_of(
    found: Mapping[str, StoredTensor], expected: Mapping[str, Tensor], changed: Sequence[str]
) -> list[str]:
    """Say in what stored tensors differ from those that a model expects, a text for each kind."""
    wrong = list[str]()
    for name, tensor in expected.items():
        if name in found and (stored := _form(found[name])) != _form(tensor):
            wrong.append(f"{name} ({stored} in the checkpoint, {_form(tensor)} in the model)")
    missing, unexpected = expected.keys() - found.keys(), found.keys() - expected.keys()
    # Another class: sizes say nothing more.
    if missing and unexpected:
        wrong.clear()
    differing = {"missing": sorted(missing), "unexpected": sorted(unexpected), "different": wrong}
    faults = list[str]()
    for what, names in differing.items():
        if names:
            faults.append(f"{what} {first_of([*map(clip, names)])}")
    if changed:
        faults.append(
            f"frozen {first_of([*map(clip, changed)])} not stored, and built with other values "
            "than the run had; name the weights that it began with"
        )
    return faults


def _form(tensor: Tensor | StoredTensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"

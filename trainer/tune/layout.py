"""Choose what hardware, model and data ask of every cut: padding, shapes, packing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from trainer.core.errors import ConfigError
from trainer.models.bind import AUTOCAST
from trainer.models.boundaries import BOUNDARIES, OTHER_WORDS, uses_flash
from trainer.plan.cut import Cost, IntArray, Layout
from trainer.plan.partition import ladder, pad

GPU_MULTIPLE = 8  # tokens; tensor cores take matrices whose sides are multiples of it at full speed
# Padded lengths of a compiled model, over a whole run; the number of samples is dynamic
COMPILED_SHAPES = 16
# Of the longest sample, in the mean: above it, as in windows of one length, padding costs nothing
FULL = 0.95


def layout_for(
    lengths: IntArray,
    *,
    world_size: int,
    device_type: str,
    packed: bool,
    compiled: bool,
    group_size: int = 1,
) -> Layout:
    """Choose a layout for all training data, whose lengths are `(samples,)`; see `Layout`.

    On `cuda` lengths are padded to a multiple of 8 tokens; a compiled model bounds the number of
    padded lengths, the same for the whole run.
    """
    longest = int(lengths.max())
    # A sample without tokens counts as one, and is not padded to eight.
    multiple = GPU_MULTIPLE if device_type == "cuda" and longest > 1 else 1
    shapes: tuple[int, ...] = ()
    if compiled and not packed:
        padded = pad(lengths, Layout(pad_multiple=multiple, longest=longest))
        shapes = ladder(padded, COMPILED_SHAPES, Cost())
    return Layout(
        world_size=world_size,
        pad_multiple=multiple,
        longest=longest,
        packed=packed,
        max_shapes=COMPILED_SHAPES if compiled and packed else None,
        shapes=shapes,
        group_size=group_size,
    )


def packs(
    asked: bool | Literal["auto"],
    module: nn.Module,
    *,
    unfit: str | None,
    device: torch.device,
    precision: str,
    fill: float = 0.0,
    fault: Callable[[], str | None] = lambda: None,
) -> bool:
    """Decide whether documents are packed end to end.

    Left to itself it is done where padding would cost something and the model has one kernel for
    all documents of a row, as it says itself. Never on a CPU: there documents are attended to one
    by one, which gains 1 % at 350 tokens in the mean, and less where they are shorter.

    Args:
        asked: `accum.packed`.
        module: the model.
        unfit: why data or objective cannot be packed; None when they can.
        device: where it computes.
        precision: of the forward, such as `bf16`.
        fill: mean length of the data over that of the longest sample.
        fault: runs a model that is given boundaries in other words than `cu_seqlens`, and says why
            it cannot be packed.

    Raises:
        ConfigError: packing was asked for, and the model, data or objective cannot be packed.
    """
    names = inspect.signature(module.forward).parameters.keys()
    if not names & {BOUNDARIES, *OTHER_WORDS}:
        unfit = (
            f"forward of {type(module).__name__} takes no {BOUNDARIES}, so documents laid end to "
            "end would see each other"
        )
    if asked is False:
        return False
    if asked == "auto" and (fill > FULL or not has_kernel(module, device, precision)):
        return False
    if unfit is None and BOUNDARIES not in names:
        unfit = fault()
    if asked is True and unfit is not None:
        raise ConfigError(f"accum.packed=true: {unfit}; use accum.packed=false")
    return unfit is None


def has_kernel(module: nn.Module, device: torch.device, precision: str) -> bool:
    """Whether one kernel takes all documents of a row, which a model can be asked for."""
    weight = next(module.parameters(), torch.empty(0))
    dtype = AUTOCAST.get(precision, weight.dtype)
    if device.type != "cuda":
        return False
    if callable(ask := getattr(module, "has_packed_kernel", None)):
        return bool(ask(device, dtype))
    # Other kernels of Hugging Face's score every pair of positions of the row.
    return dtype in AUTOCAST.values() and uses_flash(module) is not False

"""Choose what hardware, model and data ask of every cut: padding, shapes, packing."""

from __future__ import annotations

import inspect
from typing import Literal

import torch
from torch import nn

from trainer.core.errors import ConfigError
from trainer.plan.cut import Cost, IntArray, Layout
from trainer.plan.partition import ladder, pad

GPU_MULTIPLE = 8  # tokens; tensor cores take matrices whose sides are multiples of it at full speed
# Padded lengths of a compiled model, over a whole run; the number of samples is dynamic
COMPILED_SHAPES = 16
BOUNDARIES = "cu_seqlens"  # the field that says where packed documents begin


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
) -> bool:
    """Decide whether documents are packed end to end.

    Left to itself it is done on a GPU in bf16, where one kernel takes all documents of a row. On a
    CPU padded plans are as fast, and documents are attended to one by one.

    Args:
        asked: `accum.packed`.
        module: the model.
        unfit: why data or objective cannot be packed; None when they can.
        device: where it computes.
        precision: of the forward.

    Raises:
        ConfigError: packing was asked for, and the model, data or objective cannot be packed.
    """
    if BOUNDARIES not in inspect.signature(module.forward).parameters:
        unfit = (
            f"forward of {type(module).__name__} takes no {BOUNDARIES}, so documents laid end to "
            "end would see each other"
        )
    if asked == "auto":
        return device.type == "cuda" and precision == "bf16" and unfit is None
    if asked and unfit is not None:
        raise ConfigError(f"accum.packed=true: {unfit}; use accum.packed=false")
    return asked

"""Run the model on fake tensors once, for what it looks up and how much it computes."""

from __future__ import annotations

from dataclasses import replace

from trainer.build.parts import Parts
from trainer.core.micro_batch import Fields
from trainer.data.collate import PACKING
from trainer.data.loader import Request
from trainer.models.boundaries import BOUNDARIES
from trainer.tune.flops import ModelFlops, model_flops, peak_flops
from trainer.tune.lookups import lookup_limits
from trainer.tune.workload import Tiled, Workload


def limit_lookups(parts: Parts, work: Workload) -> None:
    """Have the loaders compare with the rows of the model's tables what is looked up in them."""
    loader, longest = parts.source.loader, int(parts.source.lengths.argmax())
    tokens = int(parts.source.lengths[longest])
    if limits := lookup_limits(work, tokens, loader.limits):
        for each in [loader, *([parts.held_out.loader] if parts.held_out else [])]:
            each.limit(limits)
        loader.load(Request((longest,), 0, tokens))  # the example was loaded without limits


def count_flops(parts: Parts, work: Workload) -> ModelFlops | None:
    """Count the model's FLOPs, on the rank that reports them; documents side by side."""
    if not parts.world.is_main:
        return None
    lengths = parts.source.lengths
    shortest, longest = int(lengths.min()), int(lengths.max())
    if BOUNDARIES in parts.example:
        work = replace(work, make_fields=Tiled(unpacked(parts.example), longest))
    peak = peak_flops(parts.world.device, parts.precision)
    return model_flops(work, shortest, longest, peak and peak * parts.world.size)


def unpacked(example: Fields) -> Fields:
    """Take from a packed row of one document what says that it is one."""
    return {name: f for name, f in example.items() if name not in PACKING}

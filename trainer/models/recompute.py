"""Activation checkpointing: blocks forget what they computed and compute it again in backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain

from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.core.norms import moves_in_forward

SIGNIFICANT = 0.2
"""A stack of blocks counts when it holds at least this share of the largest stack's weights."""


def blocks_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """Find the repeated blocks of a model that can be computed twice.

    A block whose forward moves running statistics is left out: to compute it twice would move them
    twice.
    """
    blocks = repeated_blocks(model)
    return tuple(block for block in blocks if not any(map(moves_in_forward, block.modules())))


def repeated_blocks(model: nn.Module) -> tuple[nn.Module, ...]:
    """Find the repeated blocks of a model: the children of its largest lists of modules.

    A list is an `nn.ModuleList`, or an `nn.Sequential` of modules that have children of their
    own, and counts only outside of other such lists.

    Returns:
        The blocks, in the order of `model.modules()`; empty when the model has none.
    """
    return tuple(block for stack in repeated_stacks(model) for block in stack.children())


def repeated_stacks(model: nn.Module) -> list[nn.Module]:
    """Find the lists that `repeated_blocks` takes the blocks of."""
    stacks = _outermost(model)
    sizes = [sum(p.numel() for p in stack.parameters()) for stack in stacks]
    least = SIGNIFICANT * max(sizes, default=0)
    return [s for s, size in zip(stacks, sizes, strict=True) if size and size >= least]


def separable_blocks(model: nn.Module) -> tuple[nn.Module, ...]:
    """Find the repeated blocks that share no parameter with anything outside of themselves."""
    blocks = blocks_of(model)
    owned = [{id(p) for p in block.parameters()} for block in blocks]
    # A module counts as often as it has owners; `modules()` would give it once.
    times = Counter(chain(*owned, {id(p) for p in _parameters_outside(model, set(blocks))}))
    return tuple(
        block for block, own in zip(blocks, owned, strict=True) if all(times[p] == 1 for p in own)
    )


def _parameters_outside(module: nn.Module, blocks: Collection[nn.Module]) -> Iterator[nn.Parameter]:
    yield from module.parameters(recurse=False)
    for child in module.children():
        if child not in blocks:
            yield from _parameters_outside(child, blocks)


def can_recompute(model: nn.Module) -> bool:
    """Tell whether activation checkpointing changes anything for a model."""
    return _own_switch(model, "enable") is not None or bool(blocks_of(model))


def checkpoint_blocks(model: nn.Module) -> int:
    """Make every block recompute itself in backward, from now on.

    Gradients stay the same bit for bit, dropout included; names, weights and hooks stay. A Hugging
    Face model is asked to do it itself, since its blocks share caches.

    Returns:
        The number of blocks that recompute; 0 when the model has none, and nothing changed.
    """
    enable = _own_switch(model, "enable")
    if enable is not None:
        enable({"use_reentrant": False})
        return 1
    blocks = blocks_of(model)
    for block in blocks:
        if not _recomputes(block):
            # An attribute hides the method of the class and leaves the module tree alone; a
            # partial of a bound method follows the block when a model is deep-copied.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return len(blocks)


@contextmanager
def with_checkpointing(model: nn.Module) -> Iterator[int]:
    """Recompute inside the block, and after it as before it; yields the number of blocks."""
    before = any(_recomputes(m) or vars(m).get("gradient_checkpointing") for m in model.modules())
    count = checkpoint_blocks(model)
    try:
        yield count
    finally:
        if not before:
            recompute_nothing(model)


def recompute_nothing(model: nn.Module) -> None:
    """Make every block keep what it computed, from now on."""
    if (disable := _own_switch(model, "disable")) is not None:
        disable()
    for module in model.modules():
        if _recomputes(module):
            del module.forward


def _outermost(module: nn.Module) -> list[nn.Module]:
    stacks: list[nn.Module] = []
    for child in module.children():
        is_stack = isinstance(child, nn.ModuleList) or (
            isinstance(child, nn.Sequential) and any([*part.children()] for part in child)
        )
        stacks += [child] if is_stack else _outermost(child)
    return stacks


def _own_switch(model: nn.Module, verb: str) -> Callable[..., None] | None:
    """Find the method by which a Hugging Face model does it itself; None for any other."""
    if getattr(model, "supports_gradient_checkpointing", False) is not True:
        return None
    # transformers 5 renamed the methods and warns of the former names.
    for kind in ("activation", "gradient"):
        switch: object = getattr(model, f"{kind}_checkpointing_{verb}", None)
        if callable(switch):
            return switch
    return None


def _recomputes(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func is checkpoint

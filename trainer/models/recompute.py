"""Activation checkpointing: blocks forget what they computed and compute it again in backward."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.core.declared_state import EarlierState, has_declared_state
from trainer.models.facts import BESIDE

_OWN_FUNCTION = "_gradient_checkpointing_func"  # of layers of Hugging Face models
SIGNIFICANT = 0.2
"""A stack of blocks counts when it holds at least this share of the largest stack's weights."""


def blocks_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """Find the repeated blocks of a model: the children of its largest lists of modules.

    A list is an `nn.ModuleList`, or an `nn.Sequential` of modules that have children of their own,
    and counts only outside of other such lists. They come in the order of `model.modules()`.
    """
    blocks = list[nn.Module]()
    for stack in repeated_stacks(model):
        blocks += stack.children()
    return tuple(blocks)


def repeated_stacks(model: nn.Module) -> list[nn.Module]:
    """Find the lists that `blocks_of` takes the blocks of."""
    # A list that two modules hold is there twice, as its blocks run twice.
    stacks = _outermost(model)
    sizes = [sum(map(torch.numel, stack.parameters())) for stack in stacks]
    # At least one weight, so that a stack of empty modules is none
    least = max(1, SIGNIFICANT * max(sizes, default=0))
    return [stack for stack, size in zip(stacks, sizes, strict=True) if size >= least]


def separable_blocks(model: nn.Module) -> tuple[nn.Module, ...]:
    """Find the repeated blocks that share no parameter with anything outside of themselves."""
    blocks = blocks_of(model)
    owned = [set(map(id, block.parameters())) for block in blocks]
    known, outside, todo = {*blocks}, set[int](), [model]
    # A module is walked to from each of its owners; `modules()` would give it once.
    while todo:
        part = todo.pop()
        outside.update(map(id, part.parameters(recurse=False)))
        for child in part.children():
            if child not in known:
                todo.append(child)
    times = Counter(chain(outside, *owned))
    found = list[nn.Module]()
    for block, own in zip(blocks, owned, strict=True):
        if all(times[parameter] == 1 for parameter in own):
            found.append(block)
    return tuple(found)


def can_recompute(model: nn.Module) -> bool:
    """Tell whether activation checkpointing changes anything for a model."""
    return _own_switch(model, "enable") is not None or bool(blocks_of(model))


def checkpoint_blocks(model: nn.Module) -> int:
    """Make every block recompute itself in backward, from now on.

    Gradients stay the same bit for bit, dropout included, and so does what forwards write; names,
    weights and hooks stay. A Hugging Face model says itself which of its layers do it. Gives the
    number of blocks that recompute; 0 when the model has none, and nothing changed.
    """
    enable = _own_switch(model, "enable")
    if enable is not None:
        enable({"use_reentrant": False})
        for module in model.modules():
            if _OWN_FUNCTION in vars(module):
                setattr(module, _OWN_FUNCTION, _recomputing(module))
        return 1
    blocks = blocks_of(model)
    for block in blocks:
        if not _recomputes(block):
            # An attribute hides the method of the class and leaves the module tree alone; a
            # partial of a bound method follows the block when a model is deep-copied.
            block.forward = partial(_recomputing(block), block.forward)
    return len(blocks)


def _recomputing(module: nn.Module) -> partial[Any]:
    """Give what runs a forward now and in backward; a module without state needs no copy of it."""
    if has_declared_state(module):
        return partial(recompute_from_state, module)
    return partial(checkpoint, use_reentrant=False)


@torch.compiler.disable  # type: ignore[untyped-decorator] # untyped in torch
def recompute_from_state(
    module: nn.Module,
    forward: Callable[..., Any],
    *args: Any,  # noqa: ANN401 - whatever the forward takes
    **kwargs: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401 - whatever it gives
    """Compute now, and again in backward, where the module has the declared state that it has now.

    It keeps a copy of that state until then.
    """
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    before, runs = EarlierState(module), itertools.count()

    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with before.lent() if next(runs) else nullcontext():
            return forward(*args, **kwargs)

    return checkpoint(run, *args, use_reentrant=False, **kwargs)


def recomputes(model: nn.Module) -> bool:
    """Whether any block of a model recomputes itself."""
    return any(_recomputes(m) or vars(m).get("gradient_checkpointing") for m in model.modules())


@contextmanager
def with_checkpointing(model: nn.Module) -> Iterator[int]:
    """Recompute inside the block, and after it as before it; yields the number of blocks."""
    before = recomputes(model)
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
    for name, child in module.named_children():
        # What is beside the model is no part of it.
        if name == BESIDE:
            continue
        is_stack = isinstance(child, nn.ModuleList)
        if isinstance(child, nn.Sequential):
            is_stack = any([*part.children()] for part in child)
        stacks += [child] if is_stack else _outermost(child)
    return stacks


def _own_switch(model: nn.Module, verb: str) -> Callable[..., None] | None:
    """Find the method by which a Hugging Face model does it itself; None for any other."""
    if getattr(model, "supports_gradient_checkpointing", False) is not True:
        return None
    switch: Callable[..., None] | None = getattr(model, f"activation_checkpointing_{verb}", None)
    return switch


def _recomputes(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func in {checkpoint, recompute_from_state}

"""Compile a model by its repeated blocks: one graph serves all blocks that compute the same.

Compiled as a whole, a deep model takes minutes, and hooks of shards break its graph at every block.
So the forward of each block is compiled, inside of its hooks. Samples and packed documents, the
first dimension of what a block gets, are dynamic. So is the length from the second one on: data of
one length have kernels for just that. A block that recomputes itself does so within its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainer.models.recompute import blocks_of

# Of a length, where fakes are compiled: one sample and several, each in training and evaluation
GRAPHS = 4
# Padded lengths of a compiled model, over a whole run: of each that may be the largest, predicting
# the memory compiles for seconds
COMPILED_SHAPES = 16

COMPILED = "compiled_by"  # attribute of a model that is compiled: by which backend


def compile_model(model: nn.Module, max_lengths: int, backend: str = "inductor") -> None:
    """Compile in place, before the model is laid out: names, weights and checkpoints stay.

    A model without a list of blocks is one graph for all shapes. It recomputes its blocks already,
    where it is to. `max_lengths` are the padded lengths that a run may have, of packed rows too.
    """
    import torch._dynamo.config as limits  # noqa: PLC0415 - a second

    blocks = blocks_of(model)
    vars(model)[COMPILED] = backend
    if not blocks:
        model.compile(dynamic=True, backend=backend)
        return
    limits.recompile_limit = max(limits.recompile_limit, GRAPHS * max_lengths)
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        # By the cache of a Hugging Face model, which no step reads, every block differs.
        config.use_cache = False
    for block in blocks:
        block.forward = compiled(block.forward, backend)


@contextmanager
def with_compilation(model: nn.Module, max_lengths: int) -> Iterator[None]:
    """Compute compiled inside the block; what was compiled is found again later."""
    before = [(block, vars(block).get("forward")) for block in blocks_of(model)]
    compile_model(model, max_lengths)
    try:
        yield
    finally:
        for name in ("_compiled_call_impl", COMPILED):
            vars(model).pop(name, None)
        for block, forward in before:
            if forward is None:
                del block.forward
            else:
                block.forward = forward


def compiled(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Compile a function, for any first dimension of its tensors."""
    run = torch.compile(forward, backend=backend)

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever a block takes and gives
        # Tensors in containers, and among the attributes of objects.
        found = tree_leaves((args, kwargs))
        for value in found.copy():
            found += getattr(value, "__dict__", {}).values()
        for tensor in found:
            # A first dimension of one is another graph in any case.
            if isinstance(tensor, Tensor) and tensor.ndim and tensor.shape[0] > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return run(*args, **kwargs)

    return call

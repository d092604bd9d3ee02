"""Runs a live model without a trace: what a rehearsal changes is put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from trainer.accumulate.snapshot import Snapshot
from trainer.errors import ConfigError

COPIED_BYTES = 64 * 2**20
"""Of what is no buffer: copied, the smallest first, such as codebooks and averages.

A frozen model under adapters would be another model; no forward moves it.
"""


@contextmanager
def untouched(model: nn.Module, *others: object) -> Iterator[None]:
    """Put a model and the random generators back bit for bit when the block ends.

    Covers `.grad`, whether modules train or evaluate, all that a step's `Snapshot` does, every
    buffer whatever its size, and the random state of torch on the CPU and the model's GPU, of
    Python and of NumPy. Trained weights are not copied: forward and backward do not change
    them. Inside, `.grad` is None.

    Args:
        model: not wrapped for several ranks; one rank may do this alone.
        others: objects that a forward may move besides, such as the objective.

    Raises:
        ConfigError: the block moved something too large to be copied.
    """
    kept = Snapshot(
        model,
        *others,
        every_bytes=0,
        unseen_bytes=COPIED_BYTES,
        moving=[id(buffer) for buffer in model.buffers()],
        by_value=False,  # reading every frozen weight, twice in each of many rehearsals
    )
    kept.take()
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    python_state, numpy_state = random.getstate(), np.random.get_state()
    on_gpu = {p.device.index for p, _ in gradients if p.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=sorted(on_gpu)):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        lost = kept.restore()
        for module, trains in modes:
            module.training = trains
        for parameter, gradient in gradients:
            parameter.grad = gradient
    if lost is not None:
        raise ConfigError(
            f"model: a rehearsal of it cannot be undone: {lost}: make it a buffer "
            "(register_buffer), or set the cut by hand (accum=fixed accum.micro=N)"
        )

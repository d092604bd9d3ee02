"""Run a live model and put its declared state back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from trainer.accumulate.rollback import Snapshot


@contextmanager
def restoring(model: nn.Module, *others: object) -> Iterator[None]:
    """Put a model's declared state and the random generators back when the block ends.

    Covers `.grad`, whether modules train or evaluate, what a step's `Snapshot` does, and the random
    state of torch on the CPU and the model's GPU, of Python and of NumPy. Weights are not copied:
    forward and backward do not change them. Inside, `.grad` is None.

    Args:
        model: not wrapped for several ranks; one rank may do this alone.
        others: objects that a forward may move besides, such as the objective.
    """
    snapshot = Snapshot(model, *others)
    snapshot.take()
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
        snapshot.restore()
        for module, trains in modes:
            module.training = trains
        for parameter, gradient in gradients:
            parameter.grad = gradient

"""Compare an objective with the loss that a model computes itself, where it takes labels."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection
from contextlib import suppress

import torch
from torch import nn

from trainer.core.errors import ConfigError, DataError
from trainer.core.micro_batch import Fields, output_part, to_device
from trainer.core.user_code import described
from trainer.models.bind import bind
from trainer.models.transformers_classes import quiet
from trainer.objectives.base import Objective, sums_of, weights_of
from trainer.tune.workload import restoring

_TARGETS = {"labels", "start_positions"}


def compare_losses(
    objective: Objective, option: str, module: nn.Module, fields: Fields, keys: Collection[str]
) -> None:
    """Refuse an objective that gives another loss than the model, which knows its labels best.

    Those of Bart as a causal model, for one, are not shifted; a router adds to its loss. Image
    tokens that are more, or fewer, than the parts of the image are refused by the model itself.
    """
    parameter = next(module.parameters(), None)
    names = inspect.signature(module.forward).parameters
    if parameter is None or parameter.is_meta or _TARGETS.isdisjoint(names):
        return
    given, refusal = to_device(fields, parameter.device), None
    own = ours = math.nan
    # What fails here fails again, in full, where it is needed.
    with suppress(Exception), quiet(), restoring(module, objective), torch.no_grad():
        module.eval()
        call, weights = bind(module), weights_of(objective, given)
        try:
            losses = sums_of(objective, call, given, weights).losses
        except ValueError as error:  # a library's own check of what it is given
            refusal = error
        else:
            ours = sum(float(loss) / weights[name] for name, loss in losses.items())
            own = float(output_part(call(given), "loss"))
    if refusal is not None:
        raise DataError(
            f"data: {type(module).__name__} does not take the longest sample: "
            f"{described(refusal)}; change what makes its {', '.join(fields)} "
            f"({', '.join(keys)}), or the model"
        ) from refusal
    # Heads of transformers turn logits into float32, whatever the weights are.
    eps = max(torch.finfo(dtype).eps for dtype in (parameter.dtype, torch.float32))
    if abs(own - ours) > math.sqrt(eps) * abs(own):
        raise ConfigError(
            f"objective: {type(module).__name__} computes a loss of {own:.5g} for the longest "
            f"sample, {option} one of {ours:.5g}: type objective=model_loss for the model's own, "
            f"or objective={option}"
        )

"""Lower the learning rate with the distance of a weight from the output of a model.

Layer-wise decay as BEiT has it (Bao et al. 2022, 2106.08254): of n blocks, block i from 0 has
`decay ** (n - i)` of the rate, what stands ahead of them `decay ** (n + 1)`, what follows them 1.
"""

from __future__ import annotations

import re

from torch import nn

from trainer.core.errors import ConfigError
from trainer.models.output_layer import candidate
from trainer.models.recompute import repeated_stacks

_LAST = re.compile(
    r"(\w+_)?(heads?|classifier|score|logits|output|fc)\d*|norm|(ln|norm)_f|final_\w+"
)
"""Names of what stands behind the blocks of a model, as the classes of libraries have them."""


def depth_scales(model: nn.Module, decay: float) -> dict[int, float]:
    """Give the share of the learning rate of each parameter, by its id.

    Modules count in the order in which the model names them; what lies between two blocks is of the
    one ahead of it. A tied parameter goes by the first of its names. A single number that is the
    model's own, such as a temperature, has the whole rate, as has an output layer that the model
    gives by `get_output_embeddings` and shares with no input.
    """
    stacks, layer = repeated_stacks(model), candidate(model)
    remedy = "give rates by optimizer.groups"
    if len(stacks) != 1:
        found = f"{len(stacks)} lists" if stacks else "no list"
        text = f"the model has {found} of repeated blocks, and one is needed; {remedy}"
        raise ConfigError(f"optimizer.layer_decay={decay:g}: {text}")
    if name := _ends_ahead(model, stacks[0], layer):
        text = f"{name}, by its name an end of the model, stands ahead of its blocks: declare it"
        raise ConfigError(f"optimizer.layer_decay={decay:g}: {text} behind them, or {remedy}")
    whole = _at_whole_rate(model, layer)
    blocks = [*stacks[0].children()]
    of_block = dict[int, int]()
    for place, block in enumerate(blocks, 1):
        for parameter in block.parameters():
            of_block.setdefault(id(parameter), place)
    scales, place, left = dict[int, float](), 0, len(of_block)
    for parameter in model.parameters():
        is_behind = not left
        if id(parameter) in of_block:
            place, left = of_block[id(parameter)], left - 1
        if is_behind or id(parameter) in whole:
            scales[id(parameter)] = 1.0
        else:
            scales[id(parameter)] = decay ** (len(blocks) + 1 - place)
    return scales


def _at_whole_rate(model: nn.Module, layer: nn.Module | None) -> set[int]:
    """Give the ids of what has the whole rate, wherever it stands in a model."""
    whole = set[int]()
    for parameter in model.parameters(recurse=False):
        if parameter.numel() == 1:
            whole.add(id(parameter))
    if layer is None:
        return whole
    whole.update(map(id, layer.parameters()))
    # A matrix that is looked up as well is the first layer of the model, with the lowest rate.
    for part in model.modules():
        if isinstance(part, nn.Embedding):
            whole.discard(id(part.weight))
    return whole


def _ends_ahead(module: nn.Module, stack: nn.Module, known: nn.Module | None) -> str | None:
    """Find, ahead of the blocks and beside them or what has them, what ends a model."""
    for name, child in module.named_children():
        if stack in child.modules():
            return None if child is stack else _ends_ahead(child, stack, known)
        if _LAST.fullmatch(name) and child is not known:
            return name
    return None

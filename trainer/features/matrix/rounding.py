"""Bound what computing a gradient in fewer bits rounds, by what it makes of roundings that are due.

Weights, and what modules give each other, have to be rounded to the precision. What that alone does
to the gradient no algorithm can avoid: it is small for a smooth model, and large for one with ReLUs
whose inputs change their signs. An algorithm is stable if it does not much worse (Higham 2002,
Accuracy and Stability of Numerical Algorithms, 1.5 and 1.6). One in which digits cancel does.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from trainer.features.matrix.compared import Reference, relative_distance

ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11, "tf32": 2.0**-11, "fp32": 2.0**-24}
"""Half the distance from 1 to the next number: what one rounding may be off by."""

# Within a module values are rounded several times, and each module is rounded once here: 16
# roundings add up to four times one.
FACTOR = 4


def bound_of_rounding(own: Reference, word: str) -> float:
    """Bound the relative error of a gradient, in the 2-norm, under a word of `precision`."""
    # Products are added up in fp32, with an error of the root of as many terms (Higham and Mary
    # 2019, SIAM J. Sci. Comput. 41(5), theorem 2.4).
    sizes = [max(each.shape, default=1) for each in own.case.module.parameters()]
    terms = max(*sizes, sum(each.num_positions for each in own.pieces))
    roundoff = ROUNDOFF[word] + math.sqrt(terms) * ROUNDOFF["fp32"]
    case = replace(own.case, change=partial(round_modules, roundoff=roundoff))
    return FACTOR * max(relative_distance(case.gradient(own.pieces), own.expected), roundoff)


def round_modules(module: nn.Module, roundoff: float) -> None:
    """Round weights, what each module gives, and the gradients that it gets back."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(rounded(parameter, roundoff))

    def rounds(values: Tensor) -> Any:  # noqa: ANN401
        return _Rounded.apply(values, roundoff)  # type: ignore[no-untyped-call] # untyped in torch

    def give(_module: nn.Module, _args: Any, output: Any) -> Any:  # noqa: ANN401
        return tree_map_only(Tensor, rounds, output)

    for part in module.modules():
        part.register_forward_hook(give)


def rounded(values: Tensor, roundoff: float) -> Tensor:
    """Round to as few bits as err by a roundoff, by splitting off the others (Dekker 1971)."""
    if not values.is_floating_point():
        return values
    wide = values * (2 ** round(math.log2(2 * roundoff / torch.finfo(values.dtype).eps)) + 1)
    return torch.where(wide.isfinite(), wide - (wide - values), values)


@final
class _Rounded(torch.autograd.Function):
    """Rounds values in forward, and their gradient in backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, roundoff: float) -> Tensor:  # noqa: ANN401
        """Round the values."""
        ctx.roundoff = roundoff
        return rounded(values, roundoff)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        """Round the gradient."""
        return rounded(gradient, ctx.roundoff), None

"""The norm of a gradient does not depend on how large its parameters are."""

import pytest
import torch
from torch import nn

from trainer.core.world import World
from trainer.parallel.base import NORM_PIECE, Replicated


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
def test_the_norm_of_many_elements_is_that_of_fp64(dtype):
    sizes = (10 * NORM_PIECE + 7, 3, 0)
    draw = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.empty(size, dtype=dtype)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, dtype=dtype, generator=draw)
    model = Replicated(nn.ParameterList(parameters), print, parameters, World())
    wide = torch.cat([p.grad.to(torch.complex128) for p in parameters])
    exact = torch.view_as_real(wide).square().sum().sqrt()
    assert float(model.gradient_norm()) == pytest.approx(float(exact), rel=1e-12)
    model.scale_gradients(1 / model.gradient_norm())  # as clipping does
    assert float(model.gradient_norm()) == pytest.approx(1.0, rel=4e-3)

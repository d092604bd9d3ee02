"""Tests that a GPU has to pass. Those that take `device` run on a CPU, too, at the same toy size.

`python -m pytest -n 0 -m gpu tests/gpu` runs what needs a GPU; without one that is skipped.
"""

import os

import pytest
import torch

from tests.lib.gpu_support import ON_A_GPU

# cuBLAS reads it when it starts, which is before the first test that wants equal bits.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(params=[ON_A_GPU, "cpu"])
def device(request: pytest.FixtureRequest) -> str:
    """Where a test computes."""
    where: str = request.param
    return where


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none; on one, warnings of libraries are no errors."""
    lacks = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.filterwarnings("default"))
            if not torch.cuda.is_available():
                item.add_marker(lacks)

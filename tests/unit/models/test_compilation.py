"""Compiled blocks: the same loss and gradient, from few graphs."""

import copy

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

from tests.lib.nightly import nightly
from tests.lib.tune_support import VOCABULARY, ConvNet, gpt
from trainer.models.compilation import GRAPHS, compile_model
from trainer.models.gpt import GPT
from trainer.models.recompute import checkpoint_blocks

SAMPLES = (4, 1, 7, 3)
LENGTHS = (12, 20, 17, 33)


@pytest.fixture(autouse=True)
def one_thread(no_graphs):
    torch.set_num_threads(1)
    torch.manual_seed(0)


def compare(model: nn.Module, compiled: nn.Module, shapes: list[tuple[int, ...]]) -> None:
    """Hold losses and gradients of one model against another's."""
    for shape in shapes:
        fields = torch.randn(shape) if len(shape) > 2 else torch.randint(0, VOCABULARY, shape)
        found = []
        for each in (model, compiled):
            each.zero_grad()
            loss = each(fields).square().mean()
            loss.backward()
            found.append([loss, *(p.grad for p in each.parameters())])
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


def graphs() -> int:
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("recomputes", [False, nightly(True)])
def test_all_blocks_share_a_graph_of_all_lengths_and_compute_the_same(recomputes):
    model = GPT(vocab_size=VOCABULARY, width=24, num_layers=4, num_heads=2, max_length=128)
    if recomputes:
        assert checkpoint_blocks(model) == 4
    compiled, names = copy.deepcopy(model), list(model.state_dict())
    compile_model(compiled, len(LENGTHS), backend="aot_eager" if recomputes else "eager")
    compare(model, compiled, [(n, length) for length in LENGTHS for n in SAMPLES])
    assert graphs() == 4, "the first length, and all others; one sample, and several"
    with torch.no_grad():
        compiled.eval()(torch.zeros(5, LENGTHS[0], dtype=torch.int64))
    assert graphs() <= GRAPHS * len(LENGTHS)
    assert list(compiled.state_dict()) == names
    assert torch._dynamo.config.recompile_limit >= GRAPHS * len(LENGTHS)


def test_packed_rows_of_one_length_share_a_graph_whatever_their_documents():
    model = gpt()
    compiled = copy.deepcopy(model)
    compile_model(compiled, 2, backend="eager")
    for bounds in ([0, 5, 24], [0, 7, 11, 15, 24], [0, 1, 20, 24], [0, 5, 32]):
        row = torch.zeros(1, bounds[-1], dtype=torch.int64)
        ends = torch.tensor(bounds, dtype=torch.int32)
        packed = {"cu_seqlens": ends, "max_seqlen": int(ends.diff().max())}
        torch.testing.assert_close(compiled(row, **packed), model(row, **packed))
        # Another length than the first gets kernels for all lengths.
        assert graphs() == (1 if bounds[-1] == 24 else 2)


def test_a_model_without_blocks_is_one_graph():
    model = ConvNet()
    compiled = copy.deepcopy(model)
    compile_model(compiled, 1, backend="eager")
    compare(model, compiled, [(4, 3, 12, 12), (6, 3, 12, 12)])
    assert graphs() == 1

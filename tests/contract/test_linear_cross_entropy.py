"""Cross entropy in chunks is that of whole logits, in sums, gradients and steps."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from tests.lib.support import EXACT, WRONG, Bench, relative_error
from trainer.models.bind import bind
from trainer.models.compilation import compile_model
from trainer.models.gpt import GPT
from trainer.objectives import next_token
from trainer.objectives.base import Objective
from trainer.objectives.linear_cross_entropy import CHUNK_BYTES, MULTIPLE, linear_cross_entropy
from trainer.objectives.next_token import LEAST_BYTES, NextToken
from trainer.plan.cuts import Budget, Fixed

CLASSES, WIDTH = 19, 5
SMALL_CHUNKS = 12 * CLASSES
LARGE = 2**17
"""A vocabulary of which 16 positions are computed in chunks."""


def tensors(bias: bool, dtype: torch.dtype = torch.float64):
    """Hidden states, weight, bias and targets, some of which are ignored."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(37, WIDTH), (CLASSES, WIDTH), *([(CLASSES,)] if bias else [])]
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    targets = torch.randint(CLASSES, (37,), generator=generator)
    targets[::3] = -100
    inputs = [x.to(dtype).requires_grad_() for x in inputs]
    return (*inputs, None)[:3], targets


def gradients(loss, inputs):
    wanted = [x for x in inputs if x is not None]
    grads = torch.autograd.grad(loss, wanted, retain_graph=True)
    return {str(index): grad for index, grad in enumerate(grads)}


@pytest.mark.parametrize(
    ("smoothing", "bias", "chunk_bytes", "multiple"),
    [
        (0.0, False, CHUNK_BYTES["cpu"], 1),
        (0.1, True, 12 * CLASSES, 1),
        (0.1, True, 12 * CLASSES, 8),
    ],
)
def test_sums_and_gradients_are_those_of_whole_logits(
    smoothing, bias, chunk_bytes, multiple, monkeypatch
):
    monkeypatch.setitem(CHUNK_BYTES, "cpu", chunk_bytes)
    monkeypatch.setitem(MULTIPLE, "cpu", multiple)
    (hidden, weight, added), targets = inputs, _ = tensors(bias)
    layer = weight, added
    found, _ = linear_cross_entropy(hidden, layer, targets, label_smoothing=smoothing)
    logits = F.linear(hidden, weight, added)
    expected, other = (
        F.cross_entropy(logits, targets, reduction="sum", label_smoothing=each)
        for each in (smoothing, 0.2)
    )
    torch.testing.assert_close(found, expected, rtol=EXACT[torch.float64], atol=0.0)
    reference = gradients(expected / 7.0, inputs)
    for _ in range(2):  # the second time they are computed anew
        assert relative_error(gradients(found / 7.0, inputs), reference) <= EXACT[torch.float64]
    assert relative_error(gradients(other / 7.0, inputs), reference) > WRONG
    with torch.no_grad():
        found, hits = linear_cross_entropy(hidden, layer, targets, label_smoothing=smoothing)
    assert int(hits) == int((logits.argmax(-1) == targets)[targets != -100].sum())
    torch.testing.assert_close(found, expected.detach())


def test_half_precision_is_summed_in_single_and_its_gradients_are_rounded_once(monkeypatch):
    monkeypatch.setitem(CHUNK_BYTES, "cpu", SMALL_CHUNKS)
    (hidden, weight, _), targets = tensors(bias=False, dtype=torch.bfloat16)
    master = weight.detach().float().requires_grad_()  # as under autocast
    entropy, _ = linear_cross_entropy(hidden, (master, None), targets)
    assert entropy.dtype == torch.float32
    found = gradients(entropy, (hidden, master))
    assert [grad.dtype for grad in found.values()] == [torch.bfloat16, torch.float32]
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    loss = F.cross_entropy(F.linear(*exact), targets, reduction="sum")
    assert float(entropy.detach()) == pytest.approx(float(loss.detach()), rel=4e-3)
    assert relative_error(found, gradients(loss, exact)) <= 8e-3


def test_frozen_layers_get_no_gradient_and_labels_beyond_the_classes_are_refused():
    (hidden, weight, _), targets = tensors(bias=False)
    entropy, _ = linear_cross_entropy(hidden, (weight.detach(), None), targets)
    entropy.backward()
    assert hidden.grad is not None
    for wrong in (CLASSES, -5):
        targets[1] = wrong
        with pytest.raises(RuntimeError, match="out of bounds"):
            linear_cross_entropy(hidden, (weight, None), targets)


@pytest.mark.slow
@pytest.mark.usefixtures("no_graphs")
def test_chunks_are_compiled_where_their_model_is(monkeypatch):
    monkeypatch.setattr(next_token, "LEAST_BYTES", 0)
    monkeypatch.setitem(MULTIPLE, "cpu", 8)
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 4 * 8 * CLASSES)  # 21 positions: two of 8, one of 5
    objective, ids = NextToken(label_smoothing=0.1), torch.arange(21).view(3, 7) % CLASSES
    found, graphs = [], []
    model = GPT(CLASSES, width=8, num_layers=1, num_heads=2, max_length=7).double()
    for compiled in (False, True):
        if compiled:
            compile_model(model, 1, backend="eager")  # chunks by Inductor
        sums = objective.sums(bind(model), {"input_ids": ids, "labels": ids})
        found.append(gradients(sums.losses["cross_entropy"], [*model.parameters()]))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [0, 2], "one of the block, one of all chunks"
    assert relative_error(found[1], found[0]) <= EXACT[torch.float64]
    assert not counters["graph_break"]


def large() -> nn.Module:
    return GPT(LARGE, width=4, num_layers=1, num_heads=2, max_length=32, tied=True)


class WholeLogits(Objective):  # through a call that knows no output layer
    metric_names = ("accuracy",)

    def weights(self, fields):
        return NextToken().weights(fields)

    def sums(self, model, fields):
        return NextToken().sums(model.run, fields)


def test_steps_of_any_cut_are_those_with_whole_logits():
    how = {"model": large, "global_batch": 5}
    reference, expected = Bench(Fixed(steps=1), objective=WholeLogits(), **how).gradient_and_loss()
    # Pieces of fewer than 16 positions are computed with whole logits.
    assert 4 * 16 * LARGE == LEAST_BYTES
    for cut in (Fixed(steps=1), Budget(max_tokens=30), Fixed(micro=1)):
        found, loss = Bench(cut, **how).gradient_and_loss()
        assert relative_error(found, reference) <= EXACT[torch.float64]
        assert loss == pytest.approx(expected, rel=EXACT[torch.float64])

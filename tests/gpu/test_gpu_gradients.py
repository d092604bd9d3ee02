"""Gradients on a GPU: packed rows in bf16, filler, cuts, and memory that runs out."""

import pytest
import torch
import torch.nn.functional as F

from tests.lib.gpu_support import (
    LONGEST,
    ON_A_GPU,
    bench_of,
    compiled_for,
    documents,
    make_gpt,
    run_out_of_memory,
    soiled_memory,
)
from tests.lib.nightly import nightly
from tests.lib.support import relative_error
from trainer.core.errors import DoesNotFitError
from trainer.data.collate import pack_samples, pad_samples
from trainer.models.bind import bind
from trainer.objectives.linear_cross_entropy import CHUNK_BYTES, linear_cross_entropy
from trainer.objectives.next_token import NextToken
from trainer.plan.cuts import Fixed

FIELDS = ("input_ids", "labels")
LENGTHS = [7, 12, LONGEST, 1, 1, 3]
BF16 = 1e-2
"""What bf16 loses of a gradient, over all parameters, as a 2-norm."""


def gradient(model, micro_batches, autocast=None):
    """The gradient of a sum over micro-batches, and nothing else, in double precision."""
    device = next(model.parameters()).device
    call = bind(model)
    model.zero_grad()
    for fields in micro_batches:
        moved = {name: value.to(device) for name, value in fields.items()}
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            sums = NextToken().sums(call, moved)
        sum(sums.losses.values()).backward()
    return torch.cat([p.grad.double().flatten().cpu() for p in model.parameters()])


@pytest.mark.parametrize("spare", [0, 3, LONGEST, 3 * LONGEST])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_packed_row_has_the_gradient_of_its_documents(device, positions, spare):
    samples = documents(LENGTHS)
    alone = [pad_samples([s], FIELDS, len(s["input_ids"]), str) for s in samples]
    expected = gradient(make_gpt("cpu", positions).double(), alone)
    row = pack_samples(samples, FIELDS, sum(LENGTHS) + spare, str)
    with soiled_memory(device):
        found = gradient(make_gpt(device, positions), [row], torch.bfloat16)
    assert float((found - expected).norm() / expected.norm()) < BF16
    starts = row["cu_seqlens"]
    merged = {**row, "cu_seqlens": torch.cat([starts[:1], starts[2:]])}  # two documents as one
    wrong = gradient(make_gpt(device, positions), [merged], torch.bfloat16)
    assert float((wrong - expected).norm() / expected.norm()) > 5 * BF16


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("device", [ON_A_GPU, nightly("cpu")], indirect=True)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_compiled_chunks_have_the_gradient_of_whole_logits(device, smoothing, monkeypatch):
    monkeypatch.setitem(CHUNK_BYTES, torch.device(device).type, 4 * 256 * 1003)
    targets = torch.randint(1003, (600,), device=device).masked_fill_(
        torch.arange(600, device=device) % 3 == 0, -100
    )
    inputs = [torch.randn(n, 64, device=device, requires_grad=True) for n in (600, 1003)]
    hidden, weight = (x.detach().bfloat16().double().requires_grad_() for x in inputs)
    how = {"label_smoothing": smoothing}
    whole = F.cross_entropy(hidden @ weight.T, targets, reduction="sum", **how)
    expected = torch.autograd.grad(whole, (hidden, weight))
    with compiled_for(device):
        found, _ = linear_cross_entropy(
            inputs[0].bfloat16(), (inputs[1], None), targets, backend="inductor", **how
        )
        gradients = torch.autograd.grad(found, inputs)
    assert float(found.detach()) == pytest.approx(float(whole.detach()), rel=1e-3)
    for one, exact in zip(gradients, expected, strict=True):
        assert float((one - exact).norm() / exact.norm()) < BF16


def test_cuts_make_no_difference(device):
    whole, _ = bench_of(device, Fixed()).gradient_and_loss()
    for steps in (4, 16):
        found, _ = bench_of(device, Fixed(steps=steps)).gradient_and_loss()
        assert relative_error(flat(found), flat(whole)) < 1e-6


def flat(found):
    return {"all": torch.cat([g.flatten() for g in found.values()])}


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_step_that_ran_out_of_memory_is_the_step_of_a_smaller_cut(device, phase):
    failing, smaller = (bench_of(device, Fixed(micro=micro)) for micro in (8, 4))
    failed = []

    def fail(*_):
        if not failed:
            failed.append(True)
            run_out_of_memory(device)

    if phase == "forward":
        failing.module.register_forward_hook(fail)
    else:
        next(failing.module.parameters()).register_hook(fail)
    assert failing.step().replays == 1
    smaller.step()
    assert relative_error(failing.parameters(), smaller.parameters()) < 1e-6


def test_an_update_that_runs_out_of_memory_ends_the_run(device):
    bench = bench_of(device, Fixed())
    bench.context.optimizer.register_step_pre_hook(lambda *_: run_out_of_memory(device))
    with pytest.raises(DoesNotFitError, match="update"):
        bench.step()
    assert float(torch.ones(8, device=device).sum()) == 8

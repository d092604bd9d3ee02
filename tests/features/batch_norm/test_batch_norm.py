"""What layers normalise over, bit for bit, and how their running statistics move once a step."""

import copy

import pytest
import torch
from torch import nn

from trainer.core.coupling import Coupling
from trainer.core.world import World
from trainer.features.batch_norm.layers import BatchNormLayer, RunningStatistics, use_mode
from trainer.features.batch_norm.modes import Frozen, Ghost, Micro, Pooled

KINDS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
SHAPES = {2: (), 3: (7,), 4: (3, 5), 5: (2, 3, 2)}


def layer(dims=4, dtype=torch.float32, **how):
    made = KINDS[dims](6, **how).to(dtype)
    with torch.no_grad():
        made.weight.uniform_(0.5, 2)
        made.bias.normal_()
    return nn.Sequential(made)


def using(model, mode):
    model = copy.deepcopy(model)
    use_mode(model, mode)
    return model


def drawn(count, dims=4, dtype=torch.float32):
    """Samples whose mean and spread grow with their number, as where classes are sorted."""
    grows = torch.arange(1.0, count + 1).view(count, *[1] * (dims - 1))
    return (torch.randn(count, 6, *SHAPES[dims]) * grows + 3 * grows).to(dtype)


@pytest.mark.parametrize("dims", KINDS)
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_a_group_has_the_bits_of_pytorchs_own_whatever_shares_its_micro_batch(dims, form):
    torch.manual_seed(0)
    plain, values = layer(dims), drawn(20, dims)
    values = values.to(memory_format=form) if dims == 4 else values
    outputs, gradients, moved = [], [], []
    for cut in ([20], [8, 12], [8, 8, 4], [12, 8]):  # in groups of 4
        model, given = using(plain, Ghost(group=4)), values.clone().requires_grad_()
        parts = [model(part) for part in given.split(cut)]
        sum((part.sin() ** 2).sum() for part in parts).backward()
        RunningStatistics(model, World()).after_update(1)
        outputs.append(torch.cat(parts))
        gradients.append(given.grad)
        moved.append([*model.buffers()])
    own = [plain(values[i : i + 4]) for i in range(0, 20, 4)]
    assert all(torch.equal(each, torch.cat(own)) for each in outputs)
    assert all(torch.equal(each, gradients[0]) for each in gradients)
    assert all(torch.equal(a, b) for each in moved for a, b in zip(each, moved[0], strict=True))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_statistics_of_a_step_are_those_of_its_whole_batch_and_by_micro_batches_are_not(
    order, momentum
):
    torch.manual_seed(0)
    plain = layer(dtype=torch.float64, momentum=momentum)
    pooled, micro, steps = using(plain, Pooled()), using(plain, Micro()), RunningStatistics
    follows = steps(pooled, World())
    for step in range(1, 4):
        values = drawn(24, dtype=torch.float64)
        values = values if order == "sorted" else values[torch.randperm(24)]
        plain(values)
        for part in values.split([5, 1, 8, 10]):
            pooled(part)
            micro(part)
        follows.after_update(step)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        whole, found, off = (getattr(m[0], name) for m in (plain, pooled, micro))
        assert torch.allclose(found, whole, rtol=1e-10, atol=0), name
        assert not torch.allclose(off, whole, rtol=1e-2, atol=0), name


def test_rows_of_a_sample_stay_together_where_tokens_are_flattened_into_rows():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x):
            return self.norm(x.transpose(1, 2).flatten(0, 1)).view(len(x), -1, 6)

    values = drawn(8, dims=3)
    flat, other = using(Flat(), Ghost(group=4)), Flat()
    assert torch.equal(flat(values), torch.cat([other(values[:4]), other(values[4:])]))


def test_what_is_saved_and_computed_in_evaluation_is_pytorchs_own():
    torch.manual_seed(0)
    plain = layer()
    plain(drawn(8))
    found = using(plain, Ghost(group=4))
    assert [*found.state_dict()] == [*plain.state_dict()]
    assert isinstance(found[0], nn.BatchNorm2d)
    assert repr(found) == repr(plain)
    values = drawn(5)
    assert torch.equal(found.eval()(values), plain.eval()(values))
    copied = copy.deepcopy(found).double().train()
    copied(drawn(8).double())
    assert copied[0].step_sums is not None
    assert found[0].step_sums is None


def test_frozen_statistics_stay_and_weights_are_trained():
    plain = layer()
    plain(drawn(8))
    found = using(plain, Frozen())
    before = [buffer.clone() for buffer in found.buffers()]
    values = drawn(8)
    output = found(values)
    assert torch.equal(output, plain.eval()(values))
    output.sum().backward()
    assert found[0].weight.grad is not None
    RunningStatistics(found, World()).after_update(1)
    assert all(torch.equal(a, b) for a, b in zip(found.buffers(), before, strict=True))


def test_a_layer_of_ones_own_keeps_its_forward_and_one_in_evaluation_is_left_alone():
    class Turned(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x.transpose(1, 2)).transpose(1, 2)

    model = nn.Sequential(Turned(6), nn.BatchNorm1d(5).eval())
    use_mode(model, Ghost(group=2))
    assert isinstance(model[0], BatchNormLayer)
    assert type(model[1]) is nn.BatchNorm1d
    why = model[0].coupling.why
    coupling = Coupling("group", 2, why=why, key="batchnorm", remedy="batchnorm.group=N")
    assert model[0].coupling == coupling
    values = torch.randn(4, 5, 6)
    own = Turned(6)
    assert torch.equal(model[0](values), torch.cat([own(values[:2]), own(values[2:])]))

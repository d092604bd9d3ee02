"""What layers normalise over, bit for bit, and how their running statistics move once a step."""

import copy

import pytest
import torch
from torch import nn

from trainer.core.world import World
from trainer.features.batch_norm.layers import RunningStatistics, use_mode
from trainer.features.batch_norm.modes import Frozen, Ghost, Micro, Pooled


def layer(**how):
    made = nn.BatchNorm2d(6, **how)
    nn.init.uniform_(made.weight, 0.5, 2)
    nn.init.normal_(made.bias)
    return nn.Sequential(made)


def using(model, mode):
    model = copy.deepcopy(model)
    use_mode(model, mode)
    return model


def drawn(count, *shape):
    """Samples whose mean and spread grow with their number, as where classes are sorted."""
    values = torch.randn(count, 6, *shape or (3, 5))
    grows = torch.arange(1.0, count + 1).view(count, *[1] * (values.dim() - 1))
    return values * grows + 3 * grows


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_a_group_has_the_bits_of_pytorchs_own_whatever_shares_its_micro_batch(form):
    torch.manual_seed(0)
    plain, values = layer(), drawn(20).to(memory_format=form)
    outputs, gradients, moved = [], [], []
    for cut in ([20], [8, 12], [8, 8, 4]):  # in groups of 4
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
def test_statistics_of_a_step_are_those_of_its_whole_batch_and_by_micro_batches_are_not(momentum):
    torch.manual_seed(0)
    plain = layer(momentum=momentum).double()
    pooled, micro = using(plain, Pooled()), using(plain, Micro())
    follows = RunningStatistics(pooled, World())
    for step in range(1, 4):
        values = drawn(24).double()
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

    values = drawn(8, 7)
    flat, other = using(Flat(), Ghost(group=4)), Flat()
    assert torch.equal(flat(values), torch.cat([other(values[:4]), other(values[4:])]))


def test_evaluations_are_pytorchs_own_and_frozen_statistics_stay_while_weights_are_trained():
    plain = layer()
    plain(drawn(8))
    ghost, frozen = using(plain, Ghost(group=4)), using(plain, Frozen())
    assert [*ghost.state_dict()] == [*plain.state_dict()]
    values, before = drawn(5), [buffer.clone() for buffer in frozen.buffers()]
    expected = plain.eval()(values)
    assert torch.equal(ghost.eval()(values), expected)
    output = frozen(values)
    assert torch.equal(output, expected)
    output.sum().backward()
    assert frozen[0].weight.grad is not None
    RunningStatistics(frozen, World()).after_update(1)
    assert all(torch.equal(a, b) for a, b in zip(frozen.buffers(), before, strict=True))


def test_a_layer_of_ones_own_keeps_its_forward_and_one_in_evaluation_is_left_alone():
    class Turned(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x.transpose(1, 2)).transpose(1, 2)

    model, own = nn.Sequential(Turned(6), nn.BatchNorm1d(5).eval()), Turned(6)
    use_mode(model, Ghost(group=2))
    assert type(model[1]) is nn.BatchNorm1d
    values = torch.randn(4, 5, 6)
    assert torch.equal(model[0](values), torch.cat([own(values[:2]), own(values[2:])]))

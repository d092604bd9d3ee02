"""Muon and AdamW are PyTorch's own, over the right parameters, and resume as one."""

import copy

import pytest
import torch
from torch import nn

from trainer.models.gpt import GPT
from trainer.models.output_layer import note_output_matrices
from trainer.optim.muon import Muon

TINY = {"vocab_size": 11, "width": 12, "num_layers": 2, "num_heads": 2, "max_length": 8}


def tiny(**options) -> GPT:
    torch.manual_seed(0)
    return GPT(**TINY, **options).double()


def matrices(model: nn.Module) -> set[str]:
    groups = Muon(lr=0.1).build(model).param_groups
    ids = {id(p) for group in groups if group["use_muon"] for p in group["params"]}
    return {name for name, p in model.named_parameters() if id(p) in ids}


@pytest.mark.parametrize("tied", [False, True])
def test_muon_has_the_hidden_matrices_and_adamw_the_rest(tied):
    model = tiny(tied=tied, positions="learned", bias=True)
    inner = {n for n, p in model.named_parameters() if n.startswith("blocks") and p.ndim == 2}
    assert len(inner) >= 8
    assert matrices(model) == inner


class Heads(nn.Module):
    """A user's own, which registers its heads first and names no output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.policy = nn.Linear(6, 1), nn.Linear(6, 3, bias=False)
        self.table, self.inner = nn.Embedding(5, 6), nn.Linear(6, 6)
        self.gate = nn.Linear(6, 2)

    def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
        x = self.table(ids).mean(1)
        gate = self.gate(x).softmax(-1)  # which the loss sees too, as that of a router
        x = x + gate[:, :1] * self.inner(x).relu()
        return [self.value(x), self.policy(x)[:, [1, 2]].logsumexp(-1), gate.square()]


def test_the_output_layer_is_known_by_its_use_and_not_by_its_place():
    model = Heads()
    losses = [each.mean() for each in model(torch.zeros(4, 3, dtype=torch.long))]
    for found in (losses, [sum(losses)]):
        note_output_matrices(model, found)
        assert matrices(model) == {"inner.weight", "gate.weight"}


def test_a_step_is_that_of_both_optimizers_of_pytorch_also_from_a_saved_state():
    ours, theirs = tiny(), tiny()
    spec = Muon(lr=0.01, weight_decay=0.1, betas=[0.9, 0.95])
    mine, hidden = spec.build(ours), matrices(theirs)
    groups = {True: [], False: []}
    for name, p in theirs.named_parameters():
        decay = 0.0 if p.ndim < 2 else 0.1
        groups[name in hidden].append({"params": [p], "weight_decay": decay})
    rule = {"lr": 0.01, "adjust_lr_fn": "match_rms_adamw"}
    others = [
        torch.optim.Muon(groups[True], **rule),
        torch.optim.AdamW(groups[False], lr=0.01, betas=(0.9, 0.95), fused=True),
    ]
    ids = torch.tensor([[1, 2, 3, 4]])
    for step in range(5):
        for model, optimizers in ((ours, [mine]), (theirs, others)):
            model(ids).square().sum().backward()
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = 0.01 / (step + 1)  # as a schedule does
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        if step == 2:
            state = copy.deepcopy(mine.state_dict())
            mine = spec.build(ours)
            mine.load_state_dict(state)
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(left, right)
    moments = {key for state in mine.state.values() for key in state}
    assert moments == {"momentum_buffer", "step", "exp_avg", "exp_avg_sq"}

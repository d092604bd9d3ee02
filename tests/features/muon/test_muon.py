"""Muon and AdamW are PyTorch's own, over the right parameters, and resume as one."""

import copy

import pytest
import torch
from torch import nn

from tests.lib.support import tiny_gpt
from trainer.core.errors import ConfigError
from trainer.features.muon.muon import Muon
from trainer.models.fused import FusedMatrix
from trainer.models.output_layer import note_output_matrices


def matrices(model: nn.Module) -> set[str]:
    groups = Muon(lr=0.1).build(model).param_groups
    ids = {id(p) for group in groups if group["use_muon"] for p in group["params"]}
    return {name for name, p in model.named_parameters() if id(p) in ids}


@pytest.mark.parametrize("tied", [False, True])
def test_muon_has_the_hidden_matrices_and_adamw_the_rest(tied):
    model = tiny_gpt(tied=tied, positions="learned", bias=True)
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
        self.places, self.words = nn.Parameter(torch.ones(9, 6)), nn.Parameter(torch.ones(5, 6))

    def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
        x = self.table(ids) + self.places[: ids.shape[1]] + nn.functional.embedding(ids, self.words)
        x = x.mean(1)
        gate = self.gate(x).softmax(-1)  # which the loss sees too, as that of a router
        x = x + gate[:, :1] * self.inner(x).relu()
        return [self.value(x), self.policy(x)[:, [1, 2]].logsumexp(-1), gate.square()]


def test_a_matrix_is_known_by_its_use_and_not_by_its_place():
    model = Heads()
    losses = [each.mean() for each in model(torch.zeros(4, 3, dtype=torch.long))]
    for found in (losses, [sum(losses)]):
        note_output_matrices(model, found)
        assert matrices(model) == {"inner.weight", "gate.weight"}


def test_a_step_is_that_of_both_optimizers_of_pytorch_also_from_a_saved_state():
    ours, theirs = tiny_gpt().float(), tiny_gpt().float()
    for part in ours.modules():
        part.fused_matrices = {}  # which PyTorch's does not know
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
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)
    moments = {key for state in mine.state.values() for key in state}
    assert moments == {"momentum_buffer", "step", "exp_avg", "exp_avg_sq"}


class Split(nn.Module):
    """Several layers in one weight, which it declares, or each on its own."""

    def __init__(self, *, is_fused: bool, outputs=(6, 2, 2), cycles: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        rows, self.cycles, self.outputs = cycles * sum(outputs), cycles, outputs
        whole = torch.randn(rows, 6, dtype=torch.float64)
        if is_fused:
            self.weight, self.fused_matrices = nn.Parameter(whole), {"weight": outputs}
        else:
            parts = whole.view(cycles, -1, 6).split(outputs, 1)
            self.parts = nn.ParameterList(part.reshape(-1, 6) for part in parts)

    @property
    def whole(self) -> torch.Tensor:
        if hasattr(self, "weight"):
            return self.weight
        parts = [part.view(self.cycles, -1, 6) for part in self.parts]
        return torch.cat(parts, 1).flatten(0, 1)


@pytest.mark.parametrize("cycles", [1, 3], ids=["blocks", "heads"])
@pytest.mark.parametrize("rule", ["match_rms_adamw", "original"])
def test_fused_matrices_move_as_several_do(rule, cycles):
    models = [Split(is_fused=is_fused, cycles=cycles) for is_fused in (True, False)]
    undeclared = Split(is_fused=True, cycles=cycles)
    undeclared.fused_matrices = {}
    for model in (*models, undeclared):
        optimizer = Muon(lr=0.1, adjust_lr_fn=rule).build(model)
        for step in range(3):
            x = torch.arange(6.0).double().add(step).cos()
            optimizer.zero_grad()
            (model.whole @ x).cos().sum().backward()
            optimizer.step()
    fused, several = (model.whole for model in models)
    torch.testing.assert_close(fused, several, rtol=1e-12, atol=1e-12)
    assert (undeclared.weight - several).abs().max() > 1e-3, "a control"


def test_columns_are_outputs_of_a_layer_that_is_transposed():
    whole = torch.randn(6, 12)
    upright, lying = FusedMatrix((6, 4, 2)), FusedMatrix((6, 4, 2), is_transposed=True)
    parts = lying.split(whole)
    assert [part.shape for part in parts] == [(6, 6), (4, 6), (2, 6)]
    assert all(map(torch.equal, parts, upright.split(whole.T)))
    found = torch.empty_like(whole)
    lying.write(parts, found)
    assert found.equal(whole)


def test_a_declaration_that_does_not_fit_is_refused_in_a_line():
    model = Split(is_fused=True)
    for outputs, name in (((3, 3), "weight"), ((10,), "wieght")):
        model.fused_matrices = {name: outputs}
        with pytest.raises(ConfigError, match=f"model: {name} is no matrix whose fused_matrices"):
            Muon(lr=0.1).build(model)

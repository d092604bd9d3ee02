"""Give hidden matrices to Muon and all other parameters to AdamW, as one optimizer.

Muon orthogonalises the momentum of a matrix (`orthogonal.py`). That means nothing for vectors,
tables that are looked up or added, and the layer that gives the output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Literal, final

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.config.components import Betas, Count, NonNegative, Share
from trainer.core.errors import ConfigError
from trainer.core.format import plural
from trainer.core.rows import Row, row
from trainer.features.muon.orthogonal import FUSED, HiddenMatrices
from trainer.models.facts import facts_of
from trainer.models.frozen import own_parameters
from trainer.models.fused import FusedMatrix, fused_matrices
from trainer.models.output_layer import output_matrices, unmultiplied
from trainer.optim.optimizers import AdamW, OptimizerSpec, TrainingJob, all_fuse, without_compiler

SplitGroups = list[dict[str, Any]]
_USE_MUON = "use_muon"
"""Setting of a parameter group: which of the two steps it."""


@final
@dataclass(frozen=True, kw_only=True)
class Muon(OptimizerSpec):
    """Muon for hidden matrices, AdamW for the rest; `lr` and `weight_decay` are those of both."""

    momentum: Share = 0.95  # of Muon
    nesterov: bool = True  # looks ahead by the momentum
    ns_steps: Count = 5  # iterations that orthogonalise, each three products of matrices
    # How the update of a matrix follows its shape: to the size of AdamW's (Liu et al. 2025,
    # 2502.16982), so that one learning rate suits both, or by the root of rows / columns
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    betas: Betas = (0.9, 0.95)  # of AdamW
    eps: NonNegative = 1e-8  # of AdamW

    asks_for_output: ClassVar[bool] = True
    by_job: ClassVar[Mapping[TrainingJob, Mapping[str, Any]]] = AdamW.by_job
    decay_rates: ClassVar[tuple[str, ...]] = ("betas", "momentum")

    def split(self, model: nn.Module, groups: SplitGroups) -> SplitGroups:
        """See the base class."""
        hidden, fused, parts = _hidden_matrices(model), _fused_in(model), SplitGroups()
        for parameter in model.parameters():
            if id(parameter) in fused:
                setattr(parameter, FUSED, fused[id(parameter)])
        for group in groups:
            # Both parts keep the group's rate and decay.
            for is_hidden, word in ((True, "matrices"), (False, "others")):
                members = [each for each in group["params"] if (id(each) in hidden) == is_hidden]
                own = {"name": f"{group['name']} {word}", "params": members, _USE_MUON: is_hidden}
                if members:
                    parts.append(group | own)
        return parts

    def construct(self, params: SplitGroups) -> Optimizer:
        """See the base class."""
        matrices = [group for group in params if group[_USE_MUON]]
        others = [group for group in params if not group[_USE_MUON]]
        if not matrices:
            raise ConfigError("optimizer=muon: no hidden matrix is trained; type optimizer=adamw")
        names = ("momentum", "nesterov", "ns_steps", "adjust_lr_fn")
        own = {name: getattr(self, name) for name in names}
        parts = {True: without_compiler(HiddenMatrices)(matrices, own)}
        if others:
            parts[False] = without_compiler(torch.optim.AdamW)(
                others, betas=tuple(self.betas), eps=self.eps, fused=all_fuse(params)
            )
        return without_compiler(MuonWithAdamW)(parts)

    def rows(self, model: nn.Module) -> Sequence[Row]:
        """See the base class."""
        hidden, fused = _hidden_matrices(model), _fused_in(model)
        trained = {n: each for n, each in model.named_parameters() if each.requires_grad}
        names = [name for name, each in trained.items() if id(each) in hidden]
        others = [name for name in trained if name not in names]
        count, shown = sum(trained[name].numel() for name in names), dict[str, None]()
        for name in names:
            parameter = trained[name]
            # Weights of the same place in all blocks are listed once, as `blocks.*.mlp.up.weight`.
            text = re.sub(r"\b\d+\b", "*", name)
            if id(parameter) in fused and (parts := fused[id(parameter)].num_matrices) > 1:
                text += f" as {parts} matrices"
            shown[text] = None
        text = f"{plural(len(names), 'hidden weight')} of {count:,} parameters"
        text += f"; adamw for {plural(len(others), 'other')}"
        return [
            row("muon", text, group="asked", muon=names, muon_others=others),
            row("hidden", ", ".join(shown)),
        ]


@final
class MuonWithAdamW(Optimizer):
    """Two optimizers that share one state and one list of groups, so that both are saved as one."""

    def __init__(self, parts: Mapping[bool, Optimizer]) -> None:
        self._parts = parts  # by the `use_muon` of their groups
        super().__init__([*chain(*(part.param_groups for part in parts.values()))], {})

    def note_waits(self, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        """Enter something where ranks wait for each other, whose matrices are in shards."""
        for part in self._parts.values():
            part.waiting = waiting  # type: ignore[attr-defined] # nobody else reads it

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step of both."""
        for part in self._parts.values():
            # Loading a state replaces both the state and the groups.
            part.state, part.param_groups = self.state, []
        for group in self.param_groups:
            self._parts[group[_USE_MUON]].param_groups.append(group)
        for part in self._parts.values():
            part.step()


def _fused_in(model: nn.Module) -> dict[int, FusedMatrix]:
    return fused_matrices(model, facts_of(model).fused())


def _hidden_matrices(model: nn.Module) -> set[int]:
    """Give the ids of matrices that are neither looked up, nor added, nor give the output."""
    no_factors = [*output_matrices(model), *unmultiplied(model)]
    for part in model.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            no_factors += part.parameters()
    own = dict(own_parameters(model)).values()
    matrices = {id(p) for p in own if p.ndim == 2 and not p.is_complex()}  # noqa: PLR2004
    return matrices - set(map(id, no_factors))

"""Give hidden matrices to Muon and all other parameters to AdamW, as one optimizer.

Muon orthogonalises the momentum of a matrix (kellerjordan.github.io/posts/muon). That means
nothing for vectors, tables of embeddings and the layer that gives the output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
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
from trainer.models.output_layer import output_matrices
from trainer.optim.optimizers import (
    AdamW,
    OptimizerSpec,
    TrainingJob,
    all_fuse,
    in_shards,
    without_compiler,
)

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
        hidden, parts = _hidden_matrices(model), SplitGroups()
        for group in groups:
            halves: dict[bool, list[nn.Parameter]] = {True: [], False: []}
            for parameter in group["params"]:
                halves[id(parameter) in hidden].append(parameter)
            for is_hidden, members in halves.items():
                # Both keep the group's rate and decay.
                if members:
                    name = f"{group['name']} {'matrices' if is_hidden else 'others'}"
                    own = {"name": name, "params": members, _USE_MUON: is_hidden}
                    parts.append(group | own)
        return parts

    def construct(self, params: SplitGroups) -> Optimizer:
        """See the base class."""
        matrices, others = SplitGroups(), SplitGroups()
        for group in params:
            if group[_USE_MUON]:
                matrices.append(group)
            else:
                others.append(group)
        if not matrices:
            raise ConfigError("optimizer=muon: no hidden matrix is trained; type optimizer=adamw")
        if in_shards(matrices):
            text = "needs whole matrices, and parallel=fsdp and hsdp hold shards of them"
            raise ConfigError(f"optimizer=muon: {text}; type parallel=ddp or optimizer=adamw")
        names = ("momentum", "nesterov", "ns_steps", "adjust_lr_fn")
        own = {name: getattr(self, name) for name in names}
        parts = {True: without_compiler(torch.optim.Muon)(matrices, **own)}
        if others:
            parts[False] = without_compiler(torch.optim.AdamW)(
                others, betas=tuple(self.betas), eps=self.eps, fused=all_fuse(params)
            )
        return without_compiler(MuonWithAdamW)(parts)

    def rows(self, model: nn.Module) -> Sequence[Row]:
        """See the base class."""
        hidden = _hidden_matrices(model)
        names = list[str]()
        for name, parameter in model.named_parameters():
            if id(parameter) in hidden:
                names.append(name)
        # Weights of the same place in all blocks are listed once, as `blocks.*.mlp.up.weight`.
        of_all_blocks = dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names)
        count = plural(len(names), "hidden weight")
        text = f"{count} ({', '.join(of_all_blocks)}); adamw for all else"
        return [row("muon", text, muon=names)]


@final
class MuonWithAdamW(Optimizer):
    """Two optimizers that share one state and one list of groups, so that both are saved as one."""

    def __init__(self, parts: Mapping[bool, Optimizer]) -> None:
        self._parts = parts  # by the `use_muon` of their groups
        super().__init__([*chain(*(part.param_groups for part in parts.values()))], {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step of both."""
        for part in self._parts.values():
            # Loading a state replaces both the state and the groups.
            part.state, part.param_groups = self.state, []
        for group in self.param_groups:
            self._parts[group[_USE_MUON]].param_groups.append(group)
        for part in self._parts.values():
            part.step()


def _hidden_matrices(model: nn.Module) -> set[int]:
    """Give the ids of matrices that are neither looked up nor give the output."""
    found = set[int]()
    for parameter in model.parameters():
        if parameter.ndim == 2:  # noqa: PLR2004 - a matrix
            found.add(id(parameter))
    for part in model.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            found.difference_update(map(id, part.parameters()))
    return found.difference(map(id, output_matrices(model)))

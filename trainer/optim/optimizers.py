"""Build optimizers and their parameter groups.

An `OptimizerSpec` holds the keys of `conf/optimizer/*.yaml` and builds the optimizer once the
model stands on its device. `groups` gives parameters by name a learning rate or decay of their
own, or freezes them.
"""

from __future__ import annotations

import difflib
import inspect
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self, TypeAlias, final

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.config.components import Betas, EmaDecay, NonNegative
from trainer.core import gpu
from trainer.core.errors import ConfigError
from trainer.core.rows import Described, Row
from trainer.models.frozen import own_parameters
from trainer.models.norms import NORMS
from trainer.optim.bias_correction import change_betas
from trainer.optim.depth import depth_scales
from trainer.optim.masters import MasterWeights, widen_gradients

OptimizerGroups = Mapping[str, Mapping[str, Any]]
"""Settings by name pattern, in order; of several patterns that match, the first counts."""

TrainingJob: TypeAlias = Literal["scratch", "pretrained", "new head", "adapter"]
"""What is done with a model: its weights are drawn, or loaded, or loaded but for its head, or few
new ones are trained beside them."""

_OF_WHOLE_WEIGHTS = (torch.optim.Adafactor, torch.optim.Rprop)
# Attributes of a tensor in which PyTorch keeps what is registered on its gradient
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_LOADED: Mapping[str, Any] = {"betas": (0.9, 0.999), "weight_decay": 0.01}


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec(Described, ABC):
    """Everything about an optimizer but the parameters."""

    lr: NonNegative  # learning rate at factor 1 of the schedule
    # Of weights; not of norms and biases, unless a group asks for it
    weight_decay: NonNegative = 0.0
    # Settings by name pattern: `lr`, `weight_decay`, `frozen`
    groups: OptimizerGroups = field(default_factory=dict)
    # Share of the rate that each block has of that of the block behind it; None: all have the same
    layer_decay: EmaDecay | None = None

    # What a job gives the arguments that the config leaves out or null
    by_job: ClassVar[Mapping[TrainingJob, Mapping[str, Any]]] = {}
    # Whether it treats the matrices of the output layer in another way than hidden ones
    asks_for_output: ClassVar[bool] = False
    # Arguments that say what a running mean keeps of itself from step to step
    decay_rates: ClassVar[tuple[str, ...]] = ()

    def for_batch(self, ratio: float, lr_factor: float) -> Self:
        """Keep half-lives in samples where a global batch is `ratio` times the one of before.

        A running mean keeps `beta ** ratio` of itself (Marek et al. 2025, 2507.07101). Weights
        lose `lr * weight_decay` of themselves, so that their decay makes up for what the learning
        rate, which is `lr_factor` times that of before, does not follow.
        """
        rates = {name: _power(getattr(self, name), ratio) for name in self.decay_rates}
        groups = {}
        for pattern, own in self.groups.items():
            groups[pattern] = dict(own)
            if "weight_decay" in own:
                groups[pattern]["weight_decay"] = own["weight_decay"] * ratio / lr_factor
        weight_decay = self.weight_decay * ratio / lr_factor
        return replace(self, weight_decay=weight_decay, groups=groups, **rates)

    def prepare_parameters(self, model: nn.Module, *, widens: bool) -> None:
        """Freeze what groups say, and widen gradients, before it is sharded. May be repeated."""
        for pattern, members in match_groups(model, self.groups).items():
            if self.groups[pattern].get("frozen"):
                for parameter in members:
                    parameter.requires_grad_(False)
        if widens:
            widen_gradients(model)

    def build(self, model: nn.Module) -> Optimizer:
        """Build the optimizer over the parameters of a model that stands on its device.

        Its groups have a `name` and an `lr`. It steps fp32 copies of weights whose gradients are
        wider than they are.
        """
        before, masters = hooked(model), MasterWeights(model)
        kind: type = getattr(self, "kind", type(self))
        with masters.in_place(model):
            scales = {} if self.layer_decay is None else depth_scales(model, self.layer_decay)
            groups = param_groups(model, self.lr, self.weight_decay, self.groups, scales)
            try:
                optimizer = self.construct(self.split(model, groups))
            except (TypeError, ValueError) as error:
                raise ConfigError(f"optimizer: {kind.__name__} refuses: {error}") from error
        masters.follow(optimizer)
        if new := set(hooked(model)) - set(before):
            raise ConfigError(
                f"optimizer._target_={kind.__module__}.{kind.__qualname__}: steps within backward "
                f"(a hook on {min(new)}), so every micro-batch would be a step of its own; use one "
                "that waits for step()"
            )
        return optimizer

    def split(self, model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Split groups by what their parameters are in the model, where an optimizer asks."""
        return groups

    def rows(self, model: nn.Module) -> Sequence[Row]:
        """Describe what it does with the parameters of a model, where that is to be seen."""
        return ()

    @abstractmethod
    def construct(self, params: list[dict[str, Any]]) -> Optimizer:
        """Construct the optimizer over finished groups."""


@final
@dataclass(frozen=True, kw_only=True)
class AdamW(OptimizerSpec):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, 1711.05101)."""

    betas: Betas = (0.9, 0.95)  # decay of the two moments
    eps: NonNegative = 1e-8  # added to the root of the second

    # As Hugging Face's Trainer, and peft for adapters, have them: a rate for weights that are drawn
    # ruins those that are loaded.
    by_job: ClassVar[Mapping[TrainingJob, Mapping[str, Any]]] = {
        "scratch": {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1},
        "pretrained": {"lr": 2e-5, **_LOADED},
        "new head": {"lr": 5e-5, **_LOADED},
        "adapter": {"lr": 2e-4, **_LOADED},
    }
    decay_rates: ClassVar[tuple[str, ...]] = ("betas",)

    def construct(self, params: list[dict[str, Any]]) -> Optimizer:
        """See the base class."""
        return without_compiler(torch.optim.AdamW)(
            params, betas=tuple(self.betas), eps=self.eps, fused=all_fuse(params)
        )


@final
@dataclass(frozen=True, kw_only=True)
class SGD(OptimizerSpec):
    """Stochastic gradient descent with momentum."""

    momentum: NonNegative = 0.9  # share of the last update that is kept
    nesterov: bool = False  # looks ahead by the momentum

    def __post_init__(self) -> None:
        """Refuse to look ahead by no momentum."""
        if self.nesterov and not self.momentum:
            text = "needs a momentum; type optimizer.momentum=0.9"
            raise ConfigError(f"optimizer.nesterov=true: {text}")

    def construct(self, params: list[dict[str, Any]]) -> Optimizer:
        """See the base class."""
        # PyTorch's fused SGD, unlike its AdamW, does not know sharded parameters.
        # Nor momenta that begin at different steps, as of parameters without a gradient in some.
        fused = all_fuse(params) and not in_shards(params) and not self.momentum
        return without_compiler(torch.optim.SGD)(
            params, momentum=self.momentum, nesterov=self.nesterov, fused=fused
        )


@final
@dataclass(frozen=True, kw_only=True)
class OwnOptimizer(OptimizerSpec):
    """Any subclass of `torch.optim.Optimizer`, a user's too, called with parameter groups."""

    kind: type[Optimizer]  # the class
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments of its constructor

    @classmethod
    def of(cls, kind: type[Optimizer], params: Mapping[str, Any]) -> OwnOptimizer:
        """Split the keys under `optimizer` into the spec's own and the constructor's.

        A learning rate or weight decay that is not given is the constructor's default.
        """
        options = dict(params)
        shared: dict[str, Any] = {"groups": options.pop("groups", None) or {}}
        shared["layer_decay"] = options.pop("layer_decay", None)
        defaults = dict[str, Any]()
        for name, parameter in inspect.signature(kind).parameters.items():
            if isinstance(parameter.default, int | float):
                defaults[name] = parameter.default
        # PyTorch's own classes have one; a class of one's own may leave it to the caller.
        lr = options.pop("lr", defaults.get("lr"))
        if lr is None:
            raise ConfigError(f"optimizer.lr: {kind.__name__} has no default; type optimizer.lr=")
        weight_decay = options.pop("weight_decay", defaults.get("weight_decay", 0.0))
        return cls(kind=kind, lr=lr, weight_decay=weight_decay, options=options, **shared)

    def for_batch(self, ratio: float, lr_factor: float) -> Self:
        """See the base class; of other arguments only `betas` are known for what they are."""
        spec = super().for_batch(ratio, lr_factor)
        betas = inspect.signature(self.kind).parameters.get("betas")
        if betas is None:
            return spec
        known = _power(self.options.get("betas", betas.default), ratio)
        return replace(spec, options={**self.options, "betas": known})

    def construct(self, params: list[dict[str, Any]]) -> Optimizer:
        """See the base class."""
        if issubclass(self.kind, _OF_WHOLE_WEIGHTS) and in_shards(params):
            text = "needs whole weights, and fsdp and hsdp hold shards of them"
            remedy = "type parallel=ddp or optimizer=adamw"
            raise ConfigError(f"optimizer: {self.kind.__name__} {text}; {remedy}")
        named = inspect.signature(self.kind).parameters
        if "weight_decay" not in named and any("weight_decay" in g for g in self.groups.values()):
            text = f"{self.kind.__name__} has no weight_decay; leave it out"
            raise ConfigError(f"optimizer.groups: {text}")
        options = {"lr": self.lr, "weight_decay": self.weight_decay}
        # Every group has its own; a constructor that does not name one of them would refuse it.
        for name in options.keys() - named.keys():
            del options[name]
        return self.kind(params, **options | dict(self.options))


@final
@dataclass(frozen=True, kw_only=True)
class HalfLives:
    """Sets what of an optimizer follows a global batch that changes, as `for_batch` has it."""

    spec: OptimizerSpec  # as it is at the reference batch
    optimizer: Optimizer  # that was built by it
    reference_batch: int
    decays: tuple[float, ...]  # weight decay of each of its groups, there

    def __call__(self, size: int, lr_factor: float) -> None:
        """Set the groups for a step of so many samples, or tokens."""
        ratio = size / self.reference_batch
        # A class of one's own has them among its options.
        known = vars(self.spec.for_batch(ratio, lr_factor))
        known = {**known, **known.get("options", {})}
        for group, decay in zip(self.optimizer.param_groups, self.decays, strict=True):
            if "betas" in known.keys() & group.keys():
                change_betas(self.optimizer, group, known["betas"])
            for name in self.spec.decay_rates & known.keys() & group.keys():
                group[name] = known[name]
            group["weight_decay"] = decay * ratio / lr_factor


def _power(rates: Any, exponent: float) -> Any:  # noqa: ANN401 - a number, or several
    """Raise a rate, or each of several, to a power."""
    if isinstance(rates, int | float):
        return rates**exponent
    return tuple(rate**exponent for rate in rates)


def param_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float,
    groups: OptimizerGroups,
    scales: Mapping[int, float] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Sort the trainable parameters of a model into groups, each parameter once.

    Not decayed are vectors and scalars, biases, and everything in a normalisation layer. Embeddings
    are decayed, as in GPT-2. A group that names a `weight_decay` decays all that its pattern
    matches: `{"*": {"weight_decay": 0.1}}` decays everything. Tied parameters go by all of their
    names. Of several patterns that match, the first counts. `scales` are factors on rates that no
    group names, by the id of a parameter. Frozen parameters are in no group.
    """
    exempt, by_pattern = _not_decayed(model), match_groups(model, groups)
    grouped = set[int]()
    for members in by_pattern.values():
        grouped.update(map(id, members))
    rest = [p for p in model.parameters() if id(p) not in grouped]
    found: list[dict[str, Any]] = []
    for pattern, members in [*by_pattern.items(), ("", rest)]:
        settings = groups.get(pattern, {})
        has_decay, is_scaled = "weight_decay" in settings, bool(scales) and "lr" not in settings
        # PyTorch has one rate and one decay for a group.
        parts = defaultdict[tuple[bool, float], list[nn.Parameter]](list)
        for p in members:
            if p.requires_grad and not settings.get("frozen"):
                scale = scales.get(id(p), 1.0) if is_scaled else 1.0
                parts[not has_decay and id(p) in exempt, scale].append(p)
        for (is_exempt, scale), part in sorted(parts.items()):
            words = [pattern]
            if not has_decay:
                words.append("not decayed" if is_exempt else "decayed")
            if is_scaled:
                words.append(f"at {scale:.6g}")
            group: dict[str, Any] = {"name": " ".join(words).strip(), "params": part}
            group["lr"] = settings.get("lr", lr) * scale
            group["weight_decay"] = 0.0 if is_exempt else settings.get("weight_decay", weight_decay)
            found.append(group)
    if not found:
        raise ConfigError("optimizer.groups: every parameter is frozen, nothing is left to train")
    return found


def _not_decayed(model: nn.Module) -> set[int]:
    """Give the ids of what no weight decay draws to zero unless a group asks for it."""
    exempt = set[int]()
    for name, parameter in model.named_parameters():
        if parameter.ndim <= 1 or name.endswith("bias"):
            exempt.add(id(parameter))
    # The gain of a LayerNorm over several dimensions is a matrix by its shape.
    for module in model.modules():
        if isinstance(module, NORMS):
            exempt.update(map(id, module.parameters(recurse=False)))
    return exempt


def match_groups(model: nn.Module, groups: OptimizerGroups) -> dict[str, list[nn.Parameter]]:
    """Give every parameter to the first pattern that matches one of its names."""
    # Tied weights have several names, and a pattern may match any of them.
    names = list(own_parameters(model))
    taken: set[int] = set()
    found: dict[str, list[nn.Parameter]] = {}
    for pattern in groups:
        matching = dict[int, nn.Parameter]()
        for name, parameter in names:
            if fnmatchcase(name, pattern):
                matching[id(parameter)] = parameter
        if not matching:
            near = difflib.get_close_matches(pattern.replace("*", ""), dict(names), n=3, cutoff=0.0)
            text = f"no parameter is named like {pattern!r}; nearest: {', '.join(near)}"
            raise ConfigError(f"optimizer.groups: {text}")
        found[pattern] = [p for key, p in matching.items() if key not in taken]
        if not found[pattern]:
            raise ConfigError(
                f"optimizer.groups: what {pattern!r} matches belongs to patterns before it; "
                "put the narrower pattern first"
            )
        taken |= matching.keys()
    return found


def in_shards(params: Sequence[Mapping[str, Any]]) -> bool:
    """Whether parameters are DTensors, by their attribute, since the import alone is slow."""
    for group in params:
        if any(hasattr(parameter, "placements") for parameter in group["params"]):
            return True
    return False


def all_fuse(params: Sequence[Mapping[str, Any]]) -> bool:
    """Whether one kernel per group can update all parameters: floating point, CPU or GPU."""
    kinds = {"cpu", gpu.DEVICE_TYPE}
    for group in params:
        for parameter in group["params"]:
            if not parameter.is_floating_point() or parameter.device.type not in kinds:
                return False
    return True


@cache
def without_compiler(kind: type[Optimizer]) -> Callable[..., Optimizer]:
    """Derive an optimizer class that does not import the compiler of torch, as its wrappers do."""
    plain_step: Callable[..., float | None] = inspect.unwrap(kind.step)

    def step(self: Optimizer, closure: Callable[[], float] | None = None) -> float | None:
        with torch.no_grad():
            return plain_step(self, closure)

    wrapped = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    plain: dict[str, Any] = {name: inspect.unwrap(getattr(kind, name)) for name in wrapped}
    about = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), {"step": step} | about | plain)


def hooked(module: nn.Module) -> list[str]:
    """Name the parameters with a hook on their gradient, which runs for every micro-batch."""
    found = list[str]()
    for name, parameter in module.named_parameters():
        if any(getattr(parameter, kind, None) for kind in _HOOKS):
            found.append(name)
    return found

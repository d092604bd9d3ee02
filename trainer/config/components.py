"""Describe the parts of a run that are classes by name: anyone's, with their constructors' keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from trainer.config.types import (
    Auto,
    Betas,
    Bytes,
    Count,
    Natural,
    NonNegative,
    Pair,
    ParameterGroups,
    Part,
    Positive,
    Section,
    Share,
    Text,
    Warmup,
    Weights,
)

OWN = "own"
"""The option of every component that names no class: the user does."""

LIBRARIES: Mapping[str, Mapping[str, str]] = {
    "model": {"torch.nn": "Module", "transformers": "PreTrainedModel"},
    "optimizer": {"torch.optim": "Optimizer"},
}
"""Modules of the model libraries whose classes a recipe may name without being trusted: by the
component they are for, each with the base that they must have."""

LIBRARY_ROOTS = {module.partition(".")[0] for each in LIBRARIES.values() for module in each}

GPT = "trainer.models.gpt.GPT"
FIXED_CUT = "trainer.plan.cuts.Fixed"

SHARED: Mapping[str, Mapping[str, Any]] = {
    "accum": {
        "micro": Count | None,
        "steps": Count | None,
        "max_tokens": Count | None,
        "memory": Bytes | None,
    },
    "data": {"max_length": Pair, "overlong": Literal["chunk", "cut", "drop"], "holdout": Share},
    "optimizer": {"lr": NonNegative, "weight_decay": NonNegative, "groups": ParameterGroups},
    "scheduler": {
        "warmup": Warmup,
        "reference_batch": Count | None,
        "scale": Literal["none", "linear", "sqrt"],
    },
}
"""Types of arguments that mean the same in every class of a component."""

ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    GPT: {
        "vocab_size": Count | None,
        "width": Count,
        "num_layers": Natural,
        "num_heads": Count,
        "max_length": Count | None,
        "mlp_width": Count | None,
        "dropout": Share,
        "norm": Literal["rms", "layer"],
        "mlp": Literal["swiglu", "gelu"],
        "positions": Literal["rotary", "learned"],
        "init_std": Positive | None,
    },
    "trainer.data.text.Text": {"field": Text},
    "trainer.data.tokens.TokenWindows": {
        "dtype": Literal["auto", "uint16", "uint32"],
        "vocab_size": Count | None,
    },
    "trainer.objectives.next_token.NextToken": {"z_loss": NonNegative, "label_smoothing": Share},
    "trainer.objectives.classify.Classify": {
        "class_weights": Weights | None,
        "label_smoothing": Share,
    },
    "trainer.objectives.model_loss.ModelLoss": {"reduction": Literal["sum", "mean"]},
    "trainer.optim.optimizers.AdamW": {"betas": Betas, "eps": NonNegative},
    "trainer.optim.optimizers.SGD": {"momentum": NonNegative},
    "trainer.optim.schedules.Cosine": {"floor": Part},
    "trainer.optim.schedules.WSD": {"floor": Part, "decay": Part},
}
"""Types of further arguments of the built-in classes; the others are of the type of their default.
They stand here, and not beside each class, since those modules import torch."""


class Component(Section):
    """A class that is named in the config, and what its constructor gets.

    Attributes:
        target: import path of the class.
        params: constructor arguments.
        name: the option it was chosen by, e.g. `gpt_tiny`; None for a class of one's own.
        typed_target: the user named the class, and every class among its arguments, on their own
            command line or in their own `--config-dir`, which is consent to run them. Never read
            from a file.
    """

    target: str = Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")
    params: dict[str, Any] = Field(default_factory=dict)
    name: str | None = None
    typed_target: bool = False

    def targets(self, key: str) -> Iterator[tuple[str, str]]:
        """Name the class and those among its arguments: dotted key and import path of each."""
        return targets_in(key, {"_target_": self.target, **self.params})


class Accum(Component):
    """How a global batch is cut into micro-batches, and how their gradients are joined."""

    gradient: Component
    packed: bool | Auto


class Data(Component):
    """The samples."""

    on_bad: Literal["stop", "skip"]


COMPONENTS: Mapping[str, type[Component]] = {
    "accum": Accum,
    "accum.gradient": Component,
    "sync": Component,
    "model": Component,
    "data": Data,
    "objective": Component,
    "optimizer": Component,
    "scheduler": Component,
}
"""Where a config names a class, by dotted key."""

GROUPS: tuple[str, ...] = ("batch", "parallel", *COMPONENTS)
"""Where a folder of `conf/` gives options; `accum.gradient` is the folder `accum/gradient`."""


def extra_keys(path: str) -> frozenset[str]:
    """Name the program's own keys beside the arguments of a component's class."""
    fields = COMPONENTS.get(path, Component).model_fields.keys()
    return frozenset(fields - Component.model_fields.keys())


def owner_of(key: str) -> str | None:
    """Name the innermost component that a dotted key belongs to."""
    owners = [path for path in COMPONENTS if f"{key}.".startswith(f"{path}.")]
    return max(owners, key=len, default=None)


def targets_in(place: str, value: object) -> Iterator[tuple[str, str]]:
    """Find every class that a setting names, at any depth.

    Args:
        place: dotted key.
        value: as composed.

    Yields:
        Dotted key of each class, what is in a list under the key of the list, and import path.
    """
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield place, str(value["_target_"])
        for name, inner in value.items():
            yield from targets_in(f"{place}.{name}", inner)
    elif isinstance(value, list):
        for inner in value:
            yield from targets_in(place, inner)

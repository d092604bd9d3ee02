"""The parts of a run that are classes by name: anyone's, with what their constructors get."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.config.sections import HIDDEN, Auto, Section

LIBRARIES: Mapping[str, Mapping[str, str]] = {
    "model": {"torch.nn": "Module", "transformers": "PreTrainedModel"},
    "optimizer": {"torch.optim": "Optimizer"},
}
"""Modules of the model libraries whose classes a recipe may name without being trusted: by the
component they are for, each with the base that they must have."""

LIBRARY_ROOTS = {module.partition(".")[0] for each in LIBRARIES.values() for module in each}


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

    target: Annotated[str, HIDDEN] = Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")
    params: Annotated[dict[str, Any], HIDDEN] = Field(default_factory=dict)
    name: Annotated[str | None, HIDDEN] = None
    typed_target: Annotated[bool, HIDDEN] = False

    def targets(self, key: str) -> Iterator[tuple[str, str]]:
        """Name the class and those among its arguments: dotted key and import path of each."""
        return targets_in(key, {"_target_": self.target, **self.params})


class Accum(Component):
    """How a global batch is cut into micro-batches, and how their gradients are joined."""

    gradient: Component = Field(description="how gradients of micro-batches become the step's")
    packed: bool | Auto = Field(
        "auto", description="lay documents end to end, for models that take cu_seqlens; auto: GPU"
    )


class Data(Component):
    """The samples."""

    on_bad: Literal["stop", "skip"] = Field(
        "stop", description="skip: pass over bad records, up to 1 % of them, and list them"
    )

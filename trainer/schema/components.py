"""The parts of a run that are classes by name: anyone's, with what their constructors get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.schema.sections import HIDDEN, Auto, Section

LIBRARIES: Mapping[str, Mapping[str, str]] = {
    "model": {"torch.nn": "Module", "transformers": "PreTrainedModel"},
    "optimizer": {"torch.optim": "Optimizer"},
}
"""Modules of the model libraries whose classes a recipe may name without being trusted: by the
component they are for, each with the base that they must have."""


class Component(Section):
    """A class that is named in the config, and what its constructor gets.

    Attributes:
        target: import path of the class.
        params: constructor arguments.
        name: the option it was chosen by, e.g. `gpt_tiny`; None for a class of one's own.
        typed_target: the user named the class on their own command line or in their own
            `--config-dir`, which is consent to run it. Never read from a file.
    """

    target: Annotated[str, HIDDEN] = Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")
    params: Annotated[dict[str, Any], HIDDEN] = Field(default_factory=dict)
    name: Annotated[str | None, HIDDEN] = None
    typed_target: Annotated[bool, HIDDEN] = False


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

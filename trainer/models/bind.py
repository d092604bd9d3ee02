"""Bind a model to the fields of a micro-batch: it is called with what its `forward` names."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from trainer.core.errors import ConfigError
from trainer.core.micro_batch import Fields
from trainer.models.boundaries import with_boundaries
from trainer.models.check import refuse_dtypes
from trainer.models.output_layer import ModelRun, is_gpt

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What a forward's matrix products compute in, where it is not what the weights are in."""
OMITTED = "_trainer_omitted"
"""Attribute of a module that names fields its calls leave out; that of a copy has it too."""
NAMED = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


def bind(
    module: nn.Module, *, autocast: torch.dtype | None = None, device_type: str = "cpu"
) -> ModelRun:
    """Call a module with those fields of a micro-batch that its `forward` names.

    The signature is read once. A `forward` with `**kwargs` gets every field but those `OMITTED`.

    Args:
        module: any module, compiled in place or sharded too.
        autocast: dtype of the forward's matrix products; `None` is the weights' own.
        device_type: where autocast applies.

    Returns:
        A call that raises `ConfigError` when `forward` requires what the fields do not hold.
    """
    # `torch.compile(module)` gives a wrapper whose own forward takes anything.
    written = getattr(module, "_orig_mod", module)
    parameters = inspect.signature(written.forward).parameters.values()
    omitted = vars(written).get(OMITTED, ())
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    names = tuple(p.name for p in parameters if p.kind in NAMED)
    single = NAMED | {inspect.Parameter.POSITIONAL_ONLY}
    required = tuple(p.name for p in parameters if p.default is p.empty and p.kind in single)

    def call(fields: Fields) -> Any:  # noqa: ANN401 - models return what they like
        given = with_boundaries({n: fields[n] for n in fields if n not in omitted}, names)
        arguments = given if takes_all else {n: given[n] for n in names if n in given}
        missing = [name for name in required if name not in arguments]
        if missing or not arguments:
            lack = f"needs {', '.join(missing)}, none" if missing else "takes none"
            raise ConfigError(
                f"model: forward of {type(written).__name__} {lack} of the fields of the data "
                f"({', '.join(fields) or 'none'}; labels go only to the objective): rename the "
                "argument, or give it a default"
            )
        # Fresh for each call, since one is not re-entrant. It forgets casts, but in `casting_once`.
        try:
            with torch.autocast(device_type, autocast) if autocast else nullcontext():
                return module(**arguments)
        except (RuntimeError, ValueError) as error:
            refuse_dtypes(error, written, arguments)
            raise

    return ModelRun(call, written, is_gpt(written))


def casting_once(module: nn.Module, device_type: str) -> AbstractContextManager[Any]:
    """Let autocast cast a weight once inside the block, and not in every call of a bound module.

    PyTorch forgets casts where the outermost context ends, here one that is off: objective and
    backward compute as without. Casts made under `no_grad` have a graph too (torch >= 2.11,
    #165068), so reentrant checkpointing and two passes lose no gradient. They take half of the
    weights' bytes, and would be old where weights change: a table with `max_norm` scales its own.
    """
    tables = (m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    changes = any(table.max_norm is not None for table in tables)
    return nullcontext() if changes else torch.autocast(device_type, enabled=False)

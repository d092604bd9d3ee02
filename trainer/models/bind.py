"""Bind a model to the fields of a micro-batch: it is called with what its `forward` names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, final

import torch
from torch import Tensor, nn

from trainer.core.errors import ConfigError
from trainer.core.micro_batch import Fields
from trainer.models.boundaries import with_boundaries
from trainer.models.check import refuse_dtypes
from trainer.models.output_layer import ModelRun, declares_logits

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What a forward's matrix products compute in, where it is not what the weights are in."""
OMITTED = "omitted_fields"
"""Attribute of a module that names fields its calls leave out."""
NAMED = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


def bind(
    module: nn.Module, *, autocast: torch.dtype | None = None, device_type: str = "cpu"
) -> ModelRun:
    """Call a module with those fields of a micro-batch that its `forward` names.

    The signature is read once. A `forward` with `**kwargs` gets every field but those `OMITTED`;
    one of a single argument, as those of torchvision are, the images, whatever their name. A
    Hugging Face model that is given a mask keeps no keys and values, which nothing reads. Without
    both it would look for packed documents in every call, and a GPU would wait for that. The call
    raises `ConfigError` when `forward` requires what the fields do not hold.
    """
    # `torch.compile(module)` gives a wrapper whose own forward takes anything.
    written = getattr(module, "_orig_mod", module)
    parameters = inspect.signature(written.forward).parameters.values()
    omitted = getattr(written, OMITTED, ())
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    names = tuple(p.name for p in parameters if p.kind in NAMED)
    single = NAMED | {inspect.Parameter.POSITIONAL_ONLY}
    has_cache = takes_all and hasattr(getattr(written, "config", None), "use_cache")
    has_cache |= "use_cache" in names
    required = tuple(p.name for p in parameters if p.default is p.empty and p.kind in single)

    def call(fields: Fields) -> Any:  # noqa: ANN401 - models return what they like
        given = with_boundaries({n: fields[n] for n in fields if n not in omitted}, names)
        arguments = given if takes_all else {n: given[n] for n in names if n in given}
        missing = [name for name in required if name not in arguments]
        if len(required) == 1 and missing and len(images := _images(fields)) == 1:
            arguments, missing = {**arguments, missing.pop(): images[0]}, []
        if missing or not arguments:
            lack = f"needs {', '.join(missing)}, none" if missing else "takes none"
            raise ConfigError(
                f"model: forward of {type(written).__name__} {lack} of the fields of the data "
                f"({', '.join(fields) or 'none'}; labels go only to the objective): rename the "
                "argument, or give it a default"
            )
        if has_cache and "attention_mask" in arguments:
            arguments = {"use_cache": False, **arguments}
        if autocast is not None and (casts := _CASTS.get()) is not None:
            casts.renew()
        # Fresh for each call, since one is not re-entrant. It forgets casts, but in `Casts.once`.
        try:
            with torch.autocast(device_type, autocast) if autocast else nullcontext():
                return module(**arguments)
        except (RuntimeError, ValueError) as error:
            refuse_dtypes(error, written, arguments)
            raise

    return ModelRun(call, written, declares_logits(written))


def unnamed_fields(module: nn.Module, names: Iterable[str]) -> list[str]:
    """List the fields of which a module's forward does not say that it reads them."""
    named = inspect.signature(module.forward).parameters.keys() - set(getattr(module, OMITTED, ()))
    return [name for name in names if name not in named]


def _images(fields: Fields) -> list[Tensor]:
    """Give the fields that are `(batch, channels, height, width)`."""
    return [field for field in fields.values() if field.dim() == 4]  # noqa: PLR2004


@final
class Casts:
    """Lets autocast cast a weight once inside a block, and again after it was written to.

    PyTorch forgets casts where the outermost context ends, here one that is off: objective and
    backward compute as without. Casts made under `no_grad` have a graph too (torch >= 2.11,
    #165068), so reentrant checkpointing and two passes lose no gradient. They take half of the
    weights' bytes. Before each call of a bound module PyTorch's counts of writes are compared, some
    10 us for 150 weights; within one call autocast keeps a cast, as in any program. With
    `by_value`, values are compared in the first block, too: weights that are written to there
    without being counted, as through `.data`, are then cast in every call of all blocks.
    """

    def __init__(self, module: nn.Module, *, by_value: bool = False) -> None:
        self._module, self._by_value, self._is_counted = module, by_value, True
        self._weights: list[nn.Parameter] = []
        self._versions: list[int] = []
        self._bits: list[int] = []

    @contextmanager
    def once(self, device_type: str) -> Iterator[None]:
        """Keep casts inside the block."""
        token = _CASTS.set(self)
        try:
            with torch.autocast(device_type, enabled=False):
                yield
        finally:
            _CASTS.reset(token)
            if self._weights:
                self._weights, self._by_value = [], False  # shards come and go

    def renew(self) -> None:
        """Forget casts that are older than their weights."""
        is_first = not self._weights
        if is_first:
            trained = (p for p in self._module.parameters() if p.requires_grad)
            self._weights = [p for p in trained if p.dtype == torch.float32]  # all that it keeps
        versions = [p._version for p in self._weights]
        bits = _sums_of_bits(self._weights) if self._by_value else []
        is_same = versions == self._versions
        self._is_counted &= is_first or not is_same or bits == self._bits
        if not (is_first or (is_same and self._is_counted)):
            torch.clear_autocast_cache()
        self._versions, self._bits = versions, bits


_CASTS: ContextVar[Casts | None] = ContextVar("casts", default=None)  # of the block one is in


def _sums_of_bits(weights: Sequence[Tensor]) -> list[int]:
    """Add up the bits of each tensor in fp32, which any write to it changes."""
    plain = [weight.data for weight in weights if type(weight.data) is Tensor]
    sums = [weight.view(torch.int32).sum() for weight in plain]
    return [int(total) for total in torch.stack(sums).tolist()] if sums else []

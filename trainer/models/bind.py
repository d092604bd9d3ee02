"""Bind a model to the fields of a micro-batch: it is called with what its `forward` names.

Where packed documents begin it is told in the words that its `forward` takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from trainer.core.errors import ConfigError
from trainer.core.micro_batch import Fields
from trainer.models.attention import computed_in
from trainer.models.check import refuse_dtypes
from trainer.models.compilation import COMPILED
from trainer.models.facts import facts_of
from trainer.models.frozen import evaluating, frozen_of
from trainer.models.output_layer import IS_LAST, candidate, declares_logits

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What a forward's matrix products compute in, where it is not what the weights are in."""
OMITTED = "omitted_fields"  # attribute of a module that names fields its calls leave out
NAMED = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
SINGLE = NAMED | {inspect.Parameter.POSITIONAL_ONLY}  # all but `*args` and `**kwargs`
IMAGE_DIMS = 4  # (batch, channels, height, width)
BOUNDARIES = "cu_seqlens"  # the field that says where packed documents begin
BOUNDARY_FIELDS = ("cu_seq_lens_q", "position_ids")
"""Parameters by which a forward without it may learn the same; whether it does is to be tried."""


@final
@dataclass(frozen=True)
class ModelRun:
    """A call of a model, as objectives get it, that can leave the output layer out."""

    run: Callable[[Fields], Any]
    module: nn.Module
    declares_logits: bool  # see `declares_logits`
    beside: ModelRun | None = None  # the call of the frozen model, where there is one
    is_whole: bool = False  # whether the output layer stays in it

    def __call__(self, fields: Fields) -> Any:  # noqa: ANN401 - models return what they like
        """Run the model as it is."""
        return self.run(fields)

    @contextmanager
    def frozen(self) -> Iterator[ModelRun]:
        """Lend the call of the frozen model, or of this one as its adapter leaves it.

        Inside the block nothing has a graph or dropout. Call this model first: then what both have
        in shards is there.
        """
        run, switch = self.beside or self, None
        if self.beside is None:
            switch = facts_of(self.module).without_adapter
        switched_off = nullcontext() if switch is None else switch()
        with evaluating(run.module), torch.no_grad(), switched_off:
            yield replace(run, is_whole=self.is_whole)

    @property
    def output_layer(self) -> Any:  # noqa: ANN401 - of any class
        """The layer `x @ weight.T + bias` whose outputs are the logits; None where none is."""
        layer = candidate(self.module)
        is_known = self.declares_logits or (layer is not None and IS_LAST in vars(layer))
        return layer if is_known and not self.is_whole else None

    @property
    def compiled_by(self) -> str | None:
        """The backend that compiles the model now."""
        return vars(self.module).get(COMPILED)

    def without_output_layer(self, fields: Fields) -> Any:  # noqa: ANN401
        """Run the model with what goes into its output layer in place of the logits."""
        layer: Any = self.output_layer
        # An attribute hides the method of the class; hooks and weights stay where they are.
        layer.forward = _pass
        try:
            return self.run(fields)
        finally:
            del layer.forward


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
    omitted = getattr(written, OMITTED, ())
    names, required, takes_all = _parameters_of(written.forward)
    has_cache = takes_all and hasattr(getattr(written, "config", None), "use_cache")
    has_cache |= "use_cache" in names

    def call(fields: Fields) -> Any:  # noqa: ANN401 - models return what they like
        arguments = with_boundaries(_without(fields, omitted), names)
        if not takes_all:
            arguments = {name: arguments[name] for name in names if name in arguments}
        missing = [name for name in required if name not in arguments]
        if missing and len(required) == 1:
            images = [field for field in fields.values() if field.dim() == IMAGE_DIMS]
            if len(images) == 1:
                arguments[missing.pop()] = images[0]
        if missing or not arguments:
            lack = f"needs {', '.join(missing)}, none" if missing else "takes none"
            raise ConfigError(
                f"model: forward of {type(written).__name__} {lack} of the fields of the data "
                f"({', '.join(fields) or 'none'}; labels go only to the objective): rename the "
                "argument, or give it a default"
            )
        if has_cache and "attention_mask" in arguments:
            arguments.setdefault("use_cache", False)
        if autocast is not None and (casts := _CASTS.get()) is not None:
            casts.renew()
        # Fresh for each call, since one is not re-entrant. It forgets casts, but in `Casts.once`.
        try:
            with torch.autocast(device_type, autocast) if autocast else nullcontext():
                return module(**arguments)
        except (RuntimeError, ValueError) as error:
            refuse_dtypes(error, written, arguments)
            raise

    beside = None
    if (frozen := frozen_of(written)) is not None:
        beside = bind(frozen, autocast=autocast, device_type=device_type)
    return ModelRun(call, written, declares_logits(written), beside)


def _pass(x: Tensor) -> Tensor:
    """Give back what goes into a matrix product, in the dtype that autocast would compute it in."""
    return x.to(computed_in(x))


def _parameters_of(forward: Callable[..., Any]) -> tuple[list[str], list[str], bool]:
    """List what is given by name, and what is required; and whether it takes any name."""
    names, required, takes_all = list[str](), list[str](), False
    for parameter in inspect.signature(forward).parameters.values():
        if parameter.kind in NAMED:
            names.append(parameter.name)
        # One by place alone counts here, too: it cannot be given by its name, and is missed.
        if parameter.kind in SINGLE and parameter.default is parameter.empty:
            required.append(parameter.name)
        takes_all |= parameter.kind is inspect.Parameter.VAR_KEYWORD
    return names, required, takes_all


def _without(fields: Fields, left_out: Collection[str]) -> dict[str, Any]:
    return {name: field for name, field in fields.items() if name not in left_out}


def unnamed_fields(module: nn.Module, names: Iterable[str]) -> list[str]:
    """List the fields of which a module's forward does not say that it reads them."""
    named = inspect.signature(module.forward).parameters.keys() - set(getattr(module, OMITTED, ()))
    return [name for name in names if name not in named]


def with_boundaries(fields: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Give fields to a forward of these parameters; only those of packed rows change.

    A forward that names `cu_seqlens` gets it, and `max_seqlen` as a number. Any other gets what
    Hugging Face's do: no mask and no cache, with which they look for boundaries in `position_ids`,
    and the four arguments that spare FlashAttention a search for them, and a wait, in every layer.
    What a data set's own `collate` gives stays as it is.
    """
    if BOUNDARIES not in fields or "max_seqlen" not in fields or fields["max_seqlen"].numel():
        return fields
    bounds, longest = fields[BOUNDARIES], fields["max_seqlen"].shape[0]
    if BOUNDARIES in names:
        return {**fields, "max_seqlen": longest}
    given = _without(fields, (BOUNDARIES, "max_seqlen", "attention_mask"))
    given |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    given |= {"max_length_q": longest, "max_length_k": longest}
    return given | {"use_cache": False}


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
                # Shards come and go.
                self._weights, self._by_value = [], False

    def renew(self) -> None:
        """Forget casts that are older than their weights."""
        is_first = not self._weights
        if is_first:
            for parameter in self._module.parameters():
                # Autocast keeps casts of no others: of fp32, with gradients.
                if parameter.requires_grad and parameter.dtype == torch.float32:
                    self._weights.append(parameter)
        versions, bits = [p._version for p in self._weights], list[int]()
        if self._by_value:
            sums = list[Tensor]()
            for weight in self._weights:
                values = weight.data
                # Any write to a tensor changes the sum of its bits.
                if type(values) is Tensor:
                    sums.append(values.view(torch.int32).sum())
            # One wait for the device, and not one for each weight
            if sums:
                bits = torch.stack(sums).tolist()
        is_same = versions == self._versions
        self._is_counted &= is_first or not is_same or bits == self._bits
        if not (is_first or (is_same and self._is_counted)):
            torch.clear_autocast_cache()
        self._versions, self._bits = versions, bits


_CASTS: ContextVar[Casts | None] = ContextVar("casts", default=None)  # of the block one is in

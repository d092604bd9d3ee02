"""Say what is known of a model beside its layers: what it is made for, and where it came from.

The engine asks for these facts alone. What it does not know is left out.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, final

from torch import nn

from trainer.config.components import Pooling
from trainer.config.option_files import LIBRARIES
from trainer.core.micro_batch import Fields
from trainer.models.fused import FusedMatrix


@final
@dataclass(frozen=True, kw_only=True)
class Continuation:
    """What is to follow a prompt."""

    prompt: Sequence[int]
    ends: Collection[int]  # tokens of which each one ends it, and is no part of it
    most: int  # tokens
    temperature: float  # 0: each token is the likeliest
    vocab_size: int | None  # tokens are below it; None: any that the model knows
    pad_token_id: int


@final
@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What is known of a model.

    A function that makes one may give `(module, ModelFacts(...))` in place of the module alone. It
    states what no one else can know, and the library of the model adds what its classes say.
    """

    # What whoever made it knows.
    task: str | None = None  # what it is made for, a word of its library
    pooling: Pooling | None = None  # how it makes one embedding of those of a text's tokens
    source: str | None = None  # folder, or name on a hub, that its weights were read from
    new: Sequence[str] = ()  # names of parameters that the source does not hold
    unused: Sequence[str] = ()  # names of what the source holds, and the model does not
    # Arguments that were given and do nothing, each with why; typed ones are refused
    unused_arguments: Mapping[str, str] = field(default_factory=dict)

    # What its library knows.
    # Names the option of `objective` for samples with these fields, and says why it is that one
    objective: Callable[[Fields], tuple[str, str] | None] = lambda _: None
    has_targets: bool = False  # whether labels are a sequence with a length of its own
    new_head: Sequence[str] = ()  # those of `new` that are a head for another task
    max_positions: int | None = None  # positions that it has a table of
    stored_dtypes: Callable[[], Sequence[str]] = tuple  # of the weights in its source
    uses_flash: bool | None = None  # whether it attends by FlashAttention; None: not known
    balance_loss: float = 0.0  # share of a loss over its experts in the loss that it gives itself
    # Has its calls leave out the mask of padding; None where it is needed, whatever a trial shows
    omit_mask: Callable[[], object] | None = None
    # Has it attend to packed documents one by one, and gives what undoes that; None where it cannot
    attend_by_document: Callable[[], Callable[[], None] | None] = lambda: None
    # By name, what has it, or a copy, attend by a kernel; a RuntimeError where it has none such
    kernels: Callable[[], Mapping[str, Callable[[nn.Module], None]]] = dict
    # Switches its adapter off inside a block: then it is the model that training began with
    without_adapter: Callable[[], AbstractContextManager[None]] | None = None
    # Continues a prompt as its library does, and calls with each token; None where it does not
    continue_prompt: Callable[[Continuation, Callable[[int], object]], object] | None = None
    # Names parameters that are several matrices, or transposed ones
    fused: Callable[[], Mapping[str, FusedMatrix]] = dict
    # Writes weights and config into a folder, and gives the lines of Python that load them from one
    save: Callable[[Path], object] | None = None
    how_to_load: Callable[[Path], list[str]] | None = None
    # What loads them, and what it makes of them, by a hub's own words
    library_name: str | None = None
    pipeline_tag: str | None = None
    # Writes into the folder of its weights what else it needs; inputs are made as folders say
    save_beside: Callable[[Path, Sequence[str]], object] | None = None

    def filled(self, **found: Any) -> ModelFacts:  # noqa: ANN401 - of every field its own
        """Add what was found; what whoever made the model stated counts before it."""
        for name, each in self.__dataclass_fields__.items():
            if getattr(self, name) != each.default:
                found.pop(name, None)
        return replace(self, **found)


FACTS = "model_facts"
"""Attribute of a module: what whoever made it knows. Parts of a model may have their own."""

BESIDE = "frozen_model"  # name of a child of a module that is beside the model, and no part of it


def noted(made: Any) -> Any:  # noqa: ANN401 - whatever was made
    """Note on a module the facts that its maker gave beside it; give anything else back."""
    if not (isinstance(made, tuple) and made and isinstance(made[-1], ModelFacts)):
        return made
    module, facts = made
    module.__dict__[FACTS] = facts
    return module


def noted_facts(module: nn.Module) -> ModelFacts:
    """Give what the maker of a module knows; by attributes, where a class of a user has them."""
    own = vars(module)
    found: ModelFacts = own.get(FACTS) or ModelFacts(source=own.get("loaded_from"))
    return found


def facts_of(module: nn.Module, arguments: Mapping[str, Any] | None = None) -> ModelFacts:
    """Give what is known of a model, and of the parts that it wraps.

    `arguments` are those that it was made of: one of them may name its source.
    """
    library = model_library()
    sources, prefixes = list[str](), list[str]()
    new, unused = list[str](), list[str]()
    for path, part in module.named_modules():
        known = noted_facts(part)
        if known.source is None:
            continue
        prefix = path and f"{path}."
        sources.append(known.source)
        prefixes.append(prefix)
        new += [f"{prefix}{name}" for name in known.new]
        unused += [f"{prefix}{name}" for name in known.unused]
    if sources:
        source: str | None = sources[0]
        # Beside a part that was loaded, all else begins new.
        for name in sorted(dict(module.named_parameters())):
            if not name.startswith((*prefixes, f"{BESIDE}.")):
                new.append(name)
    else:
        source = library.source_in(arguments or {})
    found = replace(noted_facts(module), source=source, new=new, unused=unused)
    return library.completed(found, module)


class ModelLibrary:
    """Knows the models of a library; one that knows none gives back what it gets."""

    def source_in(self, arguments: Mapping[str, Any]) -> str | None:
        """Name what a model is loaded from among the arguments of what makes it."""
        return None

    def callable(
        self, target: Callable[..., Any], arguments: Mapping[str, Any], *, typed: bool
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Give what is called in place of a class or function of the library, and with what.

        `typed` is whether the user typed the name, so that it may fetch code.
        """
        return target, dict(arguments)

    def arguments_for_data(
        self, target: str, arguments: Mapping[str, Any], source: str | None
    ) -> Mapping[str, Any]:
        """Give what a data set may ask of the model before it is built: `task` and others.

        A model is known by the import path of what makes it, by arguments, and by its source.
        """
        return {"task": arguments.get("task")}

    def completed(self, facts: ModelFacts, module: nn.Module) -> ModelFacts:
        """Add what the class of a model says to what its maker knows."""
        return facts

    def tokenizer_beside(
        self,
        built: Any,  # noqa: ANN401 - of any class
        source: str | None,
        data: Sequence[Mapping[str, Any]],
    ) -> Any:  # noqa: ANN401 - of any class
        """Give the tokenizer that is written beside exported weights; None where there is none.

        `built` is that of the run, None where its data take none. `data` are the arguments of the
        data sets.
        """
        return built if hasattr(built, "save_pretrained") else None

    def with_tokenizer(self, lines: list[str], tokenizer: Any, folder: Path) -> list[str]:  # noqa: ANN401 - of any class
        """Add to lines of Python how a tokenizer of the library is loaded from a folder."""
        return lines


@cache
def model_library() -> ModelLibrary:
    """Give the library that `conf/libraries.yaml` names."""
    found: ModelLibrary = pkgutil.resolve_name(LIBRARIES["models"])()
    return found

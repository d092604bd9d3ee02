"""Observe, before the first step, what a run reads of its samples, and whether they change.

Nothing here is collective, and the declared state of the model is put back.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from trainer.assemble.components import Components
from trainer.config.messages import first_of
from trainer.core.micro_batch import to_device
from trainer.core.tensors import bits_of
from trainer.data.loader import Request
from trainer.data.samples import INPUT_IDS, SOURCE
from trainer.models.bind import OMITTED
from trainer.models.first_weights import is_on_meta
from trainer.objectives.base import sums_of, weights_of
from trainer.tune.workload import restoring

PROBED_SAMPLES = 8
"""Samples that are read again: of draws as rare as a coin's head, 1 in 256 runs sees none."""


def check_reads(components: Components) -> list[str]:
    """Warn of fields that nothing reads, and of draws that no seed governs."""
    return [*_unread_fields(components), *_untied_draws(components)]


def _untied_draws(components: Components) -> list[str]:
    """Read samples twice under the same seed, and once as in the second epoch."""
    data, loader, lengths = (
        components.train_set,
        components.source.loader,
        components.source.lengths,
    )
    for i in data.spaced(PROBED_SAMPLES):
        first, again, _ = (
            loader.load(Request((i,), epoch, int(lengths[i]), components.layout.packed))
            for epoch in (0, 0, 1)
        )
        if changed := [n for n in first if n not in again or not _is_same(first[n], again[n])]:
            remedy = "keep its generator as an attribute, or draw with torch, np.random or random"
            if data.optional("augment"):
                remedy = "let `augment` draw with torch, np.random or random"
            elif not data.draws_randomness:
                remedy = "leave out draws_randomness=False"
            return [
                f"data: {data.name_of(i)} differs between two reads with the same seed "
                f"({first_of(changed)}), so a resumed run, or one with other num_workers, sees "
                f"other samples: {remedy}"
            ]
    return []


def _is_same(first: Tensor, again: Tensor) -> bool:
    return first.dtype == again.dtype and torch.equal(bits_of(first), bits_of(again))


def _unread_fields(components: Components) -> list[str]:
    """Find what the samples bring, and neither the model's forward nor the objective reads."""
    data, example = components.train_set, components.example
    with data.isolated_rng():
        brought = example if data.collate else data.read(0, seed=components.config.seed, epoch=0)
    omitted = getattr(components.module, OMITTED, ())
    named = inspect.signature(components.module.forward).parameters.keys() - set(omitted)
    # `input_ids` are counted, also where nothing else reads them.
    others = (n for n in brought if n in example and n != INPUT_IDS and SOURCE not in n)
    unread = [n for n in others if n not in named]
    unread = unread and _unread_in_trials(components, unread)
    if not unread:
        return []
    kinds = (
        f"forward of {type(components.module).__name__} nor {type(components.objective).__name__}"
    )
    return [
        f"data: {first_of(unread)} of the samples is read by neither {kinds}, and changes "
        "nothing: leave it out, or use a model or an objective that reads it"
    ]


def _unread_in_trials(components: Components, names: Collection[str]) -> list[str]:
    """Run the objective, in training and in evaluation; nothing is unread where both fail."""
    module, objective = components.module, components.objective
    device = torch.device("meta") if is_on_meta(module) else components.world.device
    fields, remote = components.example, to_device(components.example, device)
    reads = _Reads({id(each[name]): name for each in (fields, remote) for name in names})
    has_run = False
    for trains in (True, False):
        # What fails here fails again, in full, in the step; statistics over samples take no
        # single one in training.
        with suppress(Exception), restoring(module, objective), reads:
            module.train(trains)
            sums_of(objective, components.call, remote, weights_of(objective, fields))
            has_run = True
    return [name for name in names if has_run and name not in reads.seen]


@final
class _Reads(TorchFunctionMode):
    """Notes which tensors, by identity, any function or attribute of PyTorch is asked for."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Note the tensors, and call the function."""
        found = (self._names.get(id(value)) for value in tree_leaves((args, kwargs)))
        self.seen.update(filter(None, found))
        return func(*args, **(kwargs or {}))

"""Count what forward and backward compute, and what a micro-batch costs on a GPU not timed here.

A micro-batch costs what its host needs to launch every kernel, however few tokens they compute. On
a CPU that is some ten tokens' time; on a GPU, which computes a hundred times as fast, thousands.

Matrix products and convolutions count, two FLOPs a multiply-add; attention counts whole, causal or
not, as in Chowdhery et al. 2022 (2204.02311), appendix B. For a transformer that is
`6 * P * tokens + 12 * layers * width * sum(length^2)`, with P the parameters of its matrices.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import filterfalse
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from trainer.config.cards import CARDS, USUAL, Card, reported_as
from trainer.core import gpu
from trainer.core.micro_batch import Fields, output_part
from trainer.data.collate import LABELS, Limits
from trainer.data.samples import INPUT_IDS
from trainer.models.output_layer import IS_LAST, candidate, declares_logits, watch_last
from trainer.models.recompute import recompute_nothing
from trainer.plan.cut import Cost
from trainer.plan.memory import Shape
from trainer.tune.predict import CannotRunFake, fake_micro_batch
from trainer.tune.workload import Workload

PEAK_SHARE = 0.4  # of a card's peak, that training of language models reaches as a rule
# Of the host for one operator outside of compiled graphs: about 5 us for the kernel's launch, and
# as much for Python, dispatch and autograd
LAUNCH_S = 1e-5
# Tokens for a micro-batch's launches where FLOPs cannot be counted: 15 ms, at 40 % of an A100's
# peak, of a model of 124M parameters
USUAL_FIXED = 2500.0
BATCHED = {torch.ops.aten.bmm, torch.ops.aten.baddbmm}  # attention's scores and sums
PAIR = 2  # samples of the fake run; statistics over samples need two


@final
@dataclass(frozen=True, kw_only=True)
class ComputeCounts:
    """What forward and backward of samples of one length are made of."""

    operators: str  # a hash of the operators and the shapes that they give
    launches: int  # operators that compute something, so that a GPU's kernel is launched
    products: float  # FLOPs per token of products with weights
    pairs: float  # FLOPs per pair of tokens of one sample
    limits: Limits  # rows of the table that looks token ids up, and classes of the labels
    gives_logits: bool  # whether the output layer's outputs are the logits, and nothing else
    unread: tuple[str, ...]  # fields, of those watched, that nothing asked for


def count_compute(
    work: Workload, length: int, watched: Collection[str] = ()
) -> ComputeCounts | None:
    """Count a fake forward and backward of padded samples; None where the model cannot run fake.

    Attention is counted by its plain kernel, which has a formula everywhere. Kernels that PyTorch
    has none for count as nothing, and neither does what is computed again.

    Where the logits turn out to be what the output layer gives, the model is marked: an objective
    may then ask for what goes into that layer. Takes some 0.1 s for a small transformer, 1 s for
    one of 124M parameters.
    """
    counter = Counter()
    module = work.model.module
    layer, is_last = None, None
    # What says itself where its logits are is not watched.
    if not declares_logits(module):
        layer = candidate(module)
    try:
        micro_batch = fake_micro_batch(replace(work, fake_ranks=None), Shape(PAIR, length))
        with micro_batch as (theirs, fields, _):
            recompute_nothing(theirs.model.module)
            if layer is not None and (fake := candidate(theirs.model.module)) is not None:
                is_last = watch_last(theirs.model.module, fake)
            limits = _watch_limits(theirs, fields)
            reads = _Reads({id(fields[name]): name for name in watched})
            with ExitStack() as modes:
                modes.enter_context(sdpa_kernel(SDPBackend.MATH))
                modes.enter_context(counter)
                if watched:
                    modes.enter_context(reads)
                theirs.backward(fields)
    except CannotRunFake:
        return None
    if gives_logits := is_last is not None and is_last():
        setattr(layer, IS_LAST, True)
    return ComputeCounts(
        operators=counter.digest.hexdigest(),
        launches=counter.launches,
        products=counter.products / (PAIR * length),
        pairs=counter.pairs / (PAIR * length**2),
        limits=limits,
        gives_logits=gives_logits,
        unread=tuple(filterfalse(reads.seen.__contains__, watched)),
    )


def _watch_limits(work: Workload, fields: Fields) -> dict[str, int]:
    """Watch a copy of a model; once it ran, the dict has what ids and labels must be below.

    Seen are tables that look up the ids as they are, by `nn.Embedding`, and the logits.
    """
    limits: dict[str, int] = {}
    ids, axis = fields.get(INPUT_IDS), work.model.objective.class_axis
    layer = getattr(work.model.call, "output_layer", None)

    def note_rows(table: nn.Embedding, given: tuple[Tensor, ...]) -> None:
        if ids is None or not given:
            return
        index, base = given[0], ids if ids._base is None else ids._base
        # The ids, or another view of all that is in them.
        if index is ids or (index._base is base and index.numel() == ids.numel()):
            limits[INPUT_IDS] = min(table.num_embeddings, limits.get(INPUT_IDS, sys.maxsize))

    def note_classes(_: nn.Module, __: object, output: Any) -> None:  # noqa: ANN401
        logits = output
        if not isinstance(output, Tensor):
            logits = output_part(output, "logits")
        if axis is not None and layer is not None:
            # The objective may ask for no logits.
            limits[LABELS] = len(layer.weight)
        elif axis is not None and isinstance(logits, Tensor):
            limits[LABELS] = logits.shape[axis]

    for part in work.model.module.modules():
        if isinstance(part, nn.Embedding):
            part.register_forward_pre_hook(note_rows)
    work.model.module.register_forward_hook(note_classes)
    return limits


def card_cost(counts: ComputeCounts | None, card: Card | None, precision: str) -> Cost:
    """Work out the time model of a card, or of a usual GPU, whose time in seconds stays unknown."""
    usual = card or CARDS[USUAL]
    if counts is None or not counts.products:
        return Cost(fixed=USUAL_FIXED)
    per_token_s = counts.products / (PEAK_SHARE * usual.peak(precision))
    seconds_per_token = None
    # The ratios of a usual GPU serve for any, its seconds do not.
    if card is not None:
        seconds_per_token = per_token_s
    return Cost(
        fixed=counts.launches * LAUNCH_S / per_token_s,
        quadratic=counts.pairs / counts.products,
        seconds_per_token=seconds_per_token,
    )


def card_at(device: torch.device) -> Card | None:
    """Give the card that a device is; None for a CPU, or a card that nobody entered."""
    name = gpu.name_of(device)
    return None if name is None else reported_as(name)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Give what a device can do in a second, dense; None where nobody knows, as for any CPU."""
    card = card_at(device)
    return None if card is None else card.peak(precision)


@final
class _Reads(TorchFunctionMode):
    """Notes which tensors, by identity, any function or attribute of PyTorch is asked for."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Note the tensors, and call the function."""
        for value in tree_leaves((args, kwargs)):
            if id(value) in self._names:
                self.seen.add(self._names[id(value)])
        return func(*args, **(kwargs or {}))


@final
class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call] # untyped in torch
    """Counts operators, and FLOPs by PyTorch's formulas.

    Of the time that PyTorch's own `FlopCounterMode` takes it needs a fifth.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # untyped in torch
        self.digest = hashlib.blake2b(digest_size=16)
        self.launches, self.products, self.pairs = 0, 0.0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Run an operator and count it."""
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default or func.is_view:
            return found
        self.launches += 1
        self.digest.update(f"{func} {getattr(found, 'shape', '')}".encode())
        packet = func._overloadpacket
        if (formula := flop_registry.get(packet)) is not None:
            flops = float(formula(*args, **(kwargs or {}), out_val=found))
            if packet in BATCHED:
                self.pairs += flops
            else:
                self.products += flops
        return found


def time_note(
    device: str, precision: str, seconds: float | None, *, is_tuned: bool, is_here: bool
) -> str | None:
    """Say how the time of a step is known, or why it is not; None where it was timed."""
    if seconds:
        if (card := CARDS.get(device)) is None:
            return None
        peak = card.peak(precision) / 1e12
        return f"estimated at {PEAK_SHARE:.0%} of the {peak:,.0f} TFLOP/s of {device}"
    if not is_tuned:
        return None
    note = "unknown"
    if not is_here:
        note += ": nothing can be timed for another machine; device=h100 estimates it"
    return note

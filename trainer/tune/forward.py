"""Count a fake forward, and work out from it what a micro-batch costs on a GPU not timed here.

A micro-batch costs what its host needs to launch every kernel, however few tokens they compute. On
a CPU that is some ten tokens' time; on a GPU, which computes a hundred times as fast, thousands.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from trainer.config.cards import CARDS, USUAL, Card
from trainer.core.micro_batch import Fields
from trainer.data.collate import LABELS, Limits
from trainer.data.samples import INPUT_IDS
from trainer.models.output_layer import IS_LAST, candidate, is_gpt, watch_last
from trainer.objectives.next_token import NextToken
from trainer.plan.cut import Cost
from trainer.plan.memory import Shape
from trainer.tune.predict import CannotRunFake, fake_micro_batch
from trainer.tune.workload import Workload

PEAK_SHARE = 0.4  # of a card's peak, that training of transformers reaches as a rule
# Of the host for one operator outside of compiled graphs: about 5 us for the kernel's launch, and
# as much for Python, dispatch and autograd
LAUNCH_S = 1e-5
# Tokens for a micro-batch's launches where FLOPs cannot be counted: 15 ms, at 40 % of an A100's
# peak, of a model of 124M parameters
USUAL_FIXED = 2500.0
BATCHED = {torch.ops.aten.bmm, torch.ops.aten.baddbmm}  # attention's scores and sums


@final
@dataclass(frozen=True, kw_only=True)
class Forward:
    """What one forward of samples of one length is made of."""

    operators: str  # a hash of the operators and the shapes that they give
    launches: int  # operators that compute something, so that a GPU's kernel is launched
    products: float  # FLOPs per token of products with weights
    pairs: float  # FLOPs per pair of tokens of one sample
    trained: float  # share of the parameters that get a gradient
    limits: Limits  # rows of the table that looks token ids up, and classes of the labels


def count_forward(work: Workload, shape: Shape) -> Forward | None:
    """Count a fake forward of a micro-batch; None where the model cannot run fake.

    Attention is counted whole, causal or not, by its plain kernel. Where the logits turn out to be
    what the output layer gives, the model is marked: an objective may then ask for what goes into
    that layer.
    """
    counter, layer = Counter(), None
    if isinstance(work.objective, NextToken) and not is_gpt(work.model):
        layer = candidate(work.model)
    try:
        micro_batch = fake_micro_batch(replace(work, fake_ranks=None), shape)
        plain = sdpa_kernel(SDPBackend.MATH)
        with micro_batch as (theirs, fields, _), plain, torch.no_grad(), counter:
            fake = candidate(theirs.model) if layer is not None else None
            is_last = None if fake is None else watch_last(theirs.model, fake)
            limits = _watch_limits(theirs, fields)
            theirs.objective.sums(theirs.call, fields)
    except CannotRunFake:
        return None
    if is_last is not None and is_last():
        setattr(layer, IS_LAST, True)
    num_tokens, sizes = shape.num_samples * shape.length, [*work.model.parameters()]
    trained = sum(p.numel() for p in sizes if p.requires_grad)
    return Forward(
        operators=counter.digest.hexdigest(),
        launches=counter.launches,
        products=counter.products / num_tokens,
        pairs=counter.pairs / (num_tokens * shape.length),
        trained=trained / max(1, sum(p.numel() for p in sizes)),
        limits=limits,
    )


def _watch_limits(work: Workload, fields: Fields) -> dict[str, int]:
    """Watch a copy of a model; once it ran, the dict has what ids and labels must be below.

    Seen are tables that look up the ids as they are, by `nn.Embedding`, and the logits.
    """
    limits: dict[str, int] = {}
    ids, axis = fields.get(INPUT_IDS), work.objective.class_axis
    layer = getattr(work.call, "output_layer", None)

    def note_rows(table: nn.Embedding, given: tuple[Tensor, ...]) -> None:
        if ids is not None and given and _is_all_of(given[0], ids):
            limits[INPUT_IDS] = min(table.num_embeddings, limits.get(INPUT_IDS, sys.maxsize))

    def note_classes(_: nn.Module, __: object, output: Any) -> None:  # noqa: ANN401
        logits = getattr(output, "logits", output)
        if axis is not None and layer is not None:
            limits[LABELS] = len(layer.weight)  # the objective may ask for no logits
        elif axis is not None and isinstance(logits, Tensor):
            limits[LABELS] = logits.shape[axis]

    for part in work.model.modules():
        if isinstance(part, nn.Embedding):
            part.register_forward_pre_hook(note_rows)
    work.model.register_forward_hook(note_classes)
    return limits


def _is_all_of(index: Tensor, field: Tensor) -> bool:
    """Whether an index is a field, or another view of all that is in it."""
    base = field if field._base is None else field._base
    return index is field or (index._base is base and index.numel() == field.numel())


def card_cost(forward: Forward | None, card: Card | None, precision: str) -> Cost:
    """Work out the time model of a card, or of a usual GPU, whose time in seconds stays unknown.

    Backward computes twice what forward does, once for inputs and once for trained weights, and
    launches twice as many kernels.
    """
    usual = card or CARDS[USUAL]
    if forward is None or not forward.products:
        return Cost(fixed=USUAL_FIXED)
    passes = 2.0 + forward.trained
    per_token_s = passes * forward.products / (PEAK_SHARE * usual.peak(precision))
    return Cost(
        fixed=3 * forward.launches * LAUNCH_S / per_token_s,
        quadratic=forward.pairs / forward.products,
        seconds_per_token=None if card is None else per_token_s,
    )


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
            self.pairs += flops * (packet in BATCHED)
            self.products += flops * (packet not in BATCHED)
        return found
